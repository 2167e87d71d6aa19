"""The one thread in which an engine runs torch: the event loop never waits for a model."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

_set_threads = threading.Lock()


def parse_cores(cores: str | Iterable[int] | None) -> tuple[int, ...]:
    """Core numbers from `"0-2,5"` or from numbers; empty for None. Raises `ValueError`."""
    if cores is None:
        return ()
    if not isinstance(cores, str):
        return tuple(sorted({int(core) for core in cores}))
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in cores.split(","))):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


class TorchWorker:
    """A thread of its own, pinned to `cores` where the system can do that (Linux); empty for no pinning."""

    def __init__(self, name: str, cores: tuple[int, ...] = ()) -> None:
        self._cores = cores
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"teola-{name}", initializer=self._prepare)

    def _prepare(self) -> None:
        if not self._cores:
            return
        if hasattr(os, "sched_setaffinity"):
            # 0 is the calling thread; the OpenMP threads that torch starts from it inherit the mask.
            os.sched_setaffinity(0, self._cores)
        use_threads(len(self._cores))

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """The result of `work(*args)`, run in the thread after all that came before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args))

    async def close(self) -> None:
        """Ends the thread once what it is doing is done; what waits behind that is dropped."""
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)


def use_threads(count: int) -> None:
    """Let torch use `count` threads for what the calling thread starts, and for nobody else.

    `torch.set_num_threads` sets two things: the OpenMP count of the calling thread, and the count that threads which
    come to torch later begin with. A throw-away thread puts the second one back.
    """
    import torch

    with _set_threads:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        restore = threading.Thread(target=torch.set_num_threads, args=(before,))
        restore.start()
        restore.join()
