"""WorkflowTemplate -> p-graph (paper, Algorithm 1, GraphTransform).

Every component decomposes into primitives; the template's order becomes order-only edges from the tail primitives of
the earlier component to the head primitives of the later one, which Pass 1 prunes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from teola_plugin.errors import GraphError
from teola_plugin.graph.fragment import Fragment
from teola_plugin.graph.graph import Graph
from teola_plugin.graph.kinds import IMPURE_KINDS, PrimitiveKind
from teola_plugin.graph.primitive import Primitive
from teola_plugin.graph.refs import UNKNOWN_EFFECT, Effect, Inputs, Ref, named
from teola_plugin.graph.template import Component, Role, WorkflowTemplate

Shape = Mapping[str, int]
"""Expected sizes of one query, by component name: chunks of an uploaded document, generated items, ..."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """A decomposed component: its primitives and the one whose value is the component's."""

    primitives: tuple[Primitive, ...]
    value: str


def build_pgraph(template: WorkflowTemplate, shape: Shape | None = None) -> Graph:
    """The p-graph of `template` for a query of the given shape. Raises `GraphError`."""
    sizes = shape or {}
    parts = {c.name: _DECOMPOSE[c.role](c, sizes) for c in template.components}
    value = {name: found.value for name, found in parts.items()}
    heads = {name: _heads(found.primitives) for name, found in parts.items()}
    tails = {name: _tails(found.primitives) for name, found in parts.items()}
    waits: dict[str, list[str]] = {}
    for earlier, later in template.order:
        for head in heads[later]:
            waits.setdefault(head, []).extend(tails[earlier])
    primitives = [
        _with_edges(p, own={q.id for q in found.primitives}, value=value, after=waits.get(p.id, []))
        for found in parts.values()
        for p in found.primitives
    ]
    return Graph(primitives, _moved(template.output, value))


def _with_edges(p: Primitive, *, own: set[str], value: dict[str, str], after: list[str]) -> Primitive:
    inputs = tuple((key, ref if ref.producer in own else _moved(ref, value)) for key, ref in p.inputs)
    return p.with_(inputs=inputs, after=tuple(dict.fromkeys([*p.after, *after])))


def _moved(ref: Ref, value: dict[str, str]) -> Ref:
    return Ref(value.get(ref.producer, ref.producer), ref.path)


def _heads(primitives: tuple[Primitive, ...]) -> list[str]:
    own = {p.id for p in primitives}
    return [p.id for p in primitives if not any(r.producer in own for r in p.refs)]


def _tails(primitives: tuple[Primitive, ...]) -> list[str]:
    read = {r.producer for p in primitives for r in p.refs}
    return [p.id for p in primitives if p.id not in read]


def _need(component: Component, name: str) -> Ref:
    for key, ref in component.inputs:
        if key == name:
            return ref
    raise GraphError(
        f"component {component.name!r} ({component.role.value}) has no input {name!r}.",
        hint=f"give it inputs {name}=...",
    )


def _indexing(c: Component, sizes: Shape) -> _Parts:
    size = sizes.get(c.name, c.expected)
    chunks, vectors = f"{c.name}.chunking", f"{c.name}.embedding"
    return _Parts(
        (
            Primitive(chunks, PrimitiveKind.CHUNKING, inputs=c.inputs, call=c.call or c.name, scope=c.scope, size=1),
            Primitive(
                vectors,
                PrimitiveKind.EMBEDDING,
                c.embedder,
                named(texts=Ref(chunks)),
                scope=c.scope,
                batchable=True,
                size=size,
                options=(("role", "document"),),
            ),
            Primitive(
                f"{c.name}.ingestion",
                PrimitiveKind.INGESTION,
                c.engine,
                named(chunks=Ref(chunks), vectors=Ref(vectors)),
                scope=c.scope,
                batchable=True,
                size=size,
                effects=c.effects,
                options=c.options,
            ),
        ),
        f"{c.name}.ingestion",
    )


