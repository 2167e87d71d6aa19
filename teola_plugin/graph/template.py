"""The workflow template: the components that the developer declared, and their order (paper, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from teola_plugin.errors import GraphError
from teola_plugin.graph.primitive import NOTHING_SAID, Attributes, Primitive
from teola_plugin.graph.refs import Effect, Inputs, PromptPart, Ref


class Role(Enum):
    """The function of a component, by which `build_pgraph` decomposes it."""

    INDEXING = "indexing"
    """documents -> chunks, embedded, in a collection: CHUNKING, EMBEDDING, INGESTION"""
    CHUNKING = "chunking"
    EMBEDDING = "embedding"
    INGESTION = "ingestion"
    RETRIEVAL = "retrieval"
    """query text -> hits: EMBEDDING, SEARCHING"""
    SEARCHING = "searching"
    RERANKING = "reranking"
    GENERATION = "generation"
    """prompt -> text: PREFILLING, DECODING"""
    CALL = "call"
    OPAQUE = "opaque"
    TOOL = "tool"
    CONDITION = "condition"
    AGGREGATE = "aggregate"
    MAP = "map"
    FOLD = "fold"
    LOOP = "loop"
    BRANCH = "branch"
    CUSTOM = "custom"
    """a component of the user's own, with the primitives that it names"""

    # As in `PrimitiveKind`.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Component:
    """A module of the workflow: its role, the values that it reads, and parameters of its primitives."""

    name: str
    role: Role
    inputs: Inputs = ()
    engine: str = ""
    """Engine of its (main) primitive: the LLM, the reranker, the vector store."""
    embedder: str = ""
    """Engine of its EMBEDDING primitive (INDEXING, RETRIEVAL)."""
    batchable: bool = False
    splittable: bool = False
    expected: int | None = None
    """Expected number of items (of a splittable generation) or of requests."""
    prompt: tuple[PromptPart, ...] = ()
    effects: tuple[Effect, ...] = ()
    scope: tuple[str, ...] = ()
    call: str = ""
    """Key of its callable at the client; empty means its name."""
    body: WorkflowTemplate | None = None
    otherwise: WorkflowTemplate | None = None
    attributes: Attributes = NOTHING_SAID
    options: tuple[tuple[str, Any], ...] = ()
    """As in `Primitive`."""
    primitives: tuple[Primitive, ...] = ()
    """CUSTOM: its primitives, with ids of their own. `$key` refers to an input; the last one's value is its value."""

    def __rshift__(self, other: Component | WorkflowTemplate) -> WorkflowTemplate:
        return WorkflowTemplate((self,), Ref(self.name)) >> other


@dataclass(frozen=True, slots=True)
class WorkflowTemplate:
    """Components and the order in which the developer wrote them; `output` names the result.

    `order` holds pairs of component names (earlier, later). Refs name components, or external values: `$input`
    for the query's input, and inside a body `$item`, `$carry` and `$name` for what the holder captures.
    """

    components: tuple[Component, ...]
    output: Ref
    order: tuple[tuple[str, str], ...] = ()
    name: str = "workflow"
    _names: frozenset[str] = field(init=False, repr=False, compare=False, default=frozenset())
    _lookaheads: frozenset[bool] = field(init=False, repr=False, compare=False, default=frozenset())
    """Values of `Attributes.lookahead` in it and in the bodies of its components; False for early arms, too."""

    def __post_init__(self) -> None:
        names = [c.name for c in self.components]
        if len(set(names)) != len(names):
            duplicate = next(n for n in names if names.count(n) > 1)
            raise GraphError(f"two components share the name {duplicate!r}.", hint="rename one of them")
        object.__setattr__(self, "_names", frozenset(names))
        values = {c.attributes.lookahead for c in self.components}
        values |= {False for c in self.components if c.attributes.early_arms}
        lookaheads = frozenset(value for value in values if value is not None)
        object.__setattr__(self, "_lookaheads", lookaheads.union(*(body._lookaheads for body in self._bodies())))
        for pair in self.order:
            for name in pair:
                if name not in self._names:
                    raise GraphError(
                        f"the order names {name!r}, which is no component.", hint=f"use one of {sorted(names)}"
                    )
        for c in self.components:
            for key, ref in c.inputs:
                self._check(ref, f"input {key!r} of {c.name!r}")
        self._check(self.output, "the output")

    def _check(self, ref: Ref, reader: str) -> None:
        if not ref.external and ref.producer not in self._names:
            raise GraphError(
                f"{reader} reads {ref}, which no component produces.", hint=f"use one of {sorted(self._names)}"
            )

    def __rshift__(self, other: Component | WorkflowTemplate) -> WorkflowTemplate:
        """Return a template with all of this before all of `other`, and the output of `other`."""
        if isinstance(other, Component):
            heads: tuple[str, ...] = (other.name,)
            components: tuple[Component, ...] = (other,)
            order: tuple[tuple[str, str], ...] = ()
            output = Ref(other.name)
        else:
            heads, components, order, output = other.heads(), other.components, other.order, other.output
        between = tuple((tail, head) for tail in self.tails() for head in heads)
        return WorkflowTemplate(self.components + components, output, self.order + order + between, self.name)

    def tails(self) -> tuple[str, ...]:
        """Return the names of the components that no other comes after."""
        earlier = {a for a, _ in self.order}
        return tuple(c.name for c in self.components if c.name not in earlier)

    def heads(self) -> tuple[str, ...]:
        later = {b for _, b in self.order}
        return tuple(c.name for c in self.components if c.name not in later)

    def with_lookahead(self, *, certain: bool, open_choices: bool) -> WorkflowTemplate:
        """Return the template with only the requests before their place that are allowed.

        Args:
            certain: Keep requests of subplans that the original is certain to reach.
            open_choices: Keep requests of subplans that the original may not choose.
        """
        unwanted = {value for value in self._lookaheads if not (certain if value else open_choices)}
        if not unwanted:
            return self

        def filtered(body: WorkflowTemplate | None) -> WorkflowTemplate | None:
            return None if body is None else body.with_lookahead(certain=certain, open_choices=open_choices)

        return self.with_components(
            replace(
                c,
                body=filtered(c.body),
                otherwise=filtered(c.otherwise),
                attributes=c.attributes if open_choices else c.attributes.with_(early_arms=()),
            )
            if c.body is not None
            else c
            for c in self.components
            if c.attributes.lookahead not in unwanted
        )

    def engines_of_open_choices(self) -> frozenset[str]:
        """Return the engines of subplans that the original may not choose, and that begin before it does."""
        if False not in self._lookaheads:
            return frozenset()
        components = (c for c in self.components if c.attributes.lookahead is False or c.attributes.early_arms)
        engines = {name for c in components for name in (c.engine, c.embedder, *_engines_in(c)) if name}
        return frozenset(engines).union(*(body.engines_of_open_choices() for body in self._bodies()))

    def _bodies(self) -> Iterator[WorkflowTemplate]:
        for c in self.components:
            yield from (body for body in (c.body, c.otherwise) if body is not None)

    def __getitem__(self, name: str) -> Component:
        return next(c for c in self.components if c.name == name)

    def with_components(self, components: Iterable[Component]) -> WorkflowTemplate:
        return replace(self, components=tuple(components))


def _engines_in(component: Component) -> Iterator[str]:
    """Yield the engines of all components in a component's bodies, at any depth."""
    for body in (component.body, component.otherwise):
        for c in () if body is None else body.components:
            yield from (c.engine, c.embedder, *_engines_in(c))
