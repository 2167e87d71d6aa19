"""What users hold: a Runnable that answers as the original does, sooner."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import ensure_config, get_config_list
from langchain_core.utils.aiter import aclosing
from pydantic import ConfigDict, PrivateAttr

from teola_plugin.adapters.ahead import joinable, log_fallback, runs_ahead, shape, submitted
from teola_plugin.adapters.langchain.active import active_run
from teola_plugin.adapters.langchain.checking.shadow import Shadow, ShadowReport
from teola_plugin.adapters.langchain.live.begun import Begun, BegunBatch, shared_limit, streaming
from teola_plugin.adapters.langchain.live.session import SessionHandler, joined_config, live
from teola_plugin.adapters.langchain.own_models.gates import Gate
from teola_plugin.adapters.langchain.own_models.places import AsyncPlace, Place, SyncPlace, placed
from teola_plugin.adapters.langchain.own_models.routed import Routed
from teola_plugin.graph import PrimitiveKind, Query
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.passes import Optimised, Pass
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.query_run import PartRun, QueryRun
from teola_plugin.tracer.lcel import Traced

DEADLINE, TENANT, WEIGHT = "teola_deadline_s", "teola_tenant", "teola_weight"
"""Keys in `config["configurable"]`: seconds after which the query fails with `QueryTimeout`; whose prefixes it may
share (a cache salt); its share among the queries of a pool (1.0 is ordinary)."""


class AcceleratedRunnable(RunnableBindingBase[Any, Any]):
    """The original (`.bound`) with a live query beside it.

    The original runs unchanged, so results, prompts, types, events and errors are its own. Its pool-backed parts find
    their work done, or under way, by the e-graph of the same query; early work that is not asked for is dropped.
    Where models and retrievers of the user's own can start sooner, a routed copy of the original runs (see `routed`).
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    __teola_accelerated__: ClassVar[bool] = True

    _pool: EnginePool | None = PrivateAttr(default=None)
    _traced: Traced = PrivateAttr()
    _passes: tuple[Pass | str, ...] | None = PrivateAttr(default=None)
    _speculate: str = PrivateAttr(default="auto")
    _app: str = PrivateAttr(default="default")
    _last: list[QueryRun | PartRun] = PrivateAttr(default_factory=list)
    _chain: Runnable[Any, Any] = PrivateAttr()
    """The original, with what the user bound to engines in its place."""
    _routed: Routed | None = PrivateAttr(default=None)
    _again: Callable[[Runnable[Any, Any]], AcceleratedRunnable] | None = PrivateAttr(default=None)
    """`accelerate` on the same terms, for a copy of the original. Copied and pickled with it: it may hold its parts."""
    _limit: Gate | None = PrivateAttr(default=None)
    _shadow: Shadow | None = PrivateAttr(default=None)

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
        chain: Runnable[Any, Any] | None = None,
        routed: Routed | None = None,
    ) -> AcceleratedRunnable:
        """`chain`: what runs instead of the original, traced as `traced`; `routed`: what runs where that is sooner."""
        made = cls(bound=bound)
        made._chain, made._routed = chain or bound, routed
        made._traced, made._pool = traced, pool
        made._passes = None if passes is None else tuple(passes)
        made._speculate = speculate
        made._app = app or "default"
        return made

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> AcceleratedRunnable:
        """A copy of the original, accelerated on the same terms; pools are shared."""
        bound, again = copy.deepcopy((self.bound, self._again), memo)
        return self.model_copy() if again is None else again(bound)

    def __reduce__(self) -> Any:
        """As the original is pickled. Raises `RegistrationError` for one with a pool, which stays where it is."""
        return super().__reduce__() if self._again is None else (self._again, (self.bound,))

    # ------------------------------------------------------------ seeing it

    @property
    def _understood(self) -> Traced:
        return self._traced if self._routed is None else self._routed.traced

    @property
    def _engines(self) -> EnginePool | None:
        return self._pool if self._routed is None else self._routed.pool

    @property
    def report(self) -> Any:
        """The `TraceReport`: what is lowered, joined or called as it always was, and why."""
        return self._understood.report

    def plan(self, input: Any = None) -> Optimised | None:
        """The e-graph for a query with this input, and the passes that made it; None where the original just runs."""
        return None if self._engines is None else self._plan(self._understood, self._engines, input)

    def _plan(self, traced: Traced, pool: EnginePool, input: Any) -> Optimised:
        return pool.plan(traced.template, shape(traced, input), passes=self._passes, speculate=self._speculate)

    @property
    def chain(self) -> Runnable[Any, Any]:
        """What runs: the original, or a copy in which some of its parts are served or planned by themselves."""
        return self._chain

    @property
    def gains(self) -> bool:
        """Whether anything of it can start before its place, whatever the input."""
        if self._routed is not None:
            return True
        try:
            plan = self.plan()
        except Exception as error:
            log_fallback(error)
            return False
        if plan is None or plan.source is None:
            return False
        return runs_ahead(plan.source, plan.graph) or any(p.kind is PrimitiveKind.INGESTION for p in plan.graph)

    def explain(self, input: Any = None) -> str:
        """What was understood, the p-graph, the e-graph, the passes that fired and what to expect, as text."""
        from teola_plugin.adapters.explain import explain

        return explain(self._understood, self.plan(input), self._engines)

    def last_trace(self, timeout: float = 5.0) -> QueryTrace | None:
        """The trace of the last call that was started on this object; None before the first one."""
        return self._last[0].trace.result(timeout) if self._last else None

    @property
    def shadow(self) -> ShadowReport:
        """How the calls that were made once more by the original compared; see `accelerate(..., shadow=)`."""
        return ShadowReport() if self._shadow is None else self._shadow.report

    # ------------------------------------------------------------ one call

    def _begin(
        self,
        input: Any,
        config: RunnableConfig | None,
        kwargs: Mapping[str, Any] | None = None,
        kind: type[Place] | None = None,
        limit: Gate | None = None,
    ) -> Begun | None:
        """Start the live query; None when there is nothing to run ahead, or planning failed (then: the original).

        `kind`: where the user's own models and retrievers are called, for entries that may call them ahead.
        """
        routed = None if kind is None or kwargs else self._routed
        if self._pool is None and routed is None:
            return None
        merged = ensure_config(self._merge_configs(config) if self.config else config)
        try:
            return self._begun(input, merged, routed, kind, limit)
        except Exception as error:  # nothing of the original has run yet
            log_fallback(error)
            return None

    def _begun(
        self,
        input: Any,
        config: RunnableConfig,
        routed: Routed | None,
        kind: type[Place] | None,
        limit: Gate | None,
    ) -> Begun | None:
        place = None
        if routed is not None and kind is not None:
            place = routed.place(kind, input, config, limit or self._limit)
        pool, traced, chain = self._pool, self._traced, self._chain
        if place is not None and routed is not None:
            pool, traced, chain = routed.pool, routed.traced, routed.chain
        if pool is None:
            return None
        begun = Begun(self._submit(input, config, pool, traced, place), config, chain, place)
        self._last[:] = [begun.run]
        if kind is not None and routed is None and not begun.run.claims:
            return begun  # only traced: the context variable of `live` will do, without a callback at every node
        try:
            handler = SessionHandler(begun.run, traced.watched if begun.run.claims else {})
            begun = begun._replace(config=joined_config(config, handler))
        except BaseException:
            begun.give_up()
            raise
        return begun

    def _submit(
        self, input: Any, config: RunnableConfig, pool: EnginePool, traced: Traced, place: Place | None
    ) -> QueryRun | PartRun:
        optimised = self._plan(traced, pool, input)
        if place is None and (whole := joinable(active_run(config.get("callbacks")), pool)) is not None:
            return whole.part(optimised.graph, traced.calls, input)
        query = self._query(input, config, pool)
        ahead = optimised.source is None or runs_ahead(optimised.source, optimised.graph)
        if place is None and not ahead:
            return pool.runtime.watch(query, joins=True)
        if place is not None:
            place.open(query.id, pool)
        try:
            run = submitted(pool, query, optimised, traced.calls)
        except BaseException:
            if place is not None:
                place.close()
            raise
        if place is not None:
            place.begin(run)
        return run

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
        if self._shadow is not None and self._shadow.chosen():
            return self._shadow.invoke(self._invoke, self.bound, input, config, kwargs)
        return self._invoke(input, config, **kwargs)

    def _invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        begun = self._begin(input, config, kwargs, SyncPlace)
        if begun is None:
            return self._chain.invoke(input, config, **kwargs)
        with placed(begun.place), live(begun.run):
            return begun.chain.invoke(input, begun.config, **{**self.kwargs, **kwargs})

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        if self._shadow is not None and self._shadow.chosen():
            return await self._shadow.ainvoke(self._ainvoke, self.bound, input, config, kwargs)
        return await self._ainvoke(input, config, **kwargs)

    async def _ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        begun = self._begin(input, config, kwargs, AsyncPlace)
        if begun is None:
            return await self._chain.ainvoke(input, config, **kwargs)
        with placed(begun.place), live(begun.run):
            return await begun.chain.ainvoke(input, begun.config, **{**self.kwargs, **kwargs})

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        begun = self._begin(input, config)
        if begun is None:
            yield from self._chain.stream(input, config, **kwargs)
            return
        with streaming(begun.run):
            yield from begun.chain.stream(input, begun.config, **{**self.kwargs, **kwargs})

    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        begun = self._begin(input, config)
        if begun is None:
            async with aclosing(self._chain.astream(input, config, **kwargs)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        with streaming(begun.run):
            async with aclosing(begun.chain.astream(input, begun.config, **{**self.kwargs, **kwargs})) as chunks:
                async for chunk in chunks:
                    yield chunk

    def transform(self, input: Iterator[Any], config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        yield from self._chain.transform(input, config, **kwargs)

    async def atransform(
        self, input: AsyncIterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        async with aclosing(self._chain.atransform(input, config, **kwargs)) as chunks:
            async for chunk in chunks:
                yield chunk

    def astream_events(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        begun = None if kwargs.get("version") == "v3" else self._begin(input, config)
        if begun is None:
            return self._chain.astream_events(input, config, **kwargs)
        return self._events(input, begun, **kwargs)

    async def _events(self, input: Any, begun: Begun, **kwargs: Any) -> AsyncIterator[Any]:
        events = begun.chain.astream_events(input, begun.config, **{**self.kwargs, **kwargs})
        with streaming(begun.run):
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:  # type: ignore[union-attr]
                    yield event

    # ------------------------------------------------------------ many calls: each input is a query of its own

    def _begin_all(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None,
        kwargs: Mapping[str, Any],
        kind: type[Place],
    ) -> BegunBatch | None:
        """A live query per input; None when there is nothing to run ahead."""
        way = kind if self._routed is not None and self._routed.batches else None
        if not inputs or (self._pool is None and way is None):
            return None
        configs = get_config_list(config, len(inputs))
        limit = shared_limit(configs)
        pairs = zip(inputs, configs, strict=True)
        return BegunBatch.of([self._begin(given, one, kwargs, way, limit) for given, one in pairs])

    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        begun = self._begin_all(inputs, config, kwargs, SyncPlace)
        if begun is None:
            return self._chain.batch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        with placed(*begun.places), streaming(*begun.runs):
            return begun.chain.batch(
                inputs, begun.configs, return_exceptions=return_exceptions, **{**self.kwargs, **kwargs}
            )

    async def abatch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        begun = self._begin_all(inputs, config, kwargs, AsyncPlace)
        if begun is None:
            return await self._chain.abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        with placed(*begun.places), streaming(*begun.runs):
            return await begun.chain.abatch(
                inputs, begun.configs, return_exceptions=return_exceptions, **{**self.kwargs, **kwargs}
            )

    def batch_as_completed(
        self,
        inputs: Sequence[Any],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, Any]]:
        if self._only_passes:
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
        if self._only_passes:
            made = self._chain.abatch_as_completed(inputs, config, return_exceptions=return_exceptions, **kwargs)  # type: ignore[call-overload]
        else:
            one = self._limited(config, len(inputs))
            made = Runnable.abatch_as_completed(one, inputs, config, return_exceptions=return_exceptions, **kwargs)  # type: ignore[call-overload]
        async with aclosing(made) as ended:
            async for done in ended:
                yield done

    @property
    def _only_passes(self) -> bool:
        """Whether the original just runs, whatever the input."""
        return self._pool is None and self._routed is None

    def _limited(self, config: Any, inputs: int) -> AcceleratedRunnable:
        """This object for one batch, whose `max_concurrency` bounds the early work of all its inputs together."""
        limit = shared_limit(get_config_list(config, inputs))
        if limit is None or self._routed is None:
            return self
        made = self.model_copy()
        made._limit = limit
        return made
