"""Decomposition of a WorkflowTemplate into a p-graph (paper, Algorithm 1, GraphTransform).

Every component decomposes into primitives; the template's order becomes order-only edges from the tail primitives of
the earlier component to the head primitives of the later one, which Pass 1 prunes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from teola_plugin.errors import GraphError
from teola_plugin.graph.graph import Fragment, Graph
from teola_plugin.graph.primitive import IMPURE_KINDS, Attributes, Primitive, PrimitiveKind
from teola_plugin.graph.refs import UNKNOWN_EFFECT, Effect, Inputs, Ref, named
from teola_plugin.graph.template import Component, Role, WorkflowTemplate

Shape = Mapping[str, int]
"""Expected sizes of one query, by component name: chunks of an uploaded document, generated items, ..."""


@dataclass(frozen=True, slots=True)
class _Edges:
    """The incoming edges of a component: the values that it reads, and the primitives that come before it."""

    inputs: Inputs
    after: tuple[str, ...] = ()


_QUERY, _DOCUMENT = Attributes(role="query"), Attributes(role="document")
COLLECTION = "collection"
"""Name of the input that names the collection of a search or an ingestion, if it is known per query only."""
_Primitives = tuple[Primitive, ...]
"""A decomposed component: only the first primitive reads other components, and only the last is read by them."""
_Decompose = Callable[[Component, _Edges, Shape], _Primitives]


def build_pgraph(template: WorkflowTemplate, shape: Shape | None = None) -> Graph:
    """Return the p-graph of `template` for a query of the given shape. Raise GraphError for an invalid template."""
    sizes = shape or {}
    tails = {c.name: _last_primitive(c) for c in template.components}
    predecessors: dict[str, dict[str, None]] = {}
    for earlier, later in template.order:
        predecessors.setdefault(later, {})[tails[earlier]] = None
    primitives: list[Primitive] = []
    for c in template.components:
        inputs = tuple([(key, _to_primitive(ref, tails)) for key, ref in c.inputs])
        primitives += _DECOMPOSE[c.role](c, _Edges(inputs, tuple(predecessors.get(c.name, ()))), sizes)
    return Graph(primitives, _to_primitive(template.output, tails))


def _last_primitive(c: Component) -> str:
    """Return the id of the primitive whose value is the component's value."""
    if c.role is not Role.CUSTOM:
        return c.name + _LAST_SUFFIX.get(c.role, "")
    if not c.primitives:
        raise GraphError(f"component {c.name!r} is made of no primitives.", hint="give it at least one")
    return f"{c.name}.{c.primitives[-1].id}"


def _to_primitive(ref: Ref, tails: dict[str, str]) -> Ref:
    """Return a reference to a component as a reference to its last primitive."""
    producer = tails.get(ref.producer, ref.producer)
    return ref if producer == ref.producer else Ref(producer, ref.path)


def _require_input(component: Component, inputs: Inputs, name: str) -> Ref:
    """Return the reference that a component has for this input. Raise GraphError if it has none."""
    for key, ref in inputs:
        if key == name:
            return ref
    raise GraphError(
        f"component {component.name!r} ({component.role.value}) has no input {name!r}.",
        hint=f"give it inputs {name}=...",
    )


def _indexing(c: Component, edges: _Edges, sizes: Shape) -> _Primitives:
    """Decompose an INDEXING component into chunking, embedding and ingestion of its documents."""
    size = sizes.get(c.name, c.expected)
    chunks, vectors = f"{c.name}.chunking", f"{c.name}.embedding"
    documents = tuple([(key, ref) for key, ref in edges.inputs if key != COLLECTION])
    return (
        Primitive(
            chunks,
            PrimitiveKind.CHUNKING,
            "",
            documents,
            edges.after,
            scope=c.scope,
            call=c.call or c.name,
            size=1,
        ),
        Primitive(
            vectors,
            PrimitiveKind.EMBEDDING,
            c.embedder,
            named(texts=Ref(chunks)),
            scope=c.scope,
            batchable=True,
            size=size,
            attributes=_DOCUMENT,
        ),
        Primitive(
            f"{c.name}.ingestion",
            PrimitiveKind.INGESTION,
            c.engine,
            named(chunks=Ref(chunks), vectors=Ref(vectors)) + _collection(edges),
            scope=c.scope,
            batchable=True,
            size=size,
            effects=c.effects,
            attributes=c.attributes,
            options=c.options,
        ),
    )


