"""Queries that run in a replay: each work is requested once what it waits for has happened; its times are recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from teola_plugin.engines.fake.timeline import Job
from teola_plugin.simulation.event_clock import EventClock
from teola_plugin.simulation.flows import After, Flow, FlowChange, FlowWork
from teola_plugin.simulation.meter import QueryOutcome

if TYPE_CHECKING:
    from teola_plugin.simulation.replay import ReplayPort


@dataclass(frozen=True, slots=True)
class FlowArrival:
    """One query: seconds after the start, the app's name, its flow, and its latency goal, if any."""

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
    unfinished: int
    """Number of requests that have not ended."""
    requested_at: float = -1.0
    started: float = -1.0
    has_ended: bool = False
    ended_at: float = -1.0
    """When a warm-up ended."""
    cached: int = 0
    """Tokens of a warm-up that were in the cache before."""
    is_used: bool = False
    """True if a prompt found what this warm-up left in the cache."""


@dataclass(slots=True)
class _Action:
    """An action of a query that runs when all that it waits for has happened."""

    missing: set[After]
    do: Callable[[], object]


class LiveFlow:
    """A query that runs in a replay."""

    def __init__(
        self,
        name: str,
        arrival: FlowArrival,
        result: QueryOutcome,
        ports: Mapping[str, ReplayPort],
        clock: EventClock,
        progressed: Callable[[], object],
    ) -> None:
        self.name, self.arrival, self.outcome = name, arrival, result
        self._ports, self._clock, self._progressed = ports, clock, progressed
        self._works: list[LiveWork] = []
        self._actions: list[_Action] = []
        self._warmed: list[tuple[int, LiveWork, tuple[int, ...]]] = []
        self._waiting: dict[After, list[_Action]] = {}
        self._used: frozenset[int] = frozenset()
        self._has_ended = False

    def begin(self) -> None:
        """Begin the query at its arrival: note what each of its actions waits for, and do those without a wait."""
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
        for action in [action for action in self._actions if not action.missing]:
            action.do()

    def _when(self, after: Sequence[After], do: Callable[[], object]) -> None:
        """Have an action done once all these tokens and ends of works have come."""
        action = _Action(set(after), do)
        self._actions.append(action)
        for event in action.missing:
            self._waiting.setdefault(event, []).append(action)

    def awaited_tokens(self, work: int) -> tuple[int, ...]:
        """Return the tokens of a work that something waits for; the first frees the slots of its prompt."""
        return (1, *sorted(token for number, token in self._waiting if number == work and token > 1))

    def news(self, live: LiveWork, token: int) -> None:
        """Note that a token of a work, or its end, has come, and do the actions that waited for that alone."""
        for action in self._waiting.get((live.number, token), ()):
            if self._has_ended:
                return
            if action.missing:
                action.missing.discard((live.number, token))
                if not action.missing:
                    action.do()

    def _begin(self, live: LiveWork) -> None:
        """Request a work from its engine: a planned one at once, a call of the original after the present event."""
        live.requested_at = self._clock.time()
        port = self._ports[live.work.engine]
        if live.work.is_planned:
            port.enqueue(live)
        else:
            self._clock.call_soon(partial(port.enqueue, live))

    def _change(self, live: LiveWork, change: FlowChange) -> None:
        if not live.has_ended:
            self._ports[live.work.engine].change(live, change)

    def _give_up(self, live: LiveWork) -> None:
        if not live.has_ended and live.requested_at >= 0:
            self._ports[live.work.engine].cancel(live)
            self.count(live)

    def _end(self) -> None:
        """End the query: record its time, and give up the works that still run."""
        if self._has_ended:
            return
        self._has_ended = True
        self.outcome.ended_at = self._clock.time()
        for live in self._works:
            if live.ended_at >= 0:
                self.count(live)
            self._give_up(live)
        self._progressed()

    def prefilled(self, live: LiveWork, job: Job) -> None:
        """Record an ended prefilling: what a warm-up left in the cache, or what a prompt found thanks to warm-ups.

        It counts like `runtime.warmups.note_use`.
        """
        if live.work.warmup:
            live.cached = job.cached
            self._warmed.append((job.prompt_tokens, live, job.keys))
            return
        covered_tokens = 0
        for tokens, warm_up, keys in sorted(self._warmed, key=lambda entry: entry[0]):
            if warm_up.work.engine == live.work.engine and job.keys[: len(keys)] == keys:
                base = max(covered_tokens, warm_up.cached)
                warm_up.is_used |= min(job.cached, tokens) > base
                covered_tokens = max(covered_tokens, tokens)

    def count(self, live: LiveWork) -> None:
        """Add the time of a work that has ended or is given up.

        Whether a warm-up that has ended was of use is known only at the end of the query.
        """
        if live.work.warmup and not self._has_ended and not live.has_ended:
            live.has_ended, live.ended_at = True, self._clock.time()
            return
        live.has_ended = True
        now = self._clock.time() if live.ended_at < 0 else live.ended_at
        if live.started >= 0:
            self.outcome.queued += live.started - live.requested_at
            self.outcome.work += now - live.started
            if live.number not in self._used and not live.is_used:
                self.outcome.wasted += now - live.started
                self.outcome.wasted_tokens += sum(one.prompt for one in live.work.asks) - live.cached


def _changed(work: FlowWork, change: FlowChange) -> FlowWork:
    depth = work.depth if change.depth is None else change.depth
    objective = work.objective if change.objective is None else change.objective
    return replace(work, depth=depth, objective=objective, gang=change.gang)
