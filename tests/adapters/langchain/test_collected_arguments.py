"""Tests of helpers with `*args` and `**kwargs`, and of decorated helpers: their certain calls are found."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from support.hosted_model import HostedModel

from teola_plugin import accelerate
from teola_plugin.adapters.plan_report import Status

KINDS = ("a", "b", "c")
log: list[str] = []


def joined(*parts: str, end: str = ".", **options: str) -> str:
    """Return the parts and the values of the options as one text."""
    return " ".join(parts) + "".join(options.values()) + end


def collects(model: HostedModel) -> Any:
    def ask(kind: str, /, *words: str, **options: str) -> str:
        return str(model.invoke(joined("note", kind, *words, **options)).content)

    return lambda topic: [ask(kind, "of", topic, end="!", kind="?") for kind in KINDS]


def is_decorated(model: HostedModel) -> Any:
    def shouting(function: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> str:
            print("asking")
            return function(*args, **kwargs).upper()

        return wrapper

    @shouting
    def ask(kind: str, topic: str) -> str:
        return str(model.invoke(f"note {kind} of {topic}").content)

    return lambda topic: [ask(kind, topic=topic) for kind in KINDS]


def is_written_down(model: HostedModel) -> Any:
    def noting(function: Callable[..., str]) -> Callable[..., str]:
        def wrapper(*args: Any, **kwargs: Any) -> str:
            with open("/dev/null") as file:
                log.append(file.read())
            return function(*args, **kwargs)

        return wrapper

    @noting
    def ask(kind: str, topic: str) -> str:
        return str(model.invoke(f"note {kind} of {topic}, {len(log)}").content)

    return lambda topic: [ask(kind, topic) for kind in KINDS]


Build = Callable[[HostedModel], Any]


@pytest.mark.parametrize("build", [collects, is_decorated])
def test_calls_in_helpers_with_variable_arguments_run_concurrently(build: Build) -> None:
    plain, fast = HostedModel(), HostedModel()
    expected = RunnableLambda(build(plain)).invoke("oats")

    result = accelerate(RunnableLambda(build(fast))).invoke("oats")

    assert result == expected
    assert fast.prompts == plain.prompts
    assert fast.most_at_once == len(KINDS)


def test_calls_below_an_opaque_decorator_run_one_after_another() -> None:
    plain, fast = HostedModel(), HostedModel()
    log.clear()
    expected = RunnableLambda(is_written_down(plain)).invoke("oats")
    log.clear()

    result = accelerate(RunnableLambda(is_written_down(fast))).invoke("oats")

    assert result == expected
    assert fast.prompts == plain.prompts
    assert fast.most_at_once == 1


def make_model(name: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=name, api_key=SecretStr("key"), **options)


def test_calls_of_a_model_created_with_a_secret_are_prefetched() -> None:
    def ask(topic: str) -> list[Any]:
        model = make_model("gpt-4o-mini", temperature=0)
        return [model.invoke(f"note {kind} of {topic}") for kind in KINDS]

    report = accelerate(RunnableLambda(ask)).report()

    assert len(report.with_status(Status.PREFETCHED)) == len(KINDS) - 1
