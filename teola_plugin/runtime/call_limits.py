"""How many calls may be under way at once: of one object, of one query. Only early calls are held back by it.

A plain call waits for early calls and never for another plain one: what the framework runs in parallel stays so.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import ref

from teola_plugin.runtime.forks import ForkedLock, tell_of_forks

_lock = ForkedLock()
"""One for all limits. Never held while user code runs."""


inside_early: ContextVar[bool] = ContextVar("teola_inside_early", default=False)
"""Set in the context of an early call: what it calls in turn must not wait for itself."""


class ConcurrencyLimit:
    """At most `limit` calls at once where early ones are among them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.plain = 0
        self.early = 0
        self.waiting: list[Permit] = []
        tell_of_forks(self)

    def forked(self) -> None:
        """In a child process, whose parent's calls do not end here."""
        self.plain = self.early = 0
        self.waiting = []

    def is_open(self, *, early: bool) -> bool:
        return self.plain + self.early < self.limit or (not early and not self.early)

    def count(self, change: int, *, early: bool) -> None:
        if early:
            self.early = max(0, self.early + change)
        else:
            self.plain = max(0, self.plain + change)


class Permit:
    """Leave to call, by all of some limits at once: `with` blocks until it is granted, `async with` waits."""

    def __init__(self, limits: Sequence[ConcurrencyLimit], *, early: bool) -> None:
        self._limits = () if inside_early.get() and not early else limits
        self._early = early
        self._granted = False
        self._wake: Callable[[], Any] = bool

    def _try(self) -> bool:
        if not all(limit.is_open(early=self._early) for limit in self._limits):
            return False
        for limit in self._limits:
            limit.count(1, early=self._early)
            if self in limit.waiting:
                limit.waiting.remove(self)
        self._granted = True
        return True

    def _enter(self, wake: Callable[[], Any]) -> bool:
        with _lock.here:
            if self._try():
                return True
            self._wake = wake
            for limit in self._limits:
                limit.waiting.append(self)
            return False

    def _leave(self) -> None:
        with _lock.here:
            for limit in self._limits:
                if self._granted:
                    limit.count(-1, early=self._early)
                elif self in limit.waiting:
                    limit.waiting.remove(self)
            waiting = dict.fromkeys(other for limit in self._limits for other in limit.waiting)
            admitted = [other for other in sorted(waiting, key=lambda other: other._early) if other._try()]
        for other in admitted:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                other._wake()

    def __enter__(self) -> None:
        if not self._limits:
            return
        turn = threading.Event()
        if not self._enter(turn.set):
            turn.wait()

    def __exit__(self, *_: object) -> None:
        if self._limits:
            self._leave()

    async def __aenter__(self) -> None:
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


_of_objects: dict[int, tuple[ref[Any], ConcurrencyLimit]] = {}


def limit_of(obj: object) -> ConcurrencyLimit:
    """The limit of an object that takes one call at a time, the same for all chains that hold it."""
    key = id(obj)
    with _lock.here:
        known = _of_objects.get(key)
        if known is not None and known[0]() is obj:
            return known[1]
        made = _of_objects[key] = (ref(obj, lambda gone: _of_objects.pop(key, None)), ConcurrencyLimit(1))
    return made[1]
