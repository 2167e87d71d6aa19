"""Threads and forks: daemon threads for calls, bounded waits for other people's code, and objects that survive a fork.

Daemon threads are kept for a while, since reusing one is quicker than starting one.

A forked child has its parent's objects and none of its threads. A lock that another thread held in the parent is held
in the child for ever. Objects that depend on threads or locks register here; their `forked` is called in the child
before anything else runs there. Elsewhere this costs nothing.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

IDLE_TIMEOUT_S = 10.0
"""Time that a thread waits for the next task."""

Task = Callable[[], None]


class DaemonThreads:
    """A set of daemon threads: at most `max_threads` for `run`, and more for `start`."""

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self.idle = 0
        """Number of threads that wait for a task."""
        self.count = 0
        """Number of all threads."""
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[Task] = SimpleQueue()

    def run(self, task: Task, times: int) -> None:
        """Run a task so many times, each time on another thread, or fewer times if no thread is free."""
        with self._lock:
            reused = min(times, self.idle)
            new = max(0, min(times - reused, self._max_threads - self.count))
            self.idle -= reused
            self.count += new
        for _ in range(reused):
            self._tasks.put(task)
        for _ in range(new):
            threading.Thread(target=self._serve, args=(task,), name="teola-prefetch", daemon=True).start()

    def start(self, task: Task) -> None:
        """Run a task on another thread at once, beyond the `max_threads` threads if none is free."""
        with self._lock:
            has_idle = self.idle > 0
            self.idle -= has_idle
            self.count += not has_idle
        if has_idle:
            self._tasks.put(task)
        else:
            threading.Thread(target=self._serve, args=(task,), name="teola-prefetch", daemon=True).start()

    def _serve(self, task: Task) -> None:
        """Run a task, and others as they come, until none has come for a while. This is the body of each thread."""
        next_task: Task | None = task
        del task
        while next_task is not None:
            try:
                next_task()
            finally:
                next_task = None  # so that its objects are freed
                with self._lock:
                    self.idle += 1
            next_task = self._next_task()

    def _next_task(self) -> Task | None:
        """Wait for the next task of a thread. Return None, and count the thread no more, if none comes in time."""
        try:
            return self._tasks.get(timeout=IDLE_TIMEOUT_S)
        except Empty:
            with self._lock:
                if self.idle:
                    self.idle -= 1
                    self.count -= 1
                    return None
            return self._tasks.get()  # `run` or `start` has just counted this thread as reused


MAX_THREADS = 64
"""Threads of the process: composites that contain composites would make many."""
_threads = DaemonThreads(MAX_THREADS)


def daemon_threads() -> DaemonThreads:
    """Return the daemon threads of the process."""
    return _threads


def _after_fork() -> None:
    global _threads
    _threads = DaemonThreads(MAX_THREADS)


os.register_at_fork(after_in_child=_after_fork)


T = TypeVar("T")


async def at_most(seconds: float, awaitable: Awaitable[T]) -> T:
    """Return the value of an awaitable. Raises `TimeoutError` after `seconds`, even if it ignores its cancellation."""
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait([task], timeout=seconds)
    finally:
        if not task.done():
            abandon(task)
    if not task.done():
        raise TimeoutError(f"it did not end within {seconds:g} s")
    return task.result()


async def cancel_tasks(seconds: float, tasks: Iterable[asyncio.Future[Any]]) -> set[asyncio.Future[Any]]:
    """Cancel tasks and wait until they have ended. Return those that have not within `seconds`."""
    left = {task for task in tasks if not task.done()}
    for task in left:
        abandon(task)
    if left:
        _, left = await asyncio.wait(left, timeout=seconds)
    return left


def abandon(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and ignore what it raises.

    Call it on the task's loop. Without this, asyncio would log an exception that nobody retrieved.
    """
    task.add_done_callback(_ignore_exception)
    task.cancel()


def _ignore_exception(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()


class Forkable(Protocol):
    """An object that must behave otherwise in a forked child."""

    def forked(self) -> None:
        """Adapt to the child, where only the caller's thread exists. Make new locks; change nothing of the parent's."""


_registered: WeakSet[Forkable] = WeakSet()


def tell_of_forks(obj: Forkable) -> None:
    """Call `obj.forked()` in every forked child from now on, as long as the object exists. Idempotent."""
    _registered.add(obj)


def in_child(function: Callable[[], object]) -> None:
    """Call a function in every child that is forked from now on, before anything else runs there."""
    if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
        os.register_at_fork(after_in_child=function)


class ForkedLock:
    """A lock of the whole process, in its attribute `lock`: a forked child has one of its own, which nobody holds."""

    def __init__(self) -> None:
        self.forked()
        tell_of_forks(self)

    def forked(self) -> None:
        self.lock = threading.Lock()


def _call_registered() -> None:
    for obj in list(_registered):
        obj.forked()


in_child(_call_registered)
