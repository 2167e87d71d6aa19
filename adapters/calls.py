"""Calls of pool-backed objects, whatever their framework: the engine, the query, the deadline, and the end of a call.

A call's request context and deadline follow from its caller's arguments and from the query that it belongs to.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    aclosing,
    asynccontextmanager,
    closing,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from teola_plugin.engines.vector_store import StoreSearch, VectorStoreEngine, is_inside_search
from teola_plugin.errors import EngineUnavailable, QueryTimeout, RegistrationError, unknown_name
from teola_plugin.graph import PrimitiveKind, Query, RequestContext, on_loop
from teola_plugin.pool import EnginePool, need_pool
from teola_plugin.requests.payloads import Vector
from teola_plugin.runtime.loop_thread import CallHandle
from teola_plugin.runtime.query_run import current_request_context, current_run, during
from teola_plugin.shims.stack_levels import hide_from_stack_levels

T = TypeVar("T")
Context = Callable[[], AbstractContextManager[Any]]
_END: Any = object()
if TYPE_CHECKING:
    PoolField = EnginePool
else:  # what is no pool is left to `check_engine`, which says what to do
    PoolField = Any


def check_engine(pool: Any, engine: str) -> None:
    """Raise `RegistrationError`, where an object is made, if there is no pool or it has no such engine."""
    if engine not in need_pool(pool).engine_names:
        raise unknown_name("engine", engine, list(pool.engine_names))


def carries_openai(engine: Any) -> bool:
    """Return True for an engine that carries OpenAI clients' requests: an `OpenAIServer`, here or in a shared pool."""
    return bool(getattr(engine, "carries_openai", False))


def carries_embeddings(engine: Any) -> bool:
    """Return True for an engine that carries OpenAI clients' requests for embeddings: an `EmbeddingServer`."""
    return bool(getattr(engine, "carries_embeddings", False))


def store_engine(store: Any, pool: EnginePool, engine: str) -> VectorStoreEngine:
    """Return the engine that serves a vector store. Raise `RegistrationError` if it does not serve this very store."""
    serving_engine = pool.engine(engine)
    if not isinstance(serving_engine, VectorStoreEngine) or serving_engine.store is not store:
        raise RegistrationError(
            f"the engine {engine!r} does not serve this {type(store).__name__}.",
            hint="make the engine of the store, in a pool of this process: VectorStoreEngine(name, my_store)",
        )
    return serving_engine


def search_on_engine(
    pool: EnginePool, engine: str, search: StoreSearch, run: Any, request_context: RequestContext | None = None
) -> Any:
    """Return the result of a search that a `VectorStoreEngine` makes, or raise the store's exception. Blocks.

    The store searches by itself on a closed pool, and where waiting might never end: inside another search, and on the
    pool's own thread.
    """
    if is_inside_search.get():
        return search.run().get()
    try:
        handle: CallHandle = pool.call(
            PrimitiveKind.SEARCHING, engine, [search], run=run, request_context=request_context
        )
        if handle.would_wait_for_itself:
            handle.cancel()
            return search.run().get()
        [outcome] = handle.result()
    except EngineUnavailable:
        outcome = search.run()
    return outcome.get()


async def asearch_on_engine(pool: EnginePool, engine: str, search: StoreSearch, run: Any) -> Any:
    """Return the result of a search by a store's async client, as `search_on_engine` does, without blocking the loop.

    The engine makes it on the running loop. On a closed pool the client searches by itself.
    """
    try:
        [outcome] = await pool.call(PrimitiveKind.SEARCHING, engine, [search], run=run)
    except EngineUnavailable:
        outcome = await search.arun()
    return outcome.get()


def joined(run: Any, request_context: RequestContext | None = None) -> AbstractContextManager[None]:
    """Return a context whose calls belong to `run`, or to no query and have `request_context`; None changes nothing."""
    if request_context is not None:
        return _joined(run, request_context)
    return nullcontext() if run is None else during(current_run, run)


@contextmanager
def _joined(run: Any, request_context: RequestContext) -> Iterator[None]:
    with during(current_run, run), during(current_request_context, request_context):
        yield


