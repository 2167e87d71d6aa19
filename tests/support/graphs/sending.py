"""Graphs with `Send`: to one node several times, to different nodes, from a node, into a subgraph."""

from __future__ import annotations

import operator
from typing import Annotated, Any

from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send
from typing_extensions import TypedDict

from support.graphs.case import case
from support.graphs.kit import Kit, joined


class Topic(TypedDict, total=False):
    topic: str
    subjects: list[str]
    jokes: Annotated[list[str], operator.add]
    best: str


SUBJECTS = ["lions", "classes", "elephants and imports"]


@case({"topic": "animals"}, races=True)
def map_reduce(kit: Kit) -> Any:
    llm, retriever = kit.llm, kit.retriever

    def subjects(state: Topic) -> dict[str, Any]:
        return {"subjects": [*SUBJECTS, llm.invoke(f"another of {state['topic']}").text]}

    def joke(state: dict[str, Any]) -> dict[str, Any]:
        found = retriever.invoke(state["subject"])
        return {"jokes": [llm.invoke(f"A joke about {state['subject']} with {joined(found)}").text]}

    def best(state: Topic) -> dict[str, Any]:
        return {"best": llm.invoke(f"The best of {state['jokes']}").text}

    graph = StateGraph(Topic)
    for node in (subjects, joke, best):
        graph.add_node(node)
    graph.add_edge(START, "subjects")
    graph.add_conditional_edges("subjects", lambda s: [Send("joke", {"subject": x}) for x in s["subjects"]], ["joke"])
    graph.add_edge("joke", "best")
    return graph.compile(checkpointer=kit.saver)


@case({"topic": "x", "subjects": ["a", "b"]}, races=True)
def sent_to_different_nodes(kit: Kit) -> Any:
    """Build a graph that sends to different nodes, one of which an edge reaches as well."""
    llm = kit.llm

    def short(state: dict[str, Any]) -> dict[str, Any]:
        return {"jokes": ["short " + llm.invoke(f"short {state.get('subject', 'none')}").text]}

    def long(state: dict[str, Any]) -> dict[str, Any]:
        return {"jokes": ["long " + llm.invoke(f"long {state.get('subject', 'none')}").text]}

    def split(state: Topic) -> list[Any]:
        return [
            Send("short", {"subject": state["subjects"][0]}),
            Send("long", {"subject": state["subjects"][1]}),
            "long",
        ]

    graph = StateGraph(Topic)
    graph.add_node(short)
    graph.add_node(long)
    graph.add_conditional_edges(START, split, ["short", "long"])
    return graph.compile(checkpointer=kit.saver)


@case({"topic": "deep", "subjects": ["a", "b"]}, races=True)
def sent_from_nodes(kit: Kit) -> Any:
    """Build a graph with a node that sends to a node which sends again."""
    llm = kit.llm

    def split(state: Topic) -> Command[Any]:
        return Command(update={"jokes": ["split"]}, goto=[Send("middle", {"subject": s}) for s in state["subjects"]])

    def middle(state: dict[str, Any]) -> Command[Any]:
        said = llm.invoke(f"middle {state['subject']}").text
        return Command(goto=[Send("leaf", {"subject": f"{state['subject']}{i} {said}"}) for i in range(2)])

    def leaf(state: dict[str, Any]) -> dict[str, Any]:
        return {"jokes": [llm.invoke(f"leaf {state['subject']}").text]}

    graph = StateGraph(Topic)
    graph.add_node(split, destinations=("middle",))
    graph.add_node(middle, destinations=("leaf",))
    graph.add_node(leaf)
    graph.add_edge(START, "split")
    return graph.compile(checkpointer=kit.saver)


class Subject(TypedDict, total=False):
    subject: str
    draft: str
    jokes: list[str]


@case({"topic": "graphs", "subjects": ["a", "b"]}, races=True)
def sent_to_a_subgraph(kit: Kit) -> Any:
    llm = kit.llm
    inner = StateGraph(Subject)
    inner.add_node("write", lambda state: {"draft": llm.invoke(f"write of {state['subject']}").text})
    inner.add_node("mend", lambda state: {"jokes": [llm.invoke(f"mend {state['draft']}").text]})
    inner.add_edge(START, "write")
    inner.add_edge("write", "mend")
    graph = StateGraph(Topic)
    graph.add_node("work", inner.compile())
    graph.add_conditional_edges(START, lambda s: [Send("work", {"subject": x}) for x in s["subjects"]], ["work"])
    graph.add_edge("work", END)
    return graph.compile(checkpointer=kit.saver)


@case({"topic": "one", "subjects": []}, {"topic": "wrong", "subjects": [1]})
def sent_to_nobody(kit: Kit) -> Any:
    """Build a graph that sends nothing, or something that makes its node fail."""
    llm = kit.llm
    graph = StateGraph(Topic)
    graph.add_node("joke", lambda state: {"jokes": [llm.invoke("about " + state["subject"]).text]})
    graph.add_conditional_edges(START, lambda s: [Send("joke", {"subject": x}) for x in s["subjects"]], ["joke"])
    return graph.compile(checkpointer=kit.saver)
