"""The live query of each call of an accelerated LlamaIndex object: planned per entry, started per call."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from llama_index.core.schema import QueryBundle, QueryType
from llama_index.core.workflow import Workflow

from teola_plugin.adapters.automatic_engines import Serving, watching_pool
from teola_plugin.adapters.calls import (
    Deadline,
    RequestedContext,
    context_of,
    interrupting,
    joined,
    new_query,
    unplanned,
)
from teola_plugin.adapters.llamaindex.checking import original_call
from teola_plugin.adapters.llamaindex.copies import PARTS, Accelerate, nonblocking, with_parts
from teola_plugin.adapters.llamaindex.prefetching import (
    AllowedModels,
    PrefetchPlan,
    QueryPrefetcher,
    plan_of_sites,
    plan_prefetching,
    rows_of_sites,
)
from teola_plugin.adapters.llamaindex.started_calls import JoinedRun, Run, StartedCall, close_after
from teola_plugin.adapters.plan_report import CallRow, PlanReport, switched_off
from teola_plugin.adapters.planned_queries import (
    expected_sizes,
    joinable,
    log_fallback,
    plan_saves_time,
    submit,
)
from teola_plugin.adapters.routing import (
    RoutingRules,
    current_rules,
    meter_run,
    rules_of_call,
    under_routing,
)
from teola_plugin.adapters.shadow import Shadow
from teola_plugin.adapters.thread_safety import ThreadSafety
from teola_plugin.passes import Optimised, Pass
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import AnswerForm
from teola_plugin.runtime.prefetch_gate import PrefetchGate
from teola_plugin.runtime.query_run import Claiming, QueryRun, current_run
from teola_plugin.shims.llamaindex.interceptors import live_scopes
from teola_plugin.shims.stack_levels import hide_from_stack_levels
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.llamaindex.trace import CHUNKS, NODES, QUERY_TEXT, TEXTS, TracedEntry, entries_of, trace

GraphInput = dict[str, Any]
"""The input of a query, by the names that the graph has for its parts."""
NOT_DECLARED = ThreadSafety()


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of an accelerated object, and the request context of its queries."""

    passes: tuple[Pass, ...] | None = None
    """Passes that are used instead of the pool's; None for the pool's."""
    speculate: str = "auto"
    app: str = "default"
    tenant: str = ""
    """The tenant whose cached prefixes these queries may share: a cache salt."""
    deadline_s: float | None = None
    """Seconds after which a query fails with `QueryTimeout`."""
    weight: float = 1.0
    """Their share among the queries of the pool; 1.0 is ordinary."""
    threads: ThreadSafety = NOT_DECLARED
    """Says which of the user's own objects take several sync calls at once."""

    @property
    def requested_context(self) -> RequestedContext:
        """The values that were set; one that has its default is left to the query around."""
        return RequestedContext(self.tenant or None, self.deadline_s, None if self.weight == 1.0 else self.weight)


class ServedObject:
    """The original of an accelerated object, and the engines that serve its models."""

    def __init__(self, original: Any, pool: EnginePool | None, rules: RoutingRules | None = None) -> None:
        self.original = original
        self.pool = pool if pool is not None and pool.engine_names else None
        """The pool whose engines plans use; None without engines."""
        self.tracing_pool = pool
        """The pool that traces the calls, which may have no engines; None to trace only calls that prefetch others."""
        self.rules = rules
        """Which engines do the work of which models during a call; None to leave that to the object around."""
        self.accelerate_copy: Callable[..., Any] = unchanged
        """`accelerate` with the same options, for a copy of the original."""

    def routing(self) -> AbstractContextManager[None]:
        """Return a context in which the engines do the work of this object's models."""
        return under_routing(self.rules)

    def calling(self) -> AbstractContextManager[None]:
        """Return the context of one call of the original: as `routing`, and its calls of models are counted for it."""
        return under_routing(rules_of_call(self.rules))


def unchanged(obj: Any) -> Any:
    """Return the object itself: copies of a part that was accelerated for its whole are not accelerated."""
    return obj


