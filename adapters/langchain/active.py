"""Which live query the running code belongs to, and whether an engine is there."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from typing import Any, TypeVar

from teola_plugin.errors import unknown_name
from teola_plugin.runtime.context import current_run

T = TypeVar("T")
_END = object()


def active_run(callbacks: Any = None) -> Any:
    """The query run that a call made here and now joins; None outside every accelerated query.

    In order: the ambient context (`current_run`); a handler with an attribute `teola_run` among `callbacks` (a run
    manager, a callback manager, or a list of handlers); such a handler in LangChain's ambient config. The last two
    find the run where user code has moved to a thread without copying its context.
    """
    run = current_run.get()
    if run is None:
        run = _run_of(callbacks)
    if run is None:
        run = _run_of(_ambient_callbacks())
    return run


@contextmanager
def joined(run: Any) -> Iterator[None]:
    """Calls inside the block belong to `run`; None changes nothing."""
    token = None if run is None else current_run.set(run)
    try:
        yield
    finally:
        if token is not None:
            current_run.reset(token)


def streamed_in(run: Any, items: Iterator[T]) -> Iterator[T]:
    """The items, each made inside `joined(run)`, which never leaks to the reader between two of them."""
    with closing(items):  # type: ignore[type-var]
        while True:
            with joined(run):
                item = next(items, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]


async def astreamed_in(run: Any, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """`streamed_in` in a loop."""
    async with aclosing(items):  # type: ignore[type-var]
        while True:
            with joined(run):
                item = await anext(items, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]


def _ambient_callbacks() -> Any:
    from langchain_core.runnables.config import var_child_runnable_config

    config = var_child_runnable_config.get()
    return None if config is None else config.get("callbacks")


def _run_of(callbacks: Any) -> Any:
    return next(iter(runs_in(callbacks)), None)


def runs_in(callbacks: Any) -> list[Any]:
    """The query runs that handlers among `callbacks` stand for, outermost first."""
    handlers: Sequence[Any] = callbacks if isinstance(callbacks, list) else getattr(callbacks, "handlers", ())
    runs = (getattr(handler, "teola_run", None) for handler in handlers)
    return [run for run in runs if run is not None]


def check_engine(pool: Any, engine: str) -> None:
    """Fails early, where an object is made: `RegistrationError` for an engine that the pool does not have."""
    if engine not in pool.engine_names:
        raise unknown_name("engine", engine, list(pool.engine_names))
