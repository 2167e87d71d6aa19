"""One call of a provider method, whose results both callers of a query read: as they come, from any thread or loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from teola_plugin.observe.steps import PROVIDER, TracedCall
from teola_plugin.runtime.claims import Caller, Claims
from teola_plugin.runtime.provider_limits import ProviderLimit, provider_limit
from teola_plugin.runtime.query_run import current_call
from teola_plugin.shims.interception import STREAM_OPENED


class Invocation(Protocol):
    """One entry into a provider method, as its framework made it."""

    target: Any
    """The model or retriever."""
    kind: str
    """What the trace calls it, as of a `Span`."""
    streams: bool
    """Whether the method yields chunks; otherwise it returns one result."""
    is_pure: bool
    """True if equal calls give equal results, so that the planner needs only one of them."""

    @property
    def run_id(self) -> Any:
        """The id of the framework's run in which the method is called; None if that is not known."""
        ...

    def key(self) -> Hashable:
        """Return the request key. Raises `UnknownValue`."""
        ...

    def start(self, record: Callable[[Any], object] | None) -> Any:
        """Call the original method. `record`, if any, gets what the provider reports to the run manager."""
        ...

    def report(self, event: Any) -> Any:
        """Report to the run manager what `record` got of a prefetched call. Async methods return an awaitable."""
        ...


class CallNotShared(Exception):
    """The result of a call cannot be given to the other caller: the call was cancelled, or the result not copied."""


class Parked(Exception):
    """Raised in a prefetch that waits for a call that only the original may make.

    `CallScope` raises it where the prefetch asks for the result. The adapter's prefetcher catches it, and asks again
    when `call` is over. It is an `Exception`, since LangChain's `agenerate` takes any other for a result.
    """

    def __init__(self, call: ProviderCall) -> None:
        super().__init__()
        self.call = call


class CallProgress(Enum):
    """The stages of a call."""

    EXPECTED = "expected"
    """The planner wants the call, which nobody has begun."""
    RUNNING = "running"
    ENDED = "ended"
    NOT_SHARED = "not shared"


@dataclass(frozen=True, slots=True)
class Item:
    """One result, chunk or event of a call, in the order in which the provider produced them."""

    value: Any
    is_event: bool = False
    """True for what the provider reported to the run manager of the call: (method, args, kwargs)."""


