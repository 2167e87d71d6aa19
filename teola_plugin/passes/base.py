"""What a pass is, what it may know, and the pipeline that applies passes to a fixed point."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import ClassVar, Protocol, runtime_checkable

from teola_plugin.errors import PassError, unknown_name
from teola_plugin.graph import CARRY, EngineProfile, Fragment, Graph, GraphEdit, PrimitiveKind
from teola_plugin.graph.device import share_hardware

SPECULATE = ("all", "auto", "off")
CARRIED = frozenset({CARRY})


@dataclass(frozen=True, slots=True)
class PassContext:
    """What passes know beyond the graph: the engines' profiles, and how far work may run on predictions.

    An engine without a profile is not the pool's own: nothing is known of it, so passes leave its primitives alone
    unless `speculate` is `"all"`. One that is not declared `dedicated` gets no work on predictions either.
    """

    profiles: Mapping[str, EngineProfile] = field(default_factory=dict)
    speculate: str = "auto"
    late: frozenset[str] = frozenset()
    """External values that are known last: inside a FOLD or LOOP, what is carried from one instance to the next."""

    def __post_init__(self) -> None:
        if self.speculate not in SPECULATE:
            raise unknown_name("value of speculate", self.speculate, SPECULATE)

    def profile(self, engine: str) -> EngineProfile | None:
        return self.profiles.get(engine)

    def overlap(self, first: str, second: str) -> bool:
        """Whether two engines can work at the same time: not one and the same, and not on one device."""
        if first == second:
            return False
        one, other = self.profiles.get(first), self.profiles.get(second)
        return one is None or other is None or not share_hardware(one.device, other.device)

    def may_read(self, engine: str) -> bool:
        """Whether what the engine writes may be read as it comes, as a guess at the whole."""
        return self.speculate == "all" or (self.speculate == "auto" and engine in self.profiles)

    def may_predict(self, *engines: str) -> bool:
        """Whether work on predicted values may be sent to all of `engines`."""
        if self.speculate != "auto":
            return self.speculate == "all"
        return all(engine in self.profiles for engine in engines if engine) and self.may_ask(*engines)

    def may_ask(self, *engines: str) -> bool:
        """Return True if each of these engines is declared dedicated, or `speculate` allows all."""
        found = (self.profiles.get(engine) for engine in engines)
        return self.speculate == "all" or all(profile.dedicated for profile in found if profile is not None)

    def fingerprint(self) -> Hashable:
        """Equal for contexts that lead the passes to equal graphs."""
        return self.speculate, tuple((name, _facts(profile)) for name, profile in sorted(self.profiles.items()))


def _facts(profile: EngineProfile) -> Hashable:
    """Worked out once for a profile, which is frozen: it is asked for with every call."""
    known = _known_facts.get(id(profile))
    if known is not None and known[0] is profile:
        return known[1]
    curves = tuple((kind.value, curve.points) for kind, curve in profile.curves.items())
    curves += tuple((str(batch), curve.points) for batch, curve in profile.verifying.items())
    others = tuple(getattr(profile, name) for name in EngineProfile.__slots__ if name not in ("curves", "verifying"))
    if len(_known_facts) >= KNOWN_PROFILES:
        _known_facts.clear()
    _known_facts[id(profile)] = profile, (curves, others)
    return curves, others


KNOWN_PROFILES = 256
_known_facts: dict[int, tuple[EngineProfile, Hashable]] = {}
"""By identity, which the profile beside it keeps from being another's."""


@runtime_checkable
class Pass(Protocol):
    """One rewrite of a graph. Implementations are frozen dataclasses.

    One that only concerns what the template brought, never what other passes make of it, may say `once = True`: it is
    applied in the first round only.
    """

    name: ClassVar[str]

    def run(self, graph: Graph, context: PassContext) -> Graph:
        """A graph with the same meaning; the very same object when nothing matched."""
        ...


@dataclass(frozen=True, slots=True)
class PassReport:
    """One application of one pass."""

    pass_name: str
    fired: bool
    seconds: float
    before: Graph
    after: Graph