class Session(ServedObject):
    """The calls of an accelerated object, with their engines, plans and traces."""

    def __init__(
        self,
        original: Any,
        pool: EnginePool | None,
        settings: Settings,
        accelerate_part: Accelerate,
        rules: RoutingRules | None = None,
    ) -> None:
        super().__init__(original, pool, rules)
        self.settings = settings
        self._accelerate_part = accelerate_part
        self.serving: Serving | None = None
        """The engines that `engines=` chose or started."""
        self.shadow: Shadow | None = None
        """Compares a share of the calls with the original's."""
        self._traced: dict[tuple[str, int], TracedEntry] = {}
        self._prefetch_plans: dict[tuple[str, int, bool], tuple[TracedEntry, PrefetchPlan | None]] = {}
        self.gate = PrefetchGate(live_scopes)
        """Says whether prefetching is worth its time."""
        self._last: list[Run] = []

    def with_request_context(self, settings: Settings) -> Session:
        """Return a session of the same object with other settings; plans are shared."""
        session = self._same_object(settings)
        session._traced, session.serving, session.shadow = self._traced, self.serving, self.shadow
        session._prefetch_plans, session.gate = self._prefetch_plans, self.gate
        session.accelerate_copy = partial(self.accelerate_copy, settings=settings)
        return session

    def _same_object(self, settings: Settings) -> Session:
        return Session(self.original, self.tracing_pool, settings, self._accelerate_part, self.rules)

    # ------------------------------------------------------------ plans and explanations

    def entry(self, entry: str, texts: int = 0) -> TracedEntry:
        """Return the traced entry; it is traced again when the object has changed."""
        with self.routing():
            traced = self._traced.get((entry, texts))
            if traced is None or not traced.holds:
                traced = self._traced[entry, texts] = trace(self.original, entry, texts)
            return traced

    def plan(self, entry: str, input: Any = None, texts: int = 0) -> Optimised | None:
        """Return the e-graph of an entry; None without engines."""
        if self.pool is None:
            return None
        return self._plan_template(self.pool, self.entry(entry, texts).traced, input)

    def _plan_template(
        self, pool: EnginePool, traced: TraceResult, input: Any, as_dedicated: Collection[str] = ()
    ) -> Optimised:
        """Return the e-graph of a traced entry for this input, with the engines `as_dedicated` taken for dedicated."""
        sizes, passes, speculate = expected_sizes(traced, input), self.settings.passes, self.settings.speculate
        return pool.plan(traced.template, sizes, passes=passes, speculate=speculate, as_dedicated=as_dedicated)

    def report(self, entry: str, input: Any = None) -> PlanReport:
        """Return the report of an entry, which `explain()` prints."""
        from teola_plugin.adapters.explain import PlanIfDedicated, ended_trace, explain, left_for_form

        trace, traced, left = ended_trace(self._last), self._reported_entry(entry).traced, left_for_form(self._last)
        calls, if_dedicated, optimised, more = None, None, self.plan(entry, input), tuple[str, ...]()
        if optimised is None or not plan_saves_time(optimised):
            more = self._describe_prefetching(entry)
        if self.pool is None or more:
            calls = list(self._rows(entry))
        else:
            if_dedicated = PlanIfDedicated(self.pool, partial(self._plan_template, self.pool, traced, input))
        options = dict[str, Any](trace=trace, more=more, left=left)
        return explain(traced, optimised, self.pool, calls=calls, if_dedicated=if_dedicated, **options)

    def _reported_entry(self, entry: str) -> TracedEntry:
        """Return the traced entry that says what was understood: the one for prefetching if it has own classes."""
        if self.pool is not None:
            return self.entry(entry)
        self._any_prefetch_plan(entry)
        planned = (self._prefetch_plans.get((entry, 0, is_async)) for is_async in (False, True))
        entries_with_code = (traced for traced, _ in filter(None, planned) if traced.own_code)
        return next(entries_with_code, None) or self.entry(entry)

    def _rows(self, entry: str) -> Iterator[CallRow]:
        """Yield a row for each place where an entry calls the user's own models and stores."""
        from teola_plugin.adapters.explain import left_rows

        plan, allowed = self._any_prefetch_plan(entry), AllowedModels(self.settings.threads)
        is_off = self.settings.speculate == "off"
        with self.routing():
            traced = trace(self.original, entry, 0, allowed) if plan is None else plan.entry
            plan = plan_of_sites(traced, allowed) if is_off else plan
        rows = rows_of_sites(traced.traced, plan, allowed.sites if plan is None else plan.sites)
        yield from switched_off(rows) if is_off else rows
        yield from left_rows(allowed.left, {})

    def _describe_prefetching(self, entry: str) -> tuple[str, ...]:
        """Return a phrase for calls of the user's own models that are prefetched without a graph of the pool."""
        if self._any_prefetch_plan(entry) is None:
            return ()
        return (f"calls that {type(self.original).__name__} makes one after the other, side by side",)

    def _any_prefetch_plan(self, entry: str) -> PrefetchPlan | None:
        """Return the plan of the sync entry, else that of the async one."""
        return self.prefetch_plan(entry) or self.prefetch_plan(entry, is_async=True)

    def prefetch_plan(self, entry: str, texts: int = 0, *, is_async: bool = False) -> PrefetchPlan | None:
        """Return the plan of the calls of the user's own models that an entry prefetches; None for none.

        It is made again when the object has changed. `is_async`: the async method of the entry is called.
        """
        if self.settings.speculate == "off" or isinstance(self.original, Workflow):
            return None
        with self.routing():
            planned = self._prefetch_plans.get((entry, texts, is_async))
            if planned is None or not planned[0].holds:
                planned = plan_prefetching(self.original, entry, texts, self.settings.threads, is_async=is_async)
                self._prefetch_plans[entry, texts, is_async] = planned
            return planned[1]

    @property
    def last(self) -> Run | None:
        return self._last[0] if self._last else None

    # ------------------------------------------------------------ one call

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the method `name` of the original. With `shadow=`, compare a share of the calls with the original's."""
        entry, read_arguments, is_async = _ENTRIES[name]
        call = self.acall if is_async else self.call

        def run() -> Any:
            graph_input = _read(read_arguments, args, kwargs)
            return call(entry, graph_input, lambda target: getattr(target, name)(*args, **kwargs))

        if self.shadow is None or not self.shadow.choose():
            return run()
        original = original_call(self.original, name, args, kwargs)
        return self.shadow.acall(run, original) if is_async else self.shadow.call(run, original)

    def call(self, entry: str, graph_input: GraphInput | None, invoke: Callable[[Any], Any]) -> Any:
        """Return what `invoke` returns for the target, while the live query of the call runs."""
        with self.calling():
            call = self._begin(entry, graph_input, is_async=False)
            with call.failing(), joined(call.query_run, call.request_context):
                answer = invoke(call.target)
                call.check()
        return close_after(call, answer)

    async def acall(self, entry: str, graph_input: GraphInput | None, invoke: Callable[[Any], Awaitable[Any]]) -> Any:
        """`call` in a loop."""
        with self.calling():
            call = self._begin(entry, graph_input, is_async=True)
            with call.failing(), joined(call.query_run, call.request_context):
                async with interrupting(call.deadline):
                    answer = await invoke(call.target if call.run is None else nonblocking(call.target))
        return close_after(call, answer)

    def _begin(self, entry: str, graph_input: GraphInput | None, *, is_async: bool = True) -> StartedCall:
        """Start the live query of a call. If it cannot be planned, the call runs without one."""
        current = current_run.get()
        runs = [] if current is None else [current]
        rules = None if self.rules is None else current_rules.get()
        if self.pool is not None:
            try:
                target = self._target_for(entry, graph_input)
                run = self._submit(self.pool, entry, graph_input, runs)
            except Exception as error:  # nothing of the original has run yet
                log_fallback(error, self.original, f"a call of `{entry}`")
            else:
                self._last[:] = [run]
                meter_run(rules, run.query_run, self.pool)
                started = StartedCall(run, target, None, Deadline.of(run), None, rules)
                return started if is_async else self._with_prefetched_calls(started, entry, graph_input)
        clock = time.monotonic if self.tracing_pool is None else self.tracing_pool.runtime.time
        request_context, deadline = unplanned(self.settings.requested_context, runs, self.settings.app, clock)
        unplanned_call = StartedCall(None, self.original, request_context, deadline, rules=rules)
        if self.pool is not None:
            return unplanned_call
        is_off = self.settings.speculate == "off" or isinstance(self.original, Workflow)
        is_off = is_off or (is_async and not self._has_async_plan(entry, graph_input))
        if is_off and self.tracing_pool is None:
            return unplanned_call
        return self._begin_without_engines(entry, graph_input, unplanned_call, runs, is_off=is_off, is_async=is_async)

    def _has_async_plan(self, entry: str, graph_input: GraphInput | None) -> bool:
        """Return True if an async call of an entry prefetches calls that code of the user's own makes."""
        try:
            texts = 0 if graph_input is None else len(graph_input.get(TEXTS, ()))
            return graph_input is not None and self.prefetch_plan(entry, texts, is_async=True) is not None
        except Exception as error:  # nothing of the original has run yet
            log_fallback(error, self.original, f"a call of `{entry}`")
            return False

    def _with_prefetched_calls(self, call: StartedCall, entry: str, graph_input: GraphInput | None) -> StartedCall:
        """Prefetch calls of models that engines only carry to their provider: the graph itself starts none of these.

        Their objects run as they are: a graph of their own would send the same requests again.
        """
        run = call.run
        if graph_input is None or not isinstance(run, QueryRun) or run.claiming is Claiming.ALLOWED:
            return call
        try:
            plan = self.prefetch_plan(entry, len(graph_input.get(TEXTS, ())))
            if plan is None or not plan.intercept():
                return call
            target = with_parts(self.original, plan.entry.lowered, self._accelerate_part)
            with joined(run):
                return call._replace(target=target, prefetcher=QueryPrefetcher(plan, graph_input, None))
        except Exception as error:  # nothing of the original has run yet
            log_fallback(error, self.original, f"a call of `{entry}`")
            return call

    def _begin_without_engines(
        self,
        entry: str,
        graph_input: GraphInput | None,
        unplanned_call: StartedCall,
        runs: Sequence[Any],
        *,
        is_off: bool,
        is_async: bool,
    ) -> StartedCall:
        """Start a call without engines, and trace it, if it or its parts prefetch calls of the user's own models.

        If neither does, trace it in the pool that was given, or return `unplanned_call` without a pool. `is_off`:
        nothing is prefetched.
        """
        run, plan, target = None, None, self.original
        gated = None if is_off or self.tracing_pool is not None else self.gate.begin(is_inside=bool(runs))
        is_in_place = gated is not None and gated.is_in_place
        is_off |= is_in_place
        try:
            if not is_off:
                texts = 0 if graph_input is None else len(graph_input.get(TEXTS, ()))
                plan = None if graph_input is None else self.prefetch_plan(entry, texts, is_async=is_async)
                plan = plan if plan is not None and plan.intercept() else None
            if plan is not None or (not is_off and _has_gaining_parts(target, self.settings.threads)):
                target = with_parts(target, frozenset() if plan is None else plan.entry.lowered, self._accelerate_part)
            if self.tracing_pool is None and plan is None and target is self.original and not is_in_place:
                return unplanned_call
            run = self._watch_call(runs)
            if gated is not None and isinstance(run, QueryRun):
                gated.trace_in(run)
            prefetcher = None if plan is None else QueryPrefetcher(plan, graph_input, run.query_run)
        except Exception as error:  # nothing of the original has run yet
            log_fallback(error, self.original, f"a call of `{entry}`")
            if run is not None:
                run.close()
            return unplanned_call
        self._last[:] = [run]
        return unplanned_call._replace(run=run, target=target, prefetcher=prefetcher, gated=gated)

    def _watch_call(self, runs: Sequence[Any]) -> Run:
        """Start the trace of a call without engines: as a query, or as a part of the query around it."""
        pool = self.tracing_pool or watching_pool()
        outer_run = joinable(context_of(self.settings.requested_context, runs, pool).run)
        if outer_run is not None:
            return JoinedRun(outer_run)
        query = new_query(self.settings.requested_context, runs, self.settings.app, None, pool.runtime.time())
        run = pool.runtime.watch(query, joins=True)
        meter_run(current_rules.get(), run, pool)
        return run

    def _submit(self, pool: EnginePool, entry: str, graph_input: GraphInput | None, runs: Sequence[Any]) -> Run:
        """Submit the graph of a call: as a query, or as a part of the query around it."""
        outer_run = joinable(context_of(self.settings.requested_context, runs, pool).run)
        query = new_query(self.settings.requested_context, runs, self.settings.app, graph_input, pool.runtime.time())
        if graph_input is None:  # it cannot be planned; its parts can
            return JoinedRun(outer_run) if outer_run is not None else pool.runtime.watch(query, joins=True)
        texts = len(graph_input.get(TEXTS, ()))
        traced = self.entry(entry, texts).traced
        optimised = self._plan_template(pool, traced, graph_input)
        if outer_run is not None:
            if not plan_saves_time(optimised):
                return JoinedRun(outer_run)
            part = outer_run.begin_subplan(optimised.graph, traced.calls, graph_input, form=AnswerForm.WHOLE)
            return part or JoinedRun(outer_run)
        if not plan_saves_time(optimised):
            return pool.runtime.watch(query, joins=True)
        return submit(pool, query, optimised, traced.calls, AnswerForm.WHOLE)

    def _target_for(self, entry: str, graph_input: GraphInput | None) -> Any:
        """Return the original, with those engines and retrievers in it accelerated that the graph does not contain."""
        lowered = frozenset[int]()
        if graph_input is not None:
            lowered = self.entry(entry, len(graph_input.get(TEXTS, ()))).lowered
        return with_parts(self.original, lowered, self._accelerate_part)


