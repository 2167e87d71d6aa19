"""That the comparison is one: in the accelerated graphs work begins early, and most of it is claimed."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from differential.graphs.sides import side
from support.graphs import GRAPHS

pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved:DeprecationWarning")

AHEAD = (
    "adaptive_router", "chain_called_in_a_node", "conditional_edges",
    "corrective_rag", "deferred_node", "map_reduce", "plan_and_execute", 
    "waiting_edge",
)  # fmt: skip
"""Graphs of which something is known before its node runs, or as it begins."""


def _by(pool: Any, known: set[str]) -> Counter[str]:
    """Engine work of the queries since then: asked for by a graph and used, by a graph in vain, by the nodes alone."""
    found: Counter[str] = Counter()
    for trace in pool.traces:
        for span in trace.spans if trace.query_id not in known else ():
            if span.engine and ".call#" in span.primitive:
                found["by nodes"] += 1
            elif span.engine:
                found["in vain" if span.unused else "early"] += 1
    return found


@pytest.mark.parametrize("name", AHEAD)
def test_work_begins_early_and_is_claimed(name: str) -> None:
    with side(accelerated=True) as sooner:
        known = {trace.query_id for trace in sooner.pool.traces}
        sooner.see(GRAPHS[name], "invoke")
        found = _by(sooner.pool, known)
        for _ in range(200):  # the pool's loop ends a trace when it comes to it
            if found:
                break
            time.sleep(0.01)
            found = _by(sooner.pool, known)
    assert found["early"] > 0, found
