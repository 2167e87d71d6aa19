"""Code of the client on threads of its own: functions of the user's, prompts, parsers and packing of the frameworks.

Nothing that is not ours runs on the pool's loop: whoever is slow there is slow for every query.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

MOST = 32
"""Threads of one runtime."""
APART = 4
"""Threads of one query, beside its own, for functions of the user's that stand side by side in a workflow."""

Then = Callable[[Any, BaseException | None], None]
"""(value, error), called on the loop."""
_Task = tuple[Callable[[], Any], Then, asyncio.AbstractEventLoop]


class ClientCode:
    """Runs functions in threads, those of one query one after the other: who never ends stops its own query only.

    Those that run `apart` are not waited for by their query's others, and have up to `APART` threads more.

    The threads do not keep the process from ending. With `here`, functions run at once, where they are given.
    """

    def __init__(self, *, here: bool) -> None:
        self._here = here
        self._tasks: dict[str, deque[_Task]] = {}
        """By query: what has yet to run; a query is in here while a thread is, or will be, at work for it."""
        self._ready: SimpleQueue[str | None] = SimpleQueue()
        self._threads = self._waiting = 0
        self._lock = threading.Lock()

    def run(
        self, query: str, function: Callable[[], Any], then: Then, *, short: bool = False, apart: bool = False
    ) -> None:
        """Call `then` with what the function gives or raises. `short`: ours and bounded, so it runs at once."""
        if self._here or short:
            then(*_outcome(function))
            return
        task = function, then, asyncio.get_running_loop()
        with self._lock:
            query = self._lane(query) if apart else query
            known = self._tasks.get(query)
            if known is not None:
                known.append(task)
                return
            self._tasks[query] = deque([task])
            grow = self._waiting <= self._ready.qsize() and self._threads < MOST
            self._threads += grow
            self._ready.put(query)
        if grow:
            threading.Thread(target=self._work, name="teola-client", daemon=True).start()

    def _lane(self, query: str) -> str:
        """One of the query's further threads: one that is free, else the one with the least to do."""
        lanes = [f"{query} apart {number}" for number in range(APART)]
        return min(lanes, key=lambda lane: 1 + len(self._tasks[lane]) if lane in self._tasks else 0)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._waiting += 1
            query = self._ready.get()
            with self._lock:
                self._waiting -= 1
            if query is None:
                return
            while (task := self._next(query)) is not None:
                function, then, loop = task
                outcome = _outcome(function)
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(then, *outcome)
                del task, function, then, outcome

    def _next(self, query: str) -> _Task | None:
        with self._lock:
            tasks = self._tasks[query]
            if tasks:
                return tasks.popleft()
            del self._tasks[query]
            return None

    def close(self) -> None:
        """The threads end when what they are at has ended."""
        with self._lock:
            threads, self._threads = self._threads, 0
        for _ in range(threads):
            self._ready.put(None)


def _outcome(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:
        return None, error
