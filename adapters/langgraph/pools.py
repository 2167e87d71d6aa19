"""The pools that a graph's nodes use, found in what they hold: also in functions. Nothing of the user's runs."""

from __future__ import annotations

from typing import Any

from teola_plugin.adapters.early_work import log_fallback
from teola_plugin.adapters.held import MOST, held
from teola_plugin.adapters.langchain.pools import HINT, pools_below
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool


def the_pool_of_graph(graph: Any) -> EnginePool | None:
    """The pool that the nodes share; None without any. Raises `RegistrationError` for two, and says which nodes."""
    found = pools_by_node(graph)
    pools = {number: pool for one in found.values() for number, pool in one.items()}
    if len(pools) > 1:
        users = [[name for name, one in found.items() if number in one] for number in pools]
        raise RegistrationError(
            f"the graph uses {len(pools)} different engine pools: {', '.join(map(_used_by, users))}.", hint=HINT
        )
    return next(iter(pools.values()), None)


def pools_in(graph: Any) -> dict[int, EnginePool]:
    """Every pool that a node uses, by identity."""
    return {number: pool for one in pools_by_node(graph).values() for number, pool in one.items()}


def pools_by_node(graph: Any) -> dict[str, dict[int, EnginePool]]:
    """The same, for each node that uses any: in its Runnables, in what its functions and conditional edges hold or
    name, in its tools. What a function makes while it runs is not seen."""
    made = {name: _pools_of(node) for name, node in graph.nodes.items()}
    return {name: pools for name, pools in made.items() if pools}


def _pools_of(node: Any) -> dict[int, EnginePool]:
    try:
        return pools_below((node.bound, node.writers), held, most=MOST)
    except Exception as error:  # an object that is stranger than was thought of
        log_fallback(error, node, "the engines")
        return {}


def _used_by(nodes: list[str]) -> str:
    return f"one in the node{'s' if len(nodes) > 1 else ''} {', '.join(map(repr, nodes))}"