def _has_gaining_parts(node: Any, threads: ThreadSafety) -> bool:
    """Return True if a part of the object prefetches calls when it is accelerated by itself."""
    values = vars(node).values()
    items = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
    parts = [item for item in items if isinstance(item, PARTS)]
    return any(plan_prefetching(part, entry, 0, threads)[1] is not None for part in parts for entry in entries_of(part))


def _read(
    read_arguments: Callable[..., GraphInput | None], args: tuple[Any, ...], kwargs: GraphInput
) -> GraphInput | None:
    """Return the input for the graph; None for arguments that the graph, or the method, does not know."""
    try:
        return read_arguments(*args, **kwargs)
    except Exception:  # the method itself says what is wrong
        return None


def query_input(query: QueryType) -> GraphInput | None:
    """Return a query's input for the graph; None for a query that brings its own vector."""
    if isinstance(query, str):
        return {QUERY_TEXT: query} if query else None
    if not isinstance(query, QueryBundle) or query.embedding is not None or query.image_path is not None:
        return None
    texts = list(query.embedding_strs)
    if texts == [query.query_str]:
        return {QUERY_TEXT: query.query_str}
    return {QUERY_TEXT: query.query_str, TEXTS: texts} if texts else None


def _query_arguments(*args: Any, **kwargs: Any) -> GraphInput | None:
    (query,) = (*args, *kwargs.values())
    return query_input(query)


