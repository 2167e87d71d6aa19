"""Batches of an accelerated object: each input is a query of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, get_config_list
from langchain_core.utils.aiter import aclosing

from teola_plugin.adapters.calls import NOTHING_REQUESTED, Deadline, RequestedContext, interrupting
from teola_plugin.adapters.langchain.listening import requested_context
from teola_plugin.adapters.langchain.prefetching import EntryPoint, closing
from teola_plugin.adapters.langchain.started_calls import (
    StartedBatch,
    StartedCall,
    shared_limit,
    streaming,
    under_rules,
)
from teola_plugin.adapters.routing import RoutingRules, rules_of_call, under_routing
from teola_plugin.errors import QueryTimeout
from teola_plugin.runtime.call_limits import ConcurrencyLimit
from teola_plugin.shims.stack_levels import hide_from_stack_levels


def _in_time(answers: list[Any], deadline: Deadline | None, return_exceptions: bool) -> list[Any]:
    """Return the answers of a batch, or `QueryTimeout` in their place where they are late."""
    if deadline is None or not deadline.passed:
        return answers
    if not return_exceptions:
        raise deadline.error()
    return [one if isinstance(one, Exception) else deadline.error() for one in answers]


async def _ain_time(
    work: Awaitable[list[Any]], deadline: Deadline | None, inputs: int, return_exceptions: bool
) -> list[Any]:
    """`_in_time`, interrupted at the deadline."""
    try:
        async with interrupting(deadline):
            return await work
    except QueryTimeout as error:
        if not return_exceptions:
            raise
        return [error] * inputs


class BatchMethods:
    """Stands before the framework's class in the order of methods."""

    if TYPE_CHECKING:
        kwargs: Mapping[str, Any]
        _pool: Any
        _prefetch_plan: Any
        _chain: Runnable[Any, Any]
        _limit: ConcurrencyLimit | None
        _routing: RoutingRules | None

        def _start(
            self,
            input: Any,
            config: RunnableConfig | None,
            kwargs: Mapping[str, Any] | None = None,
            entry: EntryPoint | None = None,
            limit: ConcurrencyLimit | None = None,
            *,
            streamed: bool = True,
        ) -> StartedCall: ...

        def _rules(self, config: RunnableConfig | None) -> Any: ...

        def _original(
            self, config: RunnableConfig | None, requested: RequestedContext | None = None
        ) -> StartedCall: ...

    def _start_all(
        self,
        inputs: list[Any],
        configs: Sequence[RunnableConfig],
        kwargs: Mapping[str, Any],
        entry: EntryPoint,
    ) -> StartedBatch | None:
        """Start a live query per input, all at once. Return None if nothing can be prefetched.

        Also on a pool with `max_concurrency`: the framework takes all inputs through a step before any of them goes on,
        so early work would put on the engines at once what is to come one by one. Early calls of the user's own objects
        are bounded as the plain ones are.
        """
        prefetching_entry = entry if self._prefetch_plan is not None and self._prefetch_plan.batches else None
        limit = shared_limit(configs)
        if (
            not inputs
            or (self._pool is None and prefetching_entry is None)
            or (self._pool is not None and self._pool.engine_names and limit is not None)
        ):
            return None
        pairs = zip(inputs, configs, strict=True)
        return StartedBatch.of(
            [self._start(value, one, kwargs, prefetching_entry, limit, streamed=False) for value, one in pairs]
        )

    @contextlib.contextmanager
    def _running(self, started: StartedBatch) -> Iterator[None]:
        """Let the framework's own batch in the body run with the prefetches of its queries, which end with it."""
        rules = self._rules(started.configs[0])
        with (
            under_rules(rules),
            under_routing(rules_of_call(self._routing)),
            closing(*started.tables),
            streaming(*started.runs),
        ):
            yield

    def _of_all(self, configs: Sequence[RunnableConfig]) -> StartedCall:
        """Return the original's own batch, with the request context that its inputs have in common.

        Each input's config says the rest.
        """
        merged = ensure_config(configs[0] if configs else None)
        common_request = (
            requested_context(merged)
            if all(requested_context(one) == requested_context(configs[0]) for one in configs)
            else NOTHING_REQUESTED
        )
        return self._original(merged, common_request)

    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Run the framework's own `batch` with a live query for each input, all of which start at once.

        The original runs alone where nothing can be prefetched. Late answers become `QueryTimeout`, in their places
        with `return_exceptions`.
        """
        configs = get_config_list(config, len(inputs))
        with under_routing(rules_of_call(self._routing, len(inputs))):  # calls of models are counted for all together
            started = self._start_all(inputs, configs, kwargs, EntryPoint(on_loop=False))
            if started is None:
                original = self._of_all(configs)
                with original.running(checked=False):
                    answers = self._chain.batch(inputs, config, return_exceptions=return_exceptions, **kwargs)
                return _in_time(answers, original.deadline, return_exceptions)
            with self._running(started):
                answers = started.chain.batch(
                    inputs, started.configs, return_exceptions=return_exceptions, **{**self.kwargs, **kwargs}
                )
            return _in_time(answers, started.deadline, return_exceptions)

    async def abatch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Run the framework's own `abatch` with a live query for each input; see `batch`."""
        configs = get_config_list(config, len(inputs))
        with under_routing(rules_of_call(self._routing, len(inputs))):
            started = self._start_all(inputs, configs, kwargs, EntryPoint(on_loop=True))
            if started is None:
                original = self._of_all(configs)
                with original.running(checked=False):
                    work = self._chain.abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)
                    return await _ain_time(work, original.deadline, len(inputs), return_exceptions)
            with self._running(started):
                arguments = {**self.kwargs, **kwargs}
                work = started.chain.abatch(inputs, started.configs, return_exceptions=return_exceptions, **arguments)
                return await _ain_time(work, started.deadline, len(inputs), return_exceptions)

    def batch_as_completed(
        self,
        inputs: Sequence[Any],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Return the answers as they come, each with the index of its input: every input is an `invoke` of this object.

        Where the original just runs, it is the original's own method.
        """
        if self._only_passes(get_config_list(config, len(inputs))):
            return self._chain.batch_as_completed(inputs, config, return_exceptions=return_exceptions, **kwargs)  # type: ignore[call-overload, no-any-return]
        one = self._limited(config, len(inputs))
        return Runnable.batch_as_completed(one, inputs, config, return_exceptions=return_exceptions, **kwargs)  # type: ignore[misc, call-overload, no-any-return]

    async def abatch_as_completed(
        self,
        inputs: Sequence[Any],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> AsyncIterator[tuple[int, Any]]:
        """Yield the answers as they come, as `batch_as_completed` does, in a loop."""
        if self._only_passes(get_config_list(config, len(inputs))):
            completions = self._chain.abatch_as_completed(inputs, config, return_exceptions=return_exceptions, **kwargs)  # type: ignore[call-overload]
        else:
            one = self._limited(config, len(inputs))
            completions = Runnable.abatch_as_completed(
                one, inputs, config, return_exceptions=return_exceptions, **kwargs
            )  # type: ignore[call-overload]
        async with aclosing(completions) as results:
            async for result in results:
                yield result

    def _only_passes(self, configs: Sequence[RunnableConfig]) -> bool:
        """Return True if the original just runs, whatever the input, and has no deadline."""
        timed = any(requested_context(one).deadline_s is not None for one in configs)
        return self._pool is None and self._prefetch_plan is None and not timed

    def _limited(self, config: Any, inputs: int) -> Any:
        """Return this object for one batch, whose `max_concurrency` bounds the prefetches of all inputs together."""
        limit = shared_limit(get_config_list(config, inputs))
        if limit is None or self._prefetch_plan is None:
            return self
        limited_copy: Any = self.model_copy()  # type: ignore[attr-defined]
        limited_copy._limit = limit
        return limited_copy


hide_from_stack_levels(globals())
