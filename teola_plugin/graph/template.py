"""What the developer declared: components and their order. No data, no query (paper, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from teola_plugin.errors import GraphError
from teola_plugin.graph.attributes import NOTHING_SAID, Attributes
from teola_plugin.graph.primitive import Primitive
from teola_plugin.graph.refs import Effect, Inputs, PromptPart, Ref


class Role(Enum):
    """What a component does, hence how `build_pgraph` decomposes it."""

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
    """a component of one's own, which says its primitives"""

    # As in `PrimitiveKind`.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Component:
    """One module of the workflow: a role, the values it reads, and what its primitives need."""

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
    """Items it is expected to yield (a splittable generation) or requests it is expected to hold."""
    prompt: tuple[PromptPart, ...] = ()
    effects: tuple[Effect, ...] = ()
    scope: tuple[str, ...] = ()
    call: str = ""
    """Key of its callable at the client; empty: its name."""
    body: WorkflowTemplate | None = None
    otherwise: WorkflowTemplate | None = None
    attributes: Attributes = NOTHING_SAID
    options: tuple[tuple[str, Any], ...] = ()
    """As in `Primitive`."""
    primitives: tuple[Primitive, ...] = ()
    """CUSTOM: what it is made of, with ids of its own; `$key` is its input of that name, the last gives its value."""

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
    _ahead: frozenset[bool] = field(init=False, repr=False, compare=False, default=frozenset())
    """Which values of `Attributes.lookahead` its components have, and those of their bodies; False for early arms."""

    def __post_init__(self) -> None:
        names = [c.name for c in self.components]
        if len(set(names)) != len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise GraphError(f"two components share the name {twice!r}.", hint="rename one of them")
        object.__setattr__(self, "_names", frozenset(names))
        said = {c.attributes.lookahead for c in self.components}.union(*(body._ahead for body in self._bodies()))
        said |= {False for c in self.components if c.attributes.early_arms}
        object.__setattr__(self, "_ahead", frozenset(value for value in said if value is not None))
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

    def _check(self, ref: Ref, what: str) -> None:
        if not ref.external and ref.producer not in self._names:
            raise GraphError(
                f"{what} reads {ref}, which no component produces.", hint=f"use one of {sorted(self._names)}"
            )

    def __rshift__(self, other: Component | WorkflowTemplate) -> WorkflowTemplate:
        """All of this before all of `other`; the output is `other`'s."""
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
        """Components that nothing comes after."""
        earlier = {a for a, _ in self.order}
        return tuple(c.name for c in self.components if c.name not in earlier)

    def heads(self) -> tuple[str, ...]:
        later = {b for _, b in self.order}
        return tuple(c.name for c in self.components if c.name not in later)

    def looking_ahead(self, *, certain: bool, chosen: bool) -> WorkflowTemplate:
        """Without work for parts that are certain to be called, or that are yet to be chosen, unless it is wanted."""
        unwanted = {value for value in self._ahead if not (certain if value else chosen)}
        if not unwanted:
            return self

        def kept(body: WorkflowTemplate | None) -> WorkflowTemplate | None:
            return None if body is None else body.looking_ahead(certain=certain, chosen=chosen)

        return self.with_components(
            replace(
                c,
                body=kept(c.body),
                otherwise=kept(c.otherwise),
                attributes=c.attributes if chosen else c.attributes.with_(early_arms=()),
            )
            if c.body is not None
            else c
            for c in self.components
            if c.attributes.lookahead not in unwanted
        )

    def chosen_on(self) -> frozenset[str]:
        """Engines that work for parts which are yet to be chosen, if that is begun ahead."""
        if False not in self._ahead:
            return frozenset()
        own = (c for c in self.components if c.attributes.lookahead is False or c.attributes.early_arms)
        engines = {name for c in own for name in (c.engine, c.embedder, *_engines_in(c)) if name}
        return frozenset(engines).union(*(body.chosen_on() for body in self._bodies()))

    def _bodies(self) -> Iterator[WorkflowTemplate]:
        for c in self.components:
            yield from (body for body in (c.body, c.otherwise) if body is not None)

    def __getitem__(self, name: str) -> Component:
        return next(c for c in self.components if c.name == name)

    def with_components(self, components: Iterable[Component]) -> WorkflowTemplate:
        return replace(self, components=tuple(components))


def _engines_in(component: Component) -> Iterator[str]:
    """Engines of what a component holds, however deep."""
    for body in (component.body, component.otherwise):
        for c in () if body is None else body.components:
            yield from (c.engine, c.embedder, *_engines_in(c))
