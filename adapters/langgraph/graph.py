"""Accelerated graphs: instances of a subclass of the original's class that share the original's state.

The user's object keeps the original's nodes and subgraphs. A *runner* runs: another instance with the same state, whose
nodes tell the live query when their tasks begin. A call of an accelerated graph is one live query, which its nodes
join.
"""

from __future__ import annotations

import copy
import functools
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import merge_configs
from langchain_core.utils.aiter import aclosing
from langgraph.errors import GraphBubbleUp
from langgraph.pregel import Pregel

from teola_plugin.adapters.automatic_engines import Serving, report_with_rules
from teola_plugin.adapters.calls import (
    NO_APP,
    Deadline,
    RequestedContext,
    aitems_inside,
    context_of,
    items_inside,
    new_query,
    unplanned,
)
from teola_plugin.adapters.langchain.listening import active_runs, form_of_answers, requested_context
from teola_plugin.adapters.langchain.started_calls import StartedCall
from teola_plugin.adapters.langgraph.agents.agent_call import AgentCall, is_in_agent, outside_agents
from teola_plugin.adapters.langgraph.agents.agent_tools import AgentTools
from teola_plugin.adapters.langgraph.plans import Parts, Plans, is_same_shape, shaping_of
from teola_plugin.adapters.method_adapter import subclass_of
from teola_plugin.adapters.planned_queries import joinable, log_fallback
from teola_plugin.adapters.provider_executor import ProviderPool, shared_pool
from teola_plugin.adapters.routing import RoutingRules, meter_run, rules_of_call, under_routing
from teola_plugin.adapters.thread_safety import NOBODY
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.observe.steps import OpenStep
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.prefetch_gate import GatedQuery, PrefetchGate
from teola_plugin.runtime.query_run import QueryRun, current_position, during
from teola_plugin.shims.langchain_interceptors import live_scopes
from teola_plugin.shims.pydantic import sharing
from teola_plugin.shims.stack_levels import hide_from_stack_levels

if TYPE_CHECKING:
    from teola_plugin.adapters.plan_report import PlanReport


T = TypeVar("T")
_END: Any = object()


class GraphCall:
    """One call of a graph, as its nodes share it. Used from any thread."""

    def __init__(
        self, graph: object, run: QueryRun, parts: Parts | None = None, agent: AgentCall | None = None
    ) -> None:
        """`graph`: stands for the accelerated graph. `parts`: the parts of the query that run before their nodes."""
        self.graph, self.run, self.parts, self.agent = graph, run, parts, agent
        self.steps = Steps(run)
        self.succeeded = False
        """Set once all items of the call were read."""

    def close(self) -> None:
        """End the call: give up what nobody has claimed."""
        if self.agent is not None:
            self.agent.close()
        if self.parts is not None:
            self.parts.close(succeeded=self.succeeded)
        self.steps.close()


class Steps:
    """Supersteps and nodes of one call, in the trace of its query. Used from any thread.

    A superstep lasts until the next one begins.
    """

    def __init__(self, run: QueryRun) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._number: int | None = None
        self._superstep: OpenStep | None = None

    def start_node(self, name: str, parent: OpenStep | None, number: int, metadata: Mapping[str, Any]) -> OpenStep:
        """Start the step of a node's task in the superstep of that number. `metadata`: that of the task's config."""
        triggers = metadata.get("langgraph_triggers", ())
        with self._lock:
            if self._superstep is None or number != self._number:
                self._end_superstep()
                self._number = number
                self._superstep = self._run.step_began("superstep", str(number), parent)
            superstep = self._superstep
        return self._run.step_began("node", name, superstep, triggers=triggers)

    def _end_superstep(self) -> None:
        if self._superstep is not None:
            self._run.step_ended(self._superstep)

    def close(self) -> None:
        """End with the call."""
        with self._lock:
            self._end_superstep()
            self._superstep = None


