"""Tests of graphs that share a node cache: each finds its own entries, and no entry of another node."""

from __future__ import annotations

from typing import Any

import pytest
from differential.graphs.plain import Names, plain
from differential.graphs.sides import Side
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.types import CachePolicy
from support.graphs import Kit
from support.graphs.caching import State, cached_answer
from support.graphs.kit import joined

QUESTION = {"question": "what is a class?"}
WAYS = ("invoke", "stream")


def _called(graph: Any, way: str) -> Any:
    return graph.invoke(QUESTION) if way == "invoke" else list(graph.stream(QUESTION, stream_mode="debug"))


def _keys(kit: Kit) -> Any:
    """Return the keys of the cache: the identity of the node, and the key of its input."""
    return {namespace: sorted(entries) for namespace, entries in kit.cache._cache.items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", ["plain", "accelerated"])
def test_original_and_accelerated_graph_share_cached_nodes(first: str, way: str, accelerated_side: Side) -> None:
    """Both count as the same graph, so the second one does not run the node again."""
    kit = accelerated_side.kit()
    made = cached_answer(kit)
    two = [made, accelerated_side.fast(made)]
    before, after = [_called(graph, way) for graph in (two if first == "plain" else two[::-1])]
    assert kit.side_effects == {"model ran": 1}
    if way == "invoke":
        assert after == before


def _other(kit: Kit) -> Any:
    """Build a graph of the same shape, with another function of the same name."""
    retriever = kit.retriever

    def say(state: State) -> dict[str, Any]:
        kit.note("retriever ran")
        return {"said": [joined(retriever.invoke(state["question"]))]}

    graph = StateGraph(State)
    graph.add_node(say, cache_policy=CachePolicy())
    graph.add_edge(START, "say")
    return graph.compile(cache=kit.cache)


@pytest.mark.parametrize("way", WAYS)
def test_nodes_with_equal_names_do_not_share_cache_entries(
    way: str, original_side: Side, accelerated_side: Side
) -> None:
    """The trap: what stands before a node must not be what the cache knows it by."""
    found = []
    for side in (original_side, accelerated_side):
        kit = side.kit()
        results = [_called(side.fast(make(kit)), way) for make in (cached_answer, _other, cached_answer, _other)]
        assert kit.side_effects == {"model ran": 1, "retriever ran": 1}
        found.append((Names(raced=True)(plain(results)), _keys(kit)))
    assert found[0] == found[1]


def test_cache_keys_of_chain_nodes_equal_the_originals(original_side: Side, accelerated_side: Side) -> None:
    """The cache key of a chain contains less than that of a function, equally on both sides."""

    def made(kit: Kit) -> Any:
        graph = StateGraph(State)
        chain = (lambda state: state["question"]) | kit.llm | (lambda message: {"said": [message.content]})
        graph.add_node("say", chain, cache_policy=CachePolicy())
        graph.add_edge(START, "say")
        return graph.compile(cache=kit.cache)

    kits = [original_side.kit(), accelerated_side.kit()]
    for kit, side in zip(kits, (original_side, accelerated_side), strict=True):
        _called(side.fast(made(kit)), "invoke")
    assert _keys(kits[0]) == _keys(kits[1])


def test_cleared_cache_runs_the_node_again(original_side: Side, accelerated_side: Side) -> None:
    for side in (original_side, accelerated_side):
        kit = side.kit()
        graph = side.fast(cached_answer(kit))
        _called(graph, "invoke")
        graph.clear_cache(["say"])
        assert not any(_keys(kit).values())
        _called(graph, "invoke")
        assert kit.side_effects == {"model ran": 2}


@pytest.mark.parametrize("first", ["plain", "accelerated"])
def test_original_and_accelerated_entrypoint_share_cached_tasks(first: str, accelerated_side: Side) -> None:
    kit = accelerated_side.kit()
    llm = kit.llm

    @task(cache_policy=CachePolicy())
    def ask(text: str) -> str:
        kit.note("asked")
        return str(llm.invoke(text).content)

    @entrypoint(cache=kit.cache)
    def workflow(text: str) -> str:
        return ask(text).result()

    two = [workflow, accelerated_side.fast(workflow)]
    one, other = two if first == "plain" else two[::-1]
    assert one.invoke("x") == other.invoke("x")
    assert kit.side_effects == {"asked": 1}
