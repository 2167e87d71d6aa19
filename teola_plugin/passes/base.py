"""The interface of a pass, the facts that passes may use, and the pipeline that applies passes to a fixed point.

The optimised graphs of recent templates are cached: a repeated call costs one look-up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from threading import Lock
from time import perf_counter
from typing import Any, ClassVar, Protocol, runtime_checkable

from teola_plugin.errors import PassError, unknown_name
from teola_plugin.graph import (
    CARRY,
    Component,
    EngineProfile,
    Fragment,
    Graph,
    GraphEdit,
    Primitive,
    PrimitiveKind,
    Shape,
    WorkflowTemplate,
    build_pgraph,
)
from teola_plugin.graph.device import share_hardware

SPECULATE = ("all", "auto", "off")
CARRIED = frozenset({CARRY})


@dataclass(frozen=True, slots=True)
class PassContext:
    """The facts that passes use beyond the graph: engine profiles, and how much speculation is allowed.

    An engine without a profile does not belong to the pool, so nothing is known about it, and passes leave its
    primitives unchanged unless `speculate` is `"all"`. An engine that is not declared `dedicated` gets no speculative
    requests unless `speculate` is `"all"`.
    """

    profiles: Mapping[str, EngineProfile] = field(default_factory=dict)
    speculate: str = "auto"
    late: frozenset[str] = frozenset()
    """Producers of external values that are ready last: inside a FOLD or LOOP, the value carried between instances."""

    def __post_init__(self) -> None:
        if self.speculate not in SPECULATE:
            raise unknown_name("value of speculate", self.speculate, SPECULATE)

    def profile(self, engine: str) -> EngineProfile | None:
        return self.profiles.get(engine)

    def overlap(self, first: str, second: str) -> bool:
        """Return True if two engines can work at the same time: they are different and do not share a device.

        Engines without a profile count as separate, since nothing is known of their devices.
        """
        if first == second:
            return False
        one, other = self.profiles.get(first), self.profiles.get(second)
        return one is None or other is None or not share_hardware(one.device, other.device)

    def may_read(self, engine: str) -> bool:
        """Return True if text streamed by the engine may be used to predict the complete text."""
        return self.speculate == "all" or (self.speculate == "auto" and engine in self.profiles)

    def may_predict(self, *engines: str) -> bool:
        """Return True if requests on predicted values may be sent to all of `engines`.

        If `speculate` is `auto`, each of them must have a profile and be declared dedicated. Otherwise only `all`
        allows it.
        """
        if self.speculate != "auto":
            return self.speculate == "all"
        return all(engine in self.profiles for engine in engines if engine) and self.may_ask(*engines)

    def may_ask(self, *engines: str) -> bool:
        """Return True if each of these engines is declared dedicated, or `speculate` allows all.

        Engines without a profile do not count.
        """
        profiles = (self.profiles.get(engine) for engine in engines)
        return self.speculate == "all" or all(profile.dedicated for profile in profiles if profile is not None)

    def fingerprint(self) -> Hashable:
        """Return a key that is equal for contexts in which the passes produce equal graphs."""
        return self.speculate, tuple((name, _profile_key(profile)) for name, profile in sorted(self.profiles.items()))


MAX_PROFILE_KEYS = 256
_profile_keys: dict[int, tuple[EngineProfile, Hashable]] = {}
"""Keys of profiles by `id(profile)`. Each entry holds its profile, so that its id is not reused."""


def _profile_key(profile: EngineProfile) -> Hashable:
    """Return a hashable key of all fields of a profile. Computed once for a profile, since each call needs it."""
    cached = _profile_keys.get(id(profile))
    if cached is not None and cached[0] is profile:
        return cached[1]
    curves = tuple((kind.value, curve.points) for kind, curve in profile.curves.items())
    curves += tuple((str(batch), curve.points) for batch, curve in profile.verifying.items())
    fields = tuple(getattr(profile, name) for name in EngineProfile.__slots__ if name not in ("curves", "verifying"))
    if len(_profile_keys) >= MAX_PROFILE_KEYS:
        _profile_keys.clear()
    _profile_keys[id(profile)] = profile, (curves, fields)
    return curves, fields


@runtime_checkable
class Pass(Protocol):
    """A rewrite of a graph. Implementations are frozen dataclasses.

    A pass that only changes what came from the template, never what other passes produced, may set `once = True`: the
    pipeline applies it in the first round only.
    """

    name: ClassVar[str]

    def run(self, graph: Graph, context: PassContext) -> Graph:
        """Return a graph with the same meaning: the same object if there was nothing to rewrite."""
        ...


@dataclass(frozen=True, slots=True)
class PassReport:
    """A record of one application of one pass."""

    pass_name: str
    fired: bool
    seconds: float
    before: Graph
    after: Graph


@dataclass(frozen=True, slots=True)
class Optimised:
    """An e-graph, and the record of the passes that produced it."""

    graph: Graph
    reports: tuple[PassReport, ...] = ()
    source: Graph | None = None
    """The p-graph that the passes started from."""

    @property
    def fired(self) -> tuple[str, ...]:
        """Return the names of the passes that changed the graph, each once, in the order of their first change."""
        return tuple(dict.fromkeys(report.pass_name for report in self.reports if report.fired))


@dataclass(frozen=True, slots=True)
class PassPipeline:
    """A sequence of passes that is applied repeatedly until none of them changes the graph."""

    passes: tuple[Pass, ...] = ()
    observer: Callable[[PassReport], None] | None = None
    max_rounds: int = 16

    def run(self, graph: Graph, context: PassContext) -> Optimised:
        """Apply the passes until none changes the graph, and also to its fragments. Return the result.

        `GraphCache` calls this on a miss. Fragments are the graphs inside primitives: bodies of loops and branches.
        Raise `PassError` if a pass fails, or if the graph still changes after `max_rounds`.
        """
        optimised = self._run_to_fixed_point(graph, context)
        if self.passes:
            optimised = self._optimise_fragments(optimised, context)
        for report in optimised.reports:  # reports stay in caches for long, so their derived masks are dropped
            report.after.forget_ancestors()
        graph.forget_ancestors()
        return optimised

    def _optimise_fragments(self, outer: Optimised, context: PassContext) -> Optimised:
        """Optimise each fragment once, instead of at every splice: the instances of a fragment are all alike."""
        edit, reports = GraphEdit(outer.graph), outer.reports
        for p in outer.graph:
            if p.fragment is None:  # a primitive with an `otherwise` fragment also has a `fragment`
                continue
            late = CARRIED if p.kind in (PrimitiveKind.FOLD, PrimitiveKind.LOOP) else frozenset[str]()
            for name in ("fragment", "otherwise"):
                fragment: Fragment | None = getattr(p, name)
                if fragment is None or not any(q.after or q.prefills for q in fragment.graph):
                    continue
                inner = self.run(fragment.graph, replace(context, late=late))
                reports += inner.reports
                if inner.fired:
                    edit.replace(edit[p.id].with_(**{name: Fragment(inner.graph, inner.graph.output)}))
        return Optimised(edit.freeze(), reports, outer.source)

    def _run_to_fixed_point(self, graph: Graph, context: PassContext) -> Optimised:
        """Apply the passes in turn until none of them changes the graph, its fragments excepted.

        Raise `PassError` if that takes more than `max_rounds`.
        """
        reports: list[PassReport] = []
        current, unchanged_count = graph, 0
        for round_number in range(self.max_rounds if self.passes else 0):
            for graph_pass in self.passes:
                fired = False
                if not round_number or not getattr(graph_pass, "once", False):
                    reports.append(report := self._apply(graph_pass, current, context))
                    current, fired = report.after, report.fired
                unchanged_count = 0 if fired else unchanged_count + 1
                if unchanged_count >= len(self.passes):
                    return Optimised(current, tuple(reports), graph)
        if not self.passes:
            return Optimised(graph, (), graph)
        last_round = reports[-len(self.passes) :]
        last_name = last_round[-1].pass_name
        names = ", ".join(dict.fromkeys(repr(r.pass_name) for r in last_round if r.fired)) or repr(last_name)
        raise PassError(
            f"the passes did not settle in {self.max_rounds} rounds; still changing the graph: {names}.",
            pass_name=last_name,
            hint="a pass must return its input where it has nothing to do",
        )

    def _apply(self, graph_pass: Pass, graph: Graph, context: PassContext) -> PassReport:
        """Run one pass and report it, also to the observer. Raise `PassError` if it fails or returns no Graph."""
        name, started_s = graph_pass.name, perf_counter()
        try:
            rewritten = graph_pass.run(graph, context)
        except Exception as error:
            message = f"pass {name!r} failed on a graph of {len(graph)} primitives: {type(error).__name__}: {error}"
            raise PassError(message, pass_name=name, hint="leave it out of passes=, and report it") from error
        if not isinstance(rewritten, Graph):
            message = f"pass {name!r} returned {type(rewritten).__name__}, not a Graph."
            raise PassError(message, pass_name=name, hint="return GraphEdit(graph).freeze()")
        # An equal copy counts as unchanged: otherwise the pipeline would never reach a fixed point.
        fired = rewritten is not graph and rewritten != graph
        report = PassReport(name, fired, perf_counter() - started_s, graph, rewritten if fired else graph)
        if self.observer is not None:
            self.observer(report)
        return report


MAX_PRIMITIVES = 1 << 18
"""Default bound on the primitives of all cached graphs, those between the p-graph and the e-graph included."""


class GraphCache:
    """A least-recently-used cache of optimised graphs. Safe to use from several threads.

    Two equal templates share an entry, even if they are different objects: the chains that a function builds anew on
    each call are planned once.

    Args:
        pipeline: The passes to apply on a miss.
        capacity: Maximum number of cached plans.
        max_primitives: Maximum number of primitives in all cached graphs; the newest plan is kept even if it is larger.
    """

    def __init__(self, pipeline: PassPipeline, capacity: int = 128, max_primitives: int = MAX_PRIMITIVES) -> None:
        self.pipeline = pipeline
        self.capacity = capacity
        self.max_primitives = max_primitives
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[Hashable, Optimised] = OrderedDict()
        self._structures: OrderedDict[int, _Structure] = OrderedDict()
        """Keys of templates by `id(template)`. Each holds its template, so that its id is not reused."""
        self._primitives = 0
        self._lock = Lock()

    def optimised(
        self,
        template: WorkflowTemplate,
        shape: Shape | None,
        context: PassContext,
        *,
        certain: bool = True,
        open_choices: bool = True,
    ) -> Optimised:
        """Return the e-graph of `template` for queries of this shape.

        Args:
            template: The workflow template to plan.
            shape: Expected number of items by component, None if unknown.
            context: Engine profiles and the speculation setting.
            certain: Include requests of subplans that are certain to be called.
            open_choices: Include requests of subplans that the original may not choose.

        Raises:
            GraphError: The template cannot be built into a p-graph.
            PassError: A pass failed, or the passes did not settle.
        """
        sizes = tuple(sorted((shape or {}).items()))
        key = self._structure(template), certain, open_choices, sizes, context.fingerprint(), self.pipeline.passes
        with self._lock:
            cached = self._entries.get(key)
            if cached is not None:
                self.hits += 1
                self._entries.move_to_end(key)
                return cached
        # Planned outside the lock: two threads may plan the same graph, but no thread waits for another's plan.
        optimised = self.pipeline.run(
            build_pgraph(template.with_lookahead(certain=certain, open_choices=open_choices), shape), context
        )
        with self._lock:
            self.misses += 1
            return self._add(key, optimised)

    def _add(self, key: Hashable, optimised: Optimised) -> Optimised:
        """Add an entry unless another thread added an equal one. Return the entry that the cache now has."""
        entry = self._entries.setdefault(key, optimised)
        if entry is optimised:
            self._primitives += _count_primitives(optimised)
        while len(self._entries) > self.capacity or (self._primitives > self.max_primitives and len(self._entries) > 1):
            self._primitives -= _count_primitives(self._entries.popitem(last=False)[1])
        return entry

    def _structure(self, template: WorkflowTemplate) -> _Structure:
        """Return the key of a template. Computed once while the template is among the recent ones."""
        with self._lock:
            cached = self._structures.get(id(template))
            if cached is not None:
                self._structures.move_to_end(id(template))
                return cached
        structure = _Structure(template)
        with self._lock:
            self._structures[id(template)] = structure
            while len(self._structures) > self.capacity:
                self._structures.popitem(last=False)
        return structure

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget all plans, and all keys of templates.

        May be called from any thread.
        """
        with self._lock:
            self._entries.clear()
            self._structures.clear()
            self._primitives = 0


