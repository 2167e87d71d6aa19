"""Graphs that choose the next node: conditional edges, commands, the parent graph, endless loops."""

from __future__ import annotations

import operator
from typing import Annotated, Any, Literal

from langgraph.graph import END, START, StateGraph
from langgraph.types import Command
from typing_extensions import TypedDict

from support.graphs.case import Turn, case
from support.graphs.kit import Kit


class Trail(TypedDict, total=False):
    question: str
    trail: Annotated[list[str], operator.add]
    answer: str


@case({"question": "short"}, {"question": "a long question that goes the other way"}, {"question": "ab"})
def conditional_edges(kit: Kit) -> Any:
    """Build a graph with conditional edges: with a map, without one, with several targets, and from the start."""
    llm = kit.llm

    def entry(state: Trail) -> str:
        return "short" if len(state["question"]) < 10 else "long"

    def short(state: Trail) -> dict[str, Any]:
        return {"trail": ["short", llm.invoke(f"Briefly: {state['question']}").content]}

    def long(state: Trail) -> dict[str, Any]:
        return {"trail": ["long", llm.invoke(f"At length: {state['question']}").content]}

    def last(state: Trail) -> dict[str, Any]:
        return {"answer": llm.invoke(f"Conclude {state['trail']}").content}

    graph = StateGraph(Trail)
    for node in (short, long, last):
        graph.add_node(node)
    graph.set_conditional_entry_point(entry, {"short": "short", "long": "long"})
    graph.add_conditional_edges("short", lambda state: ["last"] if len(state["question"]) > 2 else END)
    graph.add_conditional_edges("long", lambda state: True, {True: "last", False: END})
    return graph.compile(checkpointer=kit.saver)


@case({"question": "x"}, races=True)
def several_targets(kit: Kit) -> Any:
    """Build a graph with a router that names two nodes, one of which an edge names as well."""
    llm = kit.llm

    def node(name: str) -> Any:
        def run(state: Trail) -> dict[str, Any]:
            return {"trail": [llm.invoke(f"{name} of {state['question']}").content]}

        return run

    graph = StateGraph(Trail)
    for name in ("start", "left", "right"):
        graph.add_node(name, node(name))
    graph.add_edge(START, "start")
    graph.add_edge("start", "left")
    graph.add_conditional_edges("start", lambda _: ["left", "right"], ["left", "right"])
    return graph.compile(checkpointer=kit.saver)


@case({"question": "command me"})
def commands(kit: Kit) -> Any:
    """Build a graph with nodes that return commands: an update and the next node."""
    llm = kit.llm

    def first(state: Trail) -> Command[Literal["second", "third"]]:
        said = llm.invoke(f"first {state['question']}").content
        return Command(update={"trail": [said]}, goto="third" if len(said) > 3 else "second")

    def second(state: Trail) -> dict[str, Any]:
        return {"answer": "second"}

    def third(state: Trail) -> Command[Literal["first", "__end__"]]:
        if len(state["trail"]) > 2:
            return Command(update={"answer": llm.invoke(f"third {state['trail']}").content}, goto=END)
        return Command(goto="first")

    graph = StateGraph(Trail)
    for node in (first, second, third):
        graph.add_node(node)
    graph.add_edge(START, "first")
    return graph.compile(checkpointer=kit.saver)


@case({"question": "up"})
def goto_the_parent(kit: Kit) -> Any:
    """Build a graph with a subgraph whose node continues in the parent graph, with an update for it."""
    llm = kit.llm

    def inside(state: Trail) -> Command[Any]:
        said = llm.invoke(f"inside {state['question']}").content
        return Command(graph=Command.PARENT, goto="above", update={"trail": [said]})

    def above(state: Trail) -> dict[str, Any]:
        return {"answer": llm.invoke(f"above {state['trail']}").content}

    inner = StateGraph(Trail)
    inner.add_node(inside)
    inner.add_edge(START, "inside")
    graph = StateGraph(Trail)
    graph.add_node("inner", inner.compile(), destinations=("above",))
    graph.add_node(above)
    graph.add_edge(START, "inner")
    return graph.compile(checkpointer=kit.saver)


@case(Turn({"question": "for ever"}, config={"recursion_limit": 4}), Turn(None, config={"recursion_limit": 2}))
def recursion_limit(kit: Kit) -> Any:
    """Build a graph with an endless loop, which ends in an error.

    The second call continues where the first one ended.
    """
    llm = kit.llm

    def again(state: Trail) -> dict[str, Any]:
        return {"trail": [llm.invoke(f"again {len(state['trail'])} {state['question']}").content]}

    graph = StateGraph(Trail)
    graph.add_node(again)
    graph.add_edge(START, "again")
    graph.add_edge("again", "again")
    return graph.compile(checkpointer=kit.saver)


@case({"question": "who writes?"})
def supervisor_by_commands(kit: Kit) -> Any:
    """Build a graph of two workers that hand over to each other, depending on the model's answers."""
    llm = kit.llm

    def worker(name: str, other: str) -> Any:
        def work(state: Trail) -> Command[Any]:
            said = llm.invoke(f"{name}, go on: {state['question']} {state['trail']}").content
            enough = len(state["trail"]) >= 3
            return Command(update={"trail": [f"{name}: {said}"]}, goto=END if enough else other)

        return work

    graph = StateGraph(Trail)
    graph.add_node("writer", worker("writer", "editor"), destinations=("editor", END))
    graph.add_node("editor", worker("editor", "writer"), destinations=("writer", END))
    graph.add_edge(START, "writer")
    return graph.compile(checkpointer=kit.saver)


@case({"question": "nowhere"})
def wrong_targets(kit: Kit) -> Any:
    """Build a graph with a router that names a node which does not exist."""
    llm = kit.llm
    graph = StateGraph(Trail)
    graph.add_node("only", lambda state: {"answer": llm.invoke(state["question"]).content})
    graph.add_edge(START, "only")
    graph.add_conditional_edges("only", lambda _: "missing")
    return graph.compile(checkpointer=kit.saver)
