"""An event loop on a thread of its own, where a pool's engines and schedulers live, and handles of results under way.

A caller of `pool.call(...)` gets a handle, which may be used from any thread or loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import CancelledError, Future
from contextvars import Context, copy_context
from typing import Any

from teola_plugin.errors import (
    EngineUnavailable,
    QueryCancelled,
    TeolaError,
    pool_closed,
    pool_forked,
    pool_not_started,
)
from teola_plugin.requests.payloads import Piece
from teola_plugin.runtime.threads import cancel_tasks, tell_of_forks

log = logging.getLogger("teola_plugin")
_STOP_TIMEOUT_S = 5.0
"""Time that running tasks have to end when the loop is stopped."""

_parent_loops: list[asyncio.AbstractEventLoop] = []
"""Loops that a forked child has from its parent. They are never closed, since that would disturb the parent's."""


class LoopThread:
    """An event loop on a thread of its own, independent of its callers' loops, from `start` to `stop`.

    Only `stop` ends it, whatever the functions on it raise. Functions that were posted before `stop` are run. Before
    `start`, after `stop`, and in a child that was forked meanwhile, none is accepted. It cannot be started twice.
    """

    def __init__(self, name: str = "teola-pool") -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._name = name
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # reentrant: the garbage collector may end objects that post, on this thread
        self._posted: list[tuple[Context, Callable[..., Any], tuple[Any, ...]]] = []
        self._is_woken = False
        """True while the loop is about to run the posted functions."""
        self._is_open = False
        """True while functions are accepted."""
        self._closed_reason: Callable[[], EngineUnavailable] = pool_not_started
        """Returns the error for functions that are not accepted."""
        self._is_ending = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which engines and queries run. Raise `EngineUnavailable` before `start`."""
        if self._loop is None:
            raise pool_not_started()
        return self._loop

    @property
    def ident(self) -> int:
        return (self._thread and self._thread.ident) or 0

    @property
    def used(self) -> bool:
        """True once it was started."""
        return self._thread is not None

    @property
    def runs(self) -> bool:
        """True while functions are accepted."""
        return self._is_open

    @property
    def was_forked(self) -> bool:
        """True if it runs in a parent process and not here."""
        return self._closed_reason is pool_forked

    def unavailable(self) -> EngineUnavailable:
        """Return the error for functions that are not accepted."""
        return self._closed_reason()

    def time(self) -> float:
        """The loop's clock, in seconds."""
        return time.monotonic() if self._loop is None else self._loop.time()

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._loop = asyncio.new_event_loop()
        self._closed_reason, self._is_open = pool_closed, True
        tell_of_forks(self)
        # The thread is created here: in a forked child, one that was not started yet counts as ended.
        self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
        self._thread.start()

    def forked(self) -> None:
        """Accept nothing in a child, where the thread does not exist and the loop's selector is the parent's, too."""
        self._lock = threading.RLock()
        if self._loop is not None:
            _parent_loops.append(self._loop)
        if self._is_open:
            self._closed_reason, self._is_open = pool_forked, False

    def _main(self) -> None:
        """Run the loop until `stop` has ended it, whatever callbacks raise. This is the body of the thread."""
        loop = self.loop
        asyncio.set_event_loop(loop)
        while not self._is_ending:
            try:
                loop.run_forever()
            except BaseException as error:  # SystemExit and KeyboardInterrupt leave a loop; here they end one callback
                log.error("a callback on the pool's loop raised %r; the loop goes on", error, exc_info=error)

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Run `function` on the loop soon; from any thread. Raises `EngineUnavailable` once the pool is closed.

        It runs in a copy of the caller's context. What it raises does not reach the caller.
        """
        if not self.try_post(function, *args):
            raise self._closed_reason()

    def try_post(self, function: Callable[..., Any], *args: Any) -> bool:
        """Run `function` on the loop soon, from any thread. Return False if the loop has ended."""
        with self._lock:  # so that accepted functions are in the loop's queue before its end is
            if not self._accept(function, args):
                return False
            if not self._is_woken:  # once for all functions until they are run
                self._is_woken = True
                self.loop.call_soon_threadsafe(self._run_posted)
            return True

    def post_lazily(self, function: Callable[..., Any], *args: Any) -> bool:
        """Run `function` with the next one that is posted: waking the loop takes time. Return False if it has ended."""
        with self._lock:
            return self._accept(function, args)

    def _accept(self, function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        if self._is_open:
            self._posted.append((copy_context(), function, args))
        return self._is_open

    def _run_posted(self) -> None:
        """Run the posted functions in order, each in the context of its caller. An error is logged and stops no other
        one.

        After SystemExit or KeyboardInterrupt the remaining functions are run by another callback.
        """
        with self._lock:
            posted, self._posted, self._is_woken = self._posted, [], False
        posted.reverse()
        try:
            while posted:
                context, function, args = posted.pop()
                try:
                    context.run(function, *args)
                except Exception as error:
                    self.loop.call_exception_handler({"message": f"{function!r} failed", "exception": error})
        finally:
            if posted:  # after SystemExit or KeyboardInterrupt
                with self._lock:
                    self._posted[:0] = posted[::-1]
                    self._is_woken = True
                    self.loop.call_soon(self._run_posted)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine and return its future, which fails with `EngineUnavailable` if the pool is closed before it
        ends."""
        future: Future[Any] = Future()
        if not self.try_post(self._start_task, coroutine, future):
            coroutine.close()
            future.set_exception(self._closed_reason())
        return future

    def _start_task(self, coroutine: Coroutine[Any, Any, Any], future: Future[Any]) -> None:
        """Start a coroutine on the loop for `run`. Its outcome goes to `future`; cancelling that cancels the task."""
        task = self.loop.create_task(coroutine)

        def copy_outcome(task: asyncio.Task[Any]) -> None:
            if task.cancelled() and not self._is_open and not future.done():
                future.set_exception(pool_closed())
            else:
                _copy_outcome(task, future)

        task.add_done_callback(copy_outcome)
        future.add_done_callback(lambda _: self.try_post(task.cancel) if future.cancelled() else None)

    def stop(self) -> None:
        """End the loop and its thread, within a bounded time even if something hangs there. Idempotent."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
        thread = self._thread
        assert thread is not None, "it is open only after it was started"
        if thread.is_alive():
            self.loop.call_soon_threadsafe(self._run_posted)
            asyncio.run_coroutine_threadsafe(self._finish(), self.loop)
            thread.join(4 * _STOP_TIMEOUT_S)
        if thread.is_alive():
            log.warning("the pool's loop hangs in a callback; its thread is left behind")
        else:
            self.loop.close()

    async def _finish(self) -> None:
        """Cancel all tasks on the loop, wait a bounded time for them, and end the loop. `stop` runs it there."""
        try:
            left = await cancel_tasks(_STOP_TIMEOUT_S, asyncio.all_tasks() - {asyncio.current_task()})  # type: ignore[arg-type]
            if left:
                log.warning("%d tasks did not end with the pool's loop: they ignore cancellations", len(left))
            else:
                await asyncio.wait_for(self.loop.shutdown_asyncgens(), _STOP_TIMEOUT_S)
        finally:
            self._is_ending = True
            self.loop.stop()


class SameLoop:
    """The caller's own running loop with the methods of a `LoopThread`, for virtual time and tests."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ident = threading.get_ident()
        """Id of the thread in which nobody may wait for the loop."""

    used = was_forked = False
    runs = True

    def start(self) -> None:
        pass

    def time(self) -> float:
        return self.loop.time()

    def unavailable(self) -> EngineUnavailable:
        return pool_closed()

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Run `function` at once. Raises `TeolaError` on another thread, and in code that runs as if on one: it would
        wait for the loop."""
        if asyncio._get_running_loop() is not self.loop:
            raise TeolaError(
                "sync code called a pool that runs on its caller's own loop, and would wait for itself.",
                hint="use the async form (ainvoke, aquery, aembed_query, ...), or EnginePool.local()",
            )
        function(*args)

    def try_post(self, function: Callable[..., Any], *args: Any) -> bool:
        function(*args)
        return True

    post_lazily = try_post

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine as a task of the caller's loop, and return a future of its outcome.

        Call it on that loop. Nobody may block on the future in the loop's thread: the task could then never run.
        """
        future: Future[Any] = Future()
        task = self.loop.create_task(coroutine)
        task.add_done_callback(lambda _: _copy_outcome(task, future))
        return future

    def stop(self) -> None:
        pass