class _Structure:
    """A template as a key: two keys are equal if the templates are equal and their options have the same types."""

    __slots__ = ("_hash", "_template", "_types")

    def __init__(self, template: WorkflowTemplate) -> None:
        self._template = template
        try:
            self._types, self._hash = _option_types(template), hash(template)
        except TypeError:  # an option has a type that cannot be compared: the key equals itself only
            self._types, self._hash = None, id(template)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        """Return True if two templates are planned alike: they are equal, and so are the types of their options."""
        if not isinstance(other, _Structure):
            return NotImplemented
        if self._template is other._template:
            return True
        return self._types is not None and self._types == other._types and self._template == other._template


def _option_types(template: WorkflowTemplate) -> Hashable:
    """Return the types of all options: 1, 1.0 and True are equal, but mean different things in a filter."""
    inner = [body for c in template.components for body in (c.body, c.otherwise) if body is not None]
    nodes: list[Component | Primitive] = [*template.components]
    nodes += [p for c in template.components for p in c.primitives]
    pairs = [pair for node in nodes for pair in (*node.attributes.non_default_items(), *node.options)]
    options = tuple([_types(value) for _, value in pairs])
    return options, tuple([_option_types(body) for body in inner])


def _types(value: Any) -> Hashable:
    """Return the types inside a value. Raise TypeError for a type whose equal values may differ in meaning."""
    if isinstance(value, tuple):
        return type(value), tuple([_types(inner) for inner in value])
    if isinstance(value, frozenset):
        return frozenset([(inner, _types(inner)) for inner in value])
    if value is None or isinstance(value, (str, bytes, int, float, Enum)):
        return type(value).__name__
    raise TypeError(type(value))


def _count_primitives(optimised: Optimised) -> int:
    """Return the number of primitives in all graphs of a plan, those inside fragments not counted."""
    graphs = {id(graph): len(graph) for report in optimised.reports for graph in (report.before, report.after)}
    return sum(graphs.values()) + len(optimised.graph)