class NodeTask:
    """A context manager around one task of a node. A class: generators would take more of the time that tasks take."""

    __slots__ = ("_agent", "_call", "_config", "_input", "_is_async", "_name", "_step", "_token")

    def __init__(self, call: GraphCall, name: str, input: Any, config: Mapping[str, Any], is_async: bool) -> None:
        self._call, self._name, self._input, self._config = call, name, input, config
        self._is_async = is_async
        self._agent: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        """Begin a node's task: trace it as a step, start the node's plan, and let an agent listen to its models."""
        call, name, config = self._call, self._name, self._config
        metadata = config.get("metadata") or {}
        number = int(metadata.get("langgraph_step", 0))
        outer = current_position.get() if call.parts is None else call.parts.position_of(name, config)
        self._step = call.steps.start_node(name, outer.step, number, metadata)
        node_position = replace(outer, step=self._step, form=form_of_answers(config))
        if call.parts is not None:
            held_part = call.parts.start_node(name, self._input, config, node_position, number, is_async=self._is_async)
            node_position = node_position if held_part is None else replace(node_position, deferred=held_part)
            prefetched = () if call.agent is None else call.agent.tools.tools
            options: Any = {"is_async": self._is_async, "skip": prefetched}
            call.parts.start_tools(name, self._input, config, node_position, number, **options)
        self._token = current_position.set(node_position)
        if call.agent is not None:
            self._agent = call.agent.in_node(name)
        elif is_in_agent():
            self._agent = outside_agents()
        if self._agent is not None:
            self._agent.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """End a node's task in the trace: done, failed, or interrupted if it leaves for a human or an outer graph."""
        try:
            if self._agent is not None:
                self._agent.__exit__(kind, error, trace)
        finally:
            with suppress(ValueError):  # a generator may be closed in another context than it began in
                current_position.reset(self._token)
            outcome = "done" if error is None else "failed"
            if isinstance(error, GraphBubbleUp):  # an interrupt, a command for the graph around
                outcome = "interrupted"
            self._call.run.step_ended(self._step, outcome)


current_call: ContextVar[GraphCall | None] = ContextVar("teola_graph_call", default=None)
"""The call that the running code belongs to: of the innermost accelerated graph."""


def in_call(call: GraphCall, items: Iterator[T]) -> Iterator[T]:
    """Yield the items, each made inside the call. The call ends with them, and is not current for their reader."""
    with closing(call):
        yield from items_inside(partial(during, current_call, call), items)
        call.succeeded = True


