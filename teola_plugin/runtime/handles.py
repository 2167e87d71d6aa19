"""Results on their way: what a caller holds after `pool.call(...)`, from any thread or loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

from teola_plugin.errors import QueryCancelled, TeolaError
from teola_plugin.requests.results import Piece


class PieceLog:
    """Pieces of one request in order, kept from the start, so that late readers miss nothing.

    Written on the pool's loop; read from any thread. A reader gets every piece, then the end. What a `tentative` one
    reads is a guess at the result: the request may be done again and say something else, and then the log just ends.
    """

    def __init__(self, *, tentative: bool = False) -> None:
        self.tentative = tentative
        self.lost: Callable[[], object] = _nobody
        """Told when a reader cannot go on: its loop is closed."""
        self._pieces: list[Piece] = []
        self._closed = False
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []

    def append(self, piece: Piece) -> None:
        self._change(lambda: self._pieces.append(piece))

    def close(self) -> None:
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
        """Pieces from `start` on and whether the log is closed; registers `wake` when there is nothing to give."""
        with self._lock:
            if len(self._pieces) <= start and not self._closed:
                self._wakers.append(wake)
            return self._pieces[start:], self._closed

    def __iter__(self) -> Iterator[Piece]:
        return self.within(None)

    def within(self, seconds: float | None) -> Iterator[Piece]:
        """The pieces. Raises `TimeoutError` when the next one takes longer than that."""
        start, news = 0, threading.Event()
        while True:
            news.clear()
            pieces, closed = self.take(start, news.set)
            yield from pieces
            start += len(pieces)
            if closed and not pieces:
                return
            if not pieces and not news.wait(seconds):
                raise TimeoutError(f"nothing came for {seconds:g} s.")

    async def __aiter__(self) -> AsyncIterator[Piece]:
        loop = asyncio.get_running_loop()
        start = 0
        while True:
            news = asyncio.Event()
            pieces, closed = self.take(start, lambda e=news: self._wake(loop, e))  # type: ignore[misc]
            for piece in pieces:
                yield piece
            start += len(pieces)
            if closed and not pieces:
                return
            if not pieces:
                await news.wait()

    def _wake(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        try:
            loop.call_soon_threadsafe(event.set)
        except RuntimeError:
            self.lost()


def _nobody() -> None: ...


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
        lost: Callable[[], object] = _nobody,
    ) -> None:
        """`lost` is told when whoever waits cannot go on, since their loop is closed."""
        self._future = future
        self.pieces = pieces or PieceLog()
        self.pieces.lost = lost
        self._cancel = cancel
        self._owner = owner
        self._lost = lost

    def result(self, timeout: float | None = None) -> list[Any]:
        """Values of all requests. Raises their error, or `TimeoutError`; never call it on the pool's own thread."""
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
        """Whether the results, or an error, are there."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._wait().__await__()

    async def _wait(self) -> list[Any]:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[list[Any]] = loop.create_future()
        lost = self._lost  # and not this handle, which would keep its own values until Python's collector comes

        def ended(future: Future[list[Any]]) -> None:
            try:
                loop.call_soon_threadsafe(_hand_over, future, waiter)
            except RuntimeError:  # their loop is closed: nobody waits any more
                lost()

        self._future.add_done_callback(ended)
        try:
            return await waiter
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Give the results up. Reaches the engine unless another part of the query needs them."""
        if not self._future.done():
            self._cancel()


def _hand_over(future: Future[list[Any]], waiter: asyncio.Future[list[Any]]) -> None:
    if waiter.done():  # who waited has gone
        return
    if future.cancelled():
        waiter.cancel()
    elif (error := future.exception()) is not None:
        waiter.set_exception(error)
    else:
        waiter.set_result(future.result())
