"""Tests of calls whose prompts only the run can tell: they stay in their place, and calls behind them do not."""

from __future__ import annotations

import datetime
import json
import os
import random
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from differential.recording import observe
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda
from support.hosted_model import HostedModel

from teola_plugin import accelerate
from teola_plugin.adapters.plan_report import Reason, Status

Build = Callable[[Any], Runnable[Any, Any]]
SPACES = re.compile(r"\s+")
NAMES = ["Ada", "Bob", "Cy"]
WAYS = ("invoke", "stream", "batch")


def date_in_a_text(model: Any, topic: str) -> Any:
    return model.invoke(f"On {datetime.date.today()}: pros of {topic}")


def formatted_date(model: Any, topic: str) -> Any:
    now = datetime.datetime.now(datetime.UTC)
    return model.invoke(f"In {now:%Y}, {now.strftime('%B')} {now.year}: pros of {topic}")


def date_of_a_helper(model: Any, topic: str) -> Any:
    return model.invoke("On " + _today() + ": pros of " + topic)


def _today() -> str:
    tomorrow = datetime.date.today() + datetime.timedelta(days=1)
    return str(tomorrow - datetime.timedelta(days=1))


def environment(model: Any, topic: str) -> Any:
    tone = os.environ.get("TONE_OF_ANSWERS", "kind") + os.getenv("TONE_OF_ALL", "")
    return model.invoke(f"Be {tone.strip()}: pros of {topic}")


def random_choice(model: Any, topic: str) -> Any:
    random.seed(7)
    return model.invoke(f"As {random.choice(NAMES)} {random.randint(1, 9)}: pros of {topic}")


def choice_by_the_clock(model: Any, topic: str) -> Any:
    greeting = "Good day" if time.time() > 0 else "Hello"
    if datetime.date.today().year > 2000:
        style = "brief"
    else:
        style = "long"
    return model.invoke(f"{greeting}, be {style}: pros of {topic}")


def regular_expression(model: Any, topic: str) -> Any:
    return model.invoke("Pros of " + re.sub(r"\s+", " ", topic) + SPACES.sub(" ", topic))


def name_based_id(model: Any, topic: str) -> Any:
    return model.invoke(f"{uuid.uuid5(uuid.NAMESPACE_DNS, topic).hex[:8]}: pros of {topic}")


def text_of_json(model: Any, topic: str) -> Any:
    question = {"topic": topic, "year": datetime.date.today().year}
    return model.invoke(json.dumps(question))


def chain_of_a_prompt(model: Any, topic: str) -> Any:
    prompt = ChatPromptTemplate.from_template("On {date}: pros of {topic}")
    return (prompt | model).invoke({"date": str(datetime.date.today()), "topic": topic})


def messages(model: Any, topic: str) -> Any:
    return model.invoke([("system", f"It is {datetime.date.today()}."), ("user", f"pros of {topic}")])


def most_common(model: Any, topic: str) -> Any:
    word = Counter(topic.split()).most_common(1)[0][0]
    return model.invoke(f"pros of {word}")


HARMLESS = {
    one.__name__: one
    for one in (
        date_in_a_text,
        formatted_date,
        date_of_a_helper,
        environment,
        random_choice,
        choice_by_the_clock,
        regular_expression,
        name_based_id,
        text_of_json,
        chain_of_a_prompt,
        messages,
        most_common,
    )
}


def with_calls_behind(first: Callable[[Any, str], Any]) -> Build:
    """Return an app that makes a call, one that needs nothing of it, and one that needs both answers."""

    def build(model: Any) -> Runnable[Any, Any]:
        def run(topic: str) -> str:
            pros = first(model, topic).content
            cons = model.invoke(f"cons of {topic}").content
            return str(model.invoke(f"weigh {pros} and {cons}").content)

        return RunnableLambda(run)

    return build


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", HARMLESS.values(), ids=HARMLESS)
def test_call_behind_a_prompt_of_the_run_is_prefetched(first: Callable[[Any, str], Any], way: str) -> None:
    plain, fast = HostedModel(), HostedModel()
    build = with_calls_behind(first)
    expected = observe(build(plain), way, "oats")

    result = observe(accelerate(build(fast)), way, "oats")

    assert result == expected
    assert fast.prompts == plain.prompts
    assert fast.most_at_once > plain.most_at_once


@pytest.mark.parametrize("first", HARMLESS.values(), ids=HARMLESS)
def test_explain_says_that_only_the_run_knows_the_prompt(first: Callable[[Any, str], Any]) -> None:
    rows = accelerate(with_calls_behind(first)(HostedModel())).report().calls

    assert [row.status for row in rows] == [Status.IN_PLACE, Status.PREFETCHED, Status.IN_PLACE]
    assert rows[0].reason is Reason.PROMPT_AT_RUN_TIME
    assert f"{__name__.rpartition('.')[2]}.py:" in str(rows[0].explanation)
    assert rows[1].start == f"without waiting for {rows[0].name}"
    assert rows[2].reason is Reason.NEEDS_RESULTS


