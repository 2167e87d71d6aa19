"""Pass 2: a batchable primitive beyond its engine's max efficient batch becomes pipelined stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from teola_plugin.graph import Graph, GraphEdit, InstancePath, Primitive, PrimitiveKind, Ref, Slice, conflict
from teola_plugin.passes.base import PassContext

_K = PrimitiveKind
STAGED_KINDS = frozenset({_K.EMBEDDING, _K.RERANKING, _K.SEARCHING, _K.INGESTION})
LIST_INPUTS = frozenset({"texts", "chunks", "vectors", "documents", "queries"})
CONCAT = "concat"
"""`call` of the AGGREGATE at the end of stages: the values of its inputs, which are lists, one after the other."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """One stage's share of the requests."""

    items: Slice
    size: int


_Cuts = tuple[_Cut, ...]


@dataclass(frozen=True, slots=True)
class StageDecomposition:
    """`x` becomes `x#0`, `x#1`, ...; the last stage is open-ended, so any actual number of requests is right.

    A batchable reader on an engine that can work meanwhile is cut alike, its stage i reading the producer's stage i.
    An AGGREGATE with the old id follows where somebody still needs the whole.
    """

    name: ClassVar[str] = "stage-decomposition"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        plan: dict[str, _Cuts] = {}
        for p in graph:
            if p.batchable and p.kind in STAGED_KINDS and not _follows_as_a_whole(p, plan, graph):
                cuts = _inherited(p, plan, graph, context) or _own(p, graph, context)
                if cuts:
                    plan[p.id] = cuts
        return _staged(graph, plan) if plan else graph


def _follows_as_a_whole(p: Primitive, plan: dict[str, _Cuts], graph: Graph) -> bool:
    """Whether all of a cut primitive has to come before any of `p`: both touch one thing, and a way leads from one to
    the other. Stage by stage, the first of `p` would overtake the last of the other."""
    if not plan or not p.effects:
        return False
    above = graph.above[p.id]
    return any(above & graph.bits[q] and conflict(p.effects, graph[q].effects) for q in plan)


def list_inputs(p: Primitive) -> tuple[str, ...]:
    """Names of the inputs that hold one entry a request. A reranker's query is shared by all requests."""
    names = tuple(key for key, _ in p.inputs if key in LIST_INPUTS)
    return names or tuple(key for key, _ in p.inputs if key != "query")[:1]


def _inherited(p: Primitive, plan: dict[str, _Cuts], graph: Graph, context: PassContext) -> _Cuts:
    """The cuts of a producer that `p` can be pipelined with."""
    if plan:
        lists = list_inputs(p)
        for key, ref in p.inputs:
            found = plan.get(ref.producer)
            if found and key in lists and not ref.path and context.overlap(p.engine, graph[ref.producer].engine):
                return found
    return ()


def _own(p: Primitive, graph: Graph, context: PassContext) -> _Cuts:
    profile = context.profile(p.engine)
    if profile is None or p.size is None or p.size <= profile.max_efficient_batch or not _gains(p, graph, context):
        return ()
    size, step = p.size, profile.max_efficient_batch
    starts = range(0, size, step)
    last = starts[-1]
    return tuple(_Cut(Slice(at, None if at == last else at + step), size - at if at == last else step) for at in starts)


def _gains(p: Primitive, graph: Graph, context: PassContext) -> bool:
    """Whether stages of `p` can overlap with anything: a batchable reader elsewhere, or instances elsewhere."""
    readers = [q for q in graph.readers(p.id) if q.batchable and q.kind in STAGED_KINDS]
    if readers:
        return any(context.overlap(p.engine, q.engine) for q in readers)
    profile = context.profile(p.engine)
    return profile is not None and not profile.device


def _staged(graph: Graph, plan: dict[str, _Cuts]) -> Graph:
    edit = GraphEdit(graph)
    stages = {name: _stages(graph[name], cuts, plan) for name, cuts in plan.items()}
    wanted = {graph.output.producer}
    wanted.update(*(graph.parents(p.id) for p in graph if p.id not in plan))
    wanted.update(*(Graph.edges_into(stage) for made in stages.values() for stage in made))
    for name, made in stages.items():
        edit.remove(name)
        edit.add(*made)
        if name in wanted:
            parts = tuple((f"part{i}", Ref(stage.id)) for i, stage in enumerate(made))
            edit.add(Primitive(name, _K.AGGREGATE, inputs=parts, scope=made[0].scope, call=CONCAT))
    return edit.freeze()


def _stages(p: Primitive, cuts: _Cuts, plan: dict[str, _Cuts]) -> list[Primitive]:
    lists, here = list_inputs(p), InstancePath(p.id)

    def read(key: str, ref: Ref, i: int) -> Ref:
        if key not in lists:
            return ref
        if not ref.path and plan.get(ref.producer) == cuts:
            return Ref(InstancePath(ref.producer).stage(i))
        return ref.at(cuts[i].items)

    return [
        p.with_(id=here.stage(i), inputs=tuple([(key, read(key, ref, i)) for key, ref in p.inputs]), size=cut.size)
        for i, cut in enumerate(cuts)
    ]
