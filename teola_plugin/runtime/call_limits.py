"""Limits of calls that are under way at once: of one object, or of one query. They hold back prefetched calls only.

A call of the original waits for prefetched calls and never for another one of the original: what the framework runs in
parallel stays so.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Generic, TypeVar
from weakref import ref

from teola_plugin.runtime.threads import ForkedLock, tell_of_forks

T = TypeVar("T")

_lock = ForkedLock()
"""One for all limits. Never held while user code runs."""


is_inside_prefetch: ContextVar[bool] = ContextVar("teola_is_inside_prefetch", default=False)
"""Set in the context of a prefetched call: what it calls in turn must not wait for itself."""


class ConcurrencyLimit:
    """A limit that allows at most `limit` calls at once if prefetched ones are among them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.original_calls = 0
        self.prefetched_calls = 0
        self.waiting: list[Permit] = []
        tell_of_forks(self)

    def forked(self) -> None:
        """Start anew in a child process, where the parent's calls do not end.

        Called in each forked child by `runtime.threads`, before other code runs there.
        """
        self.original_calls = self.prefetched_calls = 0
        self.waiting = []

    def is_open(self, *, is_prefetch: bool) -> bool:
        """Return True if another call may begin.

        At the limit, a call of the original is admitted only while no prefetched call runs: the original alone decides
        how many calls of its own run at once. The caller holds the lock.
        """
        if self.original_calls + self.prefetched_calls < self.limit:
            return True
        return not is_prefetch and not self.prefetched_calls

    def count(self, change: int, *, is_prefetch: bool) -> None:
        """Count a call that begins (1) or ends (-1)."""
        if is_prefetch:
            self.prefetched_calls = max(0, self.prefetched_calls + change)
        else:
            self.original_calls = max(0, self.original_calls + change)


class Permit:
    """The leave to call, by all of some limits at once: `with` blocks until it is granted, `async with` waits."""

    def __init__(self, limits: Sequence[ConcurrencyLimit], *, is_prefetch: bool) -> None:
        """Create a permit that is not granted yet.

        Calls that code within a prefetched call makes have no limits of their own, unless they are prefetched, too.
        """
        self._limits = () if is_inside_prefetch.get() and not is_prefetch else limits
        self._is_prefetch = is_prefetch
        self._granted = False
        self._wake: Callable[[], Any] = bool

    def _try(self) -> bool:
        """Count the call at all of its limits and return True if each of them admits it; else change nothing.

        Callers hold `_lock`.
        """
        if not all(limit.is_open(is_prefetch=self._is_prefetch) for limit in self._limits):
            return False
        for limit in self._limits:
            limit.count(1, is_prefetch=self._is_prefetch)
            if self in limit.waiting:
                limit.waiting.remove(self)
        self._granted = True
        return True

    def _enter(self, wake: Callable[[], Any]) -> bool:
        """Return True if the call may begin now; else queue the permit, and call `wake` once it is granted."""
        with _lock.lock:
            if self._try():
                return True
            self._wake = wake
            for limit in self._limits:
                limit.waiting.append(self)
            return False

    def _leave(self) -> None:
        """Give the permit back, or leave the queue, and grant others that wait: those of the original first."""
        with _lock.lock:
            for limit in self._limits:
                if self._granted:
                    limit.count(-1, is_prefetch=self._is_prefetch)
                elif self in limit.waiting:
                    limit.waiting.remove(self)
            waiting = dict.fromkeys(other for limit in self._limits for other in limit.waiting)
            admitted = [other for other in sorted(waiting, key=lambda other: other._is_prefetch) if other._try()]
        for other in admitted:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                other._wake()

    def __enter__(self) -> None:
        """Block the thread until every limit admits the call."""
        if not self._limits:
            return
        turn = threading.Event()
        if not self._enter(turn.set):
            turn.wait()

    def __exit__(self, *_: object) -> None:
        if self._limits:
            self._leave()

    async def __aenter__(self) -> None:
        """Wait in the running loop until every limit admits the call. Leave the queue if the wait is cancelled."""
        if not self._limits:
            return
        loop, turn = asyncio.get_running_loop(), asyncio.Event()
        if self._enter(lambda: loop.call_soon_threadsafe(turn.set)):
            return
        try:
            await turn.wait()
        except BaseException:
            self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        if self._limits:
            self._leave()


class PerObject(Generic[T]):
    """Makes one value for each object, and forgets it with the object. An object without weak references has no own."""

    def __init__(self, make: Callable[[object], T]) -> None:
        self._make = make
        self._values: dict[int, tuple[ref[Any], T]] = {}

    def __call__(self, obj: object) -> T:
        """Return the value of an object, from any thread."""
        key = id(obj)
        entry = self._values.get(key)
        if entry is not None and entry[0]() is obj:
            return entry[1]
        with _lock.lock:
            entry = self._values.get(key)
            if entry is None or entry[0]() is not obj:
                try:
                    reference = ref(obj, lambda _: self._values.pop(key, None))
                except TypeError:
                    return self._make(obj)
                entry = self._values[key] = (reference, self._make(obj))
        return entry[1]


limit_of: Callable[[object], ConcurrencyLimit] = PerObject(lambda obj: ConcurrencyLimit(1))
"""Returns the limit of an object that takes one call at a time, the same for all chains that hold it."""
