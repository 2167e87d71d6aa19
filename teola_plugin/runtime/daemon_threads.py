"""Threads that calls are made on: kept for a while, since to start one takes longer than to hand it work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

KEPT = 10.0
"""Seconds that a thread waits for more work."""

Work = Callable[[], None]


class DaemonThreads:
    """Daemon threads: at most `most` for `run`, and more for `start`.

    `idle` and `made` count those that wait for work, and all of them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.idle = 0
        self.made = 0
        self._lock = threading.Lock()
        self._given: SimpleQueue[Work] = SimpleQueue()

    def run(self, work: Work, times: int) -> None:
        """Has `work` done so many times, each on a thread of its own, or fewer times where no thread is free."""
        with self._lock:
            waiting = min(times, self.idle)
            more = max(0, min(times - waiting, self._most - self.made))
            self.idle -= waiting
            self.made += more
        for _ in range(waiting):
            self._given.put(work)
        for _ in range(more):
            threading.Thread(target=self._serve, args=(work,), name="teola-prefetch", daemon=True).start()

    def start(self, work: Work) -> None:
        """Do `work` on a thread of its own at once, beyond the `most` threads if none is free."""
        with self._lock:
            is_waited_for = self.idle > 0
            self.idle -= is_waited_for
            self.made += not is_waited_for
        if is_waited_for:
            self._given.put(work)
        else:
            threading.Thread(target=self._serve, args=(work,), name="teola-prefetch", daemon=True).start()

    def _serve(self, work: Work) -> None:
        next_work: Work | None = work
        del work
        while next_work is not None:
            try:
                next_work()
            finally:
                next_work = None  # what it holds is not kept
                with self._lock:
                    self.idle += 1
            next_work = self._next()

    def _next(self) -> Work | None:
        try:
            return self._given.get(timeout=KEPT)
        except Empty:
            with self._lock:
                if self.idle:
                    self.idle -= 1
                    self.made -= 1
                    return None
            return self._given.get()  # given just now


MOST = 64
"""In the process: batches of composites that hold composites would make many."""
_threads = DaemonThreads(MOST)


def threads() -> DaemonThreads:
    """Return those of the process."""
    return _threads


def _after_fork() -> None:
    global _threads
    _threads = DaemonThreads(MOST)


os.register_at_fork(after_in_child=_after_fork)
