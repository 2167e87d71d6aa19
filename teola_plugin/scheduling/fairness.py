"""Weighted fair shares of an engine between apps: start-time fair queueing over units of work."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

MOST_APPS = 1000
LEAST_WEIGHT = 1e-6


@dataclass(frozen=True, slots=True)
class Turn:
    """A bucket that waits: whose it is, and what its deepest level takes."""

    app: str
    weight: float
    units: float


@dataclass(slots=True)
class Served:
    """Units that each app was given, divided by its weight. An app that comes back is not owed for its absence."""

    _had: dict[str, float] = field(default_factory=dict)
    _now: float = 0.0
    """What the app that was served last had had before."""

    def arrive(self, app: str, *, waiting: bool) -> None:
        """Work of an app comes. `waiting`: it has some queued already, so it may be behind the others."""
        if not waiting:
            self._had[app] = max(self._now, self._had.get(app, 0.0))

    def add(self, app: str, weight: float, units: float) -> None:
        before = self._had.get(app, self._now)
        self._now = max(self._now, before)
        self._had[app] = before + units / max(weight, LEAST_WEIGHT)
        if len(self._had) > MOST_APPS:  # those who had least are treated like new ones
            most = sorted(self._had, key=self._had.__getitem__)[MOST_APPS // 2 :]
            self._had = {name: self._had[name] for name in most}

    def had(self, apps: Iterable[str]) -> dict[str, float]:
        return {app: self._had.get(app, self._now) for app in apps}


def in_turn(turns: Mapping[str, Turn], had: dict[str, float], apps: Mapping[str, str] | None = None) -> Iterator[str]:
    """Names of buckets in the order in which they are served; `had` is kept up to date. `apps`: whose each is, where
    `turns` makes them when they are looked at.

    Next is always the first bucket of the app that had least, so an app of twice the weight gets twice the units.
    """
    waiting: dict[str, deque[str]] = {}
    for name, owner in ({name: turn.app for name, turn in turns.items()} if apps is None else apps).items():
        waiting.setdefault(owner, deque()).append(name)
    while waiting:
        app = min(waiting, key=had.__getitem__)
        name = waiting[app].popleft()
        turn = turns[name]  # before it is served
        yield name
        had[app] += turn.units / max(turn.weight, LEAST_WEIGHT)
        if not waiting[app]:
            del waiting[app]