async def ain_call(call: GraphCall, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Yield the items as `in_call` does, in a loop."""
    with closing(call):
        async with aclosing(aitems_inside(partial(during, current_call, call), items)) as items_in_call:
            async for item in items_in_call:
                yield item
        call.succeeded = True


# ------------------------------------------------------------ nodes

_NO_TASK = nullcontext()


class WatchedNode(Runnable[Any, Any]):
    """Stands for a node in the graph that runs: tells the call when a task begins, and hands everything on to the node.

    It is no run of its own: callbacks and events are the node's alone.
    """

    def __init__(self, graph: object, name: str, node: Runnable[Any, Any]) -> None:
        self._graph, self._name, self.node = graph, name, node

    def _task(self, input: Any, config: RunnableConfig | None, *, is_async: bool) -> AbstractContextManager[None]:
        """Return the context of a task of this node; an empty one outside a call of this accelerated graph.

        Nothing is planned or traced outside of such a call.
        """
        call = current_call.get()
        if call is None or call.graph is not self._graph:
            return _NO_TASK
        return NodeTask(call, self._name, input, config or {}, is_async)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        with self._task(input, config, is_async=False):
            return self.node.invoke(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        with self._task(input, config, is_async=True):
            return await self.node.ainvoke(input, config, **kwargs)

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        with self._task(input, config, is_async=False):
            yield from self.node.stream(input, config, **kwargs)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        """Yield the node's chunks inside a task of the graph's call."""
        with self._task(input, config, is_async=True):
            async with aclosing(self.node.astream(input, config, **kwargs)) as chunks:
                async for chunk in chunks:
                    yield chunk


hide_from_stack_levels(globals())


_ACCELERATION = "_teola"
"""The attribute of accelerated graphs that holds their `Acceleration`."""


@dataclass(slots=True, eq=False)
class Acceleration:
    """The options with which a graph is accelerated, and what was made for it."""

    original: Pregel[Any, Any, Any, Any]
    pool: EnginePool | None
    accelerate: Callable[..., Any]
    """Accelerates another graph with the same options."""
    app: str = NO_APP
    plans: Plans | None = None
    tools: AgentTools | None = None
    inner: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """Graphs that are nodes of the original, each with its accelerated graph, by identity."""
    last_run: list[QueryRun] = field(default_factory=list)
    """The query of the last call; empty before the first one."""
    serving: Serving | None = None
    """The engines that `engines=` has started."""
    composites: Any = None
    """The `CompositeRules` of its nodes, if calls of composites are prefetched."""
    routing: RoutingRules | None = None
    """The rules by which models of its nodes are routed to engines."""
    runner: Any = None
    """The graph that runs: it has the original's state, and nodes that tell when their tasks begin."""
    gate: PrefetchGate = field(default_factory=partial(PrefetchGate, live_scopes))
    """Says whether prefetching is worth its time."""
    shaping: tuple[Any, ...] = ()
    """The parts of the original that the plans and the runner's nodes were made of; see `shaping_of`."""

    def is_current(self) -> bool:
        """Return True unless a node, an interrupt or the like was set on the original since."""
        return is_same_shape(shaping_of(self.original), self.shaping)


class AcceleratedGraph:
    """A mixin before the graph's own class. All entry points of LangGraph go through `stream` and `astream`."""

    __teola_accelerated__: ClassVar[bool] = True
    if TYPE_CHECKING:
        _teola: Acceleration

    @property
    def original(self) -> Any:
        """The graph that was accelerated."""
        return self._teola.original

    @functools.wraps(Pregel.stream)
    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """Stream the original graph while a live query runs. `invoke` and all other sync entry points come here."""
        acceleration = None if "stream" in vars(self) else _acceleration_of(self)
        if acceleration is None:  # made by its class's constructor, or the method was replaced (`mock.patch.object`)
            yield from super().stream(input, config, **kwargs)  # type: ignore[misc]
            return
        started = self._started(config)
        yield from started.items(lambda: self._items(acceleration.runner, started, input, config, kwargs))

    def _items(
        self, runner: Any, started: StartedCall, input: Any, config: Any, kwargs: dict[str, Any]
    ) -> Iterator[Any]:
        """Return the runner's items, inside the call if there is a query. Runs once the first item is read."""
        items = runner.stream(input, config, **kwargs)
        call = self._call(started, kwargs)
        return items if call is None else in_call(call, items)

    @functools.wraps(Pregel.astream)
    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        """Stream the original graph while a live query runs, as `stream` does, in a loop."""
        acceleration = None if "astream" in vars(self) else _acceleration_of(self)
        started = None if acceleration is None else self._started(config)
        if acceleration is None or started is None:
            items = super().astream(input, config, **kwargs)  # type: ignore[misc]
        else:
            items = started.aitems(lambda: self._aitems(acceleration.runner, started, input, config, kwargs))
        async with aclosing(items) as chunks:
            async for chunk in chunks:
                yield chunk

    def _aitems(
        self, runner: Any, started: StartedCall, input: Any, config: Any, kwargs: dict[str, Any]
    ) -> AsyncIterator[Any]:
        """Return the runner's items as `_items` does, in a loop."""
        items = runner.astream(input, config, **kwargs)
        call = self._call(started, kwargs)
        return items if call is None else ain_call(call, items)

    # ------------------------------------------------------------ one call

    def _call(self, started: StartedCall, kwargs: Mapping[str, Any]) -> GraphCall | None:
        """Create the state that the nodes of one call share; None for a call without a query.

        Tools are not prefetched in a call that is interrupted at a node around them.
        """
        if started.run is None:
            return None
        if started.gated is not None and started.gated.is_in_place:
            return GraphCall(self._teola, started.run.query_run)
        run, plans, tools = started.run.query_run, self._teola.plans, self._teola.tools
        stops = (kwargs.get("interrupt_before"), kwargs.get("interrupt_after"))
        agent = None if tools is None or tools.is_interrupted(*stops) else AgentCall(tools, run)
        return GraphCall(self._teola, run, None if plans is None else Parts(plans, run), agent)

    def _started(self, config: RunnableConfig | None) -> StartedCall:
        """Start a call: a query of its own, or none without a pool. Raises `RegistrationError` for invalid options."""
        merged = _merged(self.config, config)  # type: ignore[attr-defined]
        call_options, runs = requested_context(merged), active_runs(merged.get("callbacks"))
        pool, composites, gated = self._teola.pool, self._teola.composites, None
        if isinstance(pool, ProviderPool) or (pool is None and composites is not None):
            gated = self._teola.gate.begin(is_inside=bool(runs))
        if pool is not None:
            try:
                return self._query(call_options, runs, pool, gated)
            except Exception as error:  # nothing of the original has run yet
                log_fallback(error, self._teola.original)
        clock = time.monotonic if pool is None else pool.runtime.time
        request_context, deadline = unplanned(call_options, runs, self._teola.app, clock)
        return self._call_of(None, config, request_context=request_context, deadline=deadline, gated=gated)

    def _query(
        self, call_options: RequestedContext, runs: list[Any], pool: EnginePool, gated: GatedQuery | None
    ) -> StartedCall:
        """Start the live query of a call, or join the one around it: a graph inside another has no query of its own."""
        outer_run = joinable(context_of(call_options, runs, pool).run)
        if outer_run is not None:
            outer_run.has_user_code = True  # its nodes'
            return self._call_of(_InnerCall(outer_run), gated=gated)
        if isinstance(pool, ProviderPool):
            pool.running_now()
        query = new_query(call_options, runs, self._teola.app, None, pool.runtime.time())
        run = pool.runtime.watch(query, joins=True)
        run.has_user_code = True  # its nodes'
        self._teola.last_run[:] = [run]
        if gated is not None:
            gated.trace_in(run)
        return self._call_of(run, deadline=Deadline.of(run), gated=gated)

    def _call_of(
        self, run: Any, config: RunnableConfig | None = None, *, gated: GatedQuery | None, **options: Any
    ) -> StartedCall:
        graph: Any = self
        composites, routing = self._teola.composites, rules_of_call(self._teola.routing)
        if gated is not None and gated.is_in_place:
            composites = None
        if run is not None and self._teola.pool is not None:
            meter_run(routing, run.query_run, self._teola.pool)
        return StartedCall(run, config, graph, composites=composites, routing=routing, gated=gated, **options)

    # ------------------------------------------------------------ explanations and traces

    def explain(self, input: Any = None, *, details: bool = False) -> str:
        """Say what was understood, what starts before its node, and what to expect, in three lines. Nothing runs.

        `details`: also the nodes and edges, which part of each prompt is constant and what breaks that, and when each
        call starts, in sections. `input` changes nothing; other accelerated objects need it.
        """
        return self.__teola_report__(input).text(details=details)

    def report(self, input: Any = None) -> PlanReport:
        """Return what `explain()` prints, as data: a row for each place that makes calls, and for each node."""
        return self.__teola_report__(input)

    def __teola_of__(self) -> tuple[Any, EnginePool | None]:
        """Return the original, and the pool that plans it."""
        return self._teola.original, self._teola.pool

    def __teola_report__(self, input: Any = None) -> PlanReport:
        """Collect what `explain()` and `report()` show of the graph. Nothing of it runs; `input` is not used."""
        from teola_plugin.adapters.explain import ended_trace, left_for_form
        from teola_plugin.adapters.langchain.call_sites import CodeSites
        from teola_plugin.adapters.langgraph.explain import NOTHING_PREFETCHED, explain_graph
        from teola_plugin.adapters.langgraph.facts import GraphFacts

        acceleration = self._teola
        composites, plans = acceleration.composites, acceleration.plans
        threads = NOBODY if composites is None else composites.threads.safety
        if is_off := plans is None and composites is None:
            plans = Plans(acceleration.runner, acceleration.original, shared_pool(), None, "auto")
        code_sites = CodeSites(threads) if plans is None else plans.code_sites
        with under_routing(acceleration.routing):
            facts = GraphFacts(acceleration.runner, plans, acceleration.tools, code_sites, is_off=is_off)
            note = NOTHING_PREFETCHED if acceleration.pool is None else ""
            trace, left = ended_trace(acceleration.last_run), left_for_form(acceleration.last_run)
            report = explain_graph(facts.nodes, facts.first_nodes, facts.first_choices, note, trace, left)
        return report_with_rules(report, acceleration.serving, acceleration.routing, acceleration.gate)

    def last_trace(self, timeout: float = 5.0) -> QueryTrace | None:
        """Return the trace of the last call that was started on this object; None before the first one."""
        return self._teola.last_run[0].trace.result(timeout) if self._teola.last_run else None

    # ------------------------------------------------------------ copies

    def copy(self, update: dict[str, Any] | None = None) -> Any:
        """Copy the original, and accelerate the copy with the same options.

        `update`: attributes that the copy gets, as of LangGraph's `Pregel.copy`.
        """
        acceleration = self._teola
        return acceleration.accelerate(acceleration.original.copy(update), like=acceleration)

    def __copy__(self) -> Any:
        acceleration = self._teola
        return acceleration.accelerate(copy.copy(acceleration.original), like=acceleration)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._teola.accelerate(copy.deepcopy(self._teola.original, memo))

    def __reduce__(self) -> Any:
        """Pickle the original. Raises `RegistrationError` for a graph with a pool, which belongs to its process."""
        return self._teola.accelerate, (self._teola.original,)


class _Runner:
    """A mixin for the graph that runs: its nodes are not those in its state, but watched copies of them."""

    if TYPE_CHECKING:
        _teola: Mapping[str, Any]

    @property
    def nodes(self) -> Mapping[str, Any]:
        return self._teola


def _acceleration_of(graph: Any) -> Acceleration | None:
    """Return the options of an accelerated graph, up to date; None for one that its class's constructor has made."""
    acceleration: Acceleration | None = getattr(graph, _ACCELERATION, None)
    if acceleration is None or acceleration.is_current():
        return acceleration
    original, accelerate = acceleration.original, acceleration.accelerate
    try:
        current: Acceleration = accelerate(original, like=acceleration)._teola
    except Exception as error:  # nothing of the original has run yet
        log_fallback(error, original)
        current = Acceleration(original, None, accelerate, acceleration.app, runner=original)
    current.last_run = acceleration.last_run
    object.__setattr__(graph, _ACCELERATION, current)
    return current


@dataclass(frozen=True, slots=True)
class _InnerCall:
    """A call of a graph inside a live query, which goes on when the graph ends."""

    query_run: QueryRun

    def close(self) -> None:
        pass

    cancel = close


def _merged(*configs: RunnableConfig | None) -> RunnableConfig:
    """Merge configs. Return an empty one if that is impossible: the original says what is wrong with them."""
    try:
        return merge_configs(*configs)
    except Exception:
        return {}


def original_of(graph: Any) -> Any:
    """Return the graph that was accelerated; a graph that is not accelerated itself."""
    return graph._teola.original if isinstance(graph, AcceleratedGraph) else graph


def has_requested_context(graph: Any) -> bool:
    """Return True for a graph that is accelerated, with a pool, already."""
    return isinstance(graph, AcceleratedGraph) and graph._teola.pool is not None


def accelerated_graph(acceleration: Acceleration, nodes: dict[str, Any]) -> Any:
    """Create the accelerated graph, and the runner with these nodes, which share the original's state."""
    acceleration.runner = _sharing(_Runner, acceleration.original, nodes)
    acceleration.shaping = shaping_of(acceleration.original)
    return _sharing(AcceleratedGraph, acceleration.original, acceleration)


def _sharing(mixin: type, graph: Any, value: Any) -> Any:
    """Create an instance of a subclass of the graph's class, with the mixin before it, that shares the graph's state.

    `value` goes into the mixin's slot: the options of an accelerated graph, or the nodes of a runner.
    """
    cls = subclass_of(type(graph), mixin, slots=(_ACCELERATION,))
    instance = sharing(cls, graph)
    object.__setattr__(instance, _ACCELERATION, value)
    return instance


hide_from_stack_levels(globals())
