"""`accelerate` for LangGraph's graphs and agents."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from langgraph.pregel import Pregel

from teola_plugin.adapters.calls import NO_APP
from teola_plugin.adapters.langchain.binding.rules import routing_of
from teola_plugin.adapters.langchain.composite_calls import CompositeRules, Threads, intercept_composite_methods
from teola_plugin.adapters.langchain.tools import ReadOnlyTools
from teola_plugin.adapters.langgraph.agents.agent_call import ain_tool_call, in_tool_call
from teola_plugin.adapters.langgraph.agents.agent_tools import agent_tools, tools_below, watch_tool_node
from teola_plugin.adapters.langgraph.agents.tool_inputs import ToolPlanner
from teola_plugin.adapters.langgraph.graph import (
    Acceleration,
    WatchedNode,
    accelerated_graph,
    has_requested_context,
    original_of,
)
from teola_plugin.adapters.langgraph.plans import Plans
from teola_plugin.adapters.langgraph.pools import pool_of_graph
from teola_plugin.adapters.options import Options
from teola_plugin.adapters.provider_executor import shared_pool
from teola_plugin.adapters.routing import under_routing
from teola_plugin.errors import RegistrationError
from teola_plugin.shims.langgraph import watched_node


def is_graph(obj: object) -> bool:
    """Return True for a compiled graph of this process; a remote one runs elsewhere."""
    return isinstance(obj, Pregel)


def accelerate_graph(graph: Any, options: Options, like: Acceleration | None = None) -> Any:
    """Accelerate a graph: return an instance of a subclass of its class that shares its state.

    See `teola_plugin.accelerate`. An accelerated graph is accelerated anew, with these options. `like`: the
    acceleration of a graph that this one copies, with the same options; what is the same in both is not made again.
    """
    graph = original_of(graph)
    if options.shadow:
        raise RegistrationError(
            "shadow= runs an object twice, which a graph's checkpoints do not bear.",
            hint="compare plain and accelerated graphs by `teola compare`",
        )
    read_only = ReadOnlyTools.of(options.read_only, tools_below(graph), strict=options.strict)
    accelerate = partial(accelerate_graph, options=replace(options, read_only=read_only.entries, strict=False))
    options = replace(options, read_only=read_only.entries)
    options = replace(options, pool=options.pool or pool_of_graph(graph))
    options, rules, serving = routing_of([[node.bound, node.writers] for node in graph.nodes.values()], options)
    acceleration = Acceleration(graph, options.pool, accelerate, options.app or NO_APP, serving=serving, routing=rules)
    with under_routing(rules):
        return _accelerated(acceleration, options, like)


def _accelerated(acceleration: Acceleration, options: Options, like: Acceleration | None) -> Any:
    """Create the accelerated graph: its watched nodes, its plans, and the tools that may be prefetched.

    Plans and inner graphs are taken over from `like`, the acceleration of a graph that this one copies, where they fit.
    """
    graph, pool, passes, speculate = acceleration.original, options.pool, options.passes, options.speculate
    like = like if like is not None and like.pool in (pool, shared_pool()) else None
    if pool is not None:
        acceleration.tools = agent_tools(graph, ToolPlanner(pool, passes, speculate), ReadOnlyTools(options.read_only))
    runnables = [node.bound for node in graph.nodes.values()]
    if speculate != "off":
        intercept_composite_methods()
        acceleration.composites = CompositeRules(runnables, Threads(options.threads))
    fast = accelerated_graph(acceleration, _watched_nodes(graph, acceleration, like))
    plans = None if like is None else like.plans
    if plans is None or not plans.fit(graph):
        plans = _new_plans(acceleration, options)
    acceleration.plans = plans
    if plans is not None:
        acceleration.pool = plans.pool
    return fast


def _new_plans(acceleration: Acceleration, options: Options) -> Plans | None:
    """Return the plans of a graph; None without a pool if they prefetch nothing of the user's own models."""
    pool = options.pool
    if pool is None and options.speculate == "off":
        return None
    graphs = acceleration.runner, acceleration.original
    plans = Plans(*graphs, pool or shared_pool(), options.passes, options.speculate, options.threads)
    return None if pool is None and plans.are_empty else plans


def _watched_nodes(graph: Any, acceleration: Acceleration, like: Acceleration | None) -> dict[str, Any]:
    """Return copies of the nodes, which tell when their tasks begin.

    Graphs that are nodes are accelerated with the same options, except for those that have options of their own.
    """
    nodes: dict[str, Any] = {}
    for name, node in graph.nodes.items():
        runnable, changes = node.bound, dict[str, Any]()
        if is_graph(runnable):
            inner = runnable if has_requested_context(runnable) else _inner_graph(runnable, acceleration, like)
            changes = {"bound": inner, "subgraphs": [inner if one is runnable else one for one in node.subgraphs]}
        has_tools = acceleration.tools is not None
        runs = watch_tool_node(runnable, in_tool_call, ain_tool_call) if has_tools else None
        nodes[name] = watched_node(node, partial(WatchedNode, acceleration, name), runs, **changes)
    return nodes


def _inner_graph(graph: Any, acceleration: Acceleration, like: Acceleration | None) -> Any:
    """Accelerate a graph that is a node of another, unless `like` has its accelerated graph."""
    original, accelerated = (None, None) if like is None else like.inner.get(id(graph), (None, None))
    if original is not graph:
        accelerated = acceleration.accelerate(graph)
    acceleration.inner[id(graph)] = graph, accelerated
    return accelerated
