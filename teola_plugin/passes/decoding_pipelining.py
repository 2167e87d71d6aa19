"""Pass 4: process each item of a splittable decoding as soon as it is complete (streaming decoding output).

Requests for such items are speculative: the items are predicted from the streamed text, while the list's parsers (the
framework's parser, the user's lambda) run once, on the complete text. A VERIFY compares the predictions with the list.
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
PARSER_KINDS = frozenset({_K.CALL, _K.OPAQUE})
SPECULATIVE_KINDS = frozenset({_K.EMBEDDING, _K.RERANKING, _K.SEARCHING, _K.CALL, _K.AGGREGATE, *LLM_KINDS})


@dataclass(frozen=True, slots=True)
class DecodingPipelining:
    """Split a decoding `d` of expected width n into the PARTIAL_DECODINGs `d#0..n-1` and `d`.

    A MAP `m` over its items gets speculative instances `m[0]..m[n-1]` and reads the list from `m.verify`. Other
    batchable readers get speculative single requests.
    """

    name: ClassVar[str] = "decoding-pipelining"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        """Rewrite decodings of lists whose readers may start on single items; return the same graph if there are none.

        With a known number of items the instances are planned; else they are added at run time.
        """
        decodings = [p for p in graph if p.kind is _K.DECODING and p.splittable and not _is_pipelined(p, graph)]
        if not decodings or context.speculate == "off":
            return graph
        edit = GraphEdit(graph)
        pipelined: set[str] = set()
        for d in decodings:
            consumers = [c for c in _consumers(d, graph, context) if c.id not in pipelined]
            pipelined.update(c.id for c in consumers)
            if consumers and d.size:
                items = _split_into_items(edit, d, graph, d.size)
                for c in consumers:
                    if c.kind is _K.MAP:
                        _add_instances(edit, c, d, graph, items)
                    else:
                        _add_requests(edit, c, _searches(c, d, graph, context), items)
            elif consumers:
                _grow_maps(edit, d, [c for c in consumers if c.kind is _K.MAP])
        return edit.freeze()


def _is_pipelined(d: Primitive, graph: Graph) -> bool:
    """Return True if this pass has rewritten the decoding before."""
    return any(graph[r.producer].kind is _K.PARTIAL_DECODING for r in d.refs if not r.external) or bool(
        d.attributes.stream_items
    )


def _consumers(d: Primitive, graph: Graph, context: PassContext) -> list[Primitive]:
    """Return the readers of the list in `d`'s text that may run on predicted items."""
    if not context.may_read(d.engine):
        return []
    parsers, consumers = [d.id], dict[str, Primitive]()
    for name in parsers:
        for reader in graph.readers(name):
            if reader.kind in PARSER_KINDS and reader.id not in parsers and _only_parses(reader, parsers, d, graph):
                parsers.append(reader.id)
            elif _runs_per_item(reader, name) and _may_speculate(reader, d, graph, context):
                consumers[reader.id] = reader
    return list(consumers.values())


def _only_parses(p: Primitive, parsers: list[str], d: Primitive, graph: Graph) -> bool:
    """Return True if `p` reads nothing that depends on `d` except the list itself."""
    producers = (ref.producer for ref in p.refs if not ref.external)
    return all(name in parsers or not graph.ancestor_masks[name] & graph.bits[d.id] for name in producers)


def _runs_per_item(p: Primitive, parser: str) -> bool:
    """Return True if `p` processes each item of the list that `parser` returns by itself."""
    if p.speculative:
        return False
    if p.kind is _K.MAP:
        return _is_whole_list(p.input("items"), parser)
    if p.batchable and p.kind in (_K.EMBEDDING, _K.RERANKING):
        lists = list_inputs(p)
        return len(lists) == 1 and _is_whole_list(p.input(lists[0]), parser)
    return False


def _is_whole_list(ref: Ref | None, parser: str) -> bool:
    return ref is not None and ref.producer == parser and not any(isinstance(key, Slice) for key in ref.path)


def _may_speculate(p: Primitive, d: Primitive, graph: Graph, context: PassContext) -> bool:
    """Return True if all primitives of a speculative instance of `p` may run speculatively."""
    inner = list(p.fragment.graph) if p.fragment is not None else [p]
    leaves = [leaf for q in inner for leaf in leaf_primitives(q)]
    if not all(q.kind in SPECULATIVE_KINDS for q in leaves) or not context.may_predict(*(q.engine for q in leaves)):
        return False
    if any(e.writes for q in leaves for e in q.effects):
        return False
    return all(e.validated or not _overtaken((e,), q, p, d, graph) for q in inner for e in q.effects)


def leaf_primitives(p: Primitive) -> Iterator[Primitive]:
    """Yield `p` itself if it has no fragment, else the leaf primitives of its fragments, at any depth."""
    fragments = [fragment for fragment in (p.fragment, p.otherwise) if fragment is not None]
    if not fragments:
        yield p
    for fragment in fragments:
        for q in fragment.graph:
            yield from leaf_primitives(q)


def _overtaken(effects: tuple[Effect, ...], q: Primitive, p: Primitive, d: Primitive, graph: Graph) -> tuple[str, ...]:
    """Return the ids of primitives that a speculative `q` would overtake although their effects conflict.

    These come before `p`, conflict with `effects`, and are not among the ancestors of the speculative `q`. `q` is `p`
    itself or a primitive of its fragment.
    """
    if not effects:
        return ()
    above = graph.ancestor_masks[p.id]
    for name in _awaited(q, p, d):
        above &= ~(graph.ancestor_masks[name] | graph.bits[name])
    return tuple([o.id for o in graph if o.effects and above & graph.bits[o.id] and conflict(effects, o.effects)])


