"""An event loop on a thread of its own, where a pool's engines and schedulers live."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import Context, copy_context
from typing import Any

from teola_plugin.errors import EngineUnavailable
from teola_plugin.runtime.timeouts import ended

log = logging.getLogger("teola_plugin")
_ENDING = 5.0
"""Seconds that what still runs has to end when the loop is stopped."""


class LoopThread:
    """Starts with `start`, ends with `stop`; independent of the loops that callers come and go with.

    Nothing that runs on it ends it but `stop`. What was posted before `stop` is run; afterwards nothing is taken.
    """

    def __init__(self, name: str = "teola-pool", loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop`: one that somebody else runs; it is not to be started here."""
        self.loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._taking = threading.Lock()
        self._told: list[tuple[Context, Callable[..., Any], tuple[Any, ...]]] = []
        self._woken = False
        """Whether the loop is about to look at what it was told."""
        self._stopped = False
        self._ends = False

    @property
    def ident(self) -> int:
        return self._thread.ident or 0

    def start(self) -> None:
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._ends:
            try:
                self.loop.run_forever()
            except BaseException as error:  # SystemExit and KeyboardInterrupt leave a loop; here they end one callback
                log.error("a callback on the pool's loop raised %r; the loop goes on", error, exc_info=error)

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Run `function` on the loop soon; from any thread. Raises `EngineUnavailable` once the pool is closed."""
        if not self.tell(function, *args):
            raise closed()

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
        if not self._stopped:
            self._told.append((copy_context(), function, args))
        return not self._stopped

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
            future.set_exception(closed())
        return future

    def _begin(self, coroutine: Coroutine[Any, Any, Any], future: Future[Any]) -> None:
        task = self.loop.create_task(coroutine)
        task.add_done_callback(self._copy_to(future))
        future.add_done_callback(lambda given: self.tell(task.cancel) if given.cancelled() else None)

    def _copy_to(self, future: Future[Any]) -> Callable[[asyncio.Task[Any]], None]:
        def copy(task: asyncio.Task[Any]) -> None:
            if task.cancelled() and self._stopped and not future.done():
                future.set_exception(closed())
            else:
                _copy(task, future)

        return copy

    def stop(self) -> None:
        """Ends the loop and its thread; within a bounded time, whatever hangs there. Idempotent."""
        with self._taking:
            if self._stopped:
                return
            self._stopped = True
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._hear)
            asyncio.run_coroutine_threadsafe(self._finish(), self.loop)
            self._thread.join(4 * _ENDING)
        if self._thread.is_alive():
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


def closed() -> EngineUnavailable:
    """What is raised once the pool has ended."""
    return EngineUnavailable("the engine pool is closed.", hint="use it inside its `with` block, or start another one")


class SameLoop:
    """The caller's own running loop in the role of a `LoopThread`: virtual time, and tests on one loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    @property
    def ident(self) -> int:
        return 0

    def start(self) -> None:
        pass

    def post(self, function: Callable[..., Any], *args: Any) -> None:
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
