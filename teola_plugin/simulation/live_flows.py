"""Queries under way in a replay: what each asks for as what it waits for happens, and what that took."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from teola_plugin.engines.fake.timeline import Job
from teola_plugin.simulation.event_clock import EventClock
from teola_plugin.simulation.flows import After, Flow, FlowChange, FlowWork
from teola_plugin.simulation.meter import Served

if TYPE_CHECKING:
    from teola_plugin.simulation.replay_ports import ReplayPort


@dataclass(frozen=True, slots=True)
class FlowArrival:
    """One query: seconds after the start, the app's name, what it asks of engines, and its goal, if any."""

    at: float
    app: str
    flow: Flow
    goal: float | None = None


@dataclass(slots=True)
class LiveWork:
    """A work of a live query."""

    number: int
    query: LiveFlow
    work: FlowWork
    left: int
    """Requests that have not ended."""
    asked_at: float = -1.0
    started: float = -1.0
    ended: bool = False
    over_at: float = -1.0
    """A warm-up's end."""
    cached: int = 0
    """Of a warm-up's tokens, those that were in the cache before."""
    found: bool = False
    """Whether a prompt has found what a warm-up left in the cache."""


@dataclass(slots=True)
class _Act:
    """What a query does when all that it waits for has happened."""

    missing: set[After]
    do: Callable[[], object]


class LiveFlow:
    def __init__(
        self,
        name: str,
        arrival: FlowArrival,
        served: Served,
        ports: Mapping[str, ReplayPort],
        clock: EventClock,
        progressed: Callable[[], object],
    ) -> None:
        self.name, self.arrival, self.served = name, arrival, served
        self._ports, self._clock, self._progressed = ports, clock, progressed
        self._works: list[LiveWork] = []
        self._acts: list[_Act] = []
        self._warmed: list[tuple[int, LiveWork, tuple[int, ...]]] = []
        self._waiting: dict[After, list[_Act]] = {}
        self._used: frozenset[int] = frozenset()
        self._over = False

    def begin(self) -> None:
        flow = self.arrival.flow
        self._works = [LiveWork(number, self, work, len(work.asks)) for number, work in enumerate(flow.works)]
        self._used = flow.used()
        for live in self._works:
            self._when(live.work.after, partial(self._begin, live))
            for change in live.work.changes:
                self._when(change.after, partial(self._change, live, change))
            if live.work.given_up is not None:
                self._when(live.work.given_up, partial(self._give_up, live))
        self._when(flow.end, partial(self._clock.call_soon, self._end))
        for act in [act for act in self._acts if not act.missing]:
            act.do()

    def _when(self, after: Sequence[After], do: Callable[[], object]) -> None:
        act = _Act(set(after), do)
        self._acts.append(act)
        for news in act.missing:
            self._waiting.setdefault(news, []).append(act)

    def heard(self, work: int) -> tuple[int, ...]:
        """Tokens of a work after which something happens; the first frees the slots of its prompt."""
        return (1, *sorted(token for number, token in self._waiting if number == work and token > 1))

    def news(self, live: LiveWork, token: int) -> None:
        for act in self._waiting.get((live.number, token), ()):
            if self._over:
                return
            if act.missing:
                act.missing.discard((live.number, token))
                if not act.missing:
                    act.do()

    def _begin(self, live: LiveWork) -> None:
        live.asked_at = self._clock.time()
        port = self._ports[live.work.engine]
        if live.work.early:
            port.enqueue(live)
        else:
            self._clock.call_soon(partial(port.enqueue, live))

    def _change(self, live: LiveWork, change: FlowChange) -> None:
        if not live.ended:
            self._ports[live.work.engine].change(live, change)

    def _give_up(self, live: LiveWork) -> None:
        if not live.ended and live.asked_at >= 0:
            self._ports[live.work.engine].cancel(live)
            self.count(live)

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        self.served.ended = self._clock.time()
        for live in self._works:
            if live.over_at >= 0:
                self.count(live)
            self._give_up(live)
        self._progressed()

    def prefilled(self, live: LiveWork, job: Job) -> None:
        """It has ended: what a warm-up left in the cache, or found by a prompt because of them (as
        `runtime.warmups.note_use` has it)."""
        if live.work.warmup:
            live.cached = job.cached
            self._warmed.append((job.prompt_tokens, live, job.keys))
            return
        before = 0
        for tokens, one, keys in sorted(self._warmed, key=lambda found: found[0]):
            if one.work.engine == live.work.engine and job.keys[: len(keys)] == keys:
                base = max(before, one.cached)
                one.found |= min(job.cached, tokens) > base
                before = max(before, tokens)

    def count(self, live: LiveWork) -> None:
        """It has ended, or is given up: what it took. Of a warm-up that has ended nobody knows before the query's
        end whether it was of use."""
        if live.work.warmup and not self._over and not live.ended:
            live.ended, live.over_at = True, self._clock.time()
            return
        live.ended = True
        now = self._clock.time() if live.over_at < 0 else live.over_at
        if live.started >= 0:
            self.served.queued += live.started - live.asked_at
            self.served.work += now - live.started
            if live.number not in self._used and not live.found:
                self.served.wasted += now - live.started
                self.served.wasted_tokens += sum(one.prompt for one in live.work.asks) - live.cached


def _changed(work: FlowWork, change: FlowChange) -> FlowWork:
    depth = work.depth if change.depth is None else change.depth
    objective = work.objective if change.objective is None else change.objective
    return replace(work, depth=depth, objective=objective, gang=change.gang)
