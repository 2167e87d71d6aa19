"""Threads for code of the client: the user's functions, and prompts, parsers and packing of the frameworks.

Only our own code runs on the pool's loop: slow code there would delay every query.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

MAX_THREADS = 32
"""Threads of one runtime."""
MAX_EXTRA_THREADS = 4
"""Further threads of one query, for functions of the user's that stand side by side in a workflow."""

OnResult = Callable[[Any, BaseException | None], None]
"""(value, error), called on the loop."""
_Task = tuple[Callable[[], Any], OnResult, asyncio.AbstractEventLoop]


class ClientCode:
    """Threads that run functions, those of one query one after the other: one that never ends stops its own query only.

    The threads do not keep the process from ending. With `runs_inline`, functions run at once on the caller's thread.
    """

    def __init__(self, *, runs_inline: bool) -> None:
        self._runs_inline = runs_inline
        self._tasks: dict[str, deque[_Task]] = {}
        """Tasks that have yet to run, by query; a query has an entry while a thread works, or will work, for it."""
        self._ready: SimpleQueue[str | None] = SimpleQueue()
        self._threads = self._waiting = 0
        self._lock = threading.Lock()

    def run(
        self,
        query: str,
        function: Callable[[], Any],
        on_result: OnResult,
        *,
        is_short: bool = False,
        has_own_thread: bool = False,
    ) -> None:
        """Run a function and call `on_result` with its value or error.

        `is_short`: the code is ours and takes a bounded time, so it runs at once. `has_own_thread`: other functions of
        the query do not wait for this one; there are up to `MAX_EXTRA_THREADS` of them.
        """
        if self._runs_inline or is_short:
            on_result(*_outcome(function))
            return
        task = function, on_result, asyncio.get_running_loop()
        with self._lock:
            query = self._lane(query) if has_own_thread else query
            tasks = self._tasks.get(query)
            if tasks is not None:
                tasks.append(task)
                return
            self._tasks[query] = deque([task])
            needs_thread = self._waiting <= self._ready.qsize() and self._threads < MAX_THREADS
            self._threads += needs_thread
            self._ready.put(query)
        if needs_thread:
            threading.Thread(target=self._work, name="teola-client", daemon=True).start()

    def _lane(self, query: str) -> str:
        """Return the name of one of the query's further threads: a free one, else the one with the fewest tasks.

        A query has at most `MAX_EXTRA_THREADS` (4) of them. Tasks of one lane run one after another.
        """
        lanes = [f"{query} apart {number}" for number in range(MAX_EXTRA_THREADS)]
        return min(lanes, key=lambda lane: 1 + len(self._tasks[lane]) if lane in self._tasks else 0)

    def _work(self) -> None:
        """Run the tasks of one query after another until `close`. This is the body of each thread.

        Outcomes are handed to the loop that a task came from.
        """
        while True:
            with self._lock:
                self._waiting += 1
            query = self._ready.get()
            with self._lock:
                self._waiting -= 1
            if query is None:
                return
            while (task := self._next(query)) is not None:
                function, on_result, loop = task
                outcome = _outcome(function)
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(on_result, *outcome)
                del task, function, on_result, outcome

    def _next(self, query: str) -> _Task | None:
        """Return the next task of a query; forget the query and return None if it has none."""
        with self._lock:
            tasks = self._tasks[query]
            if tasks:
                return tasks.popleft()
            del self._tasks[query]
            return None

    def close(self) -> None:
        """Let each thread end when its present task has ended.

        Does not wait for them. May be called from any thread.
        """
        with self._lock:
            threads, self._threads = self._threads, 0
        for _ in range(threads):
            self._ready.put(None)


def _outcome(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Call a function. Return its value and None, or None and whatever it raised."""
    try:
        return function(), None
    except BaseException as error:
        return None, error
