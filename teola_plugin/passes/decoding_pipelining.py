"""Pass 4: items of a splittable decoding are worked on as soon as each is complete (streaming decoding output).

The work is tentative: it runs on the items that the streamed text predicts, while the list makers (the framework's
parser, the user's lambda) run once, on the whole text. A VERIFY compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from teola_plugin.graph import (
    ITEM,
    LLM_KINDS,
    Effect,
    Graph,
    GraphEdit,
    InstancePath,
    Primitive,
    PrimitiveKind,
    Ref,
    Slice,
    conflict,
)
from teola_plugin.graph.build import captures
from teola_plugin.passes.base import PassContext
from teola_plugin.passes.stage_decomposition import list_inputs

_K = PrimitiveKind
LIST_MAKERS = frozenset({_K.CALL, _K.OPAQUE})
TENTATIVE_KINDS = frozenset({_K.EMBEDDING, _K.RERANKING, _K.SEARCHING, _K.CALL, _K.AGGREGATE, *LLM_KINDS})


@dataclass(frozen=True, slots=True)
class DecodingPipelining:
    """`d` of expected width n becomes the PARTIAL_DECODINGs `d#0..n-1` and `d`; a MAP `m` over its items gets the
    instances `m[0]..m[n-1]` early and reads the items from `m.verify`. Other batchable readers get single requests.
    """

    name: ClassVar[str] = "decoding-pipelining"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        decodings = [p for p in graph if p.kind is _K.DECODING and p.splittable and not _streams(p, graph)]
        if not decodings or context.speculate == "off":
            return graph
        edit = GraphEdit(graph)
        taken: set[str] = set()
        for d in decodings:
            consumers = [c for c in _consumers(d, graph, context) if c.id not in taken]
            taken.update(c.id for c in consumers)
            if consumers and d.size:
                items = _items(edit, d, graph, d.size)
                for c in consumers:
                    if c.kind is _K.MAP:
                        _early_instances(edit, c, d, graph, items)
                    else:
                        _early_requests(edit, c, _followers(c, d, graph, context), items)
            elif consumers:
                _grown(edit, d, [c for c in consumers if c.kind is _K.MAP])
        return edit.freeze()


def _streams(d: Primitive, graph: Graph) -> bool:
    """Whether this pass was here already."""
    return any(graph[r.producer].kind is _K.PARTIAL_DECODING for r in d.refs if not r.external) or bool(
        d.attributes.stream_items
    )


def _consumers(d: Primitive, graph: Graph, context: PassContext) -> list[Primitive]:
    """Readers of the list that `d`'s text becomes, as far as they may work on predictions."""
    if not context.may_read(d.engine):
        return []
    makers, found = [d.id], dict[str, Primitive]()
    for name in makers:
        for reader in graph.readers(name):
            if reader.kind in LIST_MAKERS and reader.id not in makers and _only_reshapes(reader, makers, d, graph):
                makers.append(reader.id)
            elif _per_item(reader, name) and _may_run(reader, d, graph, context):
                found[reader.id] = reader
    return list(found.values())


def _only_reshapes(p: Primitive, makers: list[str], d: Primitive, graph: Graph) -> bool:
    """Whether all that `p` reads of `d`'s making is the list itself, not what became of its items further on."""
    made = (ref.producer for ref in p.refs if not ref.external)
    return all(name in makers or not graph.above[name] & graph.bits[d.id] for name in made)


def _per_item(p: Primitive, maker: str) -> bool:
    """Whether `p` does something for each item of the list that `maker` gives."""
    if p.tentative:
        return False
    if p.kind is _K.MAP:
        return _is_list(p.input("items"), maker)
    if p.batchable and p.kind in (_K.EMBEDDING, _K.RERANKING):
        lists = list_inputs(p)
        return len(lists) == 1 and _is_list(p.input(lists[0]), maker)
    return False


def _is_list(ref: Ref | None, maker: str) -> bool:
    return ref is not None and ref.producer == maker and not any(isinstance(key, Slice) for key in ref.path)


def _may_run(p: Primitive, d: Primitive, graph: Graph, context: PassContext) -> bool:
    """Whether everything an early instance of `p` holds may be tentative."""
    inner = list(p.fragment.graph) if p.fragment is not None else [p]
    every = [one for q in inner for one in held(q)]
    if not all(q.kind in TENTATIVE_KINDS for q in every) or not context.may_predict(*(q.engine for q in every)):
        return False
    if any(e.writes for q in every for e in q.effects):
        return False
    return all(e.validated or not _overtaken((e,), q, p, d, graph) for q in inner for e in q.effects)


def held(p: Primitive) -> Iterator[Primitive]:
    """`p` itself, or what the fragments that it holds are made of, however deep."""
    arms = [arm for arm in (p.fragment, p.otherwise) if arm is not None]
    if not arms:
        yield p
    for arm in arms:
        for q in arm.graph:
            yield from held(q)


def _overtaken(effects: tuple[Effect, ...], q: Primitive, p: Primitive, d: Primitive, graph: Graph) -> tuple[str, ...]:
    """What conflicts with `effects` of an early `q`, comes before `p`, and is not waited for anyway.

    `q` is `p` itself or in its fragment.
    """
    if not effects:
        return ()
    above = graph.above[p.id]
    for name in _awaited(q, p, d):
        above &= ~(graph.above[name] | graph.bits[name])
    return tuple([o.id for o in graph if o.effects and above & graph.bits[o.id] and conflict(effects, o.effects)])


