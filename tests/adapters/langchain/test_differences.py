"""Tests of the differences that docs/compatibility-langchain.md lists, as far as no other test covers them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.runnable import AcceleratedRunnable


def two_answers(pool: Any, **options: Any) -> AcceleratedRunnable:
    """Return a chain that answers one prompt twice and compares the answers."""
    model = ChatTeola(pool=pool, **options)
    one = ChatPromptTemplate.from_template("A number: {question}") | model | StrOutputParser()
    both = RunnablePassthrough.assign(a=one).assign(b=one)
    return accelerate(both | ChatPromptTemplate.from_template("{a} or {b}?") | model, pool=pool)


def test_astream_events_v3_gives_the_events_of_the_original(llm_pool: Any) -> None:
    chain = ChatPromptTemplate.from_template("{question}") | ChatTeola(pool=llm_pool)

    async def seen(one: Any) -> Any:
        try:
            stream = await one.astream_events({"question": "why"}, version="v3")
            return [type(event) async for event in stream]
        except NotImplementedError as error:
            return str(error)

    fast = accelerate(chain, pool=llm_pool)
    assert asyncio.run(seen(fast)) == asyncio.run(seen(chain))
    assert fast.last_trace() is None


def test_model_whose_answers_depend_on_call_order_is_not_prefetched() -> None:
    model = FakeListChatModel(responses=["one", "two", "three"])
    first = ChatPromptTemplate.from_template("{x}") | model | StrOutputParser()
    chain = RunnablePassthrough.assign(a=first).assign(b=first)
    fast = accelerate(chain)
    assert {row.level for row in fast.report().parts if row.class_name == "FakeListChatModel"} == {"original"}
    assert [fast.invoke({"x": "?"}) for _ in range(3)] == [
        {"x": "?", "a": a, "b": b} for a, b in (("one", "two"), ("three", "one"), ("two", "three"))
    ]


@pytest.mark.parametrize("options", [{"temperature": 0.9}, {"temperature": 0.0}])
def test_equal_generation_requests_stay_separate(llm_pool: Any, llm: Any, options: dict[str, Any]) -> None:
    two_answers(llm_pool, **options).invoke({"question": "any"})
    requests = [(one.prompt.flat(), one.sampling.temperature) for one in llm.requests]
    assert requests.count(("user: A number: any\nassistant:", options["temperature"])) == 2 and len(requests) == 3


def test_message_formatted_into_a_prompt_includes_its_run_id(llm_pool: Any, llm: Any) -> None:
    """Two runs of the original differ, too. A call prefetched with another id is not claimed."""
    model = ChatTeola(pool=llm_pool)
    draft = ChatPromptTemplate.from_template("Draft {question}") | model
    chain = RunnablePassthrough.assign(draft=draft) | ChatPromptTemplate.from_template("Better: {draft}") | model
    answers = [one.invoke({"question": "why"}).content for one in (chain, chain, accelerate(chain, pool=llm_pool))]
    assert all("id='lc_run-" in one for one in answers) and len(set(answers)) == 3


def test_bounded_batch_fails_in_the_order_of_the_original(llm_pool: Any) -> None:
    def first(x: Any) -> Any:
        if x["question"] == "b":
            raise ValueError("b fails in the first step")
        return x

    def last(x: Any) -> Any:
        raise ValueError(f"{x.content[-1]} fails in the last step")

    chain = RunnableLambda(first) | ChatPromptTemplate.from_template("{question}") | ChatTeola(pool=llm_pool) | last
    fast, given = accelerate(chain), [{"question": "a"}, {"question": "b"}]
    bounded: Any = {"max_concurrency": 1}
    for one in (chain, fast):
        with pytest.raises(ValueError, match="first step"):
            one.batch(given, bounded)
        failed = [str(error) for error in one.batch(given, bounded, return_exceptions=True)]
        assert ["last step" in error for error in failed] == [True, False]
