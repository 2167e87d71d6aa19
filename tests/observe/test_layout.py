"""Tests of the layout of traces: nothing overlaps, and edges run from left to right around nodes."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from teola_plugin.observe.layout import layered, pack_lanes
from teola_plugin.observe.spans import GraphEdge, GraphNode, GraphView

from .sample_traces import trace

intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda p: (float(p[0]), float(p[0] + p[1]))))


@given(intervals)
def test_lanes_never_overlap_and_are_as_few_as_possible(found: list[tuple[float, float]]) -> None:
    lanes = pack_lanes(found)
    for i, j in combinations(range(len(found)), 2):
        if lanes[i] == lanes[j]:
            (a, b), (c, d) = found[i], found[j]
            assert b <= c or d <= a
    busiest = max((sum(a <= at < b for a, b in found) for at, _ in found), default=0)
    instants = 1 if any(a == b for a, b in found) else 0
    assert busiest <= max(lanes, default=-1) + 1 <= busiest + instants


@st.composite
def views(draw: st.DrawFn) -> GraphView:
    """Draw any graph: depths may contradict edges, and edges may form cycles or name missing nodes."""
    count = draw(st.integers(0, 12))
    nodes: tuple[GraphNode, ...] = tuple(
        (f"n{i}", "CALL", "", draw(st.integers(0, 6)), draw(st.booleans())) for i in range(count)
    )
    ends = st.sampled_from([f"n{i}" for i in range(count + 1)])
    pairs = draw(st.lists(st.tuples(ends, ends), max_size=20))
    edges: tuple[GraphEdge, ...] = tuple((a, b, "data") for a, b in pairs)
    return GraphView(nodes, edges)


@settings(max_examples=60, deadline=None)
@given(views())
def test_any_graph_is_laid_out_without_overlaps(view: GraphView) -> None:
    plan = layered(view)
    assert set(plan.positions) == {node[0] for node in view.nodes}
    for (layer, y), (other, z) in combinations(plan.positions.values(), 2):
        assert layer != other or abs(y - z) >= 1.4
    for (a, b), route in plan.routes.items():
        assert (route[0], route[-1]) == (plan.positions[a], plan.positions[b])
        assert [layer for layer, _ in route] == list(range(route[0][0], route[-1][0] + 1))
        for layer, y in route[1:-1]:  # clear of every node it passes
            assert all(abs(y - z) > 0.6 for other, z in plan.positions.values() if other == layer)
    assert all(-1e-9 <= y <= plan.height + 1e-9 for _, y in plan.positions.values())


def test_deepest_node_is_leftmost_and_depths_are_inferred() -> None:
    view = trace().view()  # the sample records no depths
    plan = layered(view)
    assert all(plan.positions[a][0] < plan.positions[b][0] for a, b, _ in view.edges)
    assert plan.positions["answer.decoding"][0] == plan.layers - 1


def test_chain_is_laid_out_straight() -> None:
    nodes: tuple[GraphNode, ...] = tuple((f"n{i}", "CALL", "", 4 - i, False) for i in range(5))
    plan = layered(GraphView(nodes, tuple((f"n{i}", f"n{i + 1}", "data") for i in range(4))))
    assert len({y for _, y in plan.positions.values()}) == 1


def test_avoidable_edge_crossings_are_avoided() -> None:
    nodes: tuple[GraphNode, ...] = tuple(
        (f"{side}{i}", "CALL", "", depth, False) for side, depth in (("a", 1), ("b", 0)) for i in range(4)
    )
    plan = layered(GraphView(nodes, tuple((f"a{i}", f"b{3 - i}", "data") for i in range(4))))
    order = sorted(range(4), key=lambda i: plan.positions[f"a{i}"][1])
    assert all(plan.positions[f"b{3 - i}"][1] < plan.positions[f"b{3 - j}"][1] for i, j in pairwise(order))
