"""Which queries are taken: those that will probably meet their goal, as far as the queue has room. Pure: time is told.

How long a query takes depends on how many are under way when it begins. That is learnt, for each app, from the queries
that end: a mean and a deviation for each number under way, in steps. A query whose predicted time is over its goal is
refused at once, before it costs anything, with the time after which enough of the others will have ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

STEPS = 4
"""Of numbers under way, per doubling."""
OLD = 60.0
"""Seconds after which what was learnt is not believed any more: engines may have been added."""
FIRST = 8
"""Queries of an app that are taken at a time before anything is known of it."""
MARGIN = 2.0
"""Deviations that are added to the mean."""
NEW = 0.2
"""Share of a new time in what is kept."""


@dataclass(slots=True)
class Seen:
    """Times of queries that began beside about as many others."""

    running: float
    """How many others, on average."""
    mean: float
    deviation: float
    at: float

    def add(self, running: int, seconds: float, at: float) -> None:
        self.running += NEW * (running - self.running)
        off = seconds - self.mean
        self.mean += NEW * off
        self.deviation += NEW * (abs(off) - self.deviation)
        self.at = at

    @property
    def cautious(self) -> float:
        return self.mean + MARGIN * self.deviation


class LatencyCurve:
    """Seconds of one app's queries, by the number under way when they begin."""

    def __init__(self) -> None:
        self._seen: dict[int, Seen] = {}

    def learn(self, running: int, seconds: float, now: float) -> None:
        step = _step(running)
        if step in self._seen and now - self._seen[step].at < OLD:
            self._seen[step].add(running, seconds, now)
        else:
            self._seen[step] = Seen(running, seconds, seconds / 4, now)

    def predicted(self, running: int, now: float) -> float | None:
        """None where nothing is known. Beyond what was seen, time grows with the number: a queue is served in turn."""
        known = {step: seen for step, seen in self._seen.items() if now - seen.at < OLD}
        step = _step(running)
        if not known or (running < FIRST and max(known) < step):
            return None
        below = max((one for one in known if one <= step), default=None)
        if below is None:
            return known[min(known)].cautious
        return known[below].cautious * max(1.0, (running + 1) / (known[below].running + 1))


def _step(running: int) -> int:
    return round(STEPS * math.log2(running + 1))


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a query is not taken: `full` or `goal`."""

    why: str
    seconds: float
    """After which it is worth asking again."""
    predicted: float = 0.0

    @property
    def retry_after(self) -> int:
        return max(1, math.ceil(self.seconds))


@dataclass(slots=True, eq=False)
class Ticket:
    """A query that was taken; `end` gives its place back."""

    owner: Admission
    app: str
    tokens: int
    running: int
    began: float
    since: float
    """When the first byte of its request came: what its goal counts from."""
    goal: float | None
    ended: bool = False

    def end(self, *, whole: bool) -> None:
        """`whole`: it was answered, so that its time tells something. Idempotent."""
        if not self.ended:
            self.ended = True
            self.owner.left(self, whole=whole)


@dataclass(slots=True)
class Counts:
    """Of one app, since the start."""

    accepted: int = 0
    refused: int = 0
    answered: int = 0
    within_goal: int = 0


@dataclass(slots=True, eq=False)
class Admission:
    """The queue's bounds and the goals. One owner: the server's loop."""

    most_requests: int
    most_tokens: int
    clock: Callable[[], float]
    running: int = 0
    tokens: int = 0
    counts: dict[str, Counts] = field(default_factory=dict)
    _curves: dict[str, LatencyCurve] = field(default_factory=dict)

    def ask(self, app: str, tokens: int, goal: float | None, since: float | None = None) -> Ticket | Refused:
        """A query of so many tokens, to be answered within `goal` seconds (None: whenever). `since`: when its request
        began to come, if that was earlier: reading it is a part of the time."""
        counts, now = self.counts.setdefault(app, Counts()), self.clock()
        since = now if since is None else since
        refused = self._refusal(app, tokens, goal, now - since)
        if refused is not None:
            counts.refused += 1
            return refused
        counts.accepted += 1
        ticket = Ticket(self, app, tokens, self.running, now, since, goal)
        self.running += 1
        self.tokens += tokens
        return ticket

    def _refusal(self, app: str, tokens: int, goal: float | None, gone: float) -> Refused | None:
        predicted = self.predicted(app)
        full = self.running >= self.most_requests or (self.running and self.tokens + tokens > self.most_tokens)
        if full:
            return Refused("full", (predicted or 1.0) / 2)
        if goal is None:
            return None
        if predicted is None:
            return None if self.running < FIRST else Refused("goal", 1.0)
        whole = gone + predicted
        if whole <= goal or not self.running:  # an idle pool is asked again: how else would it be known
            return None
        return Refused("goal", whole - goal, whole)

    def predicted(self, app: str) -> float | None:
        """Seconds that a query of this app would take from now."""
        curve = self._curves.get(app)
        return None if curve is None else curve.predicted(self.running, self.clock())

    def left(self, ticket: Ticket, *, whole: bool) -> None:
        self.running -= 1
        self.tokens -= ticket.tokens
        if not whole:
            return
        now = self.clock()
        self._curves.setdefault(ticket.app, LatencyCurve()).learn(ticket.running, now - ticket.began, now)
        counts = self.counts[ticket.app]
        counts.answered += 1
        counts.within_goal += ticket.goal is None or now - ticket.since <= ticket.goal
