"""Graphs with parallel branches, and how the branches join."""

from __future__ import annotations

import operator
from typing import Annotated, Any

from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict

from support.graphs.case import Turn, case
from support.graphs.kit import Kit, joined


class State(TypedDict, total=False):
    question: str
    found: str
    said: Annotated[list[str], operator.add]
    answer: str


def speaker(kit: Kit, name: str) -> Any:
    llm = kit.llm

    def speak(state: State) -> dict[str, Any]:
        return {"said": [llm.invoke(f"{name}: {state['question']}").text]}

    return speak


def closing(kit: Kit) -> Any:
    llm = kit.llm

    def close(state: State) -> dict[str, Any]:
        return {"answer": llm.invoke(f"Close {state['question']} {sorted(state['said'])}").text}

    return close


SYNC = {"durability": "sync"}
"""Saves checkpoints before the next step, which may otherwise change what a waiting edge has received."""


@case(Turn({"question": "what is a lambda?"}, options=SYNC), races=True)
def waiting_edge(kit: Kit) -> Any:
    """Build a graph of three branches, one of them longer. The last node waits for all."""
    retriever = kit.retriever
    graph = StateGraph(State)
    graph.add_node("find", lambda state: {"found": joined(retriever.invoke(state["question"]))})
    graph.add_node("left", speaker(kit, "left"))
    graph.add_node("right", speaker(kit, "right"))
    graph.add_node("after", speaker(kit, "after"))
    graph.add_node("close", closing(kit))
    for node in ("find", "left", "right"):
        graph.add_edge(START, node)
    graph.add_edge("right", "after")
    graph.add_edge(["find", "left", "after"], "close")
    return graph.compile(checkpointer=kit.saver)


@case({"question": "what is a lambda?"}, races=True)
def deferred_node(kit: Kit) -> Any:
    graph = StateGraph(State)
    for name in ("left", "right", "after"):
        graph.add_node(name, speaker(kit, name))
    graph.add_node("close", closing(kit), defer=True)
    graph.add_edge(START, "left")
    graph.add_edge(START, "right")
    graph.add_edge("right", "after")
    graph.add_edge("left", "close")
    graph.add_edge("after", "close")
    return graph.compile(checkpointer=kit.saver)


@case({"question": "uneven"}, races=True)
def joined_twice(kit: Kit) -> Any:
    """Build a graph of branches of different lengths. The last node waits for none, and runs twice."""
    graph = StateGraph(State)
    for name in ("left", "right", "after"):
        graph.add_node(name, speaker(kit, name))
    graph.add_node("close", closing(kit))
    graph.add_edge(START, "left")
    graph.add_edge(START, "right")
    graph.add_edge("right", "after")
    graph.add_edge("left", "close")
    graph.add_edge("after", "close")
    return graph.compile(checkpointer=kit.saver)


@case({"question": "who wins?"}, races=True, fails=True)
def conflicting_writes(kit: Kit) -> Any:
    """Build a graph with two nodes of one step that write to a channel which takes one value."""
    llm = kit.llm
    graph = StateGraph(State)
    for name in ("left", "right"):
        graph.add_node(name, lambda state, name=name: {"answer": llm.invoke(f"{name} {state['question']}").text})
        graph.add_edge(START, name)
    return graph.compile(checkpointer=kit.saver)


@case(Turn({"question": "same"}, options=SYNC), races=True)
def equal_prompts_side_by_side(kit: Kit) -> Any:
    """Build a graph with two parallel generations from the same prompt. They must stay two."""
    graph = StateGraph(State)
    graph.add_node("one", speaker(kit, "same"))
    graph.add_node("two", speaker(kit, "same"))
    graph.add_node("close", closing(kit))
    graph.add_edge(START, "one")
    graph.add_edge(START, "two")
    graph.add_edge(["one", "two"], "close")
    return graph.compile(checkpointer=kit.saver)
