"""Provider calls of a query: calls of the user's own models and retrievers, each made once and claimed once.

Whoever comes first with a request key, the original or the planner, makes the call. The other one claims it (see
`claims`) and gets its results as they come. A claimed call that was cancelled, or failed in a way that may pass, is
made again by the original.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from teola_plugin.request_keys import UnknownValue
from teola_plugin.runtime.call_limits import ConcurrencyLimit, Permit
from teola_plugin.runtime.claims import OWN_GRAPH, Caller, ClaimRule, Claims, ClaimTable, PlannerGraph
from teola_plugin.runtime.provider_call import (
    CallNotShared,
    CallProgress,
    InsideCall,
    Invocation,
    Item,
    Parked,
    ProviderCall,
    astream_chunks,
    executing,
    limit_here,
    stream_chunks,
)
from teola_plugin.runtime.provider_limits import is_transient, provider_limit
from teola_plugin.runtime.query_run import current_position
from teola_plugin.shims import httpx as httpx_shim
from teola_plugin.shims.interception import STREAM_OPENED

if TYPE_CHECKING:
    from teola_plugin.runtime.query_run import QueryRun

Copy = Callable[[Any], Any]
"""Return a copy that shares nothing with the value that can change. Raises `TypeError` if that is impossible."""


class ProviderCallTable:
    """The provider calls of one query, by request key. Used from any thread."""

    def __init__(
        self,
        limits: Callable[[Any], Sequence[ConcurrencyLimit]] = lambda target: (),
        on_call: Callable[[Any, bool], object] = lambda target, is_made: None,
        is_request_for: Callable[..., bool] | None = None,
    ) -> None:
        """Create an empty table.

        Args:
            limits: Returns the limits of calls of a model or retriever.
            on_call: Called with the model or retriever of each call of the original, and True if it has to make it.
            is_request_for: Returns True if the payload of a request is for a call of a model or retriever. Traces keep
                the models and retrievers alive that they ask it about; without it they do not.
        """
        self.is_closed = False
        self._limits, self._on_call, self._is_request_for = limits, on_call, is_request_for
        self._run: QueryRun | None = None
        self.original_calls = 0
        """Number of calls that the original has made so far."""
        self._claims = ClaimTable[ProviderCall]()
        httpx_shim.install(limit_here)

    def begin(self, run: QueryRun) -> None:
        """Write calls and waits to the trace of this query from now on."""
        self._run = run

    def join(
        self,
        key: Hashable,
        caller: Caller,
        invocation: Invocation,
        *,
        may_make: bool = True,
        is_offer: bool = False,
        takes_offers: bool = False,
        graph: PlannerGraph = OWN_GRAPH,
    ) -> tuple[ProviderCall, bool]:
        """Return the call that `caller` gets for this key, and whether it has to make that call itself.

        `may_make`: False for a planner that waits for the original's call. `is_offer`: the call is made for whoever
        asks for it, unless the object was called so before; raises `CallNotShared` then, but with `takes_offers` the
        planner gets a call that was offered. `graph`: the one that the planner makes the call for.
        """
        new = list[ProviderCall]()

        def make() -> ProviderCall:
            rule = ClaimRule.PURE_FOR_PLANNER if invocation.is_pure else ClaimRule.ONCE_PER_CALLER
            new.append(ProviderCall(key, Claims(rule, caller), CallProgress.EXPECTED, invocation))
            return new[0]

        if not is_offer:
            call = self._claims.claim_or_add(key, caller, make, graph)
        else:
            call = make()
            if not self._claims.offer(key, call, unless=lambda other: other.target is invocation.target):
                offered = self._claims.claim(key, caller, graph) if takes_offers else None
                if offered is None:
                    raise CallNotShared
                return offered, False
        if new:
            self._trace(call)
        is_maker = may_make and self.begin_call(call)
        if caller is Caller.ORIGINAL:
            if call.report is not None:
                call.report.used = True
            self.original_calls += 1
            call.claims.last_claim = self.original_calls
            self._on_call(invocation.target, is_maker)
            if new and self._run is not None:
                self._run.note_unforeseen_call()
        elif graph is not OWN_GRAPH:
            call.claims.add_graph(graph, lookahead=graph.lookahead, is_new=bool(new))
        return call, is_maker

    def unshared_call(self, invocation: Invocation) -> ProviderCall:
        """Return a call of the original that has begun. It has no key, so nobody else can claim it."""
        call = ProviderCall(object(), Claims(), CallProgress.EXPECTED, invocation)
        self._trace(call)
        self.begin_call(call)
        call.withdraw()
        return call

    def _trace(self, call: ProviderCall) -> None:
        """Write a new call to the trace of the query, if there is one."""
        if (report := call.report) is None:
            return
        report.used = call.claims.made_by is Caller.ORIGINAL
        if self._is_request_for is not None:
            report.is_requested_by = partial(self._is_request_for, target=call.target)
        if self._run is not None:
            self._run.waits.add_provider_call(report)

    def begin_call(self, call: ProviderCall) -> bool:
        """Begin a call that is expected, and note when. Return False if somebody else has begun it."""
        is_begun = call.begin()
        if is_begun and call.report is not None:
            call.report.began = self._now()
        return is_begun

    def has_call(self, key: Hashable) -> bool:
        """Return True if a call with this key was made, or is expected, and can be shared."""
        return self._claims.has(key)

    def make_again(self, failed: ProviderCall, caller: Caller) -> ProviderCall:
        """Return a new call that `caller` makes in place of one whose result it cannot have."""
        call = ProviderCall(failed.key, Claims(failed.claims.rule, caller), CallProgress.RUNNING)
        call.report, call.target = failed.report, failed.target
        self._claims.add(failed.key, call, caller)
        return call

    def note_end(self, call: ProviderCall) -> None:
        """Note when a call ended, for the trace."""
        if call.report is not None:
            call.report.ended_at = self._now()

    def permit(self, caller: Caller, target: Any) -> Permit:
        """Return the leave to call an object. Where it takes one call at a time, the original waits for prefetched
        calls, and those wait for all others; what is called in turn waits for nobody."""
        limits = (*self._limits(target), provider_limit(target)) if executing.get() is None else ()
        return Permit(limits, is_prefetch=caller is Caller.PLANNER)

    @contextmanager
    def waiting(self, caller: Caller, call: ProviderCall) -> Iterator[None]:
        """Note in the trace that the original waits for a call in the body."""
        run = self._run
        if run is None or caller is Caller.PLANNER:
            yield
            return
        wait = run.waits.begin(self._now(), run.steps.id_of(current_position.get().step))
        wait.provider_call = call.report
        try:
            yield
        finally:
            wait.answered = self._now()

    def _now(self) -> float:
        """Return the time on the runtime's clock, in seconds."""
        return 0.0 if self._run is None else float(self._run.runtime.time())

    def close(self) -> None:
        """End the query: cancel prefetched calls that the original did not claim."""
        self.is_closed = True
        for call in self._claims:
            if not call.is_claimed_by(Caller.ORIGINAL):
                call.cancel()
                call.withdraw()


