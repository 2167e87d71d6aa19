"""Graphs that fail: errors, retries, handlers, time limits, errors that nodes swallow."""

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import Callable
from typing import Annotated, Any

from langgraph.errors import NodeError
from langgraph.graph import START, StateGraph
from langgraph.types import Command, RetryPolicy, TimeoutPolicy
from typing_extensions import TypedDict

from support.graphs.case import case
from support.graphs.kit import POISON, Kit

SOON = RetryPolicy(initial_interval=0.001, jitter=False, max_attempts=3)


class State(TypedDict, total=False):
    question: str
    said: Annotated[list[str], operator.add]
    answer: str


class Odd(Exception):
    """An error with arguments and a note."""


def two_nodes(kit: Kit, first: Any, **options: Any) -> Any:
    """Build a graph of a node that may fail, and a node that answers."""
    llm = kit.llm
    graph = StateGraph(State)
    graph.add_node("first", first, **options)
    graph.add_node("answer", lambda state: {"answer": llm.invoke(f"answer {state.get('said')}").content})
    graph.add_edge(START, "first")
    graph.add_edge("first", "answer")
    return graph.compile(checkpointer=kit.saver)


def _fails(kit: Kit, times: int, error: Callable[[], Exception]) -> Any:
    llm = kit.llm

    def shaky(state: State) -> dict[str, Any]:
        said = llm.invoke(f"try {state['question']}").content
        if kit.before("tried") < times:
            raise error()
        return {"said": [said]}

    return shaky


@case({"question": "will it work?"})
def retried_until_it_works(kit: Kit) -> Any:
    return two_nodes(kit, _fails(kit, 2, lambda: ConnectionError("not yet")), retry_policy=SOON)


@case({"question": "will it work?"})
def retried_in_vain(kit: Kit) -> Any:
    return two_nodes(kit, _fails(kit, 9, lambda: ConnectionError("never")), retry_policy=[SOON])


@case({"question": "fail"}, None)
def own_error(kit: Kit) -> Any:
    """Build a graph whose error keeps its arguments and notes. The next call continues after it."""

    def error() -> Odd:
        made = Odd("mine", 3)
        made.add_note("a note")
        return made

    return two_nodes(kit, _fails(kit, 1, error))


@case({"question": f"a {POISON} question"})
def engine_error(kit: Kit) -> Any:
    return two_nodes(kit, _fails(kit, 0, Odd))


@case({"question": f"a {POISON} question"}, {"question": "wholesome"})
def swallowed_errors(kit: Kit) -> Any:
    """Build a graph that swallows the errors of an engine, of a wrong argument and of user code."""
    llm = kit.llm

    def careful(state: State) -> dict[str, Any]:
        said = []
        for ask in (
            lambda: llm.invoke(f"Say {state['question']}"),
            lambda: llm.invoke("Say", nonsense=1),
            lambda: llm.invoke(state["missing"]),  # type: ignore[typeddict-item]
        ):
            try:
                said.append(ask().content)
            except Exception as error:
                said.append(type(error).__name__)
        return {"said": said}

    return two_nodes(kit, careful)


@case({"question": "one of two"}, races=True, fails=True)
def a_branch_fails(kit: Kit) -> Any:
    llm = kit.llm

    def bad(state: State) -> dict[str, Any]:
        raise Odd("branch")

    graph = StateGraph(State)
    graph.add_node("good", lambda state: {"said": [llm.invoke(f"good {state['question']}").content]})
    graph.add_node(bad)
    graph.add_edge(START, "good")
    graph.add_edge(START, "bad")
    return graph.compile(checkpointer=kit.saver)


@case({"question": "handled"})
def error_handler(kit: Kit) -> Any:
    """Build a graph with an error handler that calls the model."""
    llm = kit.llm

    def handle(state: State, error: NodeError) -> Command[Any]:
        said = llm.invoke(f"what to do about {error.error!r} in {error.node}?").content
        return Command(update={"said": [said]}, goto="answer")

    return two_nodes(kit, _fails(kit, 9, lambda: Odd("bad")), retry_policy=SOON, error_handler=handle)


@case({"question": "too slow"}, only="async", races=True)
def node_timeout(kit: Kit) -> Any:
    llm = kit.llm

    async def slow(state: State) -> dict[str, Any]:
        if kit.before("slow") < 1:
            await asyncio.sleep(5)
        return {"said": [(await llm.ainvoke(f"slow {state['question']}")).content]}

    return two_nodes(kit, slow, timeout=TimeoutPolicy(run_timeout=0.3), retry_policy=SOON)


@case({"question": "too slow"}, fails=True)
def step_timeout(kit: Kit) -> Any:
    llm = kit.llm

    def slow(state: State) -> dict[str, Any]:
        said = llm.invoke(f"slow {state['question']}").content
        time.sleep(0.15)
        return {"said": [said]}

    graph = two_nodes(kit, slow)
    graph.step_timeout = 0.05
    return graph


@case({"question": "wrong"})
def a_node_returns_nonsense(kit: Kit) -> Any:
    """Build a graph with a node that returns something else than an update of the state."""
    llm = kit.llm
    return two_nodes(kit, lambda state: llm.invoke(f"no dict for {state['question']}").content)
