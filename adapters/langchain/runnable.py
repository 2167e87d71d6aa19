"""The entry points of accelerated LangChain objects, which answer as the original does, sooner.

Users hold an instance of the original's class (see `accelerated`), whose entry points are these.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import ensure_config, merge_configs
from langchain_core.utils.aiter import aclosing
from pydantic import ConfigDict, PrivateAttr

from teola_plugin.adapters.automatic_engines import Serving, report_with_rules
from teola_plugin.adapters.calls import (
    NO_APP,
    Deadline,
    RequestedContext,
    context_of,
    interrupting,
    new_query,
    unplanned,
)
from teola_plugin.adapters.langchain.batches import BatchMethods
from teola_plugin.adapters.langchain.composites import chain_with_history
from teola_plugin.adapters.langchain.listening import active_runs, form_of_answers, requested_context
from teola_plugin.adapters.langchain.prefetch_plan import PrefetchPlan
from teola_plugin.adapters.langchain.prefetching import EntryPoint, QueryCalls
from teola_plugin.adapters.langchain.shadow import (
    Shadow,
    ShadowReport,
    check_repeatable,
    original_call,
    shadow_of,
)
from teola_plugin.adapters.langchain.started_calls import (
    CallOptions,
    SessionHandler,
    StartedCall,
    joined_config,
    version_of_events,
)
from teola_plugin.adapters.plan_report import PlanReport, Status, switched_off
from teola_plugin.adapters.planned_queries import expected_sizes, graph_saves_time, joinable, log_fallback, submit
from teola_plugin.adapters.provider_executor import ProviderPool, ensure_engine, shared_pool, without_tail
from teola_plugin.adapters.routing import RoutingRules, meter_run, rules_of_call, under_routing
from teola_plugin.adapters.snapshots import FieldSnapshot
from teola_plugin.adapters.thread_safety import NOBODY
from teola_plugin.graph import PrimitiveKind
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.passes import Optimised, Pass
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import AnswerForm
from teola_plugin.runtime.call_limits import ConcurrencyLimit
from teola_plugin.runtime.prefetch_gate import GatedQuery, PrefetchGate
from teola_plugin.runtime.query_run import Claiming, QueryRun, SubplanRun
from teola_plugin.shims.langchain import event_listeners
from teola_plugin.shims.langchain_interceptors import live_scopes
from teola_plugin.shims.stack_levels import hide_from_stack_levels
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.functions.lookup import DataGuards

if TYPE_CHECKING:
    from teola_plugin.adapters.langchain.composite_calls import CompositeRules


def _is_accelerated(cls: Any, instance: Any) -> bool:
    """Accelerated models are of their own class, and accelerated Runnables as well."""
    like = cls is AcceleratedRunnable and hasattr(type(instance), "__teola_accelerated_runnable__")
    return like or bool(super(_KIND, cls).__instancecheck__(instance))


_KIND: Any = type("AcceleratedKind", (type(RunnableBindingBase),), {"__instancecheck__": _is_accelerated})


class AcceleratedRunnable(BatchMethods, RunnableBindingBase[Any, Any], metaclass=_KIND):  # type: ignore[metaclass]
    """The original (`.bound`) with a live query beside it.

    The original runs unchanged, so results, prompts, types, events and errors are its own. Its pool-backed parts find
    their work done, or under way, by the e-graph of the same query; early work that is not asked for is dropped.
    Calls of the user's own models and retrievers that can start sooner are prefetched (see `prefetch_plan`).
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    __teola_accelerated__: ClassVar[bool] = True

    _pool: EnginePool | None = PrivateAttr(default=None)
    _traced: TraceResult = PrivateAttr()
    _passes: tuple[Pass | str, ...] | None = PrivateAttr(default=None)
    _speculate: str = PrivateAttr(default="auto")
    _app: str = PrivateAttr(default=NO_APP)
    _last: list[QueryRun | SubplanRun] = PrivateAttr(default_factory=list)
    _chain: Runnable[Any, Any] = PrivateAttr()
    """The original, or a copy whose parts are planned when they begin."""
    _prefetch_plan: PrefetchPlan | None = PrivateAttr(default=None)
    _accelerate_copy: partial[Any] | None = PrivateAttr(default=None)
    """`accelerate` with the same options, for a copy of the original. Copied and pickled with it: it may hold parts."""
    _snapshot: FieldSnapshot | None = PrivateAttr(default=None)
    """Fields of the original that the plan depends on; None if every field is read from the original itself."""
    _guards: DataGuards = PrivateAttr()
    _renew: Callable[[AcceleratedRunnable], AcceleratedRunnable] | None = PrivateAttr(default=None)
    _limit: ConcurrencyLimit | None = PrivateAttr(default=None)
    _shadow: Shadow | None = PrivateAttr(default=None)
    _serving: Serving | None = PrivateAttr(default=None)
    _composites: CompositeRules | None = PrivateAttr(default=None)
    _gate: PrefetchGate = PrivateAttr(default_factory=partial(PrefetchGate, live_scopes))
    _routing: RoutingRules | None = PrivateAttr(default=None)
    """The rules by which models are routed to engines, in calls of this object and where plans of it are made."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a private attribute without pydantic's detour, which takes five times as long."""
            private = self.__pydantic_private__
            return private[name] if private is not None and name in private else super().__getattr__(name)

    @classmethod
    def of(
        cls,
        bound: Runnable[Any, Any],
        traced: TraceResult,
        pool: EnginePool | None,
        *,
        passes: Iterable[Pass | str] | None,
        speculate: str,
        app: str | None,
        chain: Runnable[Any, Any] | None = None,
        prefetch_plan: PrefetchPlan | None = None,
    ) -> AcceleratedRunnable:
        """`chain`: what runs instead of the original, traced as `traced`; `prefetch_plan`: what
        is prefetched beside it."""
        accelerated = cls(bound=bound)
        accelerated._chain, accelerated._prefetch_plan = chain or bound, prefetch_plan
        accelerated._traced, accelerated._pool = traced, pool
        accelerated._passes = None if passes is None else tuple(passes)
        accelerated._speculate = speculate
        accelerated._app = app or NO_APP
        return accelerated

    def copied_by(self, accelerate_again: partial[Any]) -> None:
        """Copy and pickle the original from now on, and accelerate each copy with `accelerate_again`."""
        self._accelerate_copy = accelerate_again

    def renewed_by(
        self,
        renew: Callable[[AcceleratedRunnable], AcceleratedRunnable],
        snapshot: FieldSnapshot,
        guards: DataGuards,
    ) -> None:
        """Plan with `renew` again once a field in `snapshot` is another, or data that functions read."""
        self._renew, self._snapshot, self._guards = renew, snapshot, guards

    def is_current(self) -> bool:
        """Return True unless a field of the original, or data, that the plan depends on was set since."""
        return self._snapshot is None or (self._snapshot.holds() and self._guards.are_unchanged())

    @property
    def guards(self) -> DataGuards:
        """The guards on the data that the plan relies on."""
        return self._guards

    def renewed(self) -> AcceleratedRunnable:
        """Return the same object, planned for the fields that the original has now."""
        assert self._renew is not None
        return self._renew(self)

    @property
    def has_prefetch_plan(self) -> bool:
        """True if calls of the user's own models or retrievers are prefetched."""
        return self._prefetch_plan is not None

    def runs_original(self, traced: TraceResult) -> None:
        """Run the original from now on, and plan nothing."""
        self._chain, self._traced, self._pool = self.bound, traced, None
        self._prefetch_plan = self._snapshot = None

    def continues(self, other: AcceleratedRunnable) -> None:
        """Keep the last trace and the figures of `shadow=` of an object that this one replaces."""
        self._last, self._shadow, self._gate = other._last, other._shadow, other._gate

    def shadowed(self, share: float) -> None:
        """Compare a share of the calls from now on. Raises `RegistrationError` for a chain that writes."""
        check_repeatable(self.bound, self._traced.template)
        self._shadow = shadow_of(share)

    def tells_of(self, serving: Serving | None) -> None:
        """Have `explain()` say what `engines=` has done."""
        self._serving = serving

    def routes_by(self, rules: RoutingRules | None) -> None:
        """Route models by these rules from now on."""
        self._routing = rules

    def prefetches_of_composites(self, rules: CompositeRules) -> None:
        """Prefetch by these rules what composites call one after the other."""
        self._composites = rules

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> AcceleratedRunnable:
        """A copy of the original, accelerated with the same options; pools are shared."""
        bound, accelerate_copy = copy.deepcopy((self.bound, self._accelerate_copy), memo)
        return self.model_copy() if accelerate_copy is None else accelerate_copy(bound)

    def __reduce__(self) -> Any:
        """Pickle as the original does. Raises `RegistrationError` for one with a pool, which stays where it is."""
        return super().__reduce__() if self._accelerate_copy is None else (self._accelerate_copy, (self.bound,))

    # ------------------------------------------------------------ seeing it

    @property
    def _understood(self) -> TraceResult:
        return self._traced if self._prefetch_plan is None else self._prefetch_plan.traced

    @property
    def _engines(self) -> EnginePool | None:
        return self._pool if self._prefetch_plan is None else self._prefetch_plan.pool

    def report(self, input: Any = None) -> PlanReport:
        """Return what `explain()` prints, as data: a row for each place that makes calls, and for each part."""
        return self.__teola_report__(input)

    def plan(self, input: Any = None) -> Optimised | None:
        """The e-graph for a query with this input, and the passes that made it; None where the original just runs."""
        return None if self._engines is None else self._plan(self._understood, self._engines, input)

    def _plan(self, traced: TraceResult, pool: EnginePool, input: Any) -> Optimised:
        return pool.plan(traced.template, expected_sizes(traced, input), passes=self._passes, speculate=self._speculate)

    @property
    def chain(self) -> Runnable[Any, Any]:
        """Return what runs: the original, or a copy in which some of its parts are served or planned by themselves."""
        return self._chain

    @property
    def gains(self) -> bool:
        """Return True if anything of it can start before its place, whatever the input."""
        if self._prefetch_plan is not None:
            return True
        try:
            plan = self.plan()
        except Exception as error:
            log_fallback(error, self.bound, "what a call gains")
            return False
        if plan is None or plan.source is None:
            return False
        return graph_saves_time(plan.source, plan.graph) or any(p.kind is PrimitiveKind.INGESTION for p in plan.graph)

    def explain(self, input: Any = None, *, details: bool = False) -> str:
        """Return what was understood, what is prefetched and what to expect, in three lines. Nothing runs.

        `details`: also each part, the p-graph, the e-graph, the passes that fired and advice, in sections.
        """
        return self.__teola_report__(input).text(details=details)

    def __teola_of__(self) -> tuple[Any, EnginePool | None]:
        """The original, and the pool that plans it."""
        return self.bound, self._pool

    def __teola_report__(self, input: Any = None) -> PlanReport:
        with under_routing(self._routing):
            return self._report(input)

    def _report(self, input: Any) -> PlanReport:
        """Collect what `explain()` shows: the plan and its gain, a row for each call, and advice.

        Nothing of the app runs. Without a plan, the rows come from the chain as it could be planned, with the reason
        why each call stays in its place.
        """
        from teola_plugin.adapters.explain import PlanIfDedicated, call_rows, ended_trace, explain, left_for_form
        from teola_plugin.adapters.langchain.composite_calls import advice, composite_rows, rows_of_planned_parts
        from teola_plugin.adapters.langchain.prefetch_plan import own_calls, read_chain

        if (inner := chain_with_history(self._chain)) is not None:
            return inner.__teola_report__(input)  # type: ignore[no-any-return]
        rules, plan, trace = self._composites, self._prefetch_plan, ended_trace(self._last)
        composites = [] if rules is None else list(composite_rows(self._chain, rules))
        safety = NOBODY if rules is None else rules.threads.safety
        optimised = self.plan(input)
        sites = None if plan is None else own_calls(plan.sites, plan.prefetched_sites, plan.left)
        if plan is not None and optimised is not None and sites is not None:
            rows = call_rows(plan.traced, optimised, sites)
        else:
            is_off, pool = self._speculate == "off", self._pool or shared_pool()
            options: Any = {"speculate": "auto" if is_off else self._speculate}
            with DataGuards().recording():
                read = read_chain(self.bound, mapped=True, threads=safety, **options)
            plan_read = partial(pool.plan, read.traced.template, {}, passes=self._passes, **options)
            if_dedicated = None if is_off else PlanIfDedicated(pool, lambda engines: plan_read(as_dedicated=engines))
            prefetched = frozenset(read.sites) if is_off else frozenset()
            calls = own_calls(read.sites, prefetched, read.code_sites.left)
            rows = call_rows(read.traced, plan_read(), calls, if_dedicated=if_dedicated)
            rows = switched_off(rows) if is_off else rows
        classes = {row.name for row in composites}
        names = dict.fromkeys(row.name for row in composites if row.status is Status.PREFETCHED)
        planned_parts = dict(rows_of_planned_parts(self._chain))
        report = explain(
            self._understood,
            optimised,
            self._engines,
            trace=trace,
            own_calls=sites,
            more=[
                *(f"the calls that {name} makes one after the other, side by side" for name in names),
                *(f"calls inside {path}, if it is called" for path in planned_parts),
            ],
            left=left_for_form(self._last),
            calls=[
                *(row for row in rows if row.target not in classes),
                *composites,
                *itertools.chain.from_iterable(planned_parts.values()),
            ],
        )
        waits = () if rules is None else advice(self._chain, rules.threads)
        advice_lines = (*report.advice, *waits)
        return report_with_rules(replace(report, advice=advice_lines), self._serving, self._routing, self._gate)

    @property
    def serving(self) -> Serving | None:
        """Return what `engines=` has bound, and what it left alone; None without it."""
        return self._serving

    def last_trace(self, timeout: float = 5.0) -> QueryTrace | None:
        """The trace of the last call that was started on this object; None before the first one."""
        return self._last[0].trace.result(timeout) if self._last else None

    @property
    def shadow(self) -> ShadowReport:
        """Return how the calls that the original made once more compared; see `accelerate(..., shadow=)`."""
        return ShadowReport() if self._shadow is None else self._shadow.report

    # ------------------------------------------------------------ one call

    def _start(
        self,
        input: Any,
        config: RunnableConfig | None,
        kwargs: Mapping[str, Any] | None = None,
        entry: EntryPoint | None = None,
        limit: ConcurrencyLimit | None = None,
        *,
        is_whole_call: bool = False,
        streamed: bool = True,
    ) -> StartedCall:
        """Start the live query; without one when there is nothing to run ahead, or planning failed: the original.

        `entry`: for entry points that may prefetch calls of the user's own models and retrievers. `is_whole_call`: all
        of the call runs in `StartedCall.running`. `streamed`: the entry may ask models to stream their answers. Raises
        `RegistrationError` for options that make no sense.
        """
        plan = None if entry is None or kwargs else self._prefetch_plan
        has_plan, merged = self._pool is not None or plan is not None, config
        if self.config or has_plan or type(config) not in (dict, type(None)):
            merged = ensure_config(self._with_own(config) if self.config else config)
        requested, runs = requested_context(merged), active_runs((merged or {}).get("callbacks"))
        rules, gated = rules_of_call(self._routing), None
        if self._pool is None and (is_whole_call or streamed) and (plan is not None or self._composites is not None):
            gated = self._gate.begin(is_inside=bool(runs))
        if gated is not None and gated.is_in_place:
            return self._in_place(config, CallOptions(requested, runs, AnswerForm.UNKNOWN, rules), plan, gated)
        if merged is not None and has_plan:
            try:
                is_unknown = streamed or kwargs or self._pool is None
                form = AnswerForm.UNKNOWN if is_unknown else form_of_answers(merged)
                with under_routing(rules):
                    started = self._started(
                        input, merged, CallOptions(requested, runs, form, rules), plan, entry, limit, is_whole_call
                    )
            except Exception as error:  # nothing of the original has run yet
                log_fallback(error, self.bound)
            else:
                if started is not None:
                    return started._replace(gated=gated)
        return self._unplanned(config, requested, runs, rules)._replace(gated=gated)

    def _in_place(
        self, config: RunnableConfig | None, call_options: CallOptions, plan: PrefetchPlan | None, gated: GatedQuery
    ) -> StartedCall:
        """Start a call whose provider calls take less time than to prefetch them; it is traced if it has a plan."""
        requested, runs, _, rules = call_options
        started = self._unplanned(config, requested, runs, rules)._replace(composites=None, gated=gated)
        if plan is None or not gated.is_measured:
            return started
        pool = plan.pool
        ensure_engine(pool)
        query = new_query(requested, runs, self._app, None, pool.runtime.time())
        run = pool.runtime.watch(query, joins=True)
        meter_run(rules, run, pool)
        gated.trace_in(run)
        self._last[:] = [run]
        return started._replace(run=run, deadline=Deadline.of(run))

    def _rules(self, config: RunnableConfig | None) -> CompositeRules | None:
        """Return the rules for composites, which do not hand on `max_concurrency`; None if the caller says that."""
        return None if config and config.get("max_concurrency") is not None else self._composites

    def _with_own(self, config: RunnableConfig | None) -> RunnableConfig:
        """Return a config merged with the one bound to this object, as the framework's bindings merge theirs."""
        merged = merge_configs(self.config, config)
        return merge_configs(merged, *(factory(merged) for factory in self.config_factories))

    def _unplanned(
        self,
        config: RunnableConfig | None,
        requested: RequestedContext,
        runs: list[Any],
        routing: RoutingRules | None,
    ) -> StartedCall:
        """Start the original alone, without a plan.

        It belongs to the query around it if the same context was requested there, and otherwise has its own deadline
        and app.
        """
        clock = time.monotonic if self._engines is None else self._engines.runtime.time
        request_context, deadline = unplanned(requested, runs, self._app, clock)
        return StartedCall(
            None,
            config,
            self._chain,
            request_context=request_context,
            deadline=deadline,
            composites=self._rules(config),
            routing=routing,
        )

    def _started(
        self,
        input: Any,
        config: RunnableConfig,
        call_options: CallOptions,
        plan: PrefetchPlan | None,
        entry: EntryPoint | None,
        limit: ConcurrencyLimit | None,
        is_whole_call: bool,
    ) -> StartedCall | None:
        """Start the live query of a call, with its prefetches; return None if there is nothing to plan.

        A callback handler joins the config only where user code may run: the query then learns what it computed, and
        pool-backed objects find the query through it.
        """
        table = None
        if plan is not None and entry is not None:
            table = plan.calls(input, config, limit or self._limit, entry)
        pool, traced = self._pool, self._traced
        if table is not None and plan is not None:
            pool, traced = plan.pool, plan.traced
        if pool is None:
            return None
        run = self._submit(input, call_options, pool, traced, table)
        started = StartedCall(
            run,
            config,
            self._chain,
            table,
            deadline=Deadline.of(run),
            composites=self._rules(config),
            routing=call_options.routing,
        )
        meter_run(call_options.routing, run.query_run, pool)
        self._last[:] = [run]
        if entry is not None and not entry.streams and plan is None and run.claiming is not Claiming.ALLOWED:
            return started  # only traced: the context variable of `live` will do, without a callback at every node
        watched = traced.watched if run.claiming is Claiming.ALLOWED else {}
        is_lowered = all(node.level == "lowered" for node in traced.report)
        if (
            is_whole_call and not watched and is_lowered and not call_options.runs
        ):  # handlers of runs around it come first
            return started  # no code of the user's runs, which might leave the context for a thread of its own
        try:
            handler = SessionHandler(run, watched)
            started = started._replace(config=joined_config(config, handler))
        except BaseException:
            started.give_up()
            raise
        return started

    def _submit(
        self, input: Any, call_options: CallOptions, pool: EnginePool, traced: TraceResult, table: QueryCalls | None
    ) -> QueryRun | SubplanRun:
        """Start the e-graph of a call: as a subplan of the live query around it, or as a query of its own.

        If the graph gains nothing, the query is only traced. `table`: the call's prefetches of the user's own models,
        if any.
        """
        optimised = self._plan(traced, pool, input)
        around = context_of(call_options.requested, call_options.runs, pool)
        if table is None and (query_run := joinable(around.run)) is not None:
            return query_run.begin_subplan(optimised.graph, traced.calls, input, form=call_options.form)
        query = new_query(call_options.requested, call_options.runs, self._app, input, pool.runtime.time())
        gains = optimised.source is None or graph_saves_time(optimised.source, optimised.graph)
        if table is None and not gains:
            return pool.runtime.watch(query, joins=True)
        if table is not None:
            ensure_engine(pool)
            table.open(query.id)
        if isinstance(pool, ProviderPool):  # no engine needs to know how far the end is
            optimised = replace(optimised, graph=without_tail(optimised.graph))
        try:
            run = submit(pool, query, optimised, traced.calls, call_options.form)
        except BaseException:
            if table is not None:
                table.close()
            raise
        if table is not None:
            table.begin(run)
        return run

    def _arguments(self, started: StartedCall, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(kwargs) if started.run is None else {**self.kwargs, **kwargs}

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Call the original's `invoke` while a live query runs; with `shadow=`, repeat and compare a share of calls."""
        if self._shadow is not None and self._shadow.choose():
            fast = partial(self._invoke, input, config, **kwargs)
            return self._shadow.call(fast, original_call(self.bound, input, config, kwargs, is_async=False))
        return self._invoke(input, config, **kwargs)

    def _invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        started = self._start(input, config, kwargs, EntryPoint(on_loop=False), is_whole_call=True, streamed=False)
        with started.running():
            return started.chain.invoke(input, started.config, **self._arguments(started, kwargs))

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Call the original's `ainvoke` as `invoke` does, in a loop."""
        if self._shadow is not None and self._shadow.choose():
            fast = partial(self._ainvoke, input, config, **kwargs)
            return await self._shadow.acall(fast, original_call(self.bound, input, config, kwargs, is_async=True))
        return await self._ainvoke(input, config, **kwargs)

    async def _ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Start the live query and await the original's answer. Raise `QueryTimeout` when its deadline passes."""
        started = self._start(input, config, kwargs, EntryPoint(on_loop=True), is_whole_call=True, streamed=False)
        with started.running():
            async with interrupting(started.deadline):
                return await started.chain.ainvoke(input, started.config, **self._arguments(started, kwargs))

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        started = self._start(input, config, kwargs, EntryPoint(on_loop=False, streams=True))
        arguments = self._arguments(started, kwargs)
        yield from started.items(lambda: started.chain.stream(input, started.config, **arguments))

    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        """Yield the original's chunks while a live query runs, which starts with the first one that is read."""
        started = self._start(input, config, kwargs, EntryPoint(on_loop=True, streams=True))
        arguments = self._arguments(started, kwargs)
        async with aclosing(
            started.aitems(lambda: started.chain.astream(input, started.config, **arguments))
        ) as chunks:
            async for chunk in chunks:
                yield chunk

    def transform(self, input: Iterator[Any], config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        started = self._original(config)
        yield from started.items(lambda: started.chain.transform(input, config, **kwargs))

    async def atransform(
        self, input: AsyncIterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Yield what the original makes of pieces of input; nothing is prefetched, as the whole input is not known."""
        started = self._original(config)
        async with aclosing(started.aitems(lambda: started.chain.atransform(input, config, **kwargs))) as chunks:
            async for chunk in chunks:
                yield chunk

    def _original(self, config: RunnableConfig | None, requested: RequestedContext | None = None) -> StartedCall:
        """Start the original alone: nothing can be prefetched, as where the input comes in pieces."""
        merged = ensure_config(config)
        runs, rules = active_runs(merged.get("callbacks")), rules_of_call(self._routing)
        return self._unplanned(config, requested_context(merged) if requested is None else requested, runs, rules)

    def astream_events(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        if version_of_events(self.bound, kwargs) == "v3":
            return self._events_v3(input, config, **kwargs)
        return self._events(input, config, **kwargs)

    async def _events(self, input: Any, config: RunnableConfig | None, **kwargs: Any) -> AsyncIterator[Any]:
        """Yield events. Nothing begins before the first one is asked for."""
        entry = EntryPoint(on_loop=True, streams=True, listeners=event_listeners())
        started = self._start(input, config, {}, entry)
        arguments = self._arguments(started, kwargs)
        make_events: Any = lambda: started.chain.astream_events(input, started.config, **arguments)  # noqa: E731
        async with aclosing(started.aitems(make_events)) as events:
            async for event in events:
                yield event

    async def _events_v3(self, input: Any, config: RunnableConfig | None, **kwargs: Any) -> Any:
        started = self._original(config)
        with started.running():
            return await started.chain.astream_events(input, config, **kwargs)


hide_from_stack_levels(globals())
