"""`accelerate` for LangGraph's graphs and agents."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from langgraph.pregel import Pregel

from teola_plugin.adapters.langchain.binding.bind import bound
from teola_plugin.adapters.langchain.binding.serve import with_serving
from teola_plugin.adapters.langchain.composite_calls import CompositeRules, intercept_composite_methods
from teola_plugin.adapters.langchain.threads import Threads
from teola_plugin.adapters.langgraph.agents.eager_tools import eager_tools_of, with_eager_tools
from teola_plugin.adapters.langgraph.agents.tool_places import around, in_loop
from teola_plugin.adapters.langgraph.agents.tool_work import Planner
from teola_plugin.adapters.langgraph.graph import Acceleration, accelerated_graph, has_terms, original_of
from teola_plugin.adapters.langgraph.nodes import WatchedNode
from teola_plugin.adapters.langgraph.plans import Plans
from teola_plugin.adapters.langgraph.pools import the_pool_of_graph
from teola_plugin.adapters.options import Options
from teola_plugin.adapters.terms import NO_APP
from teola_plugin.errors import RegistrationError
from teola_plugin.shims.langgraph import watched_node


def is_graph(obj: object) -> bool:
    """Whether it is a compiled graph of this process; a remote one runs elsewhere."""
    return isinstance(obj, Pregel)


def accelerate_graph(graph: Any, options: Options, like: Acceleration | None = None) -> Any:
    """See `teola_plugin.accelerate`. Returns an instance of a subclass of the graph's class that shares its state.

    One that is accelerated already is accelerated anew, on these terms. `like`: the acceleration of a graph that this
    one is a copy of, on the same terms; what is the same in both is not made again.
    """
    graph = original_of(graph)
    if options.shadow:
        raise RegistrationError(
            "shadow= runs an object twice, which a graph's checkpoints do not bear.",
            hint="compare plain and accelerated graphs by `teola compare`",
        )
    again = partial(accelerate_graph, options=options)
    options = replace(options, pool=options.pool or the_pool_of_graph(graph))
    options, serving = with_serving(_runnables(graph), options, _edges(graph))
    found, chosen, speculate = options.pool, options.passes, options.speculate
    acceleration = Acceleration(graph, found, again, options.app or NO_APP, serving=serving)
    like = like if like is not None and like.pool is found else None
    if found is not None:
        acceleration.tools = eager_tools_of(graph, Planner(found, chosen, speculate))
    fast = accelerated_graph(acceleration, _nodes(graph, acceleration, options, like))
    if found is not None:
        known = None if like is None else like.plans
        fits = known is not None and known.fit(graph)  # with what is bound to engines in its place
        acceleration.plans = known if fits else Plans(acceleration.runner, graph, found, chosen, speculate)
    return fast


def _nodes(graph: Any, acceleration: Acceleration, options: Options, like: Acceleration | None) -> dict[str, Any]:
    """Copies of the nodes, which tell when they begin; graphs that are nodes are accelerated on the same terms, but for
    those that have terms of their own."""
    given: dict[str, Any] = {"strict": options.strict, "beside": _edges(graph)}
    served = bound(_runnables(graph), options.bind, acceleration.pool, **given)
    if options.speculate != "off":
        intercept_composite_methods()
        acceleration.composites = CompositeRules(served, Threads(options.threads))
    made: dict[str, Any] = {}
    for (name, node), runs in zip(graph.nodes.items(), served, strict=True):
        changes: dict[str, Any] = {} if runs is node.bound else {"bound": runs}
        if is_graph(runs):
            inner = runs if has_terms(runs) else _inner(runs, acceleration, like)
            changes = {"bound": inner, "subgraphs": [inner if one is runs else one for one in node.subgraphs]}
        eager = acceleration.tools
        instead = None if eager is None else with_eager_tools(runs, around, in_loop)
        made[name] = watched_node(node, partial(WatchedNode, acceleration, name), instead, **changes)
    return made


def _runnables(graph: Any) -> list[Any]:
    return [node.bound for node in graph.nodes.values()]


def _edges(graph: Any) -> list[Any]:
    return [node.writers for node in graph.nodes.values()]


def _inner(graph: Any, acceleration: Acceleration, like: Acceleration | None) -> Any:
    """A graph that is a node of another."""
    known = (None, None) if like is None else like.inner.get(id(graph), (None, None))
    made = known[1] if known[0] is graph else acceleration.again(graph)
    acceleration.inner[id(graph)] = graph, made
    return made
