"""Tests of accelerated graphs inside accelerated chains, and of wrong configs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda
from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.langchain import ChatTeola


class State(TypedDict, total=False):
    question: str
    answer: str


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    with EnginePool.local(engines=[FakeLLM()]) as made:
        yield made


def asking(pool: EnginePool) -> Any:
    llm = ChatTeola(pool=pool)

    def ask(state: State) -> State:
        return {"answer": llm.invoke(state["question"]).text}

    return StateGraph(State).add_node(ask).add_edge(START, "ask").compile()


@pytest.mark.parametrize("way", ["with_retry", "with_fallbacks"])
def test_chain_with_a_graph_with_retry_or_fallbacks_is_traced(
    way: str, pool: EnginePool, caplog: pytest.LogCaptureFixture
) -> None:
    """The report about a graph needs only what every chain has, accelerated or not."""
    graph = accelerate(asking(pool), pool=pool)
    made = graph.with_retry() if way == "with_retry" else graph.with_fallbacks([graph])
    chain = made | RunnableLambda(lambda state: state["answer"])
    with caplog.at_level(logging.WARNING, logger="teola_plugin"):
        fast = accelerate(chain, pool=pool)
    assert not caplog.records
    assert "CompiledStateGraph" in fast.explain({"question": "why"})
    assert fast.invoke({"question": "why"}) == chain.invoke({"question": "why"})


def test_invalid_graph_config_raises_the_error_of_the_original(pool: EnginePool) -> None:
    plain = asking(pool)
    errors = []
    for graph in (plain, accelerate(plain, pool=pool)):
        with pytest.raises(AttributeError) as caught:
            graph.invoke({"question": "why"}, {"callbacks": 5})  # type: ignore[typeddict-item]
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
