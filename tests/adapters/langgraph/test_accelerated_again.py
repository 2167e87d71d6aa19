"""Tests of accelerated objects that are accelerated again, or that are nodes of another graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langgraph.graph import AcceleratedGraph
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM


class State(TypedDict):
    n: int


def more(state: State) -> State:
    return {"n": state["n"] + 1}


def graph_of(node: Any = more) -> Any:
    return StateGraph(State).add_node("more", node).add_edge(START, "more").add_edge("more", END).compile()


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    with EnginePool.local(llm=FakeLLM(), embedder=FakeEmbedder()) as pool:
        yield pool


def bases(obj: Any) -> int:
    return type(obj).__mro__.count(AcceleratedGraph)


def test_accelerating_an_accelerated_graph_wraps_the_original_once(pool: EnginePool) -> None:
    plain = graph_of()
    again = accelerate(accelerate(plain), pool=pool)
    assert type(again) is type(accelerate(plain)) and bases(again) == 1
    assert again.invoke({"n": 1}) == {"n": 2}
    assert again.last_trace().query_id


def test_changed_attribute_stays_after_accelerating_again(pool: EnginePool) -> None:
    fast = accelerate(graph_of())
    fast.step_timeout = 7
    assert accelerate(fast, pool=pool).step_timeout == 7


def test_accelerated_graph_as_a_node_joins_the_outer_query(pool: EnginePool) -> None:
    inner = accelerate(graph_of())
    outer = accelerate(graph_of(inner), pool=pool)
    assert [graph for _, graph in outer.get_subgraphs()] == [inner]
    assert outer.invoke({"n": 1}) == {"n": 2}
    assert inner.last_trace() is None


def test_inner_accelerated_graph_is_kept_as_a_subgraph(pool: EnginePool) -> None:
    inner = accelerate(graph_of(), pool=pool)
    for outer in (accelerate(graph_of(inner)), accelerate(graph_of(inner), pool=pool)):
        assert [graph for _, graph in outer.get_subgraphs()] == [inner]
        assert outer.invoke({"n": 1}) == {"n": 2}
