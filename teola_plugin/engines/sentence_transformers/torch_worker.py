"""The thread in which an engine runs torch, and threads for replicas: the event loop never waits for a model."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import threading
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger("teola_plugin")
LAST_BATCH = 20.0
"""Maximum seconds of the last batch of an engine that is stopped."""
_set_threads = threading.Lock()


class TorchWorker:
    """A thread that is pinned to `cores` if the system can do that (Linux); () for no pinning."""

    def __init__(self, name: str, cores: tuple[int, ...] = ()) -> None:
        self._cores = cores
        self._name = name
        self._thread = _DaemonThread(f"teola-{name}", self._prepare)

    def _prepare(self) -> None:
        """Pin the thread to its cores, and let torch use as many threads. Runs in the thread before its first work."""
        if not self._cores:
            return
        if hasattr(os, "sched_setaffinity"):
            # 0 is the calling thread; the OpenMP threads that torch starts from it inherit the mask.
            os.sched_setaffinity(0, self._cores)
        use_threads(len(self._cores))

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)` in the thread after all earlier work. Return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args))

    async def close(self) -> bool:
        """End the thread after its current work, and drop the work that waits.

        Return False if it hangs: then it is left behind, and does not keep the process from ending.
        """
        self._thread.shutdown(wait=False, cancel_futures=True)
        if await asyncio.to_thread(self._thread.join, LAST_BATCH):
            return True
        log.warning("the thread of engine %s hangs in its model and is left behind", self._name)
        return False


class _DaemonThread(Executor):
    """An executor of one thread. Unlike `ThreadPoolExecutor`, a hanging job does not keep the process from ending."""

    def __init__(self, name: str, prepare: Callable[[], None]) -> None:
        self._todo: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._prepare, self._closed = prepare, False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Queue a call for the thread and return its future. Raise RuntimeError after `shutdown`."""
        if self._closed:
            raise RuntimeError("the thread has been closed")
        future: Future[T] = Future()
        self._todo.put((future, partial(fn, *args, **kwargs)))
        return future

    def _main(self) -> None:
        """Run the queued calls one after the other until `shutdown`. This is the thread's own function."""
        prepared = False
        while (job := self._todo.get()) is not None:
            future, work = job
            if future.set_running_or_notify_cancel():
                try:
                    if not prepared:
                        self._prepare()
                        prepared = True
                    value = work()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(value)
                    del value
            del job, future, work  # nothing is kept alive while it waits

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after its queued calls, or after the current one if `cancel_futures`."""
        self._closed = True
        while cancel_futures and not self._todo.empty():
            job = self._todo.get()
            if job is not None:
                job[0].cancel()
        self._todo.put(None)
        if wait:
            self._thread.join()

    def join(self, seconds: float) -> bool:
        """Wait for the thread for at most `seconds`. Return True if it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


def use_threads(count: int) -> None:
    """Let torch use `count` threads for what the calling thread starts, and for no other thread.

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


SizedT = TypeVar("SizedT", bound=Sized)
V = TypeVar("V")
_MAX_THREADS = 8
"""Maximum number of threads: more of them wait for Python's lock."""


class Replicas:
    """Threads with an equal share of `threads` cores each, and a twin of the model: same weights, own tokenizer.

    A tokenizer of Hugging Face must not be used by two threads (huggingface/tokenizers#537, "Already borrowed"). Twins
    are made with the first batch: many engines never see a large one.
    """

    def __init__(self, model: Any, threads: int) -> None:
        self.count = min(threads, _MAX_THREADS)
        self._models = [model]
        share = threads // self.count
        self._threads = ThreadPoolExecutor(self.count, "teola-replica", initializer=lambda: use_threads(share))

    def compute(self, work: Callable[[Any, list[SizedT]], Sequence[V]], items: Sequence[SizedT]) -> list[V]:
        """Call `work(model, part)` on all replicas' threads. Return the values in the order of `items`.

        Each part gets short and long items alike, so that all take about as long. The embedding engine calls this on a
        CPU, for two batches of texts or more; fewer texts run on one model. The first call makes the twins.
        """
        self._models += [twin(self._models[0]) for _ in range(self.count - len(self._models))]
        order = sorted(range(len(items)), key=lambda at: len(items[at]))
        parts = [order[first :: self.count] for first in range(self.count)]
        values = self._threads.map(work, self._models, ([items[at] for at in part] for part in parts))
        values_by_position = dict(
            zip((at for part in parts for at in part), (v for part in values for v in part), strict=True)
        )
        return [values_by_position[at] for at in range(len(items))]

    def close(self) -> None:
        self._threads.shutdown()


def twin(model: Any) -> Any:
    """Return a deep copy that shares the weights.

    Each thread of `Replicas` needs a model of its own, since two threads must not use one tokenizer; the weights, which
    are nearly all of the memory, exist once.
    """
    weights = {id(one): one for one in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, weights)
