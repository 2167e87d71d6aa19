"""Tests of functions that take texts apart by regular expressions before they call models."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.runnables import Runnable, RunnableLambda
from support.hosted_model import HostedModel

from teola_plugin import accelerate

TOPICS = ["oats 1", "rye 22", "corn"]

Use = Callable[[Any, str], list[str]]


def ask(model: Any, text: str) -> str:
    return str(model.invoke(text).content)


def cleaned(model: Any, plan: str) -> list[str]:
    text = re.sub(r"[^\w ]+", "", re.sub(r"\s+", " ", plan))
    return [ask(model, f"write {text}"), ask(model, f"check {text}")]


def found(model: Any, plan: str) -> list[str]:
    return [ask(model, f"note {number}") for number in re.findall(r"\d+", plan)]


def split(model: Any, plan: str) -> list[str]:
    notes = []
    for part in re.split(r"[,;]", plan):
        notes.append(ask(model, f"note {part.strip()}"))
    return notes


def searched(model: Any, plan: str) -> list[str]:
    match = re.search(r"\d+", plan)
    number = match.group() if match else "none"
    return [ask(model, f"note {number}"), ask(model, f"check {number}")]


def dedented(model: Any, plan: str) -> list[str]:
    text = textwrap.dedent(f"  {plan}\n  end")
    return [ask(model, f"write {text}"), ask(model, f"check {text}")]


def slow(model: Any, plan: str) -> list[str]:
    text = re.sub(r"(\w+\s?)+$", "", plan)
    return [ask(model, f"write {text}"), ask(model, f"check {text}")]


def of_the_input(model: Any, plan: str) -> list[str]:
    text = re.sub(plan, "", plan)
    return [ask(model, f"write {text}"), ask(model, f"check {text}")]


def replaced_by_code(model: Any, plan: str) -> list[str]:
    text = re.sub(r"\d+", lambda match: NUMBERS.append(match.group()) or "n", plan)
    return [ask(model, f"write {text}"), ask(model, f"check {text}")]


NUMBERS: list[str] = []


def build(use: Use, model: Any) -> Runnable[Any, Any]:
    def run(inputs: dict[str, Any]) -> list[str]:
        plan = ask(model, "plan " + ", ".join(inputs["topics"]))
        return use(model, plan)

    return RunnableLambda(run)


@pytest.mark.parametrize("use", [cleaned, found, split, searched, dedented])
def test_calls_behind_linear_patterns_overlap(use: Use) -> None:
    original, model = HostedModel(), HostedModel()
    expected = build(use, original).invoke({"topics": TOPICS})

    assert accelerate(build(use, model)).invoke({"topics": TOPICS}) == expected

    assert model.prompts == original.prompts
    assert model.most_at_once >= 2


@pytest.mark.parametrize("use", [slow, of_the_input, replaced_by_code])
def test_other_patterns_run_once_in_their_place(use: Use) -> None:
    original, model = HostedModel(), HostedModel()
    expected = build(use, original).invoke({"topics": TOPICS})
    NUMBERS.clear()

    assert accelerate(build(use, model)).invoke({"topics": TOPICS}) == expected

    assert model.prompts == original.prompts
    assert len(NUMBERS) == (2 if use is replaced_by_code else 0)


def test_missing_match_raises_the_originals_error() -> None:
    def missing(model: Any, plan: str) -> list[str]:
        number = re.search(r"\d+ kg", plan).group()  # type: ignore[union-attr]
        return [ask(model, f"note {number}"), ask(model, f"check {number}")]

    with pytest.raises(AttributeError, match="group"):
        accelerate(build(missing, HostedModel())).invoke({"topics": TOPICS})
