"""The waits of the original: each of its calls, from the time it is made to the time it has its values."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Wait:
    """One call of the original. Times as in a `Span`."""

    began: float
    answered: float
    """Time at which it had its values or raised an error; the end of the query for a call that never ended."""
    spans: tuple[str, ...] = ()
    """The primitives that it waited for, by the names of their spans."""
    step: int = 0
    """Id of the step that made the call; 0 if that is not known."""
    within: str = ""
    """The span of the provider call in which it was made, if any."""


@dataclass(slots=True, eq=False)
class TracedCall:
    """A provider call (of the user's own model, retriever or tool) as the trace has it. Written from any thread."""

    name: str
    kind: str
    """Kind of its `Span`."""
    engine: str
    began: float | None = None
    ended_at: float | None = None
    requests: list[str] = field(default_factory=list)
    """Ids of the requests with which plans have prefetched it."""
    used: bool = False
    """True once the original has made or claimed it."""
    is_requested_by: Callable[[Any], bool] | None = None
    """Returns True if the payload of a request is for this very call: a plan's request may not have come to it by the
    end."""


class OpenWait:
    """A call under way. The spans that it waits for are known at its end, since failed requests are made again."""

    __slots__ = ("answered", "began", "provider_call", "spans", "step", "within")

    def __init__(self, began: float, step: int) -> None:
        self.began, self.step = began, step
        self.answered: float | None = None
        self.spans: tuple[str, ...] = ()
        self.provider_call: TracedCall | None = None
        """The call itself, if it is a provider call."""
        self.within: TracedCall | None = None
        """The provider call in which it is made."""


MAX_WAITS = 1024
"""Calls of one query that are kept."""


class WaitLog:
    """The calls of one query, written from any thread. If there are more than `max_waits`, the latest are kept."""

    def __init__(self, max_waits: int = MAX_WAITS) -> None:
        self._waits: deque[OpenWait] = deque(maxlen=max_waits)
        self._provider_calls: deque[TracedCall] = deque(maxlen=max_waits)
        self._lock = threading.Lock()

    def add_provider_call(self, call: TracedCall) -> None:
        """Add a provider call that the original or a plan requests."""
        with self._lock:
            self._provider_calls.append(call)

    @property
    def provider_calls(self) -> tuple[TracedCall, ...]:
        """The provider calls that are kept, in the order in which they were requested."""
        with self._lock:
            return tuple(self._provider_calls)

    def begin(self, at: float, step: int = 0) -> OpenWait:
        """Note that the original makes a call, and waits from now on."""
        wait = OpenWait(at, step)
        with self._lock:
            self._waits.append(wait)
        return wait

    def waits(self) -> tuple[OpenWait, ...]:
        """Return the calls that are kept, in the order in which they began."""
        with self._lock:
            return tuple(self._waits)
