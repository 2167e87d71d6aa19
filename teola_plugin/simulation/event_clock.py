"""Virtual time for replays: one heap of events, and callbacks that run right after each."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable


class Timer:
    """An event that can be cancelled."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class EventClock:
    """Runs events in the order of their times, those of one time in the order in which they were set."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Timer]] = []
        self._soon: deque[Callable[[], object]] = deque()
        self._order = itertools.count()

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Run a callback once the simulated time is `when`, in seconds, and return its timer.

        Callbacks of one time run in the order in which they were set.
        """
        timer = Timer(callback)
        heapq.heappush(self._events, (when, next(self._order), timer))
        return timer

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run the callback at the present time, after the event that is being handled."""
        self._soon.append(callback)

    def run(self) -> None:
        """Run events until none is left, and after each the callbacks of `call_soon`."""
        while self._events:
            at, _, timer = heapq.heappop(self._events)
            if timer.callback is not None:
                self._now = max(self._now, at)
                timer.callback()
                while self._soon:
                    self._soon.popleft()()
