"""Tests of a prompt whose context is a list: it is prefilled item by item while the list is still being written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableParallel
from support.own_code import with_side_effect

from benchmarks.langchain.kits import pool_kit
from teola_plugin import accelerate
from teola_plugin.engines import profiles
from teola_plugin.observe.spans import Span

LINES = ChatPromptTemplate.from_template("Write three questions, one per line, about: {question}")
ASK = ChatPromptTemplate.from_template("Use the context to answer.\n\nContext: {context}\n\nQuestion: {question}")
ASKED = {"question": "what do the reports say?"}
Found = Sequence[Sequence[Document]]


def in_order(found: Found) -> str:
    return "\n\n".join(d.page_content for documents in found for d in documents)


def with_an_end(found: Found) -> str:
    return in_order(found) + "\n\nThat is all there is."


def backwards(found: Found) -> str:
    return "\n\n".join(d.page_content for documents in reversed(found) for d in documents)


def three_or_nothing(found: Found) -> str:
    return in_order([found[0], found[1], found[2]])


@pytest.fixture(scope="module")
def kit() -> Iterator[Any]:
    made = pool_kit(profiles.scaled(profiles.rtx3090(), 0.1))
    yield made
    made.pool.close()


def chain(kit: Any, joined: Callable[[Found], str]) -> Runnable[Any, Any]:
    queries = LINES | kit.chat(24) | StrOutputParser() | (lambda text: text.split("\n"))
    context = queries | kit.store.as_retriever(search_kwargs={"k": 2}).map() | joined
    return {"context": context, "question": lambda x: x["question"]} | ASK | kit.chat(4)


def answer_and_spans(kit: Any, fast: Any) -> tuple[Any, list[Span]]:
    """Return the answer, and the spans of prefills that were made while the prompt grew."""
    kit.fresh()
    found = fast.invoke(ASKED)
    return found.content, [span for span in fast.last_trace().spans if ".grown#" in span.primitive]


@pytest.mark.parametrize("joined", [in_order, with_an_end])
def test_growing_prompt_prefix_is_prefilled_from_the_second_query(kit: Any, joined: Callable[[Found], str]) -> None:
    plain = chain(kit, joined)
    fast = accelerate(plain)
    expected = plain.invoke(ASKED).content
    first, nothing = answer_and_spans(kit, fast)
    assert nothing == [], "the first query only looks whether the text grows at its end"
    second, grown = answer_and_spans(kit, fast)
    assert first == second == expected
    assert [span.outcome for span in grown] == ["done"] * len(grown) and 1 <= len(grown) <= 2
    assert all(span.tokens > 200 for span in grown), "two passages of 128 words each, at least"
    whole = next(s for s in fast.last_trace().spans if s.primitive == "model.prefilling")
    assert whole.cached >= grown[-1].tokens - 32 or whole.cached >= grown[0].tokens - 32


@pytest.mark.parametrize("joined", [backwards, three_or_nothing])
def test_prompt_growing_before_its_end_is_not_prefilled(kit: Any, joined: Callable[[Found], str]) -> None:
    plain = chain(kit, joined)
    fast = accelerate(plain)
    expected = plain.invoke(ASKED).content
    for _ in range(3):
        answer, grown = answer_and_spans(kit, fast)
        assert answer == expected and grown == []


def test_opaque_code_is_not_run_for_partial_prefilling(kit: Any) -> None:
    calls: list[int] = []

    def counted(found: Found) -> str:
        calls.append(len(found))
        return in_order(found)

    plain = chain(kit, with_side_effect(counted))
    fast = accelerate(plain)
    expected = plain.invoke(ASKED).content
    for _ in range(3):
        answer, grown = answer_and_spans(kit, fast)
        assert answer == expected and grown == []
    assert calls == [3] * 4


def test_wrong_prefix_prediction_stops_partial_prefilling(kit: Any) -> None:
    """The order of the passages depends on the question."""

    def order(given: dict[str, Any]) -> str:
        return backwards(given["found"]) if "back" in given["question"] else in_order(given["found"])

    queries = LINES | kit.chat(24) | StrOutputParser() | (lambda text: text.split("\n"))
    found = queries | kit.store.as_retriever(search_kwargs={"k": 2}).map()
    both = RunnableParallel(found=found, question=lambda x: x["question"])
    plain = both | {"context": order, "question": lambda x: x["question"]} | ASK | kit.chat(4)
    fast = accelerate(plain)

    def grown(question: str) -> int:
        kit.fresh()
        given = {"question": question}
        assert fast.invoke(given).content == plain.invoke(given).content
        return sum(".grown#" in span.primitive for span in fast.last_trace().spans)

    assert grown("one") == 0 and grown("two") > 0
    assert grown("back") >= 0 and grown("back again") == 0
    assert grown("three") == 0 and grown("four") > 0


def test_prefix_predictions_are_kept_per_tenant(kit: Any) -> None:
    fast = accelerate(chain(kit, in_order))

    def grown(tenant: str) -> int:
        kit.fresh()
        fast.invoke(ASKED, {"configurable": {"teola_tenant": tenant}})
        return sum(".grown#" in span.primitive for span in fast.last_trace().spans)

    assert grown("trust-a") == 0 and grown("trust-a") > 0
    assert grown("trust-b") == 0, "the other tenant's queries taught nothing"
    assert grown("trust-b") > 0 and grown("trust-a") > 0
    prefixes = kit.pool.runtime._driver._incremental
    prefixes.reset()
    assert grown("trust-a") == 0 and grown("trust-a") > 0


def test_prefix_predictions_are_kept_per_pool(kit: Any) -> None:
    fast = accelerate(chain(kit, in_order))
    assert [bool(answer_and_spans(kit, fast)[1]) for _ in range(2)][1]
    other = pool_kit(profiles.scaled(profiles.rtx3090(), 0.1))
    try:
        assert answer_and_spans(other, accelerate(chain(other, in_order)))[1] == []
    finally:
        other.pool.close()
