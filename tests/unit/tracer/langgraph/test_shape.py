"""Tests of what is read from a compiled graph: edges, updates of channels, and the distance of nodes to the end."""

from __future__ import annotations

import operator
from typing import Annotated, Any, TypedDict

from langgraph.cache.memory import InMemoryCache
from langgraph.channels import LastValue, UntrackedValue
from langgraph.func import entrypoint
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.pregel import NodeBuilder, Pregel
from langgraph.types import CachePolicy

from teola_plugin.tracer.langgraph.shape import accompanied_nodes, distances, shape_of


class State(TypedDict):
    question: str
    answer: str
    notes: Annotated[list[str], operator.add]
    seen: Annotated[set[str], lambda old, new: old | new]
    scratch: Annotated[str, UntrackedValue]


def node(state: Any) -> dict[str, Any]:
    return {}


def graph(*edges: tuple[Any, str], nodes: str = "abcd", **kwargs: Any) -> Any:
    builder = StateGraph(State)
    for name in nodes:
        builder.add_node(name, node)
    for start, end in edges:
        builder.add_edge(start, end)
    return builder.compile(**kwargs)


def test_static_edges_joins_and_branches_are_distinguished() -> None:
    builder = StateGraph(State)
    for name in "abcd":
        builder.add_node(name, node)
    builder.add_edge(START, "a")
    builder.add_conditional_edges("a", lambda state: "b", ["b", "c", END])
    builder.add_edge(["b", "c"], "d")
    shape = shape_of(builder.compile())
    assert shape is not None
    assert shape.nodes["a"].successors == () and shape.nodes["a"].branches[0].nodes == ("b", "c", END)
    assert shape.nodes["b"].joins == ("d",) and shape.nodes["b"].successors == ()
    assert shape.nodes["d"].successors == () and not shape.nodes["d"].branches
    assert START not in shape.nodes


def test_shape_names_the_update_rule_of_each_channel() -> None:
    shape, messages = shape_of(graph((START, "a"))), StateGraph(MessagesState).add_node("a", node)
    assert shape is not None
    assert shape.update_rules == {
        "question": "replace",
        "answer": "replace",
        "notes": "append",
        "seen": "unknown",
        "scratch": "unknown",
    }
    found = shape_of(messages.add_edge(START, "a").compile())
    assert found is not None and found.update_rules["messages"] in ("messages", "unknown")


def test_node_with_an_interrupt_is_skippable_or_pauses() -> None:
    shape = shape_of(graph((START, "a"), ("a", "b"), nodes="ab", interrupt_before=["b"], interrupt_after=["a"]))
    assert shape is not None
    assert (shape.nodes["a"].skippable, shape.nodes["a"].pauses) == (False, True)
    assert (shape.nodes["b"].skippable, shape.nodes["b"].pauses) == (True, False)


def test_distances_count_the_nodes_that_may_follow() -> None:
    line = shape_of(graph((START, "a"), ("a", "b"), ("b", "c"), ("c", "d"), ("d", END)))
    assert line is not None and distances(line) == {"a": 3, "b": 2, "c": 1, "d": 0}
    loop = shape_of(graph((START, "a"), ("a", "b"), ("b", "a"), ("b", "c"), nodes="abc"))
    assert loop is not None
    found = distances(loop)
    assert found["a"] == 2 and found["b"] >= 1 and found["c"] == 0


def test_function_of_the_functional_api_is_one_node() -> None:
    @entrypoint()
    def flow(value: int) -> int:
        return value

    shape = shape_of(flow)
    assert shape is not None
    assert list(shape.nodes) == ["flow"]
    assert shape.is_function
    assert not shape.caches_tasks


def test_cached_results_of_tasks_are_part_of_the_shape() -> None:
    @entrypoint(cache=InMemoryCache(), cache_policy=CachePolicy())
    def flow(value: int) -> int:
        return value

    shape = shape_of(flow)
    assert shape is not None
    assert shape.caches_tasks


def test_a_graph_without_edges_has_no_shape() -> None:
    reader = NodeBuilder().subscribe_only("a").do(node).write_to("b")
    channels: Any = {"a": LastValue(str), "b": LastValue(str)}
    graph: Any = Pregel(nodes={"one": reader}, channels=channels, input_channels="a", output_channels="b")

    assert shape_of(graph) is None


def accompanied(compiled: Any) -> set[str]:
    shape = shape_of(compiled)
    assert shape is not None
    return set(accompanied_nodes(shape))


def test_nodes_of_a_sequence_run_alone() -> None:
    assert accompanied(graph((START, "a"), ("a", "b"), ("b", "c"), ("c", "d"))) == set()


def test_nodes_between_a_fork_and_the_node_where_it_ends_run_side_by_side() -> None:
    assert accompanied(graph((START, "a"), ("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"))) == {"b", "c"}


def test_first_nodes_of_a_graph_may_run_side_by_side() -> None:
    assert accompanied(graph((START, "a"), (START, "b"), ("a", "c"), ("c", "d"))) == {"a", "b"}


def test_arms_of_one_choice_run_alone() -> None:
    builder = StateGraph(State)
    for name in "abcd":
        builder.add_node(name, node)
    builder.add_edge(START, "a").add_edge("b", "d").add_edge("c", "d")
    builder.add_conditional_edges("a", lambda state: "b", ["b", "c", END])
    assert accompanied(builder.compile()) == set()


def test_arm_runs_parallel_to_the_node_of_a_static_edge() -> None:
    builder = StateGraph(State)
    for name in "abcd":
        builder.add_node(name, node)
    builder.add_edge(START, "a").add_edge("a", "d")
    builder.add_conditional_edges("a", lambda state: "b", ["b", END])
    assert accompanied(builder.compile()) == {"b", "d"}