@pytest.mark.parametrize("way", ["invoke", "stream"])
@pytest.mark.parametrize("failing", ["pros of", "cons of"])
def test_error_behind_a_prompt_of_the_run_is_the_originals(failing: str, way: str) -> None:
    build = with_calls_behind(date_in_a_text)
    expected = observe(build(HostedModel(fails_on=failing)), way, "oats")

    result = observe(accelerate(build(HostedModel(fails_on=failing))), way, "oats")

    assert "refused" in result.result
    assert result.result == expected.result


# ------------------------------------------------------------ code that may do more than compute


class Budget:
    """Counts what is asked, and raises at the end."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def spend(self) -> int:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the budget is spent")
        return self.left

    def __str__(self) -> str:
        return str(self.spend())

    @property
    def rest(self) -> int:
        return self.spend()


def helper_that_raises(model: Any, topic: str) -> Any:
    return model.invoke(f"{SPENT.spend()}: pros of {topic}")


def object_as_a_text(model: Any, topic: str) -> Any:
    return model.invoke(f"{SPENT} {datetime.date.today()}: pros of {topic}")


def property_that_raises(model: Any, topic: str) -> Any:
    return model.invoke(f"{SPENT.rest}: pros of {topic}")


def function_for_each(model: Any, topic: str) -> Any:
    return model.invoke("".join(map(lambda _: str(SPENT), NAMES)) + topic)


def object_in_json(model: Any, topic: str) -> Any:
    return model.invoke(f"{json.dumps(SPENT, default=str)} {topic}")


def object_in_a_choice(model: Any, topic: str) -> Any:
    return model.invoke(f"{random.choice([SPENT])} {topic}")


def function_for_each_match(model: Any, topic: str) -> Any:
    return model.invoke(SPACES.sub(lambda match: str(SPENT), f"pros of {topic}"))


def object_that_is_counted(model: Any, topic: str) -> Any:
    return model.invoke(f"{Counter(Words()).most_common(1)} {topic}")


class Words:
    """Words that cannot be read."""

    def __iter__(self) -> Any:
        raise RuntimeError("the budget is spent")


SPENT = Budget(0)


@pytest.mark.parametrize("way", ["invoke", "stream"])
@pytest.mark.parametrize(
    "first",
    [
        helper_that_raises,
        object_as_a_text,
        property_that_raises,
        function_for_each,
        object_in_json,
        object_in_a_choice,
        function_for_each_match,
        object_that_is_counted,
    ],
)
def test_nothing_passes_code_that_may_raise_on_purpose(first: Callable[[Any, str], Any], way: str) -> None:
    model = HostedModel()
    app = accelerate(with_calls_behind(first)(model))

    result = observe(app, way, "oats")

    assert "the budget is spent" in result.result
    assert model.prompts == []


def test_list_that_takes_an_object_is_no_longer_plain() -> None:
    def build(model: Any) -> Runnable[Any, Any]:
        def run(topic: str) -> list[Any]:
            words: list[Any] = random.sample(NAMES, 2)
            words.append(SPENT)
            return [model.invoke(f"{words[2]} {topic}"), model.invoke(f"cons of {topic}")]

        return RunnableLambda(run)

    model = HostedModel()

    result = observe(accelerate(build(model)), "invoke", "oats")

    assert "the budget is spent" in result.result
    assert model.prompts == []


def test_state_that_a_helper_changes_is_read_as_the_original_does() -> None:
    def build(model: Any) -> Runnable[Any, Any]:
        seen: list[str] = []

        def note(topic: str) -> str:
            seen.append(f"{datetime.date.today()} {topic}")
            return seen[-1]

        def run(topic: str) -> str:
            pros = model.invoke(f"pros of {note(topic)}").content
            return str(pros + model.invoke(f"cons of {topic}, seen {len(seen)}").content)

        return RunnableLambda(run)

    plain, fast = HostedModel(), HostedModel()
    original, accelerated = build(plain), accelerate(build(fast))
    expected = [original.invoke("oats"), original.invoke("rye")]

    results = [accelerated.invoke("oats"), accelerated.invoke("rye")]

    assert results == expected
    assert fast.prompts == plain.prompts


def test_chain_behind_a_function_with_a_prompt_of_the_run_gets_its_result() -> None:
    def build(model: Any) -> Runnable[Any, Any]:
        prompt = ChatPromptTemplate.from_template("conclude from {text}")
        weigh = with_calls_behind(date_in_a_text)(model)
        return {"text": weigh} | prompt | model | StrOutputParser()

    plain, fast = HostedModel(), HostedModel()
    expected = observe(build(plain), "invoke", "oats")

    result = observe(accelerate(build(fast)), "invoke", "oats")

    assert result == expected
    assert fast.prompts == plain.prompts
    assert fast.most_at_once == 2
