"""Tests of calls behind user code in a function: they start once the original begins the first call behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from differential.recording import observe
from langchain_core.messages import HumanMessage
from langchain_core.runnables import Runnable, RunnableLambda
from langgraph.graph import END, START, StateGraph
from support.hosted_model import HostedModel
from typing_extensions import TypedDict

from teola_plugin import accelerate
from teola_plugin.adapters.plan_report import Reason, Status

Build = Callable[[Any], Runnable[Any, Any]]
INPUT = {"topic": "oats"}
WAYS = ("invoke", "ainvoke", "stream", "astream", "batch", "events")


def not_understood(namespace: dict[str, Any], source: str = "") -> Any:
    """Run source code, which the reader of functions cannot know."""
    exec(source, namespace)
    return namespace.get("result", "")


def in_a_function(model: Any) -> Runnable[Any, Any]:
    def answer(inputs: dict[str, Any]) -> list[Any]:
        not_understood({})
        return [model.invoke(f"{kind} {inputs['topic']}").content for kind in ("title", "tags", "summary")]

    return RunnableLambda(answer)


def before_and_between(model: Any) -> Runnable[Any, Any]:
    def answer(inputs: dict[str, Any]) -> list[Any]:
        not_understood({})
        title = model.invoke(f"title {inputs['topic']}").content
        tags = model.invoke(f"tags {inputs['topic']}").content
        not_understood({})
        summary = model.invoke(f"summary {inputs['topic']}").content
        outline = model.invoke(f"outline {inputs['topic']}").content
        return [title, tags, summary, outline]

    return RunnableLambda(answer)


def whose_value_is_read(model: Any) -> Runnable[Any, Any]:
    def answer(inputs: dict[str, Any]) -> list[Any]:
        facts = not_understood({}, "result = 'a fact'")
        title = model.invoke(f"title {inputs['topic']}").content
        tags = model.invoke(f"tags {inputs['topic']}").content
        return [title, tags, model.invoke(f"use {facts}").content]

    return RunnableLambda(answer)


def that_calls_the_model(model: Any) -> Runnable[Any, Any]:
    """Return a chain whose code makes the very call that stands behind it."""

    def answer(inputs: dict[str, Any]) -> list[Any]:
        not_understood({"model": model, "topic": inputs["topic"]}, "model.invoke(f'title {topic}')")
        return [model.invoke(f"{kind} {inputs['topic']}").content for kind in ("title", "tags")]

    return RunnableLambda(answer)


class State(TypedDict, total=False):
    topic: str
    answers: list[Any]


def in_a_node(model: Any) -> Any:
    def answer(state: State) -> State:
        not_understood({})
        title = model.invoke([HumanMessage(f"title {state['topic']}")])
        tags = model.invoke([HumanMessage(f"tags {state['topic']}")])
        return {"answers": [title.content, tags.content]}

    builder = StateGraph(State)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    builder.add_edge("answer", END)
    return builder.compile()


GAINING: dict[str, Build] = {
    build.__name__: build for build in (in_a_function, before_and_between, whose_value_is_read, in_a_node)
}


def outcome_of(app: Any, way: str) -> Any:
    return observe(app, way, INPUT)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", [*GAINING.values(), that_calls_the_model], ids=[*GAINING, "that_calls_the_model"])
def test_results_and_requests_are_the_originals(build: Build, way: str) -> None:
    plain, fast = HostedModel(latency_s=0.01), HostedModel(latency_s=0.01)
    expected = outcome_of(build(plain), way)

    result = outcome_of(accelerate(build(fast)), way)

    assert result.result == expected.result
    assert fast.prompts == plain.prompts


@pytest.mark.parametrize("way", ["invoke", "stream"])
@pytest.mark.parametrize("build", GAINING.values(), ids=GAINING)
def test_calls_behind_code_overlap_once_the_first_of_them_begins(build: Build, way: str) -> None:
    model = HostedModel()

    outcome_of(accelerate(build(model)), way)

    assert model.most_at_once > 1


def test_calls_of_a_coroutine_behind_code_overlap() -> None:
    model = HostedModel()

    async def answer(inputs: dict[str, Any]) -> list[Any]:
        not_understood({})
        title = await model.ainvoke(f"title {inputs['topic']}")
        tags = await model.ainvoke(f"tags {inputs['topic']}")
        return [title.content, tags.content]

    outcome_of(accelerate(RunnableLambda(answer)), "ainvoke")

    assert model.most_at_once == 2


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_no_call_is_made_if_the_code_raises(way: str) -> None:
    model = HostedModel()

    def answer(inputs: dict[str, Any]) -> list[Any]:
        not_understood({}, "raise PermissionError('not you')")
        return [model.invoke(f"{kind} {inputs['topic']}").content for kind in ("title", "tags")]

    outcome = outcome_of(accelerate(RunnableLambda(answer)), way)

    assert "not you" in outcome.result
    assert model.prompts == []


def test_no_call_is_made_that_the_code_skips() -> None:
    model = HostedModel()

    def answer(inputs: dict[str, Any]) -> Any:
        if not_understood({}, "result = 'enough'"):
            return "enough"
        return [model.invoke(f"{kind} {inputs['topic']}").content for kind in ("title", "tags")]

    assert "enough" in outcome_of(accelerate(RunnableLambda(answer)), "invoke").result
    assert model.prompts == []


def test_report_says_which_calls_wait_for_the_code() -> None:
    rows = {row.name: row for row in accelerate(before_and_between(HostedModel())).report().calls}

    assert rows["answer.model"].reason is Reason.BEHIND_CODE
    assert rows["answer.model2"].status is Status.PREFETCHED
    assert rows["answer.model3"].reason is Reason.BEHIND_CODE
    assert rows["answer.model4"].status is Status.PREFETCHED


def test_report_says_that_calls_stay_in_place_if_no_call_shows_that_the_code_has_ended() -> None:
    model = HostedModel()

    def answer(inputs: dict[str, Any]) -> list[Any]:
        not_understood({})
        return [model.invoke(f"note {item}").content for item in inputs["items"]]

    report = accelerate(RunnableLambda(answer)).report()

    assert not report.with_status(Status.PREFETCHED)
