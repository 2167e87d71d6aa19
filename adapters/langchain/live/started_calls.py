"""A call that has started: the live query, and what runs beside it; or the original, on the terms asked for."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

from langchain_core.runnables import Runnable, RunnableConfig

from teola_plugin.adapters.calls import astreamed_in, joined, streamed_in
from teola_plugin.adapters.early_work import ending
from teola_plugin.adapters.langchain.live.session import live
from teola_plugin.adapters.langchain.prefetching import QueryCalls, closing, composite_rules
from teola_plugin.adapters.terms import Deadline, interrupting
from teola_plugin.graph import Terms
from teola_plugin.runtime.call_limits import ConcurrencyLimit
from teola_plugin.runtime.query_run import PartRun, QueryRun
from teola_plugin.shims.stack_levels import hide_from_stack_levels

T = TypeVar("T")


class StartedCall(NamedTuple):
    """One input."""

    run: QueryRun | PartRun | None
    """None where the original just runs."""
    config: RunnableConfig | None
    chain: Runnable[Any, Any]
    """What runs: the original, or a copy in which some of its parts are served or planned by themselves."""
    table: QueryCalls | None = None
    terms: Terms | None = None
    """Of what the original calls where there is no query; None for those around it."""
    deadline: Deadline | None = None
    composites: Any = None
    """The `CompositeRules` of the accelerated object, if calls of composites are prefetched."""

    def give_up(self) -> None:
        if self.run is not None:
            self.run.close()
        if self.table is not None:
            self.table.close()

    @contextmanager
    def running(self, *, checked: bool = True) -> Iterator[None]:
        """The body runs as part of the query, which ends with it. Raises `QueryTimeout` after a body that is late, if
        that is `checked`."""
        with under_rules(self.composites):
            if self.run is None:
                with joined(None, self.terms):
                    yield
            else:
                with closing(self.table), live(self.run):
                    yield
        if self.deadline is not None and checked:
            self.deadline.check()

    def items(self, make: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Yield what a stream of the chain gives. The query ends with it, read to its end or not."""
        query_run = None if self.run is None else self.run.whole
        with self._until_end():
            for item in _ruled(self.composites, streamed_in(query_run, self.terms, make())):
                if self.deadline is not None:
                    self.deadline.check()
                yield item
            if self.deadline is not None:
                self.deadline.check()

    async def aitems(self, make: Callable[[], AsyncIterator[T]]) -> AsyncIterator[T]:
        """`items` in a loop."""
        query_run = None if self.run is None else self.run.whole
        with self._until_end():
            async with aclosing(_aruled(self.composites, astreamed_in(query_run, self.terms, make()))) as items:
                while True:
                    async with interrupting(self.deadline):
                        item = await anext(items, _END)
                    if item is _END:
                        return
                    yield item  # type: ignore[misc]

    @contextmanager
    def _until_end(self) -> Iterator[None]:
        """Return a context for generators: the query ends with them, or when they are freed."""
        if self.run is None:
            yield
            return
        with closing(self.table), ending(self.run):
            yield


_END: Any = object()


def under_rules(composites: Any) -> AbstractContextManager[None]:
    """Return a context in which calls of composites are prefetched by these rules; None changes nothing."""
    return nullcontext() if composites is None else _under_rules(composites)


@contextmanager
def _under_rules(composites: Any) -> Iterator[None]:
    token = composite_rules.set(composites)
    try:
        yield
    finally:
        composite_rules.reset(token)


def _ruled(composites: Any, items: Iterator[T]) -> Iterator[T]:
    """Yield the items, each made `under_rules`."""
    with contextlib.closing(items):  # type: ignore[type-var]
        while True:
            with under_rules(composites):
                item = next(items, _END)
            if item is _END:
                return
            yield item


async def _aruled(composites: Any, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    async with aclosing(items):
        while True:
            with under_rules(composites):
                item = await anext(items, _END)
            if item is _END:
                return
            yield item


class StartedBatch(NamedTuple):
    """Many inputs, a query each; one object runs them all."""

    runs: list[QueryRun | PartRun]
    configs: list[RunnableConfig]
    chain: Runnable[Any, Any]
    tables: list[QueryCalls | None]
    deadline: Deadline | None
    """The first of them."""

    @classmethod
    def of(cls, started: Sequence[StartedCall]) -> StartedBatch | None:
        """Return the batch; None, with nothing left running, unless every input has started."""
        runs = [one.run for one in started if one.run is not None]
        if len(runs) < len(started):
            for one in started:
                one.give_up()
            return None
        first = min((one.deadline for one in started if one.deadline), key=lambda one: one.at, default=None)
        return cls(runs, [one.config or {} for one in started], started[0].chain, [one.table for one in started], first)


class streaming:
    """`live` for batches: no context variable, since a batch is not one query's context.

    Pool-backed objects find their query through the callbacks that the framework hands on.
    """

    def __init__(self, *runs: QueryRun | PartRun) -> None:
        self._runs = runs

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for run in self._runs:
            if kind is None or issubclass(kind, Exception):
                run.close()
            else:
                run.cancel()


def shared_limit(configs: Sequence[RunnableConfig]) -> ConcurrencyLimit | None:
    """Return the limit that `max_concurrency` sets for the prefetches of all inputs of a batch together."""
    limits = [limit for one in configs if (limit := one.get("max_concurrency"))]
    return ConcurrencyLimit(min(limits)) if limits else None


hide_from_stack_levels(globals())