def items_inside(context: Context, items: Iterator[T]) -> Generator[T, None, None]:
    """Yield the items, each made inside a new `context()`, which never leaks to the reader between two of them."""
    with closing(items):  # type: ignore[type-var]
        while True:
            with context():
                item = next(items, _END)
            if item is _END:
                return
            yield item


async def aitems_inside(context: Context, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Yield the items as `items_inside` does, in a loop."""
    async with aclosing(items):  # type: ignore[type-var]
        while True:
            with context():
                item = await anext(items, _END)
            if item is _END:
                return
            yield item


def streamed_in(run: Any, request_context: RequestContext | None, items: Iterator[T]) -> Generator[T, None, None]:
    """Return the items, each made inside `joined(run, request_context)`."""
    return items_inside(partial(joined, run, request_context), items)


def astreamed_in(run: Any, request_context: RequestContext | None, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Return the items as `streamed_in` does, in a loop."""
    return aitems_inside(partial(joined, run, request_context), items)


@contextmanager
def giving_up(handle: CallHandle) -> Iterator[None]:
    """Cancel the request if the block is left by an error, or the generator that contains it is closed."""
    try:
        yield
    except BaseException:
        handle.cancel()
        raise


@on_loop
def to_list(vector: Vector) -> list[float]:
    """Return plain floats, whatever sequence an engine gives.

    Frameworks take vectors as lists of Python's floats; engines also give arrays of numpy.
    """
    tolist = getattr(vector, "tolist", None)  # a numpy vector does it much faster
    return tolist() if tolist else [float(x) for x in vector]


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop that runs the code here; None outside of every loop."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


hide_from_stack_levels(globals())


@dataclass(frozen=True, slots=True)
class RequestedContext:
    """The request context that a caller asks for; None for a value that it does not mention."""

    tenant: str | None = None
    deadline_s: float | None = None
    """Seconds from the start of the call."""
    weight: float | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any], *, tenant: str, deadline_s: str, weight: str) -> RequestedContext:
        """Read the values under these keys. A tenant of None is the one without a name; other Nones are not mentioned.

        Raises `RegistrationError` for what is no number.
        """
        value = values.get(tenant, ...)
        tenant_name = None if value is ... else "" if value is None else str(value)
        seconds = _number(deadline_s, values.get(deadline_s), positive=False)
        return cls(tenant_name, seconds, _number(weight, values.get(weight), positive=True))

    def applied_to(self, base: RequestContext, now: float) -> RequestContext:
        """Return `base` with the requested values; of two deadlines the earlier."""
        deadline = None if self.deadline_s is None else now + self.deadline_s
        ends = [at for at in (deadline, base.deadline) if at is not None]
        return replace(
            base,
            tenant=base.tenant if self.tenant is None else self.tenant,
            weight=base.weight if self.weight is None else self.weight,
            deadline=min(ends, default=None),
        )

    def fits(self, base: RequestContext, now: float) -> bool:
        """Return True if work under `base` meets the request: the same tenant and weight, and no earlier deadline."""
        return self.applied_to(base, now) == base


NOTHING_REQUESTED = RequestedContext()


class CallContext(NamedTuple):
    """The query that a call belongs to, or its request context."""

    run: Any
    """The live query that it joins; None for none."""
    request_context: RequestContext | None
    """The context of a call without a query; None for the ambient one."""


def context_of(requested: RequestedContext, runs: Iterable[Any], pool: Any) -> CallContext:
    """Return the context of a call into `pool` that asks for these values, made within `runs` (innermost first)."""
    runs = list(runs)
    if not runs and requested == NOTHING_REQUESTED:
        return CallContext(None, None)
    now = pool.runtime.time()
    for run in runs:
        if not run.closed and run.runtime is pool.runtime and requested.fits(run.query.request_context, now):
            return CallContext(run, None)
    if runs and runs[0].closed:  # work that outlives its query keeps the tenant, and has no deadline any more
        requested = replace(requested, deadline_s=None)
    return CallContext(None, requested.applied_to(outer_context(runs), now))


