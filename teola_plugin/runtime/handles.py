"""Handles of results under way, as a caller of `pool.call(...)` gets them. Used from any thread or loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

from teola_plugin.errors import QueryCancelled, TeolaError
from teola_plugin.requests.results import Piece


class PieceLog:
    """The pieces of one request in order, kept from the start, so that late readers miss nothing.

    Written on the pool's loop; read from any thread. A reader gets every piece, then the end. Pieces of a `tentative`
    log predict the result: the request may be repeated with another text, and then the log just ends.
    """

    def __init__(self, *, tentative: bool = False) -> None:
        self.tentative = tentative
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
        with self._lock:
            change()
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    def take(self, start: int, wake: Callable[[], None]) -> tuple[list[Piece], bool]:
        """Return the pieces from `start` on, and True if the log is closed. If neither, `wake` is called later."""
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
        if threading.get_ident() == self._owner and not self._future.done():
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
    def done(self) -> bool:
        """True once the results, or an error, are there."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._wait().__await__()

    async def _wait(self) -> list[Any]:
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
        """Give the results up. The engine stops, unless another part of the query needs them."""
        if not self._future.done():
            self._cancel()


def _hand_over(future: Future[list[Any]], waiter: asyncio.Future[list[Any]]) -> None:
    if waiter.done():  # the caller has gone
        return
    if future.cancelled():
        waiter.cancel()
    elif (error := future.exception()) is not None:
        waiter.set_exception(error)
    else:
        waiter.set_result(future.result())
