"""Deadlines that expire exactly when something has happened, however slow the machine is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from teola_plugin import EnginePool
from teola_plugin.scheduling.events import Tick

HOURS = 36_000.0
"""Seconds: a deadline so late that it never expires by itself."""


@contextmanager
def expire_deadlines_when(pool: EnginePool, condition: Callable[[], object]) -> Iterator[None]:
    """In the body, expire the deadlines of all queries of the pool as soon as the condition is true.

    The pool's runtime gets a tick that is later than any deadline. Give up after 20 s.
    """

    def watch() -> None:
        until = time.monotonic() + 20
        while not condition() and time.monotonic() < until:
            time.sleep(0.005)
        driver = pool.runtime._driver
        pool.runtime.loop.post(lambda: driver.post(Tick(driver.now() + 2 * HOURS)))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        watching.join()
