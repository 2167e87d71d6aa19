"""Plans of a graph's nodes, and the parts of a live query that carry them out.

A plan says, for one node, which requests it and the nodes after it will send to engines. Plans are made when the graph
is accelerated: reading the source of its functions takes some milliseconds, which no query has to wait for. Where
conditions on the state are known beforehand, there is a plan for each outcome. A plan that is missing is made while its
query goes on with the plan that assumes no outcome.
"""

from __future__ import annotations

import dis
import inspect
import threading
from collections import Counter
from collections.abc import Collection, Container, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, NamedTuple

from teola_plugin.adapters.calls import running_loop
from teola_plugin.adapters.langchain.call_sites import CodeSites
from teola_plugin.adapters.langchain.prefetch_plan import read_prefetch_form
from teola_plugin.adapters.langchain.prefetching import EntryPoint, QueryCalls, intercept, open_calls
from teola_plugin.adapters.langgraph.agents.tool_inputs import named_arguments, plain_tools
from teola_plugin.adapters.planned_queries import graph_saves_time, log_fallback
from teola_plugin.adapters.provider_executor import ensure_engine
from teola_plugin.adapters.snapshots import snapshot
from teola_plugin.adapters.thread_safety import NOBODY, ThreadSafety
from teola_plugin.graph import LLM_PREFILLS, EngineProfile, Graph, Primitive, PrimitiveKind
from teola_plugin.observe.steps import PROVIDER
from teola_plugin.passes import Optimised, Pass
from teola_plugin.passes.decoding_pipelining import leaf_primitives
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.query_run import CallPosition, DeferredSubplan, QueryRun, SubplanRun, current_position
from teola_plugin.shims.langchain_agents import tool_calls_in
from teola_plugin.shims.langgraph import Functions, branch_of, functions_of, is_resumed, is_sent_task, state_of
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.functions import trace_function
from teola_plugin.tracer.functions.lookup import DataGuards, FreeNames
from teola_plugin.tracer.functions.pure_expressions import ABSENT, STATE, Decide
from teola_plugin.tracer.langgraph.decisions import PlanTree
from teola_plugin.tracer.langgraph.lookahead import ARGUMENT, calls_graphs_or_tasks, lookahead
from teola_plugin.tracer.langgraph.settings import current_environment, settings_of
from teola_plugin.tracer.langgraph.shape import GraphShape, distances, shape_of, state_after_input

MISSING_PLAN_DELAY_S = 0.02
"""Seconds after a node has begun until its missing plan is made: by then its query waits for an engine."""
PRIMITIVES_PER_NODE = 4
"""Primitives that a node counts for in depths: a prompt, its prefilling and decoding, a parser."""


class PlanKey(NamedTuple):
    """The tasks of a node that share one plan."""

    node: str
    is_sent: bool = False
    """True for the targets of a `Send`, which have an argument of their own."""
    is_async: bool = False
    """True for tasks of a graph that runs on a loop: nodes with a sync and an async function run the latter."""
    tool: str = ""
    """Name of the tool that the node calls, for plans of tools."""


