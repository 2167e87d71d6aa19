"""The workflow template (paper, section 3.2), the query that is one call of it, and the profiles of engines.

A template holds the components that the developer declared, and their order. An engine profile holds the latency by
size, the limits and the device, which passes, the batcher and the simulator use.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from teola_plugin.errors import GraphError, RegistrationError
from teola_plugin.graph.device import normalize
from teola_plugin.graph.graph import Graph
from teola_plugin.graph.primitive import NOTHING_SAID, Attributes, Primitive, PrimitiveKind
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
        """Raise GraphError for names that are used twice, and for an order, input or output that names no component."""
        names = [c.name for c in self.components]
        if len(set(names)) != len(names):
            duplicate = next(n for n in names if names.count(n) > 1)
            raise GraphError(f"two components share the name {duplicate!r}.", hint="rename one of them")
        object.__setattr__(self, "_names", frozenset(names))
        values = {c.attributes.lookahead for c in self.components}
        values |= {False for c in self.components if c.attributes.speculative_arms}
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
        """Raise GraphError if a reference names no component. `reader` is who has it, for the message."""
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
                attributes=c.attributes if open_choices else c.attributes.with_(speculative_arms=()),
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
        components = (c for c in self.components if c.attributes.lookahead is False or c.attributes.speculative_arms)
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


_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The context of a request: for which tenant and app it is made, and how urgent it is. It never affects the result.

    It travels with every call into the pool, also with calls that belong to no plan.
    """

    tenant: str = ""
    """Tenant. It salts caches: prefixes are shared within one tenant only."""
    app: str = "default"
    deadline: float | None = None
    """Time on the runtime's clock; None for no deadline."""
    goal: float | None = None
    """Target duration of the whole query, in seconds; None for as soon as possible."""
    weight: float = 1.0
    """Share among the queries of a pool; 1.0 is the default share."""
    depth: int = 0
    """Longest distance to the output of its query."""
    session: str = ""
    """Requests of one session should run on one replica, e.g. the prefillings of one prompt."""
    gang: str = ""
    """Requests of one gang are useful only when the last of them has ended."""


@dataclass(frozen=True, slots=True)
class Query:
    """The inputs of a query, and the context of its requests."""

    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Values of the graph's external producers, by name without the `$` (usually just `input`)."""
    id: str = field(default_factory=lambda: f"q{next(_numbers)}")
    app: str = "default"
    tenant: str = ""
    """Tenant. It salts caches: prefixes are shared within one tenant only."""
    deadline: float | None = None
    """Time on the runtime's clock; None for no deadline."""
    weight: float = 1.0

    _request_context: RequestContext = field(init=False, repr=False, compare=False, default=RequestContext())

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "_request_context", RequestContext(self.tenant, self.app, self.deadline, weight=self.weight)
        )

    @property
    def request_context(self) -> RequestContext:
        """The context of its requests, created once."""
        return self._request_context

    def check(self, graph: Graph) -> None:
        """Raise RegistrationError unless the query binds every external value of `graph`."""
        missing = sorted(name for name in graph.external_inputs if name.removeprefix("$") not in self.inputs)
        if missing:
            raise RegistrationError(
                f"query {self.id} does not bind {', '.join(missing)} of its graph; it has {sorted(self.inputs)}.",
                hint="pass a value for each input that the template declares",
            )


class Batching(Enum):
    """A way in which an engine fills its slots."""

    STATIC = "static"
    """A batch runs as one; the next waits for it (embedding, reranking)."""
    CONTINUOUS = "continuous"
    """Slots are freed request by request; a batch is never a barrier (LLMs, databases with a pool)."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size, measured at `points` (ascending sizes), with linear interpolation and extrapolation."""

    points: tuple[tuple[int, float], ...]

    def __call__(self, size: float) -> float:
        """Return the seconds for a size, by the straight line through the two points next to it; never negative."""
        points = self.points
        if len(points) == 1:
            return points[0][1]
        at = bisect_left(points, (size,), 1, len(points) - 1)
        (s0, t0), (s1, t1) = points[at - 1], points[at]
        return max(0.0, t0 + (t1 - t0) * (size - s0) / (s1 - s0))

    @staticmethod
    def linear(fixed: float, per_unit: float) -> Curve:
        return Curve(((0, fixed), (1_000_000, fixed + per_unit * 1_000_000)))

    def scaled(self, factor: float) -> Curve:
        """Return the curve with `factor` times as many seconds at every size."""
        return Curve(tuple((size, seconds * factor) for size, seconds in self.points))


