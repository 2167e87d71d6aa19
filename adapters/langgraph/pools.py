"""The pools that a graph's nodes use: searched for in what they hold, functions included. No user code runs."""

from __future__ import annotations

from typing import Any

from teola_plugin.adapters.langchain.pools import HINT, pools_below
from teola_plugin.adapters.planned_queries import log_fallback
from teola_plugin.adapters.reachable import MAX_OBJECTS, referents
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool


def pool_of_graph(graph: Any) -> EnginePool | None:
    """Return the pool that the nodes share; None without any. Raises `RegistrationError` for two pools."""
    by_node = pools_by_node(graph)
    pools = {pool_id: pool for node_pools in by_node.values() for pool_id, pool in node_pools.items()}
    if len(pools) > 1:
        users = [[name for name, node_pools in by_node.items() if pool_id in node_pools] for pool_id in pools]
        descriptions = [
            f"one in the node{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}" for names in users
        ]
        raise RegistrationError(
            f"the graph uses {len(pools)} different engine pools: {', '.join(descriptions)}.", hint=HINT
        )
    return next(iter(pools.values()), None)


def pools_by_node(graph: Any) -> dict[str, dict[int, EnginePool]]:
    """Return the pools of each node that uses any, by identity.

    Searched: its Runnables, what its functions and conditional edges hold or name, and its tools. A pool that a
    function makes while it runs is not seen.
    """
    by_node: dict[str, dict[int, EnginePool]] = {}
    for name, node in graph.nodes.items():
        try:
            pools = pools_below((node.bound, node.writers), referents, limit=MAX_OBJECTS)
        except Exception as error:  # an object that is stranger than was thought of
            log_fallback(error, node, "the engines")
            continue
        if pools:
            by_node[name] = pools
    return by_node
