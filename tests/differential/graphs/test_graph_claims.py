"""Tests that the comparison means something: in accelerated graphs calls are prefetched, and most are claimed."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter

import pytest
from differential.graphs.sides import side
from differential.graphs.ways import RUNNABLE
from support.graphs import GRAPHS

from teola_plugin.observe.spans import QueryTrace

pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved:DeprecationWarning")

AHEAD = (
    "adaptive_router", "agent", "agent_with_read_only_tools", "asks_once", "async_read_only_tools", "async_rag",
    "cached_node", "chain_called_in_a_node", "changed_in_between", "commands", "conditional_edges", "corrective_rag",
    "counted_rounds", "decided_early", "deferred_node", "early_work_fails", "independent_async_steps",
    "independent_steps", "parallel_tool_calls", "react_agent", "retried_until_it_works",
    "waiting_edge", "ways_to_ask", "written_before_it_is_searched",
)  # fmt: skip
"""Graphs of which something is known before its node runs, or as it begins."""


def _by(trace: QueryTrace) -> Counter[str]:
    """Count the engine requests of a query: prefetched and used, wasted, and made by the nodes themselves."""
    found: Counter[str] = Counter()
    for span in trace.spans:
        if span.engine and ".call#" in span.primitive:
            found["by nodes"] += 1
        elif span.engine:
            found["in vain" if span.unused else "early"] += 1
    return found


@pytest.mark.parametrize("name", AHEAD)
def test_prefetched_work_of_graphs_is_mostly_claimed(name: str) -> None:
    case, found = GRAPHS[name], Counter[str]()
    with side(accelerated=True) as accelerated_side:
        graph = accelerated_side.fast(case.build(accelerated_side.kit()))
        way = RUNNABLE["ainvoke" if case.only == "async" else "invoke"]
        for turn in case.turns:
            with contextlib.suppress(ValueError):  # a tool of one of them fails
                way(graph, copy.deepcopy(turn.given), {"configurable": {"thread_id": "thread"}}, **turn.options)
            found += _by(graph.last_trace())
    assert found["early"] > found["in vain"], found
