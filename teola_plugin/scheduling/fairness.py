"""Weighted fair shares of an engine between apps: start-time fair queueing over units of work."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

MAX_APPS = 1000
MIN_WEIGHT = 1e-6


@dataclass(frozen=True, slots=True)
class Turn:
    """A waiting bucket: its app, and the units that its deepest level takes."""

    app: str
    weight: float
    units: float


@dataclass(slots=True)
class ServedUnits:
    """Units that each app got, divided by its weight: its virtual time. An app that returns gets no credit for its
    absence."""

    _virtual_times: dict[str, float] = field(default_factory=dict)
    _virtual_now: float = 0.0
    """The virtual time of the app that was served last, before it was served."""

    def arrive(self, app: str, *, waiting: bool) -> None:
        """Record that work of an app arrives. `waiting` is True if the app has other work queued, so that it may lag
        behind."""
        if not waiting:
            self._virtual_times[app] = max(self._virtual_now, self._virtual_times.get(app, 0.0))

    def add(self, app: str, weight: float, units: float) -> None:
        before = self._virtual_times.get(app, self._virtual_now)
        self._virtual_now = max(self._virtual_now, before)
        self._virtual_times[app] = before + units / max(weight, MIN_WEIGHT)
        if len(self._virtual_times) > MAX_APPS:  # apps with the least are treated like new ones
            most_served = sorted(self._virtual_times, key=self._virtual_times.__getitem__)[MAX_APPS // 2 :]
            self._virtual_times = {name: self._virtual_times[name] for name in most_served}

    def virtual_times(self, apps: Iterable[str]) -> dict[str, float]:
        return {app: self._virtual_times.get(app, self._virtual_now) for app in apps}


def serve_in_turn(
    turns: Mapping[str, Turn], virtual_times: dict[str, float], apps: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield the names of buckets in the order in which they are served, and keep `virtual_times` up to date.

    Next is always the first bucket of the app with the least virtual time, so an app of twice the weight gets twice the
    units. `apps` are the buckets' apps, for `turns` that are made only when they are looked at.
    """
    waiting: dict[str, deque[str]] = {}
    for name, app_name in ({name: turn.app for name, turn in turns.items()} if apps is None else apps).items():
        waiting.setdefault(app_name, deque()).append(name)
    while waiting:
        app = min(waiting, key=virtual_times.__getitem__)
        name = waiting[app].popleft()
        turn = turns[name]  # read before the caller takes from the bucket
        yield name
        virtual_times[app] += turn.units / max(turn.weight, MIN_WEIGHT)
        if not waiting[app]:
            del waiting[app]
