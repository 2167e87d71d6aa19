"""One timer for all deadlines of a driver: for the earliest, and cancelled when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable
from contextvars import Context


class Deadlines:
    """Calls `ring` when one is reached. Lives on the pool's loop."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._times: list[float] = []
        self._wanted: Counter[float] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, at: float) -> bool:
        return self._wanted[at] > 0

    def add(self, at: float) -> None:
        """Once for each query that has it."""
        if at not in self:
            heapq.heappush(self._times, at)
        self._wanted[at] += 1
        self._set()

    def drop(self, at: float) -> None:
        """A query that has it is over."""
        if at in self:
            self._wanted[at] -= 1
            self._set()

    def _set(self) -> None:
        while self._times and self._times[0] not in self:
            self._wanted.pop(heapq.heappop(self._times), None)
        first = self._times[0] if self._times else None
        if self._timer is not None and self._timer.when() != first:
            self._timer.cancel()
            self._timer = None
        if first is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(first, self._rings, context=Context())  # no caller's

    def _rings(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._times and self._times[0] <= now:
            self._wanted.pop(heapq.heappop(self._times), None)
        self._ring()
        self._set()
