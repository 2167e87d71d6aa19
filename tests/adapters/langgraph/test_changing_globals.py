"""Tests of globals, closures and attributes that change between calls of a graph, so that plans are made again.

The requests are those of the original, also in the first call after a change.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import pytest
from langgraph.graph import END, START, StateGraph

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langgraph.plans import MISSING_PLAN_DELAY_S
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.engines.profiles import rtx3090, scaled
from teola_plugin.langchain import ChatTeola
from teola_plugin.requests.payloads import Generate
from teola_plugin.tracer.functions.lookup import MAX_CHANGES, MAX_ITEMS, DataGuards, is_reliable

RULES = "Answer from what is known, and say so where it is not. " * 12
STYLE = "plain"
SETTINGS: dict[str, Any] = {"styles": ["plain", "short"]}


class State(TypedDict, total=False):
    question: str
    plan: str
    answer: str


class Settings:
    style = "plain"


class Noting(FakeLLM):
    """Knows what it was asked for, and how much of it was begun early."""

    def __init__(self) -> None:
        super().__init__("llm", scaled(rtx3090(), 0.05)["llm"])
        self.requests: Counter[str] = Counter()
        self.warmed = 0

    def _job(self, request: Any, run: Any) -> Any:
        if isinstance(request.payload, Generate):
            self.requests[request.payload.prompt.flat()] += 1
        else:
            self.warmed += 1
        return super()._job(request, run)


@pytest.fixture(scope="module")
def llm() -> Iterator[tuple[Noting, EnginePool]]:
    engine = Noting()
    with EnginePool.local(llm=engine) as pool:
        yield engine, pool


def of_a_global(to: str) -> Callable[[], str]:
    global STYLE
    STYLE = to
    return lambda: STYLE


def of_a_setting(to: str) -> Callable[[], str]:
    SETTINGS["styles"][0] = to
    return lambda: str(SETTINGS["styles"][0])


def of_an_attribute(to: str) -> Callable[[], str]:
    Settings.style = to
    return lambda: Settings.style


def compiled(pool: EnginePool, style: Callable[[], str]) -> Any:
    model = ChatTeola(pool=pool, max_tokens=8)

    def plan(state: State) -> State:
        return {"plan": model.invoke("Plan it").text}

    def answer(state: State) -> State:
        return {"answer": model.invoke(f"{RULES} {style()}: {state['question']} {state['plan']}").text}

    graph = StateGraph(State)
    graph.add_node("plan", plan)
    graph.add_node("answer", answer)
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "answer")
    graph.add_edge("answer", END)
    return graph.compile()


@pytest.mark.parametrize("where", [of_a_global, of_a_setting, of_an_attribute])
def test_changed_data_is_not_used_in_prefetched_requests(
    llm: tuple[Noting, EnginePool], where: Callable[[str], Any]
) -> None:
    engine, pool = llm
    graph = compiled(pool, where("plain"))
    fast = accelerate(graph)

    def called(one: Any) -> Any:
        engine.requests.clear()
        engine.warmed = 0
        return one.invoke({"question": "why?"}), engine.requests.copy()

    for style in ("plain", "fancy", "fancy", "odd", "other", "plain"):
        where(style)
        assert called(fast) == called(graph)
        time.sleep(2 * MISSING_PLAN_DELAY_S)  # the plan is made anew behind the query


def test_graph_is_planned_again_after_data_changed(llm: tuple[Noting, EnginePool]) -> None:
    engine, pool = llm
    fast = accelerate(compiled(pool, of_a_global("plain")))
    of_a_global("fancy")
    engine.warmed, until = 0, time.monotonic() + 10
    while not engine.warmed and time.monotonic() < until:
        fast.invoke({"question": "why?"})
    assert engine.warmed


def test_data_that_keeps_changing_is_not_reliable() -> None:
    held = {"n": 0}
    noted = DataGuards()
    for _ in range(MAX_CHANGES):
        with noted.recording():
            assert is_reliable(held, "n", held["n"], lambda: held["n"])
        assert noted.are_unchanged()
        held["n"] += 1
        assert not noted.are_unchanged() and noted.are_unchanged()
    with noted.recording():
        assert not is_reliable(held, "n", held["n"], lambda: held["n"])
        assert is_reliable(held, "model", object(), object), "what is no data is what it is"


@pytest.mark.parametrize("value", [[1, {"a": [2]}], {"a": ("b", {3})}, list(range(2 * MAX_ITEMS))])
def test_data_guard_detects_changed_contents(value: Any) -> None:
    noted = DataGuards()
    with noted.recording():
        is_reliable(value, "", value, lambda: value)
    assert noted.are_unchanged()
    value.append(1) if isinstance(value, list) else value["a"][1].add(4)
    assert not noted.are_unchanged()