@dataclass(slots=True, eq=False)
class CallScope:
    """The caller of the provider calls that are made here: the original of a query, or one of its prefetches."""

    table: ProviderCallTable
    caller: Caller
    copy: Copy | None
    """Copies a result for the other caller; None for a prefetch whose result only the original reads."""
    may_make: bool = True
    """False for a prefetch whose call only the original may make."""
    is_offer: bool = False
    """True for a prefetch whose result serves whoever asks for it."""
    request_id: str = ""
    """Of the request that the prefetch serves."""
    stop: Callable[[], object] = bool
    """Cancels the prefetch."""
    graph: PlannerGraph = OWN_GRAPH
    """The graph that asks for the prefetch."""
    key_of: Callable[[Invocation], Hashable] = methodcaller("key")
    """Returns the request key of a call."""
    inside: Callable[[ProviderCall, Invocation], AbstractContextManager[None]] = InsideCall
    """Returns the context in which a provider method runs."""
    expected: ProviderCall | None = None
    """The call that a prefetch entered with `expect`, or was parked for."""
    on_change: Callable[[], object] | None = bool
    """Called once, when the method of a prefetched call was seen to change what it was called with; None after that."""
    shares_errors: bool = True
    """False for a prefetch on a thread that its object may not bear: after a failure the original makes the call."""
    is_user_code: bool = False
    """True for tools: their code calls other objects as any code of the user's does, not as a part of the call."""
    is_dropped: bool = False
    """Set once nobody wants the prefetch any more."""
    calls: list[ProviderCall] = field(default_factory=list)
    """Those that the prefetch made."""
    adopted: list[CallScope] = field(default_factory=list)
    """Prefetches that began inside this one."""

    def expect(self, invocation: Invocation) -> None:
        """Enter a prefetch's call in the table before a thread or a loop begins it, so that `has_call` knows it."""
        key = self.key_of(invocation)
        self.expected, _ = self.table.join(key, self.caller, invocation, may_make=False, graph=self.graph)

    def items(self, invocation: Invocation) -> Iterator[Any]:
        """Yield what the provider method gives: from the call of the other caller, or by calling it."""
        with self._prefetch_permit(invocation):
            call, is_maker = self._join(invocation)
            if is_maker and self.caller is Caller.PLANNER:
                yield from self._results(call, invocation)
                return
        with self.table.waiting(self.caller, call):
            if not is_maker:
                delivered = False
                try:
                    for item in call.items():
                        if item.value is STREAM_OPENED:
                            yield item.value
                        elif item.is_event:
                            invocation.report(item.value)
                        else:
                            delivered = True
                            yield self._received(item.value)
                    return
                except (GeneratorExit, KeyboardInterrupt):
                    call.cancel()
                    raise
                except Exception as error:
                    call = self._call_again(call, error, delivered)
            with self.table.permit(self.caller, invocation.target):
                yield from self._results(call, invocation)

    def result(self, invocation: Invocation) -> Any:
        """Return what a provider method returns that does not stream: from the other caller, or by calling it."""
        with self._prefetch_permit(invocation):
            call, is_maker = self._join(invocation)
            if is_maker and self.caller is Caller.PLANNER:
                return self._make(call, invocation)
        with self.table.waiting(self.caller, call):
            if not is_maker:
                values = list[Any]()
                try:
                    for item in call.items():
                        if item.is_event:
                            invocation.report(item.value)
                        else:
                            values.append(self._received(item.value))
                    return _only(values)
                except KeyboardInterrupt:
                    call.cancel()
                    raise
                except Exception as error:
                    call = self._call_again(call, error, bool(values))
            with self.table.permit(self.caller, invocation.target):
                return self._make(call, invocation)

    def _make(self, call: ProviderCall, invocation: Invocation) -> Any:
        """Call a provider method that does not stream, share its result with the other caller, and return it."""
        try:
            with self._inside(call, invocation):
                value = invocation.start(self._recorder(call))
            value = self._shared(call, invocation, value)
        except BaseException as error:
            self._fail(call, error)
            raise
        self._end(call)
        return _only([value])

    async def aresult(self, invocation: Invocation) -> Any:
        """`result` for async methods."""
        async with self._prefetch_permit(invocation):
            call, is_maker = self._join(invocation)
            if is_maker and self.caller is Caller.PLANNER:
                return await self._amake(call, invocation)
        with self.table.waiting(self.caller, call):
            if not is_maker:
                values = list[Any]()
                try:
                    async for item in call.aitems():
                        if item.is_event:
                            await invocation.report(item.value)
                        else:
                            values.append(self._received(item.value))
                    return _only(values)
                except asyncio.CancelledError:
                    await call.cancelled()
                    raise
                except Exception as error:
                    call = self._call_again(call, error, bool(values))
            async with self.table.permit(self.caller, invocation.target):
                return await self._amake(call, invocation)

    async def _amake(self, call: ProviderCall, invocation: Invocation) -> Any:
        try:
            with self._inside(call, invocation):
                value = await invocation.start(self._recorder(call))
            value = self._shared(call, invocation, value)
        except BaseException as error:
            self._fail(call, error)
            raise
        self._end(call)
        return _only([value])

    def _results(self, call: ProviderCall, invocation: Invocation) -> Iterator[Any]:
        """Call a provider method, and yield its result or chunks as they come, shared with the other caller."""
        steps = None
        try:
            with self._inside(call, invocation):
                started = invocation.start(self._recorder(call))
                steps = iter(started) if invocation.streams else iter((started,))
            while True:
                with self._inside(call, invocation):
                    value = next(steps, _END)
                if value is _END:
                    self._note_changed_arguments(call, invocation)
                    break
                value = self._shared(call, invocation, value)
                if value is not _END:
                    yield value
        except BaseException as error:
            self._fail(call, error)
            if steps is not None and hasattr(steps, "close"):
                steps.close()
            raise
        self._end(call)

    async def aitems(self, invocation: Invocation) -> AsyncIterator[Any]:
        """`items` for async methods."""
        async with self._prefetch_permit(invocation):
            call, is_maker = self._join(invocation)
            if is_maker and self.caller is Caller.PLANNER:
                async with aclosing(self._aresults(call, invocation)) as results:
                    async for value in results:
                        yield value
                return
        with self.table.waiting(self.caller, call):
            if not is_maker:
                delivered = False
                try:
                    async for item in call.aitems():
                        if item.value is STREAM_OPENED:
                            yield item.value
                        elif item.is_event:
                            await invocation.report(item.value)
                        else:
                            delivered = True
                            yield self._received(item.value)
                    return
                except (GeneratorExit, asyncio.CancelledError):
                    await call.cancelled()
                    raise
                except Exception as error:
                    call = self._call_again(call, error, delivered)
            results = self._aresults(call, invocation)
            async with self.table.permit(self.caller, invocation.target), aclosing(results):
                async for value in results:
                    yield value

    async def _aresults(self, call: ProviderCall, invocation: Invocation) -> AsyncGenerator[Any, None]:
        steps = None
        try:
            with self._inside(call, invocation):
                started = invocation.start(self._recorder(call))
                steps = started if invocation.streams else _one(started)
            while True:
                with self._inside(call, invocation):
                    value = await anext(steps, _END)
                if value is _END:
                    self._note_changed_arguments(call, invocation)
                    break
                value = self._shared(call, invocation, value)
                if value is not _END:
                    yield value
        except BaseException as error:
            self._fail(call, error)
            if steps is not None and hasattr(steps, "aclose"):
                await steps.aclose()
            raise
        self._end(call)

    def stream(self, invocation: Invocation) -> Any:
        """Return the generator of chunks that a provider method returns, once it has returned: it may raise before.

        What the invocation yields must begin with `STREAM_OPENED`. Without that its first value is returned instead:
        the method returned no generator.
        """
        items = self.items(invocation)
        first = next(items, STREAM_OPENED)
        if first is STREAM_OPENED:
            return stream_chunks(items)
        next(items, None)  # so that the call has ended
        return first

    async def astream(self, invocation: Invocation) -> Any:
        """`stream` for async methods."""
        items = self.aitems(invocation)
        first = await anext(items, STREAM_OPENED)
        if first is STREAM_OPENED:
            return astream_chunks(items)
        await anext(items, None)
        return first

    def last_result(self, invocation: Invocation) -> Any:
        """Return what a provider method gives, of a stream the last chunk; for a planner, which reads no chunks."""
        if not invocation.streams:
            return self.result(invocation)
        stream = self.stream(invocation)
        if not isinstance(stream, Generator):
            return stream
        last = None
        for last in stream:  # noqa: B007 - only the last one is of interest
            pass
        return last

    async def alast_result(self, invocation: Invocation) -> Any:
        """`last_result` for async methods."""
        if not invocation.streams:
            return await self.aresult(invocation)
        stream = await self.astream(invocation)
        if not isinstance(stream, AsyncGenerator):
            return stream
        last = None
        async for last in stream:  # noqa: B007 - as above
            pass
        return last

    def _prefetch_permit(self, invocation: Invocation) -> Permit:
        """Return the leave for a prefetch to make its call. It is given back if the call is made by another.

        While the provider refuses calls, the original makes this one.
        """
        makes = self.caller is Caller.PLANNER and self.may_make
        if makes and not provider_limit(invocation.target).may_prefetch:
            if self.is_offer:
                raise CallNotShared
            makes = self.may_make = False
        return self.table.permit(self.caller, invocation.target) if makes else _NO_LIMITS

    def _join(self, invocation: Invocation) -> tuple[ProviderCall, bool]:
        """Return the call for an invocation, and True if it has to be made here. Raise `Parked` if it must wait."""
        is_prefetch = self.caller is Caller.PLANNER
        try:
            key = self.key_of(invocation)
        except UnknownValue:  # nobody else can ask for the same
            if is_prefetch:
                raise
            return self.table.unshared_call(invocation), True
        if self.expected is not None and self.expected.key == key:
            call, is_maker = self.expected, self.may_make and self.table.begin_call(self.expected)
        else:
            options: Any = {"may_make": self.may_make, "is_offer": self.is_offer, "takes_offers": bool(self.adopted)}
            call, is_maker = self.table.join(key, self.caller, invocation, graph=self.graph, **options)
        if self.request_id and call.report is not None:
            call.report.requests.append(self.request_id)
        if is_prefetch and not is_maker and not self.may_make and not call.is_over:
            raise Parked(call)
        if is_prefetch and is_maker:
            call.cancel = self.stop
            self.calls.append(call)
            if self.table.is_closed or self.is_dropped:
                call.withdraw()
                raise CallNotShared
        return call, is_maker

    def _call_again(self, call: ProviderCall, error: Exception, delivered: bool) -> ProviderCall:
        """Return a call of the original's own, as if nothing had been prefetched. Raise an error that it has to see."""
        is_lost = isinstance(error, CallNotShared) or is_transient(error)
        if delivered or not is_lost or self.caller is Caller.PLANNER:
            raise error
        return self.table.make_again(call, self.caller)

    def _inside(self, call: ProviderCall, invocation: Invocation) -> AbstractContextManager[None]:
        """Return a context whose body runs as part of the provider method."""
        return nullcontext() if self.is_user_code else self.inside(call, invocation)

    def _recorder(self, call: ProviderCall) -> Callable[[Any], object] | None:
        return (lambda event: call.put(Item(event, is_event=True))) if self.caller is Caller.PLANNER else None

    def _shared(self, call: ProviderCall, invocation: Invocation, value: Any) -> Any:
        """Give the other caller the value, or a copy of it, and return this caller's; `_END` if it gets none."""
        if value is STREAM_OPENED:
            call.put(Item(value, is_event=True))
            return value
        is_prefetch = self.caller is Caller.PLANNER
        if not invocation.streams or not call.has_results:  # a key takes longer than a chunk
            self._note_changed_arguments(call, invocation)
        if not call.is_claimable:
            return value
        try:
            copied = _END if self.copy is None else self.copy(value)
        except TypeError:
            copied = _END
        if copied is _END and not is_prefetch:
            call.withdraw()
            return value
        call.put(Item(value if is_prefetch else copied))
        return copied if is_prefetch else value

    def _received(self, value: Any) -> Any:
        """Return a value of another scope's call, copied for a prefetch: frameworks write to it. Raises `TypeError`."""
        return value if self.copy is None or self.caller is Caller.ORIGINAL else self.copy(value)

    def _note_changed_arguments(self, call: ProviderCall, invocation: Invocation) -> None:
        """Do not share a prefetched result if the method changed what it was called with: the original would, too."""
        if self.caller is not Caller.PLANNER or self.on_change is None or invocation.key() == call.key:
            return
        self.on_change()
        self.on_change = None
        if not invocation.streams:
            call.withdraw()

    def _fail(self, call: ProviderCall, error: BaseException) -> None:
        """End a call with its error; withdraw a prefetched one if the error may pass, so the original makes it."""
        self.table.note_end(call)
        provider_limit(call.target).note_failure(error, is_prefetch=self.caller is Caller.PLANNER)
        is_lost = self.caller is Caller.PLANNER and is_transient(error) and not call.has_results
        if self.shares_errors and not is_lost:
            call.end(error)
        else:
            call.withdraw()

    def _end(self, call: ProviderCall) -> None:
        """End a call that succeeded. A prefetched one helps its provider's limit of prefetches to recover."""
        self.table.note_end(call)
        if self.caller is Caller.PLANNER:
            provider_limit(call.target).note_success()
        call.end()

    def withdraw(self, run_id: Any) -> None:
        """Let the original make the call of this run, or the one made here: it has to hear of objects called inside."""
        target = executing.get()
        for call in self.calls:
            if not call.is_over and (call.run_id == run_id or (target is not None and call.target is target)):
                call.withdraw()

    def adopt(self, inner: CallScope) -> None:
        """Take over a prefetch that begins inside this one: this one may claim its calls, and it is dropped with it."""
        self.adopted.append(inner)
        if self.is_dropped:
            inner.drop()

    def drop(self) -> None:
        """Give up the calls that nobody has claimed."""
        self.is_dropped = True
        for call in self.calls:
            if not call.is_claimed_by(Caller.ORIGINAL):
                call.cancel()
                call.withdraw()
        for inner in self.adopted:
            inner.drop()


def _only(values: list[Any]) -> Any:
    """Return the result among the values of a call. Raises `TypeError` if this caller gets no copy of it."""
    if not values or values[0] is _END:
        raise TypeError("the result of a prefetched call is not copied")
    return values[0]


async def _one(result: Awaitable[Any]) -> AsyncGenerator[Any, None]:
    yield await result


_END: Any = object()
_NO_LIMITS = Permit((), is_prefetch=True)
