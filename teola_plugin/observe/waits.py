"""What the plain object waited for: each of its calls, from asking to having what it asked for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


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
    within: str = ""
    """The span of the call of the user's own object that it was made in, if any."""


@dataclass(slots=True, eq=False)
class OwnCall:
    """A call of a model or a retriever of the user's own, made ahead of its place or there. Written from any thread."""

    name: str
    kind: str
    """As of a `Span`."""
    engine: str
    began: float | None = None
    ended: float | None = None
    requests: list[str] = field(default_factory=list)
    """Ids of those by which plans have asked for it."""
    used: bool = False
    """Whether the plain object has come to it."""
    asked_by: Callable[[Any], bool] | None = None
    """Whether a payload at this engine asks for this very call: a plan's request may not have come to it by the end."""


class OpenWait:
    """A call under way. What it waits for is known at its end: requests that failed are made again."""

    __slots__ = ("answered", "asked", "own", "spans", "step", "within")

    def __init__(self, asked: float, step: int) -> None:
        self.asked, self.step = asked, step
        self.answered: float | None = None
        self.spans: tuple[str, ...] = ()
        self.own: OwnCall | None = None
        """Where it is one of the user's own objects that is called."""
        self.within: OwnCall | None = None
        """The call of one of those, in which it is made."""


MOST_WAITS = 1024
"""Calls of one query that are kept."""


class WaitLog:
    """The calls of one query. May be told of them from any thread; of more than `most`, the latest are kept."""

    def __init__(self, most: int = MOST_WAITS) -> None:
        self._all: deque[OpenWait] = deque(maxlen=most)
        self._own: deque[OwnCall] = deque(maxlen=most)
        self._lock = threading.Lock()

    def calls(self, own: OwnCall) -> None:
        """A call of one of the user's own objects is asked for, by the plain object or a plan."""
        with self._lock:
            self._own.append(own)

    @property
    def own(self) -> tuple[OwnCall, ...]:
        """The calls of the user's own objects, in the order in which they were asked for."""
        with self._lock:
            return tuple(self._own)

    def asked(self, at: float, step: int = 0) -> OpenWait:
        """The plain object asks, and waits from now on."""
        wait = OpenWait(at, step)
        with self._lock:
            self._all.append(wait)
        return wait

    def told(self) -> tuple[OpenWait, ...]:
        """Return the calls that are kept, in the order in which they began."""
        with self._lock:
            return tuple(self._all)
