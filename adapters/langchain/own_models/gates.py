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

_lock = threading.Lock()
"""One for all gates. Never held while user code runs."""


inside_early: ContextVar[bool] = ContextVar("teola_inside_early", default=False)
"""Set in the context of an early call: what it calls in turn must not wait for itself."""


class Gate:
    """At most `limit` calls at once where early ones are among them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.plain = 0
        self.early = 0
        self.waiting: list[Pass] = []

    def is_open(self, *, early: bool) -> bool:
        return self.plain + self.early < self.limit or (not early and not self.early)

    def count(self, change: int, *, early: bool) -> None:
        if early:
            self.early += change
        else:
            self.plain += change


class Pass:
    """Entry through all of some gates at once: `with` blocks the thread until it is granted, `async with` waits."""

    def __init__(self, gates: Sequence[Gate], *, early: bool) -> None:
        self._gates = () if inside_early.get() and not early else gates
        self._early = early
        self._granted = False
        self._wake: Callable[[], Any] = bool

    def _try(self) -> bool:
        if not all(gate.is_open(early=self._early) for gate in self._gates):
            return False
        for gate in self._gates:
            gate.count(1, early=self._early)
            if self in gate.waiting:
                gate.waiting.remove(self)
        self._granted = True
        return True

    def _enter(self, wake: Callable[[], Any]) -> bool:
        with _lock:
            if self._try():
                return True
            self._wake = wake
            for gate in self._gates:
                gate.waiting.append(self)
            return False

    def _leave(self) -> None:
        with _lock:
            for gate in self._gates:
                if self._granted:
                    gate.count(-1, early=self._early)
                elif self in gate.waiting:
                    gate.waiting.remove(self)
            waiting = dict.fromkeys(other for gate in self._gates for other in gate.waiting)
            admitted = [other for other in sorted(waiting, key=lambda other: other._early) if other._try()]
        for other in admitted:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                other._wake()

    def __enter__(self) -> None:
        turn = threading.Event()
        if self._gates and not self._enter(turn.set):
            turn.wait()

    def __exit__(self, *_: object) -> None:
        if self._gates:
            self._leave()

    async def __aenter__(self) -> None:
        loop, turn = asyncio.get_running_loop(), asyncio.Event()
        if not self._gates or self._enter(lambda: loop.call_soon_threadsafe(turn.set)):
            return
        try:
            await turn.wait()
        except BaseException:
            self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        if self._gates:
            self._leave()


_of_objects: dict[int, tuple[ref[Any], Gate]] = {}


def gate_of(obj: object) -> Gate:
    """The gate of an object that takes one call at a time, the same for all chains that hold it."""
    key = id(obj)
    with _lock:
        known = _of_objects.get(key)
        if known is not None and known[0]() is obj:
            return known[1]
        made = _of_objects[key] = (ref(obj, lambda gone: _of_objects.pop(key, None)), Gate(1))
    return made[1]
