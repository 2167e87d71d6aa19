"""Pass 2: split a batchable primitive larger than its engine's max efficient batch into pipelined stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from teola_plugin.graph import Graph, GraphEdit, InstancePath, Primitive, PrimitiveKind, Ref, Slice, conflict
from teola_plugin.passes.base import PassContext

_K = PrimitiveKind
STAGED_KINDS = frozenset({_K.EMBEDDING, _K.RERANKING, _K.SEARCHING, _K.INGESTION})
LIST_INPUTS = frozenset({"texts", "chunks", "vectors", "documents", "queries"})
CONCAT = "concat"
"""`call` of the AGGREGATE behind the stages: it concatenates its inputs, which are lists."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """The share of the requests that one stage sends."""

    items: Slice
    size: int


_Cuts = tuple[_Cut, ...]


@dataclass(frozen=True, slots=True)
class StageDecomposition:
    """Split `x` into the stages `x#0`, `x#1`, ... The last one is open-ended, to fit any actual number of requests.

    A batchable reader on an engine that can work at the same time is split alike: its stage i reads the producer's
    stage i. An AGGREGATE with the original id is added if another primitive still reads the complete list.
    """

    name: ClassVar[str] = "stage-decomposition"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        """Cut batches that exceed an engine's most efficient size into stages; return the same graph if none does."""
        plan: dict[str, _Cuts] = {}
        for p in graph:
            if p.batchable and p.kind in STAGED_KINDS and not _must_wait_for_all_stages(p, plan, graph):
                cuts = _producer_cuts(p, plan, graph, context) or _batch_cuts(p, graph, context)
                if cuts:
                    plan[p.id] = cuts
        return _apply(graph, plan) if plan else graph


def _must_wait_for_all_stages(p: Primitive, plan: dict[str, _Cuts], graph: Graph) -> bool:
    """Return True if all of a split primitive must end before `p` begins: their effects conflict, and `p` depends on
    it. If `p` were split, too, its first stage would overtake the last stage of the other."""
    if not plan or not p.effects:
        return False
    above = graph.ancestor_masks[p.id]
    return any(above & graph.bits[q] and conflict(p.effects, graph[q].effects) for q in plan)


def list_inputs(p: Primitive) -> tuple[str, ...]:
    """Return the names of the inputs with one entry per request. (All requests of a reranker share its query.)"""
    names = tuple(key for key, _ in p.inputs if key in LIST_INPUTS)
    return names or tuple(key for key, _ in p.inputs if key != "query")[:1]


def _producer_cuts(p: Primitive, plan: dict[str, _Cuts], graph: Graph, context: PassContext) -> _Cuts:
    """Return the cuts of a producer that `p` can be pipelined with, () if there is none."""
    if plan:
        lists = list_inputs(p)
        for key, ref in p.inputs:
            cuts = plan.get(ref.producer)
            if cuts and key in lists and not ref.path and context.overlap(p.engine, graph[ref.producer].engine):
                return cuts
    return ()


def _batch_cuts(p: Primitive, graph: Graph, context: PassContext) -> _Cuts:
    """Return cuts of the engine's max efficient batch, () if `p` is small enough or would gain nothing."""
    profile = context.profile(p.engine)
    if (
        profile is None
        or p.size is None
        or p.size <= profile.max_efficient_batch
        or not _can_overlap(p, graph, context)
    ):
        return ()
    size, step = p.size, profile.max_efficient_batch
    starts = range(0, size, step)
    last = starts[-1]
    return tuple(_Cut(Slice(at, None if at == last else at + step), size - at if at == last else step) for at in starts)


def _can_overlap(p: Primitive, graph: Graph, context: PassContext) -> bool:
    """Return True if stages of `p` can overlap with a batchable reader on another engine, or with each other."""
    readers = [q for q in graph.readers(p.id) if q.batchable and q.kind in STAGED_KINDS]
    if readers:
        return any(context.overlap(p.engine, q.engine) for q in readers)
    profile = context.profile(p.engine)
    return profile is not None and not profile.device


def _apply(graph: Graph, plan: dict[str, _Cuts]) -> Graph:
    """Return the graph with each planned primitive replaced by its stages, joined again where all are read at once."""
    edit = GraphEdit(graph)
    stages = {name: _stages(graph[name], cuts, plan) for name, cuts in plan.items()}
    read = {graph.output.producer}
    read.update(*(graph.parents(p.id) for p in graph if p.id not in plan))
    read.update(*(Graph.edges_into(stage) for group in stages.values() for stage in group))
    for name, group in stages.items():
        edit.remove(name)
        edit.add(*group)
        if name in read:
            parts = tuple((f"part{i}", Ref(stage.id)) for i, stage in enumerate(group))
            edit.add(Primitive(name, _K.AGGREGATE, inputs=parts, scope=group[0].scope, call=CONCAT))
    return edit.freeze()


def _stages(p: Primitive, cuts: _Cuts, plan: dict[str, _Cuts]) -> list[Primitive]:
    """Return the stages of a primitive. If its producer has the same cuts, each reads the producer's stage alone."""
    lists, path = list_inputs(p), InstancePath(p.id)

    def stage_input(key: str, ref: Ref, i: int) -> Ref:
        """Return what stage `i` reads for an input: a slice of a list, a stage of the producer, or the whole value."""
        if key not in lists:
            return ref
        if not ref.path and plan.get(ref.producer) == cuts:
            return Ref(InstancePath(ref.producer).stage(i))
        return ref.at(cuts[i].items)

    return [
        p.with_(id=path.stage(i), inputs=tuple([(k, stage_input(k, ref, i)) for k, ref in p.inputs]), size=cut.size)
        for i, cut in enumerate(cuts)
    ]