@dataclass(frozen=True, slots=True)
class Optimised:
    """An e-graph, and how it came about."""

    graph: Graph
    reports: tuple[PassReport, ...] = ()
    source: Graph | None = None
    """The p-graph it was made from."""

    @property
    def fired(self) -> tuple[str, ...]:
        """Names of the passes that changed something, each once, in order."""
        return tuple(dict.fromkeys(report.pass_name for report in self.reports if report.fired))


@dataclass(frozen=True, slots=True)
class PassPipeline:
    """Passes in order, applied again and again until none of them changes the graph."""

    passes: tuple[Pass, ...] = ()
    observer: Callable[[PassReport], None] | None = None
    max_rounds: int = 16

    def run(self, graph: Graph, context: PassContext) -> Optimised:
        """The fixed point, fragments included. Raises `PassError` when a pass fails, or the passes never agree."""
        settled = self._settle(graph, context)
        made = self._inside(settled, context) if self.passes else settled
        for report in made.reports:  # whoever keeps them keeps them long
            report.after.forget_ancestors()
        graph.forget_ancestors()
        return made

    def _inside(self, outer: Optimised, context: PassContext) -> Optimised:
        """Fragments are optimised once, here, instead of at every splice: their instances are all alike."""
        edit, reports = GraphEdit(outer.graph), outer.reports
        for p in outer.graph:
            if p.fragment is None:  # whoever has another arm has this one
                continue
            late = CARRIED if p.kind in (PrimitiveKind.FOLD, PrimitiveKind.LOOP) else frozenset[str]()
            for name in ("fragment", "otherwise"):
                held: Fragment | None = getattr(p, name)
                if held is None or not any(q.after or q.prefills for q in held.graph):
                    continue
                inner = self.run(held.graph, replace(context, late=late))
                reports += inner.reports
                if inner.fired:
                    edit.replace(edit[p.id].with_(**{name: Fragment(inner.graph, inner.graph.output)}))
        return Optimised(edit.freeze(), reports, outer.source)

    def _settle(self, graph: Graph, context: PassContext) -> Optimised:
        reports: list[PassReport] = []
        now, quiet = graph, 0
        for number in range(self.max_rounds if self.passes else 0):
            for one in self.passes:
                fired = False
                if not number or not getattr(one, "once", False):
                    reports.append(report := self._apply(one, now, context))
                    now, fired = report.after, report.fired
                quiet = 0 if fired else quiet + 1
                if quiet >= len(self.passes):
                    return Optimised(now, tuple(reports), graph)
        if self.passes:
            raise self._unsettled(reports)
        return Optimised(graph, (), graph)

    def _apply(self, one: Pass, graph: Graph, context: PassContext) -> PassReport:
        started = perf_counter()
        try:
            made = one.run(graph, context)
        except Exception as error:
            message = f"pass {one.name!r} failed on a graph of {len(graph)} primitives: {type(error).__name__}: {error}"
            raise PassError(message, pass_name=one.name, hint="leave it out of passes=, and report it") from error
        if not isinstance(made, Graph):
            message = f"pass {one.name!r} returned {type(made).__name__}, not a Graph."
            raise PassError(message, pass_name=one.name, hint="return GraphEdit(graph).freeze()")
        # An equal copy is no change; counting it as one would never settle.
        fired = made is not graph and made != graph
        report = PassReport(one.name, fired, perf_counter() - started, graph, made if fired else graph)
        if self.observer is not None:
            self.observer(report)
        return report

    def _unsettled(self, reports: list[PassReport]) -> PassError:
        last = reports[-len(self.passes) :]
        names = ", ".join(dict.fromkeys(repr(r.pass_name) for r in last if r.fired)) or repr(last[-1].pass_name)
        message = f"the passes did not settle in {self.max_rounds} rounds; still changing the graph: {names}."
        return PassError(
            message, pass_name=last[-1].pass_name, hint="a pass must return its input where it has nothing to do"
        )