class Plans:
    """The plans of one graph. Used from any thread."""

    def __init__(
        self,
        graph: Any,
        original: Any,
        pool: EnginePool,
        passes: tuple[Pass, ...] | None,
        speculate: str,
        threads: ThreadSafety = NOBODY,
    ) -> None:
        """`original`: the graph that was accelerated. Copies of it have the same plans. `threads`: what the user said
        to take several calls at once."""
        self.pool, self._passes, self._speculate = pool, passes, speculate
        self.code_sites = CodeSites(threads)
        """Calls of the user's own models that the plans prefetch."""
        self._shaping = shaping_of(original)
        self.shape: GraphShape | None = shape_of(graph)
        self.distances: Mapping[str, int] = {} if self.shape is None else distances(self.shape)
        self.channels = () if self.shape is None else tuple(self.shape.update_rules)
        """Names of the channels of the state."""
        self._plans: dict[PlanKey, PlanTree[TraceResult | None]] = {}
        self._guards: dict[PlanKey, DataGuards] = {}
        """Data that the plans depend on."""
        self._pending: set[PlanKey] = set()
        """Missing plans that will be made."""
        self.last_settings = self._own_settings = settings_of(original.config or {})
        """Those of the last call; before the first, those that the graph was compiled with."""
        self._times_forgotten = pool.times_forgotten
        self._graphs: dict[int, tuple[tuple[EngineProfile, ...], Graph, TraceResult]] = {}
        """E-graphs by the identity of their plan, which they keep alive, and the profiles that they were made for."""
        nodes = {} if self.shape is None else self.shape.nodes
        self._tools = {name: tools for name, node in nodes.items() if (tools := plain_tools(node.bound))}
        """Tools by node and name whose calls of models may be prefetched when the tool is called."""
        functions_by_node = [both for node in nodes.values() if (both := functions_of(node.bound))]
        self._has_two_forms = any(both.func and both.afunc for both in functions_by_node)
        all_tools = [tool for by_name in self._tools.values() for tool in by_name.values()]
        functions_by_node += [Functions(tool.func, tool.coroutine) for tool in all_tools]
        functions = (function for both in functions_by_node for function in both if function is not None)
        if all(map(_has_names, functions)):
            for key in self._keys():
                self._plans_of(key).prepare(self.input_of_report())

    def fit(self, original: Any) -> bool:
        """Return True if they are the plans of this graph, too: of a copy with the same nodes and edges."""
        return is_same_shape(self._shaping, shaping_of(original))

    @property
    def are_empty(self) -> bool:
        """Return True if it is known that no node has a plan."""
        return not any(map(self.may_have, self._keys()))

    def _keys(self) -> list[PlanKey]:
        """Return the keys of tasks that are not sent an argument."""
        nodes = () if self.shape is None else self.shape.nodes
        keys = [self.key(node, is_async=is_async) for node in nodes for is_async in (False, True)]
        tools = [(node, tool) for node, by_name in self._tools.items() for tool in by_name]
        keys += [self.tool_key(*one, is_async) for one in tools for is_async in (False, True)]
        return list(dict.fromkeys(keys))

    def has_plan_of_tool(self, node: str, tool: str) -> bool:
        """Return True if calls of models in a tool that a node calls are prefetched, for a report."""
        is_known = tool in self._tools.get(node, {})
        return is_known and self.traced(self.tool_key(node, tool, False), self.input_of_report()) is not None

    def tool_key(self, node: str, tool: str, is_async: bool) -> PlanKey:
        """Return the key of the plans for calls of a tool that a node makes, on a loop or elsewhere."""
        return PlanKey(node, True, is_async and self._tools[node][tool].coroutine is not None, tool)

    def tool_inputs(self, node: str, input: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the tools that a node calls for an input, each with the arguments of its function.

        Left out are tools without plans, and arguments that a tool refuses.
        """
        assert self.shape is not None
        tools = self._tools.get(node, {})
        for call in tool_calls_in(self.shape.nodes[node].bound, input) if tools else ():
            if call["name"] not in tools:
                continue
            try:
                arguments = named_arguments(tools[call["name"]], snapshot(call["args"]))
            except Exception:  # the tool will raise it, too
                continue
            if arguments is not None:
                yield call["name"], arguments

    def key(self, node: str, *, is_sent: bool = False, is_async: bool = False) -> PlanKey:
        """Return the key of the tasks' plan: the same for both ways to run a graph, unless a node has both forms.

        A function of the functional API takes the graph's input, as if that was sent to it.
        """
        takes_input = self.shape is not None and self.shape.is_function
        return PlanKey(node, is_sent or takes_input, is_async and self._has_two_forms)

    def may_have(self, key: PlanKey) -> bool:
        """Return False for tasks that are known to have no plan."""
        if self.shape is None or key.node not in self.shape.nodes:
            return False
        self._forget_tenants()
        if not self._guards.setdefault(key, DataGuards()).are_unchanged():
            self._plans.pop(key, None)
        return not self._plans_of(key).is_empty

    def _forget_tenants(self) -> None:
        """Drop all plans and settings if the pool has forgotten a tenant since."""
        if self._times_forgotten != self.pool.times_forgotten:
            self._times_forgotten = self.pool.times_forgotten
            self._plans.clear()
            self._graphs.clear()
            self.code_sites.sites.clear()
            self.last_settings = self._own_settings

    def input_of_report(self) -> dict[str, Any]:
        """Return the input of templates for a report: the settings of the last call, and nothing of the state."""
        self._forget_tenants()
        return {**self.last_settings, **current_environment()}

    def read_environment(self, key: PlanKey) -> bool:
        """Return True if the plans of these tasks depend on environment variables."""
        guards = self._guards.get(key)
        return guards is not None and guards.read_environment

    def traced(self, key: PlanKey, value: Any) -> TraceResult | None:
        """Return the plan for an input of the template; None if nothing is gained by one.

        Makes the plan if it was not made before.
        """
        return self._plans_of(key).plan(value)

    def available(self, key: PlanKey, value: Any) -> TraceResult | None:
        """Return the plan if it was made before, else the one that assumes no outcome of conditions.

        A plan that is missing is made a little later.
        """
        plan, is_missing = self._plans_of(key).ready_plan(value)
        if is_missing and key not in self._pending:
            self._pending.add(key)
            timer = threading.Timer(MISSING_PLAN_DELAY_S, self._make_missing, (key, value))
            timer.daemon = True
            timer.start()
        return plan

    def _make_missing(self, key: PlanKey, value: Any) -> None:
        self.traced(key, value)
        self._pending.discard(key)

    def _plans_of(self, key: PlanKey) -> PlanTree[TraceResult | None]:
        """Return the plans for tasks with this key, one for each outcome of known conditions, made when needed."""
        plans = self._plans.get(key)
        if plans is None:
            plans = self._plans.setdefault(key, PlanTree(partial(self._trace, key)))
        return plans

    def _trace(self, key: PlanKey, decide: Decide | None) -> TraceResult | None:
        """Plan a node, and what may be prefetched of the nodes after it; return None for a plan that gains nothing.

        `decide` answers conditions on the state or settings; None assumes no outcome. If planning fails, that is logged
        and there is no plan.
        """
        if self.shape is None or key.node not in self.shape.nodes or self._speculate == "off":
            return None
        try:
            with self._guards.setdefault(key, DataGuards()).recording():
                traced = self._trace_tool(key) if key.tool else self._lookahead(key, decide)
            if self.code_sites.sites:
                intercept()
                ensure_engine(self.pool)
            plan = self.optimised(traced)
        except Exception as error:
            log_fallback(error, None, f"the node {key.node!r}")
            return None
        if key.tool and not _only_calls_provider(plan.graph):  # what engines do for tools has plans of its own
            return None
        return traced if plan.source is None or graph_saves_time(plan.source, plan.graph) else None

    def _lookahead(self, key: PlanKey, decide: Decide | None) -> TraceResult:
        """Return the template of what comes from the key's node on."""
        assert self.shape is not None
        find_leaves = self.code_sites.find_leaves
        options: Any = {"pushed": key.is_sent, "decide": decide, "find_leaves": find_leaves, "is_async": key.is_async}
        return lookahead(self.shape, key.node, **options)

    def _trace_tool(self, key: PlanKey) -> TraceResult:
        """Return the template of the function of the key's tool. Its input is a dictionary of the arguments."""
        tool = self._tools[key.node][key.tool]
        function = tool.coroutine if key.is_async or tool.func is None else tool.func
        names = inspect.signature(function).parameters
        return trace_function(function, names, tool.name, self.code_sites.find_leaves)

    def graph(self, traced: TraceResult) -> Graph:
        """Return the e-graph of a plan, for the engines' profiles as they are now."""
        profiles = tuple(self.pool.profiles.values())
        cached = self._graphs.get(id(traced))
        if cached is None or any(now is not before for now, before in zip(profiles, cached[0], strict=True)):
            cached = self._graphs[id(traced)] = profiles, self.optimised(traced).graph, traced
        return cached[1]

    def optimised(self, traced: TraceResult, as_dedicated: Collection[str] = ()) -> Optimised:
        """Return the e-graph of a plan, and the graph as written. `as_dedicated`: as of `EnginePool.plan`."""
        options: Any = {"passes": self._passes, "speculate": self._speculate}
        return self.pool.plan(traced.template, None, **options, as_dedicated=as_dedicated)


# ------------------------------------------------------------ what plans depend on

_SHAPING = ("builder", "interrupt_before_nodes", "interrupt_after_nodes", "cache_policy")
"""Attributes of a graph, besides its nodes, that plans depend on."""


def shaping_of(graph: Any) -> tuple[Any, ...]:
    """Return a tuple of what the plans of a graph depend on, to be compared by `is_same_shape`.

    It has the builder, interrupts, cache policy, nodes and what these call. Acceleration keeps it, to notice later
    that the original was changed, or that plans fit a copy of it.
    """
    fields = vars(graph)
    stops = (tuple(value) if isinstance(value := fields.get(name), list) else value for name in _SHAPING)
    nodes = fields["nodes"]
    return (*stops, *nodes, *nodes.values(), *(node.bound for node in nodes.values()))


def is_same_shape(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Compare two results of `shaping_of`: texts by their value, nodes and what they call by identity."""
    return len(one) == len(other) and all(
        part is same or (type(part) in (str, tuple) and type(part) is type(same) and part == same)
        for part, same in zip(one, other, strict=True)
    )


def _has_names(function: Any) -> bool:
    """Return True if all names exist that a function reads: a module may define some of them later."""
    while type(function) is partial:
        function = function.func
    function = getattr(function, "__func__", function)
    if type(function) is not FunctionType:
        return True
    code = function.__code__
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "LOAD_GLOBAL"}
    return FreeNames.of_function(function).has(*names, *code.co_freevars)


# ------------------------------------------------------------ parts of a query


@dataclass(slots=True, eq=False)
class _NodePart:
    """A part that has not ended, with its plan."""

    part: SubplanRun
    graph: Graph
    last_step: int
    """The number of the last superstep for which it is known to send requests."""


class Parts:
    """The parts of the query in one call of a graph: one for each node task with a plan. Used from any thread.

    The parts of a superstep end when the second superstep after it begins; supersteps without parts do not count. Until
    then the nodes run for which they were started. A part is held if an earlier part has sent its requests already: it
    starts only when a call comes that the earlier one has not foreseen.
    """

    def __init__(self, plans: Plans, run: QueryRun) -> None:
        """Begin without parts of the live query `run`. The lock guards them, since nodes may run on several threads."""
        self._plans, self._run = plans, run
        self._live: list[_NodePart] = []
        self._provider_calls: QueryCalls | None = None
        """Calls of the user's own models in this query, from the first plan on that prefetches any."""
        self._lock = threading.Lock()

    def position_of(self, name: str, config: Mapping[str, Any]) -> CallPosition:
        """Return the place of a node's code in the query: its distance from the end, and the tasks it ends with."""
        outer = current_position.get()
        depth = outer.depth + PRIMITIVES_PER_NODE * self._plans.distances.get(name, 0)
        return CallPosition(depth, branch_of(config) or outer.gang, outer.step, outer.deferred)

    def start_node(
        self,
        name: str,
        input: Any,
        config: Mapping[str, Any],
        node_position: CallPosition,
        step: int,
        *,
        is_async: bool = False,
    ) -> DeferredSubplan | None:
        """Start the plan of a node whose task begins in superstep `step`. Return its part if that is held.

        `is_async`: the node runs on a loop. Called from any thread; raises nothing.
        """
        part = None
        try:
            key = self._plans.key(name, is_sent=is_sent_task(config), is_async=is_async)
            planned, finished = self._planned(key, input, config), self._take_finished(step)
            if planned is None:
                self._run.schedule_subplans(finished=finished)
            else:
                self._open_provider_calls(planned[0], config)
                pushed = is_sent_task(config)
                part = self._start_part(name, *planned, node_position, step, finished, pushed=pushed)
        except Exception as error:
            log_fallback(error, None, f"the node {name!r}")
        return None if part is None else part.deferred

    def start_tools(
        self,
        name: str,
        input: Any,
        config: Mapping[str, Any],
        node_position: CallPosition,
        step: int,
        *,
        is_async: bool,
        skip: Container[str],
    ) -> None:
        """Start the plans of the tools that a node calls for its input, but for those whose names are in `skip`.

        Called from any thread when the node begins; raises nothing.
        """
        try:
            for tool, arguments in self._plans.tool_inputs(name, input):
                key = self._plans.tool_key(name, tool, is_async)
                plan = self._plans.available(key, arguments) if tool not in skip and self._plans.may_have(key) else None
                if plan is not None:
                    self._open_provider_calls(plan, config)
                    self._start_part(name, plan, arguments, node_position, step, [], pushed=True)
        except Exception as error:
            log_fallback(error, None, f"the tools of the node {name!r}")

    def _planned(
        self, key: PlanKey, input: Any, config: Mapping[str, Any]
    ) -> tuple[TraceResult, dict[str, Any]] | None:
        """Return the plan of a task and the plan's input; None without a plan."""
        plans, shape = self._plans, self._plans.shape
        if shape is None or not plans.may_have(key):
            return None
        state = state_of(config, plans.channels)
        absent = () if state is None else [name for name in plans.channels if name not in state]
        state = state or {}
        if shape.nodes[key.node].bound is None:
            state = state_after_input(shape, state, input)
            absent = [name for name in absent if isinstance(input, dict) and name not in input]
        plans.last_settings = settings = settings_of(config)
        value = {STATE: state, ABSENT: absent, ARGUMENT: input if key.is_sent else None, **settings}
        if plans.read_environment(key):
            value |= current_environment()
        plan = plans.available(key, value)
        if plan is None or (is_resumed(config) and calls_graphs_or_tasks(plan)):
            return None
        return plan, value

    def _open_provider_calls(self, plan: TraceResult, config: Any) -> None:
        """Let calls of the user's own models be prefetched that a plan asks for, if nobody would hear of it."""
        if not calls_provider(self._plans.graph(plan)):
            return
        sites = self._plans.code_sites.sites
        with self._lock:
            calls = self._provider_calls or open_calls.get(self._run.id)
            if calls is None:
                calls = self._new_provider_calls(config)
        if calls is not None:
            calls.add_sites(sites)

    def _new_provider_calls(self, config: Any) -> QueryCalls | None:
        """Let the user's own models be prefetched in this query; return None where the config allows no prefetch.

        Callers hold the lock.
        """
        on_loop = running_loop() is not None
        prefetch_form = read_prefetch_form(config, EntryPoint(on_loop), models=True)
        if prefetch_form is None:
            return None
        form, limit = prefetch_form
        calls = QueryCalls(config, {}, frozenset(), {}, frozenset(), limit, form, on_loop=on_loop, learns=True)
        calls.open(self._run.id)
        calls.begin(self._run)
        self._provider_calls = calls
        return calls

    def _start_part(
        self,
        node: str,
        plan: TraceResult,
        value: dict[str, Any],
        node_position: CallPosition,
        step: int,
        finished: list[SubplanRun],
        *,
        pushed: bool,
    ) -> SubplanRun:
        """Start the part of a node, or hold it. `finished` parts end after that: it goes on with what they share."""
        graph = self._plans.graph(plan)
        with self._lock:
            covering = "" if pushed else self._covering(graph, step)
        is_held = bool(covering) or _only_warms_up(graph)
        if not is_held:
            self._run.schedule_subplans(finished=finished, soon=False)
        calls = self._provider_calls
        calls_before = 0 if calls is None else calls.note_new_part()
        length_to_end = PRIMITIVES_PER_NODE * self._plans.distances.get(node, 0)  # a plan goes to the end
        part = self._run.begin_subplan(
            graph,
            plan.calls,
            value,
            depth=node_position.depth - length_to_end,
            gang=node_position.gang,
            members=node if pushed else "",
            lookahead=True,
            step=node_position.step,
            is_deferred=is_held,
            covering=covering,
            form=node_position.form,
        )
        if calls is not None:
            calls.name_new_part(part.name, calls_before)
        if is_held:
            self._run.schedule_subplans(part.deferred, finished)
        with self._lock:
            self._live.append(_NodePart(part, graph, step))
        return part

    def _covering(self, graph: Graph, step: int) -> str:
        """Return the name of a part of an earlier superstep that has sent all requests of a graph, "" if there is none.

        That part goes on, then.
        """
        for earlier in self._live:
            if earlier.last_step < step and earlier.part.has_begun and _covers(earlier.graph, graph):
                earlier.last_step = step
                return earlier.part.name
        return ""

    def _take_finished(self, step: int) -> list[SubplanRun]:
        """Return the parts that end as this superstep begins, and forget them."""
        with self._lock:
            latest = max((one.last_step for one in self._live if one.last_step < step), default=step)
            finished = [one.part for one in self._live if one.last_step < latest]
            self._live = [one for one in self._live if one.last_step >= latest]
            return finished

    def close(self, *, succeeded: bool = False) -> None:
        """End all parts with the call, which `succeeded` or not."""
        with self._lock:
            live, self._live = self._live, []
            calls, self._provider_calls = self._provider_calls, None
        for one in live:
            one.part.close()
        if calls is not None:
            calls.close(succeeded=succeeded)


# ------------------------------------------------------------ graphs whose requests are those of another one

_Prompt = tuple[str, ...]
"""The text of each part of a prompt, empty for variables; variables in a row are one, as lists have many."""


@lru_cache(maxsize=256)
def _covers(earlier: Graph, graph: Graph) -> bool:
    """Return True if the earlier graph has a request of its own that looks like each request of the other one.

    Such requests are to the same engine, with the same prompt except for the values of its variables. Whether those are
    the same, only the run shows.
    """
    if _requests(graph) - _requests(earlier):
        return False
    prompts = [(p.engine, _prompt(p)) for p in _reachable(earlier) if p.prompt]
    warm_ups = [p for p in _reachable(graph) if p.kind is PrimitiveKind.PARTIAL_PREFILLING]
    return all(
        any(engine == p.engine and prompt[: len(_prompt(p))] == _prompt(p) for engine, prompt in prompts)
        for p in warm_ups
    )


@lru_cache(maxsize=256)
def calls_provider(graph: Graph) -> bool:
    """Return True if a graph calls models or retrievers of the user's own."""
    fragments = [f.graph for p in graph for f in (p.fragment, p.otherwise) if f is not None]
    return any(p.engine == PROVIDER for p in graph) or any(map(calls_provider, fragments))


def _only_calls_provider(graph: Graph) -> bool:
    """Return True if a graph sends nothing to engines of a pool."""
    return all(inner.engine in ("", PROVIDER) for p in graph for inner in leaf_primitives(p))


@lru_cache(maxsize=256)
def _only_warms_up(graph: Graph) -> bool:
    """Return True if a graph sends nothing to engines but the beginnings of prompts.

    Such a plan computes no result that the original could take; it only makes the prefix caches of LLMs warm.
    """
    requests = [p for p in _reachable(graph) if p.holds_fragment or p.on_engine]
    return all(p.kind is PrimitiveKind.PARTIAL_PREFILLING for p in requests)


def _reachable(graph: Graph) -> list[Primitive]:
    """Return the primitives that do not wait for user code."""
    return [p for p in graph if p.id not in graph.behind_code]


def _requests(graph: Graph) -> Counter[Hashable]:
    """Count the requests of a graph by what they look like, without warm-ups."""
    return Counter(
        _request_signature(p)
        for p in _reachable(graph)
        if (p.holds_fragment or (p.on_engine and not p.decodes)) and p.kind is not PrimitiveKind.PARTIAL_PREFILLING
    )


def _request_signature(p: Primitive) -> Hashable:
    """Return a key that is equal for primitives which make requests of the same look, whatever nodes they stand in.

    Compared are kind, engine, prompt and search, and the requests in fragments.
    """
    attributes = p.attributes
    kind = PrimitiveKind.PREFILLING if p.kind in LLM_PREFILLS else p.kind
    inner = tuple(None if f is None else frozenset(_requests(f.graph).items()) for f in (p.fragment, p.otherwise))
    search = attributes.role, attributes.collection, attributes.k, attributes.filter, attributes.wrapped
    return kind, p.engine, _prompt(p), *search, inner


def _prompt(p: Primitive) -> _Prompt:
    texts = ["" if part.variable else part.text for part in p.prompt]
    return tuple(text for text, previous in zip(texts, [" ", *texts], strict=False) if text or previous)
