"""Graphs whose nodes append a line to a file each time they run, for tests of what runs again after a crash."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt

from teola_plugin.langchain import ChatTeola
from teola_plugin.pool import EnginePool


class State(TypedDict, total=False):
    text: str
    plan: str
    leave: str
    answer: str


def note(name: str, text: str) -> None:
    """Append a line for a run of a node to the file that `TEOLA_TEST_NOTES` names."""
    with Path(os.environ["TEOLA_TEST_NOTES"]).open("a") as file:
        file.write(f"{name} {text}\n")


def steps(pool: EnginePool) -> Any:
    """Return a graph of three nodes: a plan, work that takes `TEOLA_TEST_SECONDS` seconds, and an answer."""
    llm = ChatTeola(pool=pool, max_tokens=8)

    async def plan(state: State) -> State:
        note("plan", state["text"])
        return {"plan": str((await llm.ainvoke(f"plan {state['text']}")).content)}

    async def work(state: State) -> State:
        note("work", state["text"])
        await asyncio.sleep(float(os.environ.get("TEOLA_TEST_SECONDS", "0")))
        return {}

    async def answer(state: State) -> State:
        note("answer", state["text"])
        return {"answer": f"{state['text']} as {state['plan']}"}

    return _line(plan=plan, work=work, answer=answer).compile()


def writing() -> Any:
    """Return a chain with a side effect: it appends a line and takes `TEOLA_TEST_SECONDS` seconds."""
    from langchain_core.runnables import RunnableLambda

    async def write(text: str) -> str:
        note("write", text)
        await asyncio.sleep(float(os.environ.get("TEOLA_TEST_SECONDS", "0")))
        return f"{text} written"

    def never(text: str) -> str:
        raise NotImplementedError

    return RunnableLambda(never, afunc=write)


def pure_workflow() -> Any:
    from teola_plugin.workflow import Generation, Workflow

    return Workflow("pure", Generation("answer", "On {text}", engine="slow"))


def workflow_with_code() -> Any:
    """Return a workflow with a function that has a side effect."""
    from teola_plugin.workflow import Function, Generation, Workflow

    def write(text: str) -> str:
        note("write", text)
        return text

    return Workflow("code", Function("write", write) >> Generation("answer", "On {write}", engine="slow"))


def asking(**settings: Any) -> Any:
    """Return a graph that asks for approval between two nodes.

    With `interrupt_before` it stops there without a question.
    """

    async def plan(state: State) -> State:
        note("plan", state["text"])
        return {"plan": "a plan"}

    async def ask(state: State) -> State:
        return {"leave": str(interrupt({"question": "may I?", "plan": state["plan"]}))}

    async def answer(state: State) -> State:
        note("answer", state["text"])
        return {"answer": f"{state['text']}: {state.get('leave', 'nobody asked')}"}

    if "interrupt_before" in settings:
        return _line(plan=plan, answer=answer).compile(**settings)
    return _line(plan=plan, ask=ask, answer=answer).compile(**settings)


def asking_before() -> Any:
    return asking(interrupt_before=["answer"])


def asking_twice() -> Any:
    """Return a graph that asks two questions at the same time."""

    async def one(state: State) -> State:
        return {"plan": str(interrupt("one?"))}

    async def other(state: State) -> State:
        return {"leave": str(interrupt("other?"))}

    async def answer(state: State) -> State:
        return {"answer": f"{state['plan']} {state['leave']}"}

    builder = StateGraph(State)
    for name, node in {"one": one, "other": other, "answer": answer}.items():
        builder.add_node(name, node)
    builder.add_edge(START, "one")
    builder.add_edge(START, "other")
    builder.add_edge(["one", "other"], "answer")
    builder.add_edge("answer", END)
    return builder.compile()


def _line(**nodes: Any) -> Any:
    builder = StateGraph(State)
    before = START
    for name, node in nodes.items():
        builder.add_node(name, node)
        builder.add_edge(before, name)
        before = name
    builder.add_edge(before, END)
    return builder


def checkpointed() -> Any:
    """Return a graph with a checkpointer of its own."""
    from langgraph.checkpoint.memory import InMemorySaver

    return asking(checkpointer=InMemorySaver())
