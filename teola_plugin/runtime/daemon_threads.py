"""Daemon threads on which calls are made. They are kept for a while, since reusing one is quicker than starting one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

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


def threads() -> DaemonThreads:
    """Return the threads of the process."""
    return _threads


def _after_fork() -> None:
    global _threads
    _threads = DaemonThreads(MAX_THREADS)


os.register_at_fork(after_in_child=_after_fork)
