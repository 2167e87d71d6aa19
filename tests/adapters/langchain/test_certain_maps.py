"""Tests of `.map()` in chains with the user's own models: certain calls for each item are prefetched."""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest
from differential.recording import WAYS, observe
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from support.hosted_model import LATENCY_S, HostedModel
from support.own_leaves import Ledger, Notes

from teola_plugin import accelerate

Chain = Runnable[Any, Any]
Build = Callable[[Any], Chain]
INPUT = {"topic": "oats", "texts": ["a", "b"], "items": [{"text": "a"}, {"text": "b"}]}


def ask(template: str, model: Any) -> Chain:
    return ChatPromptTemplate.from_template(template) | model | StrOutputParser()


def behind_a_plan(model: Any, notes: Chain) -> Chain:
    """Return a chain whose notes do not need the plan that is written before them."""
    return RunnablePassthrough.assign(plan=ask("plan {topic}", model)) | RunnablePassthrough.assign(notes=notes)


def mapped_chain(model: Any) -> Chain:
    return behind_a_plan(model, itemgetter("items") | ask("note {text}", model).map())


def mapped_model(model: Any) -> Chain:
    return behind_a_plan(model, itemgetter("texts") | (model | StrOutputParser()).map())


def list_of_a_function(model: Any) -> Chain:
    items = RunnableLambda(lambda inputs: [{"text": text.upper()} for text in inputs["texts"]])
    return behind_a_plan(model, items | ask("note {text}", model).map())


def function_in_the_body(model: Any) -> Chain:
    body = RunnableLambda(lambda item: {"text": item["text"].strip()}) | ask("note {text}", model)
    return behind_a_plan(model, itemgetter("items") | body.map())


def two_steps(model: Any) -> Chain:
    return itemgetter("items") | (ask("note {text}", model) | ask("shorten {it}", model)).map()


GAINING: dict[str, Build] = {
    build.__name__: build for build in (mapped_chain, mapped_model, list_of_a_function, function_in_the_body)
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", [*GAINING.values(), two_steps], ids=[*GAINING, "two_steps"])
def test_results_events_and_requests_are_the_originals(build: Build, way: str) -> None:
    plain, fast = HostedModel(latency_s=0.01), HostedModel(latency_s=0.01)
    expected = observe(build(plain), way, INPUT)

    result = observe(accelerate(build(fast)), way, INPUT)

    assert result == expected
    assert fast.prompts == plain.prompts


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream"])
@pytest.mark.parametrize("build", GAINING.values(), ids=GAINING)
def test_calls_for_the_items_do_not_wait_for_unneeded_calls(build: Build, way: str) -> None:
    model = HostedModel()

    observe(accelerate(build(model)), way, INPUT)

    assert model.most_at_once == 3


def test_report_names_when_calls_of_a_map_start() -> None:
    starts = [
        {row.name: row.start for row in accelerate(build(HostedModel())).report().calls}
        for build in (mapped_chain, two_steps)
    ]

    assert starts[0] == {"plan.model": "", "notes.model": "without waiting for plan.model"}
    assert starts[1] == {"each.model": "", "each.model2": "once the step in front of it has ended for its item"}


class Uneven(HostedModel):
    """A model that takes longer for one of the notes, and notes the order of its answers."""

    answered: list[str] = []

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        prompt = self._begin(messages)
        time.sleep(4 * LATENCY_S if prompt == "note b" else LATENCY_S / 10)
        self.answered.append(prompt)
        return self._end(prompt)


def test_second_step_of_an_item_does_not_wait_for_others() -> None:
    model = Uneven(answered=[])

    accelerate(two_steps(model)).invoke(INPUT)

    assert model.answered == ["note a", "shorten answer to note a", "note b", "shorten answer to note b"]


def test_searches_for_the_items_do_not_wait_for_unneeded_calls() -> None:
    model, ledger = HostedModel(), Ledger(meet=2)
    chain = behind_a_plan(model, itemgetter("texts") | Notes(ledger=ledger).map())
    began = []
    ledger.look = lambda: began.append(len(model.prompts) and not model._running)

    accelerate(chain).invoke(INPUT)

    assert began == [False, False]
    assert set(ledger.calls.values()) == {1}


# ------------------------------------------------------------ calls that are not certain


def with_limit(model: Any) -> Chain:
    return behind_a_plan(model, itemgetter("items") | ask("note {text}", model).map().with_config(max_concurrency=1))


def with_limit_in_code(model: Any) -> Chain:
    limited = ask("note {text}", model).with_config(max_concurrency=1)
    return RunnableLambda(lambda inputs: [limited.batch(inputs["items"]), limited.map().invoke(inputs["items"])])


def behind_code(model: Any) -> Chain:
    return behind_a_plan(model, RunnableLambda(print) | (lambda _: ["a", "b"]) | (model | StrOutputParser()).map())


@pytest.mark.parametrize("build", [with_limit, with_limit_in_code, behind_code])
def test_limited_or_opaque_maps_gain_no_concurrency(build: Build) -> None:
    plain, fast = HostedModel(), HostedModel()
    expected = observe(build(plain), "invoke", INPUT)

    result = observe(accelerate(build(fast)), "invoke", INPUT)

    assert result == expected
    assert fast.prompts == plain.prompts
    assert fast.most_at_once == plain.most_at_once


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "batch"])
@pytest.mark.parametrize("build", [mapped_chain, two_steps])
def test_no_item_is_requested_if_one_lacks_a_variable(build: Build, way: str) -> None:
    incomplete = {**INPUT, "items": [{"text": "a"}, {"other": "b"}]}
    plain, fast = HostedModel(), HostedModel()
    expected = observe(build(plain), way, incomplete)

    result = observe(accelerate(build(fast)), way, incomplete)

    assert expected.failed
    assert result.result == expected.result
    assert fast.prompts == plain.prompts


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream"])
@pytest.mark.parametrize("build", [mapped_chain, two_steps])
def test_error_of_a_call_is_the_originals(build: Build, way: str) -> None:
    expected = observe(build(HostedModel(fails_on="note b")), way, INPUT)

    result = observe(accelerate(build(HostedModel(fails_on="note b"))), way, INPUT)

    assert "refused: note b" in result.result
    assert result.result == expected.result