def _synthesize_arguments(*args: Any, **kwargs: Any) -> GraphInput | None:
    """Return the graph's input for arguments of `synthesize`, under the names of query engines or synthesizers."""
    if "query_bundle" in kwargs:  # its name in query engines
        kwargs["query"] = kwargs.pop("query_bundle")

    def arguments(query: QueryType, nodes: Any, additional_source_nodes: Any = None) -> GraphInput:
        return {QUERY_TEXT: query if isinstance(query, str) else query.query_str, NODES: list(nodes)}

    return arguments(*args, **kwargs)


def _response_arguments(query_str: str, text_chunks: Any, **kwargs: Any) -> GraphInput | None:
    """Return the input of a synthesizer's `get_response`; None if there are arguments that the graph does not know."""
    return None if kwargs or not text_chunks else {QUERY_TEXT: query_str, CHUNKS: list(text_chunks)}


_SYNC_ENTRIES: Mapping[str, tuple[str, Callable[..., GraphInput | None]]] = {
    "query": ("query", _query_arguments),
    "retrieve": ("retrieve", _query_arguments),
    "synthesize": ("synthesize", _synthesize_arguments),
    "get_response": ("respond", _response_arguments),
    "chat": ("chat", lambda *args, **kwargs: None),
    "stream_chat": ("chat", lambda *args, **kwargs: None),
}
_ENTRIES = {
    **{name: (*entry, False) for name, entry in _SYNC_ENTRIES.items()},
    **{f"a{name}": (*entry, True) for name, entry in _SYNC_ENTRIES.items()},
}
"""For each method that starts a query: the traced entry, the reader of its arguments, and whether it is async."""


hide_from_stack_levels(globals())
