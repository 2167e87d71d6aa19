"""Graphs that stop and resume, and the moments when checkpoints are saved."""

from __future__ import annotations

import operator
from typing import Annotated, Any

from langgraph.graph import START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import Command, interrupt
from pydantic import BaseModel
from typing_extensions import TypedDict

from support.graphs.case import Turn, case
from support.graphs.kit import Kit, joined


class State(TypedDict, total=False):
    question: str
    context: str
    said: Annotated[list[str], operator.add]
    answer: str


def pipeline(kit: Kit, ask: Any = None, **options: Any) -> Any:
    """Build a graph of three nodes: find, ask, answer."""
    llm, retriever = kit.llm, kit.retriever

    def find(state: State) -> dict[str, Any]:
        return {"context": joined(retriever.invoke(state["question"]))}

    def think(state: State) -> dict[str, Any]:
        return {"said": [llm.invoke(f"think of {state['question']}").content]}

    def answer(state: State) -> dict[str, Any]:
        return {"answer": llm.invoke(f"{state['question']} {state['context']} {state['said']}").content}

    graph = StateGraph(State)
    graph.add_node(find)
    graph.add_node("ask", ask or think)
    graph.add_node(answer)
    graph.add_edge(START, "find")
    graph.add_edge("find", "ask")
    graph.add_edge("ask", "answer")
    return graph.compile(checkpointer=kit.saver, **options)


QUESTION = {"question": "what is a class?"}
GO = Command(resume="go on")


@case(QUESTION, None, None)
def stopped_before_and_after(kit: Kit) -> Any:
    return pipeline(kit, interrupt_before=["ask"], interrupt_after=["ask"])


@case(Turn(QUESTION, options={"interrupt_before": "*"}), Turn(None, options={"interrupt_after": ["find"]}), None)
def stopped_by_the_call(kit: Kit) -> Any:
    return pipeline(kit)


@case(QUESTION, GO)
def asks_once(kit: Kit) -> Any:
    """Build a graph with a node that asks a question. On resume the node runs again from its start."""
    llm = kit.llm

    def ask(state: State) -> dict[str, Any]:
        draft = llm.invoke(f"draft {state['question']}").content
        kit.note("asked")
        told = interrupt({"draft": draft})
        return {"said": [llm.invoke(f"{draft} but {told}").content]}

    return pipeline(kit, ask)


@case(QUESTION, Command(resume="one"), Command(resume="two", update={"context": "another"}))
def asks_twice(kit: Kit) -> Any:
    llm = kit.llm

    def ask(state: State) -> dict[str, Any]:
        first = interrupt("first?")
        said = llm.invoke(f"heard {first}").content
        second = interrupt(f"second, after {said}?")
        return {"said": [said, second]}

    return pipeline(kit, ask)


class Approval(BaseModel):
    approved: bool


@case(QUESTION, Command(resume={"nothing": 1}), Command(resume={"approved": True}))
def asks_with_a_schema(kit: Kit) -> Any:
    """Build a graph whose question has a schema. The first answer does not fit it."""

    def ask(state: State) -> dict[str, Any]:
        return {"said": [repr(interrupt("ok?", response_schema=Approval))]}

    return pipeline(kit, ask)


@case(QUESTION, GO)
def asks_in_a_subgraph(kit: Kit) -> Any:
    llm = kit.llm

    def inner_ask(state: State) -> dict[str, Any]:
        before = llm.invoke(f"inner {state['question']}").content
        return {"said": [before, interrupt(before)]}

    inner = StateGraph(State)
    inner.add_node("prepare", lambda state: {"said": [llm.invoke("prepare " + state["question"]).content]})
    inner.add_node(inner_ask)
    inner.add_edge(START, "prepare")
    inner.add_edge("prepare", "inner_ask")
    return pipeline(kit, inner.compile())


def _all_answered(graph: Any, config: Any) -> Any:
    """Return a command with one answer for each open question."""
    asked = graph.get_state(config).interrupts
    return Command(resume={one.id: f"to {one.value}" for one in asked})


SYNC = {"durability": "sync"}


@case(Turn(QUESTION, options=SYNC), Turn(_all_answered, options=SYNC), races=True)
def two_ask_at_once(kit: Kit) -> Any:
    llm = kit.llm

    def asker(name: str) -> Any:
        def ask(state: State) -> dict[str, Any]:
            return {"said": [llm.invoke(f"{name} heard {interrupt(name)}").content]}

        return ask

    graph = StateGraph(State)
    graph.add_node("left", asker("left"))
    graph.add_node("right", asker("right"))
    graph.add_node("close", lambda state: {"answer": llm.invoke(f"close {sorted(state['said'])}").content})
    graph.add_edge(START, "left")
    graph.add_edge(START, "right")
    graph.add_edge(["left", "right"], "close")
    return graph.compile(checkpointer=kit.saver)


@case(QUESTION, Command(resume="no", goto="find", update={"question": "what is with?"}), GO, races=True)
def resumed_elsewhere(kit: Kit) -> Any:
    def ask(state: State) -> dict[str, Any]:
        return {"said": [interrupt("go on?")]}

    return pipeline(kit, ask)


def _with(durability: str) -> tuple[Turn, Turn]:
    return Turn(QUESTION, options={"durability": durability}), Turn(GO, options={"durability": durability})


@case(*_with("sync"))
def saved_at_once(kit: Kit) -> Any:
    return asks_once(kit)


@case(*_with("exit"))
def saved_at_the_end(kit: Kit) -> Any:
    return asks_in_a_subgraph(kit)


@case(*_with("async"))
def saved_on_the_way(kit: Kit) -> Any:
    return asks_in_a_subgraph(kit)


@case(QUESTION, GO, None)
def no_checkpointer(kit: Kit) -> Any:
    """Build a graph that asks a question, and that cannot be resumed."""
    llm = kit.llm

    def ask(state: State) -> dict[str, Any]:
        return {"said": [llm.invoke(f"ask {interrupt('who?')}").content]}

    graph = StateGraph(State)
    graph.add_node(ask)
    graph.add_edge(START, "ask")
    return graph.compile()


@case(QUESTION, None)
def drained(kit: Kit) -> Any:
    """Build a graph with a node that asks the run to stop after its step. The next call continues."""

    def ask(state: State, runtime: Runtime[Any]) -> dict[str, Any]:
        assert runtime.control is not None
        runtime.control.request_drain("enough")
        return {"said": ["drained"]}

    return pipeline(kit, ask)