def _retrieval(c: Component, edges: _Edges, sizes: Shape) -> _Primitives:
    """Decompose a RETRIEVAL component into the embedding of its query and the search with that vector."""
    vector = f"{c.name}.embedding"
    size = (sizes.get(c.name, c.expected)) if c.batchable else 1
    return (
        Primitive(
            vector,
            PrimitiveKind.EMBEDDING,
            c.embedder,
            named(texts=_require_input(c, edges.inputs, "query")),
            edges.after,
            scope=c.scope,
            batchable=c.batchable,
            size=size,
            attributes=_QUERY,
        ),
        Primitive(
            f"{c.name}.searching",
            PrimitiveKind.SEARCHING,
            c.engine,
            named(vectors=Ref(vector)) + _collection(edges),
            scope=c.scope,
            batchable=c.batchable,
            size=size,
            effects=c.effects,
            attributes=c.attributes,
            options=c.options,
        ),
    )


def _collection(edges: _Edges) -> Inputs:
    """Return the input that names the collection, if it is known per query only."""
    return tuple([(key, ref) for key, ref in edges.inputs if key == COLLECTION])


def _generation(c: Component, edges: _Edges, sizes: Shape) -> _Primitives:
    """Decompose a GENERATION component into the prefilling of its prompt and the decoding of its answer."""
    prefilling = f"{c.name}.prefilling"
    return (
        Primitive(
            prefilling,
            PrimitiveKind.PREFILLING,
            c.engine,
            edges.inputs,
            edges.after,
            scope=c.scope,
            call=c.call or c.name,
            effects=c.effects,
            prompt=c.prompt,
            size=1,
            attributes=c.attributes,
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
            attributes=c.attributes,
            options=c.options,
        ),
    )


def _single(kind: PrimitiveKind) -> _Decompose:
    """Return the decomposition of a role that consists of one primitive, of this kind."""

    def decompose(c: Component, edges: _Edges, sizes: Shape) -> _Primitives:
        """Return the component as one primitive. It has the effects of its fragments, and unknown ones if it is user
        code."""
        body = otherwise = None
        effects = c.effects
        if c.body is not None:
            body, otherwise = _fragment(c.body, sizes), _fragment(c.otherwise, sizes)
            effects = effects or _inner_effects(body, otherwise)
        if not effects and kind in IMPURE_KINDS:
            effects = (UNKNOWN_EFFECT,)
        primitive = Primitive(
            c.name,
            kind,
            c.engine,
            edges.inputs,
            edges.after,
            effects=effects,
            scope=c.scope,
            call=c.call or c.name,
            batchable=c.batchable,
            splittable=c.splittable,
            size=sizes.get(c.name, c.expected) if c.batchable else 1,
            fragment=body,
            otherwise=otherwise,
            attributes=c.attributes,
            options=c.options,
        )
        return (primitive,)

    return decompose


def _custom(c: Component, edges: _Edges, sizes: Shape) -> _Primitives:
    """Return the component's own primitives, renamed; those without a parent among them get its order edges."""
    names = {p.id: f"{c.name}.{p.id}" for p in c.primitives}
    bindings = captures(edges.inputs)
    primitives = []
    for p in c.primitives:
        renamed = p.rename(names, bindings, scope=c.scope, call=f"{c.name}.{p.call}" if p.call else "")
        if not names.keys() & {*p.producers, *p.after}:
            renamed = renamed.with_(after=renamed.after + edges.after)
        primitives.append(renamed)
    return tuple(primitives)


def _fragment(body: WorkflowTemplate | None, sizes: Shape) -> Fragment | None:
    """Return the p-graph of a component's body as a fragment; None without a body."""
    if body is None:
        return None
    graph = build_pgraph(body, sizes)
    return Fragment(graph, graph.output)


def _inner_effects(*fragments: Fragment | None) -> tuple[Effect, ...]:
    """Return the effects of all primitives in the fragments: the primitive with these fragments has them, too."""
    return tuple(dict.fromkeys([e for f in fragments if f is not None for p in f.graph for e in p.effects]))


_LAST_SUFFIX = {Role.INDEXING: ".ingestion", Role.RETRIEVAL: ".searching", Role.GENERATION: ".decoding"}
"""Suffix of the id of a component's last primitive, for roles that have several primitives."""

_DECOMPOSE: dict[Role, _Decompose] = {
    Role.INDEXING: _indexing,
    Role.RETRIEVAL: _retrieval,
    Role.GENERATION: _generation,
    Role.CHUNKING: _single(PrimitiveKind.CHUNKING),
    Role.EMBEDDING: _single(PrimitiveKind.EMBEDDING),
    Role.INGESTION: _single(PrimitiveKind.INGESTION),
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
    Role.CUSTOM: _custom,
}


def captures(inputs: Inputs, *reserved: str) -> dict[str, Ref]:
    """Return the values of a fragment's external references: `$name` for each input that is not reserved."""
    return {f"${key}": ref for key, ref in inputs if key not in reserved}
