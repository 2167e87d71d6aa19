"""Graphs with node caches."""

from __future__ import annotations

import operator
from typing import Annotated, Any

from langgraph.graph import START, StateGraph
from langgraph.types import CachePolicy
from typing_extensions import TypedDict

from support.graphs.case import case
from support.graphs.kit import Kit, joined


class State(TypedDict, total=False):
    question: str
    said: Annotated[list[str], operator.add]
    answer: str


def cached_answer(kit: Kit, who: str = "model") -> Any:
    """Build a graph of a cached node `say` and a node that is not cached."""
    llm = kit.llm

    def say(state: State) -> dict[str, Any]:
        kit.note(f"{who} ran")
        return {"said": [f"{who}: " + llm.invoke(f"say {state['question']}").content]}

    graph = StateGraph(State)
    graph.add_node(say, cache_policy=CachePolicy())
    graph.add_node("answer", lambda state: {"answer": llm.invoke(f"{who} answers {state['said']}").content})
    graph.add_edge(START, "say")
    graph.add_edge("say", "answer")
    return graph.compile(cache=kit.cache)


@case({"question": "q"}, {"question": "q"}, {"question": "other"})
def cached_node(kit: Kit) -> Any:
    return cached_answer(kit)


@case({"question": "what is class?"}, {"question": "what is class?"}, races=True, not_by="batch")
def cached_nodes_side_by_side(kit: Kit) -> Any:
    """Build a graph with cached nodes that run in parallel: with an own key, a time to live, and chains as nodes.

    `batch` is left out: of two equal runs at once, the second finds the first one's result only if its thread starts
    later.
    """
    retriever, llm = kit.retriever, kit.llm
    key = CachePolicy(key_func=lambda state: state["question"][-5:], ttl=60)
    graph = StateGraph(State)
    graph.add_node("find", lambda state: {"said": [joined(retriever.invoke(state["question"]))]}, cache_policy=key)
    graph.add_node("ask", (lambda state: state["question"]) | llm | (lambda m: {"said": [m.content]}), cache_policy=key)
    graph.add_edge(START, "find")
    graph.add_edge(START, "ask")
    return graph.compile(cache=kit.cache, checkpointer=kit.saver)
