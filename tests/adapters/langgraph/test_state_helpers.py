"""Tests of helper functions that get the state: a call waits only for the parts of the state that they read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import pytest
from langgraph.graph import END, START, StateGraph

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.engines.profiles import rtx3090, scaled
from teola_plugin.langchain import ChatTeola

RULES = "Answer from what is known, and say so where it is not. " * 12


class State(TypedDict, total=False):
    question: str
    tone: str
    plan: str
    answer: str


def by_key(state: State) -> str:
    return state["question"]


def with_default(state: State) -> str:
    return state.get("question", "nothing")


def either(state: State) -> str:
    return state.get("tone") or state["question"]


def formatted(state: State) -> str:
    question = state.get("question") or "nothing"
    return f"Question: {question.strip()}"


def decided(state: State) -> str:
    if not state.get("question"):
        return "nothing"
    return state["question"].upper()


def spelled(*, state: State) -> str:
    return f"{state.get('question')}?"


def by_name(state: State) -> str:
    return spelled(state=state)


HELPERS: dict[str, Callable[[State], str]] = {
    one.__name__: one for one in (by_key, with_default, either, formatted, decided, by_name)
}
GIVEN: tuple[State, ...] = ({"question": "why?"}, {"question": ""}, {"question": "why?", "tone": "short"})
every = pytest.mark.parametrize("name", HELPERS)


@pytest.fixture(scope="module")
def pool() -> Iterator[EnginePool]:
    with EnginePool.local(llm=FakeLLM("llm", scaled(rtx3090(), 0.1)["llm"])) as made:
        yield made


def compiled(pool: EnginePool, helper: Callable[[State], str]) -> Any:
    llm = ChatTeola(pool=pool, max_tokens=12)

    def plan(state: State) -> State:
        return {"plan": llm.invoke(f"Plan for {state.get('question')}").text}

    def answer(state: State) -> State:
        return {"answer": llm.invoke(f"{RULES} {helper(state)} with {state['plan']}").text}

    graph = StateGraph(State)
    graph.add_node("plan", plan)
    graph.add_node("answer", answer)
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "answer")
    graph.add_edge("answer", END)
    return graph.compile()


@every
@pytest.mark.parametrize("given", GIVEN, ids=["asked", "nothing", "both"])
def test_state_helpers_give_the_answer_of_the_original(pool: EnginePool, name: str, given: State) -> None:
    graph = compiled(pool, HELPERS[name])
    expected, fast = graph.invoke(given), accelerate(graph)
    assert fast.invoke(given) == expected
    assert asyncio.run(fast.ainvoke(given)) == expected


@every
def test_prompt_of_a_helper_is_prefilled_up_to_missing_state(pool: EnginePool, name: str) -> None:
    """The state has no plan and no answer yet."""
    fast = accelerate(compiled(pool, HELPERS[name]))
    fast.invoke({"question": "why?", "tone": "short"})
    trace = fast.last_trace()
    planned = {span.primitive: span for span in trace.spans}
    assert not any(".call#" in name for name in planned), "all that is asked for is planned"
    early = [span for name, span in planned.items() if "answer.model.prefilling.partial" in name]
    writing = next(span for name, span in planned.items() if "plan.model.decoding" in name)
    assert early and early[0].queued < writing.done


def changes(state: State) -> str:
    state["tone"] = "changed"
    return state.get("question", "")


def elsewhere(state: State) -> str:
    return f"{state.get('question')}{SEEN.append(1) or ''}"  # type: ignore[func-returns-value]


SEEN: list[int] = []


@pytest.mark.parametrize("helper", [changes, elsewhere])
def test_helper_with_side_effects_runs_as_often_as_originally(pool: EnginePool, helper: Callable[[State], str]) -> None:
    graph = compiled(pool, helper)
    SEEN.clear()
    expected = graph.invoke({"question": "why?"})
    times = len(SEEN)
    assert accelerate(graph).invoke({"question": "why?"}) == expected
    assert len(SEEN) == 2 * times
