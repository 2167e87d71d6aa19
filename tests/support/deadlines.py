"""Deadlines that pass when something has happened, and not before, however late a busy machine does it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from teola_plugin import EnginePool
from teola_plugin.scheduling.events import Tick

HOURS = 36_000.0
"""Seconds: a deadline that does not pass by itself."""


@contextmanager
def passing(pool: EnginePool, once: Callable[[], object]) -> Iterator[None]:
    """In the body, the deadlines of the pool's queries pass once that is true: its runtime is told of a later time."""

    def watch() -> None:
        until = time.monotonic() + 20
        while not once() and time.monotonic() < until:
            time.sleep(0.005)
        driver = pool.runtime._driver
        pool.runtime.loop.post(lambda: driver.post(Tick(driver.now() + 2 * HOURS)))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        watching.join()
