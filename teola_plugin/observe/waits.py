"""What the plain object waited for: each of its calls, from asking to having what it asked for."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wait:
    """One call of the plain object. Times as in a `Span`."""

    asked: float
    answered: float
    """When it had its values, or what was raised instead; the end of the query for a call that never had any."""
    spans: tuple[str, ...] = ()
    """The primitives that it waited for, by the names of their spans."""
    step: int = 0
    """Id of the step that called; 0 where that is not known."""


class OpenWait:
    """A call under way. What it waits for is known at its end: requests that failed are made again."""

    __slots__ = ("answered", "asked", "requests", "spans", "step")

    def __init__(self, asked: float, step: int) -> None:
        self.asked, self.step = asked, step
        self.answered: float | None = None
        self.spans: tuple[str, ...] = ()
        self.requests: tuple[str, ...] = ()
        """Where the names of the spans are not known: the ids of requests that they are of."""


MOST_WAITS = 1024
"""Calls of one query that are kept."""


class WaitLog:
    """The calls of one query. May be told of them from any thread; of more than `most`, the latest are kept."""

    def __init__(self, most: int = MOST_WAITS) -> None:
        self._all: deque[OpenWait] = deque(maxlen=most)
        self._lock = threading.Lock()

    def asked(self, at: float, step: int = 0) -> OpenWait:
        """The plain object asks, and waits from now on."""
        wait = OpenWait(at, step)
        with self._lock:
            self._all.append(wait)
        return wait

    def told(self) -> tuple[OpenWait, ...]:
        """Those that are kept, in the order in which they began."""
        with self._lock:
            return tuple(self._all)