TAKING_TURNS = 0.8
"""Interference from which prefilling during a decoding gains nothing."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The latency, maximum efficient batch and limits of an engine with its model and device.

    Sizes are requests; for prefillings prompt tokens, for decodings output tokens.
    """

    curves: Mapping[PrimitiveKind, Curve] = field(default_factory=dict)
    batching: Batching = Batching.STATIC
    max_batch: int = 256
    """Number of slots in one tick: requests, or prompt tokens for an LLM."""
    max_efficient_batch: int = 128
    """Size beyond which throughput no longer grows."""
    max_requests: int = 256
    """Maximum number of requests in flight on one replica."""
    max_request_size: int | None = None
    """Largest single request (an LLM's context length, in tokens); None for no limit."""
    device: str = ""
    """Canonical name. Engines that share a device (see `graph.device`) do not overlap; empty if unknown."""
    dedicated: bool = True
    """True if it may get speculative requests: for predicted items, for arms that may not be chosen."""
    prefix_caching: bool = False
    """True if a prefix that was prefilled once makes later prompts with it cheaper."""
    cache_tokens: int = 0
    """Size of a replica's prefix cache, in tokens; 0 if unknown."""
    min_split_tokens: int = 48
    """Number of tokens below which a partial prefilling costs more than it saves."""
    warmup_chunk: int = 256
    """Maximum prompt tokens of one step of a partial prefilling while the replica decodes."""
    drafts: int = 0
    """Number of drafted tokens that it verifies at once for one request; 0 if it accepts no drafts."""
    verifying: Mapping[int, Curve] = field(default_factory=dict)
    """Seconds of one decoding step by the number of drafted tokens per request, for each measured batch size. Empty if
    not measured."""
    interference: float = 0.0
    """Share by which prefillings and decodings slow each other when they run at the same time."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", normalize(self.device))

    @property
    def takes_turns(self) -> bool:
        """True if a prefilling during a decoding gains nothing: interference is near 1, as on a CPU."""
        return self.interference >= TAKING_TURNS

    def scaled(self, factor: float) -> EngineProfile:
        """Return the profile of an engine that takes `factor` times as long. Limits stay.

        Raises:
            ValueError: `factor` is negative or not finite.
        """
        if not (0 <= factor < float("inf")):
            raise ValueError(f"a profile cannot be scaled by {factor!r}: give a number of 0 or more")
        curves = {kind: curve.scaled(factor) for kind, curve in self.curves.items()}
        return replace(self, curves=curves, verifying={n: curve.scaled(factor) for n, curve in self.verifying.items()})

    def step(self, drafted: float, batch: float) -> float:
        """Return the seconds of a decoding step of `batch` requests with `drafted` tokens each; 0 if not measured.

        Between measured sizes the duration is interpolated.
        """
        if not self.verifying:
            return 0.0
        points = tuple((rows, self.verifying[rows](drafted)) for rows in sorted(self.verifying))
        return Curve(points)(batch)

    def verify(self, drafted: float, batch: float) -> float:
        """Return the seconds by which verifying `drafted` tokens for each of `batch` requests lengthens a step."""
        return max(0.0, self.step(drafted, batch) - self.step(0, batch))

    def is_measured(self, kind: PrimitiveKind) -> bool:
        """Return True if there is a curve for `kind`."""
        return kind in self.curves or _SAME_AS.get(kind, kind) in self.curves

    def seconds(self, kind: PrimitiveKind, size: float) -> float:
        """Return the expected seconds of `size` units of `kind` on an idle replica; 0 if not measured.

        `size` is in the unit of the kind's curve. Kinds that take as long as another one share its curve.
        """
        curve = self.curves.get(kind) or self.curves.get(_SAME_AS.get(kind, kind))
        return curve(size) if curve is not None else 0.0


_K = PrimitiveKind
_SAME_AS = {_K.PARTIAL_PREFILLING: _K.PREFILLING, _K.FULL_PREFILLING: _K.PREFILLING, _K.PARTIAL_DECODING: _K.DECODING}

Profiles = Mapping[str, EngineProfile]
"""Profiles by engine name."""
