"""Calls that pool-backed objects make, whatever their framework: which engine, in which query, and giving them up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractContextManager, aclosing, closing, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from teola_plugin.errors import unknown_name
from teola_plugin.graph import RequestContext, on_loop
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


def joined(run: Any, terms: RequestContext | None = None) -> AbstractContextManager[None]:
    """Return a context whose calls belong to `run`, or to no query and are made under `terms`; None changes nothing."""
    if terms is not None:
        return _joined(run, terms)
    return nullcontext() if run is None else during(current_run, run)


@contextmanager
def _joined(run: Any, terms: RequestContext) -> Iterator[None]:
    with during(current_run, run), during(current_request_context, terms):
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


def streamed_in(run: Any, terms: RequestContext | None, items: Iterator[T]) -> Generator[T, None, None]:
    """Return the items, each made inside `joined(run, terms)`."""
    return items_inside(partial(joined, run, terms), items)


def astreamed_in(run: Any, terms: RequestContext | None, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Return the items as `streamed_in` does, in a loop."""
    return aitems_inside(partial(joined, run, terms), items)


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
    """Return plain floats, whatever sequence an engine gives."""
    tolist = getattr(vector, "tolist", None)  # a numpy vector does it much faster
    return tolist() if tolist else [float(x) for x in vector]


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop that runs the code here; None outside of every loop."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


hide_from_stack_levels(globals())
