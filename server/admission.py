"""Admission: accept the queries that will probably meet their goals, as far as the queue has room.

How long a query takes depends on how many are under way when it begins. That is learned, for each app, from the queries
that end: a mean and a deviation for each number under way, in steps. A query whose predicted time is over its goal is
refused at once, before it costs anything, with the time after which enough of the others will have ended. The clock is
passed in, so nothing here depends on real time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

STEPS = 4
"""Steps per doubling of the number of queries under way."""
MAX_AGE_S = 60.0
"""Age after which measured times no longer count: engines may have been added."""
FIRST = 8
"""Queries of an app that are accepted at a time before any of its times is known."""
MARGIN = 2.0
"""Deviations that are added to the mean."""
SMOOTHING = 0.2
"""Weight of a new time in the mean and the deviation."""


@dataclass(slots=True)
class LatencyStep:
    """Times of queries that began while about the same number of others were under way."""

    running: float
    """Average number of the others."""
    mean: float
    deviation: float
    at: float
    """When the last time was added."""

    def add(self, running: int, seconds: float, at: float) -> None:
        """Add a measured time to the moving averages of this step.

        `running`: queries under way when the measured one began. `seconds`: how long it took. `at`: the time of the
        measurement.
        """
        self.running += SMOOTHING * (running - self.running)
        error = seconds - self.mean
        self.mean += SMOOTHING * error
        self.deviation += SMOOTHING * (abs(error) - self.deviation)
        self.at = at

    @property
    def cautious_seconds(self) -> float:
        return self.mean + MARGIN * self.deviation


class LatencyCurve:
    """Seconds of one app's queries, by the number under way when they begin."""

    def __init__(self) -> None:
        self._steps: dict[int, LatencyStep] = {}

    def learn(self, running: int, seconds: float, now: float) -> None:
        """Add the time of an answered query that began while `running` others were under way.

        A step whose last time is older than `MAX_AGE_S` begins anew with this one.
        """
        step = _step(running)
        if step in self._steps and now - self._steps[step].at < MAX_AGE_S:
            self._steps[step].add(running, seconds, now)
        else:
            self._steps[step] = LatencyStep(running, seconds, seconds / 4, now)

    def predicted(self, running: int, now: float) -> float | None:
        """Return the seconds that a query would take beside `running` others; None if no recent time tells.

        Beyond the largest measured number, time grows in proportion to it: a queue is served in turn.
        """
        recent = {step: times for step, times in self._steps.items() if now - times.at < MAX_AGE_S}
        step = _step(running)
        if not recent or (running < FIRST and max(recent) < step):
            return None
        below = max((other for other in recent if other <= step), default=None)
        if below is None:
            return recent[min(recent)].cautious_seconds
        return recent[below].cautious_seconds * max(1.0, (running + 1) / (recent[below].running + 1))


def _step(running: int) -> int:
    return round(STEPS * math.log2(running + 1))


@dataclass(frozen=True, slots=True)
class AdmissionRefusal:
    """The refusal of a query: because the queue is `full`, or because it would miss its `goal`."""

    reason: Literal["full", "goal"]
    seconds: float
    """Time after which the query may be sent again."""
    predicted: float = 0.0
    """Seconds that the query would take from now."""

    @property
    def retry_after(self) -> int:
        return max(1, math.ceil(self.seconds))


@dataclass(slots=True, eq=False)
class Ticket:
    """A query that was accepted and has a place in the queue until `end`."""

    owner: Admission
    app: str
    tokens: int
    running: int
    began: float
    since: float
    """When the first byte of its request arrived; its goal counts from there."""
    goal: float | None
    has_ended: bool = False

    def end(self, *, answered: bool) -> None:
        """Give the place back. Learn the query's time if it was `answered`. Idempotent.

        Times of failed and cancelled queries are not learned, since they say nothing about how long an answer takes.
        """
        if not self.has_ended:
            self.has_ended = True
            self.owner.release(self, answered=answered)


@dataclass(slots=True)
class Counts:
    """Numbers of one app's queries since the server started."""

    accepted: int = 0
    refused: int = 0
    answered: int = 0
    within_goal: int = 0


@dataclass(slots=True, eq=False)
class Admission:
    """The bounds of the queue, and the goals of queries. Used on the server's loop alone."""

    max_requests: int
    max_tokens: int
    clock: Callable[[], float]
    running: int = 0
    tokens: int = 0
    counts: dict[str, Counts] = field(default_factory=dict)
    _curves: dict[str, LatencyCurve] = field(default_factory=dict)

    def admit(self, app: str, tokens: int, goal: float | None, since: float | None = None) -> Ticket | AdmissionRefusal:
        """Accept a query of `tokens` tokens, to be answered within `goal` seconds (None: no goal), or refuse it.

        `since`: when its request began to arrive, if that was earlier. Reading the request is part of the time.
        """
        counts, now = self.counts.setdefault(app, Counts()), self.clock()
        since = now if since is None else since
        refusal = self._refusal_for(app, tokens, goal, now - since)
        if refusal is not None:
            counts.refused += 1
            return refusal
        counts.accepted += 1
        ticket = Ticket(self, app, tokens, self.running, now, since, goal)
        self.running += 1
        self.tokens += tokens
        return ticket

    def _refusal_for(self, app: str, tokens: int, goal: float | None, elapsed: float) -> AdmissionRefusal | None:
        """Return why a query may not begin now; None if it may.

        `elapsed`: seconds since its request began to arrive, which count towards its `goal`. A full queue refuses any
        query, a predicted time over the goal only those that have a goal.
        """
        predicted = self.predicted(app)
        full = self.running >= self.max_requests or (self.running and self.tokens + tokens > self.max_tokens)
        if full:
            return AdmissionRefusal("full", (predicted or 1.0) / 2)
        if goal is None:
            return None
        if predicted is None:
            return None if self.running < FIRST else AdmissionRefusal("goal", 1.0)
        total = elapsed + predicted
        if total <= goal or not self.running:  # an idle pool accepts, so that new times are measured
            return None
        return AdmissionRefusal("goal", total - goal, total)

    def predicted(self, app: str) -> float | None:
        """Return the seconds that a query of this app would take from now; None if unknown.

        The prediction depends on how many queries are under way. It is None until a query of the app was answered, and
        again once all measured times are older than `MAX_AGE_S` seconds.
        """
        curve = self._curves.get(app)
        return None if curve is None else curve.predicted(self.running, self.clock())

    def release(self, ticket: Ticket, *, answered: bool) -> None:
        """Give back the place of a query that has ended. Learn its time if it was answered."""
        self.running -= 1
        self.tokens -= ticket.tokens
        if not answered:
            return
        now = self.clock()
        self._curves.setdefault(ticket.app, LatencyCurve()).learn(ticket.running, now - ticket.began, now)
        counts = self.counts[ticket.app]
        counts.answered += 1
        counts.within_goal += ticket.goal is None or now - ticket.since <= ticket.goal
