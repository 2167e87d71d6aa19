"""Code of the client on threads of its own: functions of the user's, prompts, parsers and packing of the frameworks.

Nothing that is not ours runs on the pool's loop: whoever is slow there is slow for every query.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

MOST = 32
"""Threads of one runtime; a function that never ends keeps one of them."""

Then = Callable[[Any, BaseException | None], None]
"""(value, error), called on the loop."""
_Task = tuple[Callable[[], Any], Then, asyncio.AbstractEventLoop]


class ClientCode:
    """Runs functions in threads; they do not keep the process from ending. With `here`, at once where it is called."""

    def __init__(self, *, here: bool) -> None:
        self._here = here
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads = 0
        self._idle = 0
        self._lock = threading.Lock()

    def run(self, function: Callable[[], Any], then: Then, *, short: bool = False) -> None:
        """Call `then` with what the function gives or raises. `short`: ours and bounded, so it runs at once."""
        if self._here or short:
            then(*_outcome(function))
            return
        self._tasks.put((function, then, asyncio.get_running_loop()))
        with self._lock:
            if self._idle:
                self._idle -= 1  # one of those that wait will take it
                return
            grow = self._threads < MOST
            self._threads += grow
        if grow:
            threading.Thread(target=self._work, name="teola-client", daemon=True).start()

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            function, then, loop = task
            outcome = _outcome(function)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(then, *outcome)
            del task, function, then, outcome
            with self._lock:
                if self._tasks.empty():
                    self._idle += 1

    def close(self) -> None:
        """The threads end when what they are at has ended."""
        with self._lock:
            threads, self._threads, self._idle = self._threads, 0, 0
        for _ in range(threads):
            self._tasks.put(None)


def _outcome(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:
        return None, error