def outer_context(runs: Iterable[Any]) -> RequestContext:
    """Return the request context of a call that asks for nothing itself."""
    run = next(iter(runs), None)
    if run is None:
        return current_request_context.get() or RequestContext()
    request_context: RequestContext = run.query.request_context
    return replace(request_context, deadline=None) if run.closed else request_context


NO_APP = "default"


def with_app(request_context: RequestContext, app: str) -> RequestContext:
    """Return the context with the name of the accelerated object; without one it keeps that of the object around it."""
    return request_context if app == NO_APP else replace(request_context, app=app)


def new_query(requested: RequestedContext, runs: Iterable[Any], app: str, input: Any, now: float) -> Query:
    """Create a query that begins now, within `runs` (innermost first)."""
    request_context = with_app(requested.applied_to(outer_context(runs), now), app)
    return Query(
        {"input": input},
        app=request_context.app,
        tenant=request_context.tenant,
        deadline=request_context.deadline,
        weight=request_context.weight,
    )


def unplanned(
    requested: RequestedContext, runs: Sequence[Any], app: str, clock: Callable[[], float]
) -> tuple[RequestContext | None, Any]:
    """Return the context and the `Deadline` of a call without its own query; None twice in a live one that fits."""
    if requested is NOTHING_REQUESTED and app == NO_APP and not runs and current_request_context.get() is None:
        return None, None
    request_context = requested.applied_to(outer_context(runs), clock())
    if runs and not runs[0].closed and request_context == runs[0].query.request_context:
        return None, None
    request_context = with_app(request_context, app)
    deadline = None if request_context.deadline is None else Deadline(request_context.deadline, clock)
    return (request_context if runs or request_context != RequestContext() else None), deadline


def _number(key: str, value: Any, *, positive: bool) -> float | None:
    """Return a number from the settings of a call as a float; None if the caller did not give it.

    Raise `RegistrationError` for anything else, and for a number that is not positive where `positive` demands it.
    `key` is the setting's name, for the message.
    """
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    if not number or (positive and value <= 0):
        raise RegistrationError(
            f"{key} is {value!r:.80}, which is no {'positive ' if positive else ''}number.", hint=f"e.g. {key}=2.0"
        )
    return float(value)


# ------------------------------------------------------------ deadlines of callers


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time at which a caller has its answer or `QueryTimeout`, even if only the caller's own code is at work."""

    at: float
    clock: Callable[[], float]
    query: str = ""

    @classmethod
    def of(cls, run: Any) -> Deadline | None:
        """Return the deadline of a live query, or of the query of a part; None if it has none.

        `run` may also be None, or anything without a query. The deadline is an instant on the clock of the run's
        runtime, in seconds.
        """
        query = getattr(run, "query", None)
        if query is None or query.deadline is None:
            return None
        return cls(query.deadline, run.runtime.time, query.id)

    @property
    def passed(self) -> bool:
        return self.clock() >= self.at

    def check(self) -> None:
        """Raise `QueryTimeout` if the deadline has passed.

        It does not wait or interrupt anything: call it between the steps of work that cannot be interrupted.
        """
        if self.passed:
            raise self.error()

    def error(self) -> QueryTimeout:
        """Return the error for a call that did not end before the deadline. The caller raises it.

        It names the query, if there is one, in its text and in `query_id`.
        """
        name = f"query {self.query}" if self.query else "the call"
        hint = "allow more time, or see fast.explain()"
        return QueryTimeout(f"{name} did not end before its deadline.", query_id=self.query, hint=hint)


def interrupting(deadline: Deadline | None) -> AbstractAsyncContextManager[None]:
    """Return a context whose body is interrupted when the deadline passes, with `QueryTimeout`."""
    return nullcontext() if deadline is None else _interrupting(deadline)


@asynccontextmanager
async def _interrupting(deadline: Deadline) -> AsyncIterator[None]:
    """Interrupt the body when a deadline passes, and raise `QueryTimeout` in its place.

    Also raised after a body that ended by itself, but late. A `TimeoutError` of the body's own passes through.
    """
    limit = asyncio.timeout(deadline.at - deadline.clock())
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if limit.expired():
            raise deadline.error() from error
        raise
    deadline.check()
