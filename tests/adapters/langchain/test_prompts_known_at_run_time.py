"""Tests of calls whose prompts only the run can tell: they stay in their place, and calls behind them do not."""

from __future__ import annotations

import datetime
import inspect
import json
import os
import random
import re
import string
import textwrap
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


@pytest.fixture(scope="module", autouse=True)
def warmed_up() -> None:
    """Start what the first prefetched call of a process has to wait for."""
    accelerate(with_calls_behind(date_in_a_text)(HostedModel())).invoke("rye")


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


# ------------------------------------------------------------ prompts that are computed as the original does

COUNTED = "In 2024, %d%%, %-9s|%r: pros"
WIDE = "%*d of %s"
QUESTION = string.Template("Cost $$5: pros of ${topic} and $topic")


def dedented_text(model: Any, topic: str) -> Any:
    text = f"""
        Give reasons.
        pros of {topic}
    """
    return model.invoke(textwrap.dedent(text).strip() + inspect.cleandoc(f"  {topic}"))


def percent_formats(model: Any, topic: str) -> Any:
    return model.invoke(COUNTED % (len(topic), topic, topic))


def template_of_the_module(model: Any, topic: str) -> Any:
    return model.invoke(QUESTION.substitute(topic=topic))


def template_made_here(model: Any, topic: str) -> Any:
    return model.invoke(string.Template("pros of $topic").substitute(topic=topic) + f" {topic!r}")


def calls_by_map(model: Any, topic: str) -> Any:
    def ask(kind: str) -> str:
        return str(model.invoke(f"{kind} of {topic}").content)

    texts = list(map(ask, ["uses", "risks"]))
    answers = "".join(map(lambda kind: model.invoke(f"{kind} of {topic}").content, texts))
    return model.invoke(f"pros of {answers}")


COMPUTED = {
    one.__name__: one
    for one in (dedented_text, percent_formats, template_of_the_module, template_made_here, calls_by_map)
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", COMPUTED.values(), ids=COMPUTED)
def test_call_with_a_computed_prompt_is_prefetched(first: Callable[[Any, str], Any], way: str) -> None:
    def build(model: Any) -> Runnable[Any, Any]:
        def run(topic: str) -> str:
            cons = model.invoke(f"cons of {topic}").content
            return str(cons + first(model, topic).content)

        return RunnableLambda(run)

    plain, fast = HostedModel(), HostedModel()
    expected = observe(build(plain), way, "oats")
    accelerated = accelerate(build(fast))

    result = observe(accelerated, way, "oats")

    assert result == expected
    assert fast.prompts == plain.prompts
    assert fast.most_at_once > plain.most_at_once
    assert accelerated.report().calls[1].status is Status.PREFETCHED


@pytest.mark.parametrize("first", COMPUTED.values(), ids=COMPUTED)
def test_error_of_a_call_with_a_computed_prompt_is_the_originals(first: Callable[[Any, str], Any]) -> None:
    build = with_calls_behind(first)
    expected = observe(build(HostedModel(fails_on="pros")), "invoke", "oats")

    result = observe(accelerate(build(HostedModel(fails_on="pros"))), "invoke", "oats")

    assert "refused" in result.result
    assert result.result == expected.result


def test_text_of_a_width_that_is_not_known_is_left_to_the_original() -> None:
    def build(model: Any) -> Runnable[Any, Any]:
        def run(topic: str) -> list[Any]:
            return [model.invoke(f"cons of {topic}"), model.invoke(WIDE % (9, len(topic), topic))]

        return RunnableLambda(run)

    plain, fast = HostedModel(), HostedModel()
    expected = build(plain).invoke("oats")
    accelerated = accelerate(build(fast))

    result = accelerated.invoke("oats")

    assert [one.content for one in result] == [one.content for one in expected]
    assert fast.prompts == plain.prompts
    assert accelerated.report().calls[1].reason is Reason.PROMPT_AT_RUN_TIME


class Drawer:
    """Has a method that is called like one of texts."""

    def join(self, items: Any) -> None:
        """Read none of the items."""


def test_map_that_nobody_reads_makes_no_call() -> None:
    def build(model: Any) -> Runnable[Any, Any]:
        def run(topic: str) -> list[Any]:
            answers = map(lambda kind: model.invoke(f"{kind} of {topic}"), ["uses", "risks"])
            Drawer().join(map(lambda kind: model.invoke(f"{kind} of {topic}"), ["uses", "risks"]))
            return [model.invoke(f"cons of {topic}").content, next(answers).content]

        return RunnableLambda(run)

    plain, fast = HostedModel(), HostedModel()
    expected = observe(build(plain), "invoke", "oats")

    result = observe(accelerate(build(fast)), "invoke", "oats")

    assert result == expected
    assert fast.prompts == plain.prompts


def test_template_without_a_value_raises_as_the_original() -> None:
    def build(model: Any) -> Runnable[Any, Any]:
        def run(topic: str) -> list[Any]:
            first = model.invoke(f"cons of {topic}").content
            return [first, model.invoke(QUESTION.substitute(subject=topic)).content]

        return RunnableLambda(run)

    expected = observe(build(HostedModel()), "invoke", "oats")

    result = observe(accelerate(build(HostedModel())), "invoke", "oats")

    assert "KeyError" in result.result
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