def _awaited(q: Primitive, p: Primitive, d: Primitive) -> tuple[str, ...]:
    """Return the ids of primitives that a speculative `q` waits for: the order edges of `p`, and all that `q` reads."""
    if p.fragment is None:
        lists = list_inputs(p)
        return (d.id, *p.after, *(ref.producer for key, ref in p.inputs if key not in lists and not ref.external))
    inner = p.fragment.graph
    bound = {**captures(p.inputs, "items"), ITEM: Ref(d.id)}
    read = {ref.producer for name in (q.id, *inner.ancestors[q.id]) for ref in inner[name].refs if ref.external}
    return (*p.after, *(ref.producer for name, ref in bound.items() if name in read and not ref.external))


def _grow_maps(edit: GraphEdit, d: Primitive, maps: list[Primitive]) -> None:
    """Mark a decoding of unknown width and its MAPs: instances are added at run time, as items arrive."""
    if maps:
        edit.replace(d.with_(attributes=d.attributes.with_(stream_items=tuple(m.id for m in maps))))
    for m in maps:
        edit.replace(m.with_(attributes=m.attributes.with_(grow=True)))


def _split_into_items(edit: GraphEdit, d: Primitive, graph: Graph, width: int) -> list[Ref]:
    """Add `width` partial decodings before `d`, which then continues the last of them. Return their values."""
    inputs, after, items = d.inputs, d.after, list[Ref]()
    for item in range(width):
        name = InstancePath(d.id).stage(item)
        edit.add(
            d.with_(id=name, kind=_K.PARTIAL_DECODING, inputs=inputs, after=after, splittable=False, size=1, item=item)
        )
        items.append(Ref(name))
        inputs, after = (("previous", items[-1]),), ()

    def is_prefilling(ref: Ref) -> bool:
        return not ref.external and graph[ref.producer].prefills

    edit.replace(
        d.with_(inputs=tuple(("previous", items[-1]) if is_prefilling(ref) else (k, ref) for k, ref in d.inputs))
    )
    return items


def _add_instances(edit: GraphEdit, m: Primitive, d: Primitive, graph: Graph, items: list[Ref]) -> None:
    """Add a speculative instance of the MAP `m` for each predicted item."""
    assert m.fragment is not None
    after = {q.id: m.after + _overtaken(q.effects, q, m, d, graph) for q in m.fragment.graph if q.effects}
    outputs: list[Ref] = []
    for i, item in enumerate(items):
        name = InstancePath(m.id).instance(i)
        instance, output = m.fragment.instantiate(name, {**captures(m.inputs, "items"), ITEM: item}, speculative=True)
        for inner, q in zip(m.fragment.graph, instance, strict=True):
            waits = tuple(dict.fromkeys(q.after + after.get(inner.id, ())))
            edit.add(q.with_(after=waits) if waits != q.after else q)
        outputs.append(output)
    _add_verify(edit, m, "items", items, outputs=tuple(outputs))


def _add_requests(edit: GraphEdit, p: Primitive, searches: list[Primitive], items: list[Ref]) -> None:
    """Add a speculative request for each predicted item, and searches over its result.

    The batchable primitive `p` finds their results by content when it runs.
    """
    key = list_inputs(p)[0]
    edit.add(*(_single_request(p, i, key, item) for i, item in enumerate(items)))
    for search in searches:
        vectors = (Ref(InstancePath(p.id).instance(i)) for i in range(len(items)))
        edit.add(*(_single_request(search, i, list_inputs(search)[0], vector) for i, vector in enumerate(vectors)))
    _add_verify(edit, p, key, items)


def _single_request(p: Primitive, item: int, key: str, value: Ref) -> Primitive:
    inputs = tuple((name, value if name == key else ref) for name, ref in p.inputs)
    return p.with_(id=InstancePath(p.id).instance(item), inputs=inputs, batchable=False, size=1, speculative=True)


def _searches(p: Primitive, d: Primitive, graph: Graph, context: PassContext) -> list[Primitive]:
    """Return the batchable searches over the vectors of `p`, which can search with each vector by itself."""
    return [
        q.with_(after=q.after + _overtaken(q.effects, q, q, d, graph))
        for q in graph.readers(p.id)
        if q.kind is _K.SEARCHING
        and q.batchable
        and len(list_inputs(q)) == 1
        and q.input(list_inputs(q)[0]) == Ref(p.id)
        and _may_speculate(q, d, graph, context)
    ]


def _add_verify(edit: GraphEdit, p: Primitive, key: str, items: list[Ref], outputs: tuple[Ref, ...] = ()) -> None:
    """Let `p` read the list through a VERIFY that compares it with the predicted items."""
    actual = p.input(key)
    assert actual is not None
    name = InstancePath(p.id).verify()
    predicted = tuple((f"predicted{i}", item) for i, item in enumerate(items))
    edit.add(Primitive(name, _K.VERIFY, inputs=(("actual", actual), *predicted), scope=p.scope))
    edit.replace(
        p.with_(
            inputs=tuple((k, Ref(name) if k == key else r) for k, r in p.inputs),
            speculative_refs=p.speculative_refs + outputs,
        )
    )