class ProviderCall:
    """One call of a provider method, under way or done. Written where it runs, read from any thread or loop."""

    def __init__(
        self, key: Hashable, claims: Claims, state: CallProgress, invocation: Invocation | None = None
    ) -> None:
        self.key, self.claims, self.state = key, claims, state
        self.run_id: Any = None if invocation is None else invocation.run_id
        """Of the framework's run in which the provider method is called; None if that is not known."""
        self.target: Any = None if invocation is None else invocation.target
        """The model or retriever that is called."""
        self.error: BaseException | None = None
        self.cancel: Callable[[], object] = bool
        """Cancel the prefetch that makes the call. A call on a thread cannot be cancelled: its result is dropped."""
        self.report: TracedCall | None = None
        """The row of this call in the trace of its query."""
        if invocation is not None:
            self.report = TracedCall(type(invocation.target).__name__, invocation.kind, PROVIDER)
        self._items: list[Item] = []
        self._wakers: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """Begin a call that is expected. Return False if somebody else has begun it."""
        with self._lock:
            if self.state is not CallProgress.EXPECTED:
                return False
            self.state = CallProgress.RUNNING
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()
        return True

    def put(self, item: Item) -> None:
        """Add the next item and wake those who wait for it."""
        self._update(item)

    def end(self, error: BaseException | None = None) -> None:
        """End the call, with the exception that it raised, if any.

        An exception that is no `Exception`, such as a cancellation, concerns this caller alone: others then do not
        share the call.
        """
        cancelled = error is not None and not isinstance(error, Exception)
        self._update(None, CallProgress.NOT_SHARED if cancelled else CallProgress.ENDED, error)

    def withdraw(self) -> None:
        """Let nobody else have what came, or comes, of this call."""
        self._update(None, CallProgress.NOT_SHARED)

    def _update(self, item: Item | None, state: CallProgress | None = None, error: BaseException | None = None) -> None:
        """Add an item or change the state, and wake all who wait. Change nothing once the call is not shared."""
        with self._lock:
            if self.state is CallProgress.NOT_SHARED:
                return
            if item is not None:
                self._items.append(item)
            if state is not None:
                self.state, self.error = state, error
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    @property
    def has_results(self) -> bool:
        """True once the provider has given a result or a chunk."""
        return any(not item.is_event for item in reversed(self._items))

    @property
    def is_claimable(self) -> bool:
        """See `Claimable`."""
        return self.state is not CallProgress.NOT_SHARED

    @property
    def is_expected(self) -> bool:
        """See `Claimable`."""
        return self.state is CallProgress.EXPECTED

    def forget(self) -> None:
        """See `Claimable`. The results go with the call, once nobody reads them."""

    def is_claimed_by(self, caller: Caller) -> bool:
        """Return True if that caller has made or claimed the call."""
        return caller in self.claims.callers

    @property
    def is_over(self) -> bool:
        return self.state in (CallProgress.ENDED, CallProgress.NOT_SHARED)

    def when_over(self, wake: Callable[[], object]) -> None:
        """Call `wake` once the call has ended, from any thread; at once if it has."""
        self._when(lambda: self.is_over, wake)

    def when_begun(self, wake: Callable[[], object]) -> None:
        """Call `wake` once somebody has begun the call, from any thread; at once if it has begun."""
        self._when(lambda: not self.is_expected, wake)

    def _when(self, holds: Callable[[], bool], wake: Callable[[], object]) -> None:
        def wake_or_wait() -> None:
            """Call `wake` if the condition holds; else look again when the call changes."""
            with self._lock:
                if not holds():
                    self._wakers.append(wake_or_wait)
                    return
            wake()

        wake_or_wait()

    async def cancelled(self) -> None:
        """Cancel the prefetch that makes the call, and wait for its end: the method may have to clean up."""
        if self.cancel is bool:
            return
        loop, end_event = asyncio.get_running_loop(), asyncio.Event()
        self.cancel()
        self.when_over(lambda: loop.call_soon_threadsafe(end_event.set))
        await asyncio.shield(end_event.wait())

    def _next(self, position: int, wake: Callable[[], object]) -> Item | bool | None:
        """Return the item at a position, None behind the last one, or False if it is yet to come: `wake` tells."""
        with self._lock:
            if self.state is CallProgress.NOT_SHARED:
                raise CallNotShared
            if position < len(self._items):
                return self._items[position]
            if self.state is not CallProgress.ENDED:
                self._wakers.append(wake)
                return False
        if self.error is not None:
            raise self.error
        return None

    def items(self) -> Iterator[Item]:
        """Yield the items as they come; block in between. Raises what the call raised, or `CallNotShared`."""
        position, arrived = 0, threading.Event()
        while True:
            arrived.clear()
            item = self._next(position, arrived.set)
            if item is None:
                return
            if isinstance(item, Item):
                position += 1
                yield item
            else:
                arrived.wait()

    async def aitems(self) -> AsyncIterator[Item]:
        """Yield the items as they come, without blocking the running loop. Raise as `items` does.

        `CallScope` reads with it a call that the query's other caller (planner or original) makes, on any thread or
        loop. `_next` returns False for an item that is yet to come, and has `wake` called then.
        """
        position, loop, arrived = 0, asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(arrived.set)
            except RuntimeError:  # the loop is closed: nobody waits any more
                pass

        while True:
            arrived.clear()
            item = self._next(position, wake)
            if item is None:
                return
            if isinstance(item, Item):
                position += 1
                yield item
            else:
                await arrived.wait()


def stream_chunks(items: Iterator[Any]) -> Generator[Any, None, None]:
    """Yield the chunks of a stream, without the item that says that it is open; close the stream with the generator."""
    try:
        yield from (item for item in items if item is not STREAM_OPENED)
    finally:
        items.close()  # type: ignore[attr-defined]


async def astream_chunks(items: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    """`stream_chunks` for async methods."""
    try:
        async for item in items:
            if item is not STREAM_OPENED:
                yield item
    finally:
        await items.aclose()  # type: ignore[attr-defined]


executing: ContextVar[Any] = ContextVar("teola_executing", default=None)
"""The model or retriever whose provider method runs here: its own nested methods are part of that call."""


def limit_here() -> ProviderLimit | None:
    """Return the limit of the model or retriever whose provider method runs here; None where none runs."""
    target = executing.get()
    return None if target is None else provider_limit(target)


class InsideCall:
    """Runs the body as part of a provider method."""

    __slots__ = ("_report", "_target", "_tokens")

    def __init__(self, call: ProviderCall, invocation: Invocation) -> None:
        self._target, self._report = invocation.target, call.report

    def __enter__(self) -> None:
        self._tokens = executing.set(self._target), current_call.set(self._report)

    def __exit__(self, *_: object) -> None:
        target, report = self._tokens
        current_call.reset(report)
        executing.reset(target)