def _copy_outcome(task: asyncio.Task[Any], future: Future[Any]) -> None:
    """Give the outcome of a task to a thread-safe future. If that was given up, ignore what the task raised."""
    if future.done():  # its caller has given up
        task.cancelled() or task.exception()
    elif task.cancelled():
        future.cancel()
    elif task.exception() is not None:
        future.set_exception(task.exception())
    else:
        future.set_result(task.result())


class PieceLog:
    """The pieces of one request in order, kept from the start, so that late readers miss nothing.

    Written on the pool's loop; read from any thread. A reader gets every piece, then the end. Pieces of a `speculative`
    log predict the result: the request may be repeated with another text, and then the log just ends.
    """

    def __init__(self, *, speculative: bool = False) -> None:
        self.speculative = speculative
        self.on_lost: Callable[[], object] = _do_nothing
        """Called when a reader cannot go on because its loop is closed."""
        self._pieces: list[Piece] = []
        self._closed = False
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []

    def append(self, piece: Piece) -> None:
        """Add the next piece."""
        self._change(lambda: self._pieces.append(piece))

    def close(self) -> None:
        """End the log."""

        def end() -> None:
            self._closed = True

        self._change(end)

    def _change(self, change: Callable[[], None]) -> None:
        """Change the log under its lock, and wake all readers that wait."""
        with self._lock:
            change()
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    def take(self, start: int, wake: Callable[[], None]) -> tuple[list[Piece], bool]:
        """Return the pieces from `start` on, and True if the log is closed. If neither, `wake` is called later.

        `start` counts pieces from 0. `wake` is not called if something is returned, or the log is closed already.
        """
        with self._lock:
            if len(self._pieces) <= start and not self._closed:
                self._wakers.append(wake)
            return self._pieces[start:], self._closed

    def __iter__(self) -> Iterator[Piece]:
        return self.within(None)

    def within(self, seconds: float | None) -> Iterator[Piece]:
        """Yield the pieces. Raises `TimeoutError` when the next one takes longer than that."""
        start, changed = 0, threading.Event()
        while True:
            changed.clear()
            pieces, closed = self.take(start, changed.set)
            yield from pieces
            start += len(pieces)
            if closed and not pieces:
                return
            if not pieces and not changed.wait(seconds):
                raise TimeoutError(f"nothing came for {seconds:g} s.")

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Yield the pieces as they come until the log is closed, without blocking the running loop."""
        loop = asyncio.get_running_loop()
        start = 0
        while True:
            changed = asyncio.Event()
            pieces, closed = self.take(start, lambda e=changed: self._wake(loop, e))  # type: ignore[misc]
            for piece in pieces:
                yield piece
            start += len(pieces)
            if closed and not pieces:
                return
            if not pieces:
                await changed.wait()

    def _wake(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        """Wake a reader that waits in a loop, from any thread. Call `on_lost` if that loop is closed."""
        try:
            loop.call_soon_threadsafe(event.set)
        except RuntimeError:
            self.on_lost()


def _do_nothing() -> None: ...


class CallHandle:
    """The results of one engine call: one per request, in order.

    `result()` blocks the thread, `await handle` waits in a loop; both give a list of values or raise the first
    request's error. With one streamed request, iterate `pieces` (sync or async) before asking for the result.
    """

    def __init__(
        self,
        future: Future[list[Any]],
        *,
        pieces: PieceLog | None = None,
        cancel: Callable[[], object] = lambda: None,
        owner: int = 0,
        on_lost: Callable[[], object] = _do_nothing,
    ) -> None:
        """`owner`: the thread that may not block. `on_lost`: called when a waiter cannot go on: its loop is closed."""
        self._future = future
        self.pieces = pieces or PieceLog()
        self.pieces.on_lost = on_lost
        self._cancel = cancel
        self._owner = owner
        self._on_lost = on_lost

    def result(self, timeout: float | None = None) -> list[Any]:
        """Return the values of all requests. Raises their error, or `TimeoutError`. Not for the pool's own thread."""
        if self.would_wait_for_itself:
            raise TeolaError(
                "a blocking engine call was made on the pool's own thread, where it would wait for itself.",
                hint="use the async form (ainvoke, aembed_query, ...) inside engine callbacks",
            )
        try:
            return self._future.result(timeout)
        except CancelledError as error:
            raise QueryCancelled("the call was cancelled.", hint="call it again") from error
        except BaseException:
            self.cancel()
            raise

    @property
    def would_wait_for_itself(self) -> bool:
        """True on the pool's own thread until the results are there: `result()` raises `TeolaError` then."""
        return threading.get_ident() == self._owner and not self._future.done()

    @property
    def done(self) -> bool:
        """True once the results, or an error, are there."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._wait().__await__()

    async def _wait(self) -> list[Any]:
        """Wait for the results in the running loop. Give the call up if the waiting task is cancelled."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[list[Any]] = loop.create_future()
        on_lost = self._on_lost  # not `self`: the callback would keep the values until the garbage collector runs

        def hand_over(future: Future[list[Any]]) -> None:
            try:
                loop.call_soon_threadsafe(_hand_over, future, waiter)
            except RuntimeError:  # the loop is closed: nobody waits any more
                on_lost()

        self._future.add_done_callback(hand_over)
        try:
            return await waiter
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Give the results up. The engine stops, unless another part of the query needs them.

        Does nothing once the results are there.
        """
        if not self._future.done():
            self._cancel()


def _hand_over(future: Future[list[Any]], waiter: asyncio.Future[list[Any]]) -> None:
    """Copy the outcome of a call to the future on which a task waits. Runs on the loop of that task."""
    if waiter.done():  # the caller has gone
        return
    if future.cancelled():
        waiter.cancel()
    elif (error := future.exception()) is not None:
        waiter.set_exception(error)
    else:
        waiter.set_result(future.result())
