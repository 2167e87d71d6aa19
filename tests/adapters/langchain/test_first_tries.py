"""Tests of retries and fallbacks with the user's own models: only the first try is prefetched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from support.hosted_model import HostedModel

from teola_plugin import accelerate

ASK = ChatPromptTemplate.from_template("note {item} of {topic}")
ITEMS = ("a", "b", "c")
INPUT = {"topic": "oats"}
Build = Callable[[HostedModel, HostedModel], Runnable[Any, Any]]


def loop(ask: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """Return a function that calls the same Runnable in a loop."""

    def take_notes(inputs: dict[str, str]) -> list[Any]:
        return [ask.invoke({"item": item, "topic": inputs["topic"]}) for item in ITEMS]

    return RunnableLambda(take_notes)


def model_with_fallback(model: HostedModel, spare: HostedModel) -> Runnable[Any, Any]:
    return loop(ASK | model.with_fallbacks([spare]) | StrOutputParser())


def model_with_retry(model: HostedModel, spare: HostedModel) -> Runnable[Any, Any]:
    return loop(ASK | model.with_retry(stop_after_attempt=2, wait_exponential_jitter=False) | StrOutputParser())


def chain_with_retry(model: HostedModel, spare: HostedModel) -> Runnable[Any, Any]:
    chain = ASK | model.bind(stop=["."]) | StrOutputParser()
    return loop(chain.with_retry(stop_after_attempt=2, wait_exponential_jitter=False))


def retry_with_fallback(model: HostedModel, spare: HostedModel) -> Runnable[Any, Any]:
    tried = (ASK | model).with_retry(stop_after_attempt=2, wait_exponential_jitter=False)
    return loop(tried.with_fallbacks([ASK | spare]) | StrOutputParser())


def steps_of_a_chain(model: HostedModel, spare: HostedModel) -> Runnable[Any, Any]:
    ask = ChatPromptTemplate.from_template
    first = RunnablePassthrough.assign(plan=ask("plan {topic}") | model.with_fallbacks([spare]) | StrOutputParser())
    return first.assign(notes=ask("notes on {topic}") | model.with_retry(stop_after_attempt=2) | StrOutputParser())


BUILDS: dict[str, Build] = {
    one.__name__: one
    for one in (model_with_fallback, model_with_retry, chain_with_retry, retry_with_fallback, steps_of_a_chain)
}


def called(chain: Any, way: str) -> Any:
    """Return what a chain returns, or the error that it raises."""
    try:
        return chain.invoke(INPUT) if way == "invoke" else asyncio.run(chain.ainvoke(INPUT))
    except ValueError as error:
        return repr(error)


def models(**options: Any) -> tuple[HostedModel, HostedModel]:
    return HostedModel(**options), HostedModel()


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_first_tries_run_at_once(build: Build, way: str) -> None:
    plain, fast = models(), models()
    expected = called(build(*plain), way)

    result = called(accelerate(build(*fast)), way)

    assert result == expected
    assert fast[0].prompts == plain[0].prompts
    assert plain[0].most_at_once == 1
    assert fast[0].most_at_once > 1
    assert fast[1].prompts == []


@pytest.mark.parametrize("failures", [1, 1_000_000], ids=["fails once", "fails always"])
@pytest.mark.parametrize("fails_on", ["note a", "note c", "note"])
@pytest.mark.parametrize("build", [model_with_fallback, model_with_retry, chain_with_retry, retry_with_fallback])
def test_tries_after_a_failure_are_those_of_the_original(build: Build, fails_on: str, failures: int) -> None:
    plain, fast = (models(fails_on=fails_on, failures=failures) for _ in range(2))
    expected = called(build(*plain), "invoke")

    result = called(accelerate(build(*fast)), "invoke")

    assert result == expected
    assert fast[1].prompts == plain[1].prompts
    if isinstance(expected, list):
        assert fast[0].prompts == plain[0].prompts
    else:  # calls that a loop does not come to any more had been made
        assert set(plain[0].prompts) <= set(fast[0].prompts)


def test_only_the_first_of_several_models_is_called() -> None:
    model, spare = models()

    called(accelerate(model_with_fallback(model, spare)), "invoke")

    assert len(model.prompts) == len(ITEMS)
    assert spare.prompts == []


def test_max_concurrency_of_one_keeps_first_tries_sequential() -> None:
    model, spare = models()
    fast = accelerate(steps_of_a_chain(model, spare))

    fast.invoke(INPUT, {"max_concurrency": 1})

    assert model.most_at_once == 1
