"""What users hold: a Runnable that answers as the original does, sooner."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import get_config_list
from pydantic import ConfigDict, PrivateAttr

from teola_plugin.adapters.langchain.session import SessionHandler, joined_config, live
from teola_plugin.errors import TeolaError
from teola_plugin.graph import Query
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.passes import Optimised, Pass
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.tracer.lcel import Traced

DEADLINE, TENANT, WEIGHT = "teola_deadline_s", "teola_tenant", "teola_weight"
"""Keys in `config["configurable"]`: seconds after which the query fails with `QueryTimeout`; whose prefixes it may
share (a cache salt); its share among the queries of a pool (1.0 is ordinary)."""


class AcceleratedRunnable(RunnableBindingBase[Any, Any]):
    """The original (`.bound`) with a live query beside it.

    The original runs unchanged, so results, prompts, types, events and errors are its own. Its pool-backed parts find
    their work done, or under way, by the e-graph of the same query; early work that is not asked for is dropped.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    _pool: EnginePool | None = PrivateAttr(default=None)
    _traced: Traced = PrivateAttr()
    _passes: tuple[Pass | str, ...] | None = PrivateAttr(default=None)
    _speculate: str = PrivateAttr(default="auto")
    _app: str = PrivateAttr(default="default")
    _last: QueryRun | None = PrivateAttr(default=None)

    @classmethod
    def of(
        cls,
        bound: Runnable[Any, Any],
        traced: Traced,
        pool: EnginePool | None,
        *,
        passes: Iterable[Pass | str] | None,
        speculate: str,
        app: str | None,
    ) -> AcceleratedRunnable:
        made = cls(bound=bound)
        made._traced, made._pool = traced, pool
        made._passes = None if passes is None else tuple(passes)
        made._speculate = speculate
        made._app = app or "default"
        return made

    # ------------------------------------------------------------ seeing it

    @property
    def report(self) -> Any:
        """The `TraceReport`: what is lowered, joined or called as it always was, and why."""
        return self._traced.report

    def plan(self, input: Any = None) -> Optimised | None:
        """The e-graph for a query with this input, and the passes that made it; None without a pool."""
        if self._pool is None:
            return None
        return self._pool.plan(
            self._traced.template, self._shape(input), passes=self._passes, speculate=self._speculate
        )

    def explain(self, input: Any = None) -> str:
        """What was understood, the p-graph, the e-graph, the passes that fired and what to expect, as text."""
        from teola_plugin.adapters.explain import explain

        return explain(self._traced, self.plan(input), self._pool)

    def last_trace(self, timeout: float = 5.0) -> QueryTrace | None:
        """The trace of the last call that was started on this object; None before the first one."""
        return None if self._last is None else self._last.trace.result(timeout)

    # ------------------------------------------------------------ one call

    def _shape(self, input: Any) -> dict[str, int]:
        try:
            return self._traced.sizes(input)
        except Exception:  # an input that the estimate cannot read: plan without expectations
            return {}

    def _begin(self, input: Any, config: RunnableConfig | None) -> tuple[QueryRun, RunnableConfig] | None:
        """Start the live query; None when there is nothing to run ahead, or planning failed (then: the original)."""
        pool = self._pool
        if pool is None:
            return None
        try:
            optimised = self.plan(input)
            if optimised is None:
                return None
            merged = self._merge_configs(config)
            query = self._query(input, merged, pool)
            run = pool.runtime.submit(
                query,
                optimised.graph,
                self._traced.calls,
                ahead=True,
                pgraph=optimised.source,
                passes=tuple((r.pass_name, r.fired, r.seconds) for r in optimised.reports),
            )
        except TeolaError:
            _log_fallback()
            return None
        self._last = run
        return run, joined_config(merged, SessionHandler(run, self._traced.watched))

    def _query(self, input: Any, config: RunnableConfig, pool: EnginePool) -> Query:
        terms = config.get("configurable") or {}
        seconds = terms.get(DEADLINE)
        return Query(
            {"input": input},
            app=self._app,
            tenant=str(terms.get(TENANT, "")),
            deadline=None if seconds is None else pool.runtime.time() + float(seconds),
            weight=float(terms.get(WEIGHT, 1.0)),
        )

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        begun = self._begin(input, config)
        if begun is None:
            return super().invoke(input, config, **kwargs)
        run, joined = begun
        with live(run):
            return self.bound.invoke(input, joined, **{**self.kwargs, **kwargs})

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        begun = self._begin(input, config)
        if begun is None:
            return await super().ainvoke(input, config, **kwargs)
        run, joined = begun
        with live(run):
            return await self.bound.ainvoke(input, joined, **{**self.kwargs, **kwargs})

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        begun = self._begin(input, config)
        if begun is None:
            yield from super().stream(input, config, **kwargs)
            return
        run, joined = begun
        with streaming(run):
            yield from self.bound.stream(input, joined, **{**self.kwargs, **kwargs})

    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        begun = self._begin(input, config)
        if begun is None:
            async for chunk in super().astream(input, config, **kwargs):
                yield chunk
            return
        run, joined = begun
        with streaming(run):
            async for chunk in self.bound.astream(input, joined, **{**self.kwargs, **kwargs}):
                yield chunk

    def astream_events(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        begun = None if kwargs.get("version") == "v3" else self._begin(input, config)
        if begun is None:
            return super().astream_events(input, config, **kwargs)
        return self._events(input, *begun, **kwargs)

    async def _events(self, input: Any, run: QueryRun, joined: RunnableConfig, **kwargs: Any) -> AsyncIterator[Any]:
        with streaming(run):
            async for event in self.bound.astream_events(input, joined, **{**self.kwargs, **kwargs}):
                yield event

    # ------------------------------------------------------------ many calls: each input is a query of its own

    def _begin_all(
        self, inputs: list[Any], config: RunnableConfig | list[RunnableConfig] | None
    ) -> tuple[list[QueryRun], list[RunnableConfig]] | None:
        """A live query per input; None when there is nothing to run ahead."""
        configs = get_config_list(config, len(inputs))
        begun = [self._begin(given, one) for given, one in zip(inputs, configs, strict=True)]
        live_ones = [one for one in begun if one is not None]
        if len(live_ones) < len(inputs):
            for run, _ in live_ones:
                run.close()
            return None
        return [run for run, _ in live_ones], [joined for _, joined in live_ones]

    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        begun = self._begin_all(inputs, config) if inputs else None
        if begun is None:
            return super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        with streaming(*begun[0]):
            return self.bound.batch(inputs, begun[1], return_exceptions=return_exceptions, **{**self.kwargs, **kwargs})

    async def abatch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        begun = self._begin_all(inputs, config) if inputs else None
        if begun is None:
            return await super().abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        with streaming(*begun[0]):
            return await self.bound.abatch(
                inputs, begun[1], return_exceptions=return_exceptions, **{**self.kwargs, **kwargs}
            )

    def batch_as_completed(
        self,
        inputs: Sequence[Any],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, Any]]:
        return Runnable.batch_as_completed(self, inputs, config, return_exceptions=return_exceptions, **kwargs)  # type: ignore[misc, call-overload, no-any-return]

    async def abatch_as_completed(
        self,
        inputs: Sequence[Any],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> AsyncIterator[tuple[int, Any]]:
        async for done in Runnable.abatch_as_completed(  # type: ignore[call-overload]
            self, inputs, config, return_exceptions=return_exceptions, **kwargs
        ):
            yield done


class streaming:
    """`live` for generators and batches: no context variable, since one of them is not one query's context.

    Pool-backed objects find their query through the callbacks that the framework hands on.
    """

    def __init__(self, *runs: QueryRun) -> None:
        self._runs = runs

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for run in self._runs:
            if kind is None or issubclass(kind, Exception):
                run.close()
            else:
                run.cancel()


def _log_fallback() -> None:
    import logging

    logging.getLogger("teola_plugin").warning("planning failed; the original runs as it always did", exc_info=True)
