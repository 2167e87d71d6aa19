"""An event loop on a thread of its own, where a pool's engines and schedulers live."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import Context, copy_context
from typing import Any

from teola_plugin.errors import EngineUnavailable, TeolaError, pool_closed, pool_forked, pool_not_started
from teola_plugin.runtime.forks import tell_of_forks
from teola_plugin.runtime.timeouts import ended

log = logging.getLogger("teola_plugin")
_ENDING = 5.0
"""Seconds that what still runs has to end when the loop is stopped."""


_of_parents: list[asyncio.AbstractEventLoop] = []
"""Loops that a forked child has from its parent, for ever: closing one would take it from what wakes the parent's."""


class LoopThread:
    """Starts with `start`, ends with `stop`, once; independent of the loops that callers come and go with.

    Nothing that runs on it ends it but `stop`. What was posted before `stop` is run; before `start` and afterwards
    nothing is taken, nor in a child that was forked meanwhile.
    """

    def __init__(self, name: str = "teola-pool") -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._name = name
        self._thread: threading.Thread | None = None
        self._taking = threading.RLock()  # what the garbage collector ends meanwhile, on this thread, may tell, too
        self._told: list[tuple[Context, Callable[..., Any], tuple[Any, ...]]] = []
        self._woken = False
        """Whether the loop is about to look at what it was told."""
        self._takes = False
        self._why: Callable[[], EngineUnavailable] = pool_not_started
        """It takes nothing."""
        self._ends = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Raises `EngineUnavailable` before `start`."""
        if self._loop is None:
            raise pool_not_started()
        return self._loop

    @property
    def ident(self) -> int:
        return (self._thread and self._thread.ident) or 0

    @property
    def used(self) -> bool:
        """Whether it was started, ever."""
        return self._thread is not None

    @property
    def runs(self) -> bool:
        """Whether it takes what is posted."""
        return self._takes

    @property
    def was_forked(self) -> bool:
        """Whether it runs in a parent process and not here."""
        return self._why is pool_forked

    def unavailable(self) -> EngineUnavailable:
        """Why it takes nothing."""
        return self._why()

    def time(self) -> float:
        """The loop's clock, in seconds."""
        return time.monotonic() if self._loop is None else self._loop.time()

    def start(self) -> None:
        """Not twice: a loop that has ended is not begun again."""
        self._loop = asyncio.new_event_loop()
        self._why, self._takes = pool_closed, True
        tell_of_forks(self)
        # Made here: in a forked child, one that was not started yet counts as ended.
        self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
        self._thread.start()

    def forked(self) -> None:
        """In a child: the thread is not there, and the loop's selector is the parent's, too."""
        self._taking = threading.RLock()
        if self._loop is not None:
            _of_parents.append(self._loop)
        if self._takes:
            self._why, self._takes = pool_forked, False

    def _main(self) -> None:
        loop = self.loop
        asyncio.set_event_loop(loop)
        while not self._ends:
            try:
                loop.run_forever()
            except BaseException as error:  # SystemExit and KeyboardInterrupt leave a loop; here they end one callback
                log.error("a callback on the pool's loop raised %r; the loop goes on", error, exc_info=error)

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Run `function` on the loop soon; from any thread. Raises `EngineUnavailable` once the pool is closed."""
        if not self.tell(function, *args):
            raise self._why()

    def tell(self, function: Callable[..., Any], *args: Any) -> bool:
        """`post` for what nobody needs to know on a loop that has ended; whether it will be run."""
        with self._taking:  # what is taken is in the loop's queue before its end is
            if not self._take(function, args):
                return False
            if not self._woken:  # once for all that comes until it looks
                self._woken = True
                self.loop.call_soon_threadsafe(self._hear)
            return True

    def leave(self, function: Callable[..., Any], *args: Any) -> bool:
        """`tell` for what has time until the next that is told. To wake the loop takes time, and the caller's turn."""
        with self._taking:
            return self._take(function, args)

    def _take(self, function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        if self._takes:
            self._told.append((copy_context(), function, args))
        return self._takes

    def _hear(self) -> None:
        with self._taking:
            told, self._told, self._woken = self._told, [], False
        told.reverse()
        try:
            while told:
                context, function, args = told.pop()
                try:
                    context.run(function, *args)
                except Exception as error:
                    self.loop.call_exception_handler({"message": f"{function!r} failed", "exception": error})
        finally:
            if told:  # left by SystemExit or KeyboardInterrupt
                with self._taking:
                    self._told[:0] = told[::-1]
                    self._woken = True
                    self.loop.call_soon(self._hear)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Its result. `EngineUnavailable` once the pool is closed, or if it is closed meanwhile."""
        future: Future[Any] = Future()
        if not self.tell(self._begin, coroutine, future):
            coroutine.close()
            future.set_exception(self._why())
        return future

    def _begin(self, coroutine: Coroutine[Any, Any, Any], future: Future[Any]) -> None:
        task = self.loop.create_task(coroutine)
        task.add_done_callback(self._copy_to(future))
        future.add_done_callback(lambda given: self.tell(task.cancel) if given.cancelled() else None)

    def _copy_to(self, future: Future[Any]) -> Callable[[asyncio.Task[Any]], None]:
        def copy(task: asyncio.Task[Any]) -> None:
            if task.cancelled() and not self._takes and not future.done():
                future.set_exception(pool_closed())
            else:
                _copy(task, future)

        return copy

    def stop(self) -> None:
        """Ends the loop and its thread; within a bounded time, whatever hangs there. Idempotent."""
        with self._taking:
            if not self._takes:
                return
            self._takes = False
        thread = self._thread
        assert thread is not None, "it takes nothing before it is started"
        if thread.is_alive():
            self.loop.call_soon_threadsafe(self._hear)
            asyncio.run_coroutine_threadsafe(self._finish(), self.loop)
            thread.join(4 * _ENDING)
        if thread.is_alive():
            log.warning("the pool's loop hangs in a callback; its thread is left behind")
        else:
            self.loop.close()

    async def _finish(self) -> None:
        try:
            left = await ended(_ENDING, asyncio.all_tasks() - {asyncio.current_task()})  # type: ignore[arg-type]
            if left:
                log.warning("%d tasks did not end with the pool's loop: they ignore cancellations", len(left))
            else:
                await asyncio.wait_for(self.loop.shutdown_asyncgens(), _ENDING)
        finally:
            self._ends = True
            self.loop.stop()


class SameLoop:
    """The caller's own running loop in the role of a `LoopThread`: virtual time, and tests on one loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ident = threading.get_ident()
        """Of the thread in which nobody may wait for the loop."""

    used = was_forked = False
    runs = True

    def start(self) -> None:
        pass

    def time(self) -> float:
        return self.loop.time()

    def unavailable(self) -> EngineUnavailable:
        return pool_closed()

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Raises `TeolaError` in a thread, and where code runs as in a thread: it would wait for the loop."""
        if asyncio._get_running_loop() is not self.loop:
            raise TeolaError(
                "sync code called a pool that runs on its caller's own loop, and would wait for itself.",
                hint="use the async form (ainvoke, aquery, aembed_query, ...), or EnginePool.local()",
            )
        function(*args)

    def tell(self, function: Callable[..., Any], *args: Any) -> bool:
        function(*args)
        return True

    leave = tell

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        task = self.loop.create_task(coroutine)
        task.add_done_callback(lambda t: _copy(t, future))
        return future

    def stop(self) -> None:
        pass


def _copy(task: asyncio.Task[Any], future: Future[Any]) -> None:
    if future.done():  # whoever waited has given up
        task.cancelled() or task.exception()
    elif task.cancelled():
        future.cancel()
    elif task.exception() is not None:
        future.set_exception(task.exception())
    else:
        future.set_result(task.result())