def _retrieval(c: Component, sizes: Shape) -> _Parts:
    vector = f"{c.name}.embedding"
    size = (sizes.get(c.name, c.expected)) if c.batchable else 1
    return _Parts(
        (
            Primitive(
                vector,
                PrimitiveKind.EMBEDDING,
                c.embedder,
                named(texts=_need(c, "query")),
                scope=c.scope,
                batchable=c.batchable,
                size=size,
                options=(("role", "query"),),
            ),
            Primitive(
                f"{c.name}.searching",
                PrimitiveKind.SEARCHING,
                c.engine,
                named(vectors=Ref(vector)),
                scope=c.scope,
                batchable=c.batchable,
                size=size,
                effects=c.effects,
                options=c.options,
            ),
        ),
        f"{c.name}.searching",
    )


def _generation(c: Component, sizes: Shape) -> _Parts:
    prefilling = f"{c.name}.prefilling"
    return _Parts(
        (
            Primitive(
                prefilling,
                PrimitiveKind.PREFILLING,
                c.engine,
                c.inputs,
                scope=c.scope,
                call=c.call or c.name,
                prompt=c.prompt,
                size=1,
                options=c.options,
            ),
            Primitive(
                f"{c.name}.decoding",
                PrimitiveKind.DECODING,
                c.engine,
                named(prefilling=Ref(prefilling)),
                scope=c.scope,
                call=c.call or c.name,
                splittable=c.splittable,
                size=sizes.get(c.name, c.expected) if c.splittable else None,
                options=c.options,
            ),
        ),
        f"{c.name}.decoding",
    )


def _single(kind: PrimitiveKind) -> Callable[[Component, Shape], _Parts]:
    def decompose(c: Component, sizes: Shape) -> _Parts:
        body, otherwise = _fragment(c.body, sizes), _fragment(c.otherwise, sizes)
        effects = c.effects or _inner_effects(body, otherwise)
        if kind in IMPURE_KINDS:
            effects = effects or (UNKNOWN_EFFECT,)
        primitive = Primitive(
            c.name,
            kind,
            c.engine,
            c.inputs,
            effects=effects,
            scope=c.scope,
            call=c.call or c.name,
            batchable=c.batchable,
            splittable=c.splittable,
            size=sizes.get(c.name, c.expected) if c.batchable else 1,
            fragment=body,
            otherwise=otherwise,
            options=c.options,
        )
        return _Parts((primitive,), c.name)

    return decompose


def _fragment(body: WorkflowTemplate | None, sizes: Shape) -> Fragment | None:
    if body is None:
        return None
    graph = build_pgraph(body, sizes)
    return Fragment(graph, graph.output)


def _inner_effects(*fragments: Fragment | None) -> tuple[Effect, ...]:
    """What the instances of a holder may touch, hence what the holder itself is ordered by."""
    return tuple(dict.fromkeys(e for f in fragments if f is not None for p in f.graph for e in p.effects))


_DECOMPOSE: dict[Role, Callable[[Component, Shape], _Parts]] = {
    Role.INDEXING: _indexing,
    Role.RETRIEVAL: _retrieval,
    Role.GENERATION: _generation,
    Role.EMBEDDING: _single(PrimitiveKind.EMBEDDING),
    Role.SEARCHING: _single(PrimitiveKind.SEARCHING),
    Role.RERANKING: _single(PrimitiveKind.RERANKING),
    Role.CALL: _single(PrimitiveKind.CALL),
    Role.OPAQUE: _single(PrimitiveKind.OPAQUE),
    Role.TOOL: _single(PrimitiveKind.TOOL),
    Role.CONDITION: _single(PrimitiveKind.CONDITION),
    Role.AGGREGATE: _single(PrimitiveKind.AGGREGATE),
    Role.MAP: _single(PrimitiveKind.MAP),
    Role.FOLD: _single(PrimitiveKind.FOLD),
    Role.LOOP: _single(PrimitiveKind.LOOP),
    Role.BRANCH: _single(PrimitiveKind.BRANCH),
}


def captures(inputs: Inputs, *reserved: str) -> dict[str, Ref]:
    """The bindings of a fragment's external refs by its holder's inputs: `$name` for each input not reserved."""
    return {f"${key}": ref for key, ref in inputs if key not in reserved}
