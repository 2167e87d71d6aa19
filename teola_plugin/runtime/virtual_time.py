"""An event loop whose clock jumps: hours of waiting in milliseconds, and the same order of events every time.

Whatever waits only for timers and for other tasks runs in it unchanged: drivers, schedulers, fake engines. Work in
threads is waited for in real time, while the virtual clock stands still; or, for runs that are to be equal every
time, done on the spot (`inline`).
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar, TypeVarTuple, Unpack

from teola_plugin.errors import TeolaError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and moves only when nothing is ready: straight to the next timer.

    Raises `TeolaError` out of `run_until_complete` when nothing is ready, no timer is set and no thread is at work:
    every task then waits for something that cannot happen. Sockets and pipes are not waited for.

    `inline`: what is handed to threads runs at once and to its end in the loop's own thread, where no loop runs
    meanwhile. Threads that end in another order, or at another time, then change nothing.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self._virtual_now = 0.0
        self._threads = 0
        self._inline = inline
        super().__init__(_JumpingSelector(self._pass_time))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_now

    def _pass_time(self, seconds: float | None) -> bool:
        """Let virtual time pass; true when a thread is at work and real waiting is needed instead."""
        if self._threads:
            return True
        if seconds is None:
            raise TeolaError(
                f"virtual time stands still at {self._virtual_now:.6f} s: no timer is set, and every task waits: "
                f"{_waiting(self)}.",
                hint="look for a future that nobody completes, or a wait for a socket or process",
            )
        self._virtual_now += seconds
        return False

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run a function on a thread while virtual time stands still; at once on this thread with `inline`."""
        if self._inline:
            return self._run_inline(func, *args)
        future = super().run_in_executor(executor, func, *args)
        self._threads += 1
        future.add_done_callback(self._thread_done)
        return future

    def _run_inline(self, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
        """Run a function at once and return a future of its outcome. As on a thread, no loop is running for it."""
        future: asyncio.Future[T] = self.create_future()
        asyncio._set_running_loop(None)  # as it is in a thread: code there may ask, and may run a loop of its own
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        finally:
            asyncio._set_running_loop(self)
        return future

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self._threads -= 1

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """End the executor's threads, with virtual time standing still meanwhile."""
        self._threads += 1  # it waits for a thread of its own
        try:
            await super().shutdown_default_executor()
        finally:
            self._threads -= 1


def run_virtual(coroutine: Coroutine[Any, Any, T], seed: int = 0, *, inline: bool = False) -> T:
    """Run a coroutine to its end in virtual time, as `asyncio.run` does in real time.

    The global `random` generator is seeded meanwhile, so that a run can be repeated exactly; see `VirtualTimeLoop` for
    `inline`. Raises what the coroutine raises, and `TeolaError` when it waits for nothing.
    """
    state = random.getstate()
    random.seed(seed)
    try:
        with asyncio.Runner(loop_factory=partial(VirtualTimeLoop, inline=inline)) as runner:
            return runner.run(coroutine)
    finally:
        random.setstate(state)


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """A selector that never waits: it lets virtual time pass instead."""

    def __init__(self, pass_time: Callable[[float | None], bool]) -> None:
        super().__init__()
        self._pass_time = pass_time

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return events that are ready. If there are none, let `timeout` seconds of virtual time pass, or wait for a
        thread."""
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if ready or timeout == 0:
            return ready
        return super().select(None) if self._pass_time(timeout) else []


def _waiting(loop: asyncio.AbstractEventLoop) -> str:
    """Return the names of the tasks that wait, and the lines where they do."""
    descriptions = []
    for task in asyncio.all_tasks(loop):
        frames = task.get_stack(limit=1)
        where = f" at {frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else ""
        descriptions.append(f"{task.get_name()}{where}")
    return ", ".join(sorted(descriptions)) or "no task at all"