def _awaited(q: Primitive, p: Primitive, d: Primitive) -> tuple[str, ...]:
    """Primitives that an early `q` waits for: the order edges of `p`, and what `q` reads, directly or not."""
    if p.fragment is None:
        lists = list_inputs(p)
        return (d.id, *p.after, *(ref.producer for key, ref in p.inputs if key not in lists and not ref.external))
    inner = p.fragment.graph
    bound = {**captures(p.inputs, "items"), ITEM: Ref(d.id)}
    read = {ref.producer for name in (q.id, *inner.ancestors[q.id]) for ref in inner[name].refs if ref.external}
    return (*p.after, *(ref.producer for name, ref in bound.items() if name in read and not ref.external))


def _grown(edit: GraphEdit, d: Primitive, maps: list[Primitive]) -> None:
    if maps:
        edit.replace(d.with_(attributes=d.attributes.with_(stream_items=tuple(m.id for m in maps))))
    for m in maps:
        edit.replace(m.with_(attributes=m.attributes.with_(grow=True)))


def _items(edit: GraphEdit, d: Primitive, graph: Graph, width: int) -> list[Ref]:
    """Cuts `d` into partial decodings; their values."""
    partials = list(_partials(d, width))
    edit.add(*partials)
    edit.replace(d.with_(inputs=_after_lead(d, graph, Ref(partials[-1].id))))
    return [Ref(partial.id) for partial in partials]


def _partials(d: Primitive, width: int) -> Iterator[Primitive]:
    inputs, after = d.inputs, d.after
    for item in range(width):
        name = InstancePath(d.id).stage(item)
        yield d.with_(
            id=name, kind=_K.PARTIAL_DECODING, inputs=inputs, after=after, splittable=False, size=1, item=item
        )
        inputs, after = (("previous", Ref(name)),), ()


def _after_lead(d: Primitive, graph: Graph, last: Ref) -> tuple[tuple[str, Ref], ...]:
    """The inputs of `d`, with the prefilling replaced by the last partial decoding."""

    def leads(ref: Ref) -> bool:
        return not ref.external and graph[ref.producer].prefills

    return tuple(("previous", last) if leads(ref) else (key, ref) for key, ref in d.inputs)


def _early_instances(edit: GraphEdit, m: Primitive, d: Primitive, graph: Graph, items: list[Ref]) -> None:
    assert m.fragment is not None
    after = {q.id: m.after + _overtaken(q.effects, q, m, d, graph) for q in m.fragment.graph if q.effects}
    outputs: list[Ref] = []
    for i, item in enumerate(items):
        name = InstancePath(m.id).instance(i)
        made, output = m.fragment.instantiate(name, {**captures(m.inputs, "items"), ITEM: item}, tentative=True)
        for inner, q in zip(m.fragment.graph, made, strict=True):
            waits = tuple(dict.fromkeys(q.after + after.get(inner.id, ())))
            edit.add(q.with_(after=waits) if waits != q.after else q)
        outputs.append(output)
    _verify(edit, m, "items", items, early=tuple(outputs))


def _early_requests(edit: GraphEdit, p: Primitive, followers: list[Primitive], items: list[Ref]) -> None:
    """Single tentative requests; the batchable primitive itself finds their results by content when it runs."""
    key = list_inputs(p)[0]
    edit.add(*(_single(p, i, key, item) for i, item in enumerate(items)))
    for follower in followers:
        made = (Ref(InstancePath(p.id).instance(i)) for i in range(len(items)))
        edit.add(*(_single(follower, i, list_inputs(follower)[0], one) for i, one in enumerate(made)))
    _verify(edit, p, key, items)


def _single(p: Primitive, item: int, key: str, value: Ref) -> Primitive:
    inputs = tuple((name, value if name == key else ref) for name, ref in p.inputs)
    return p.with_(id=InstancePath(p.id).instance(item), inputs=inputs, batchable=False, size=1, tentative=True)


def _followers(p: Primitive, d: Primitive, graph: Graph, context: PassContext) -> list[Primitive]:
    """Batchable searches over the vectors of `p`: they can go on with each early vector."""
    return [
        q.with_(after=q.after + _overtaken(q.effects, q, q, d, graph))
        for q in graph.readers(p.id)
        if q.kind is _K.SEARCHING
        and q.batchable
        and len(list_inputs(q)) == 1
        and q.input(list_inputs(q)[0]) == Ref(p.id)
        and _may_run(q, d, graph, context)
    ]


def _verify(edit: GraphEdit, p: Primitive, key: str, items: list[Ref], early: tuple[Ref, ...] = ()) -> None:
    """`p` reads the list through a VERIFY that knows what was predicted."""
    actual = p.input(key)
    assert actual is not None
    name = InstancePath(p.id).verify()
    predicted = tuple((f"predicted{i}", item) for i, item in enumerate(items))
    edit.add(Primitive(name, _K.VERIFY, inputs=(("actual", actual), *predicted), scope=p.scope))
    edit.replace(p.with_(inputs=tuple((k, Ref(name) if k == key else r) for k, r in p.inputs), early=p.early + early))
