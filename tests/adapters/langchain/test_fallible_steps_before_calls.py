"""Tests of steps that may fail before a call of the user's own model.

The call is not prefetched behind code that may refuse the input. It is behind parsers and pure functions, which have no
`raise`: when one of them fails, a later call may have been made.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any

import pytest
from differential.recording import observe
from langchain_core.output_parsers import (
    CommaSeparatedListOutputParser,
    JsonOutputParser,
    PydanticOutputParser,
    StrOutputParser,
)
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import (
    Runnable,
    RunnableBranch,
    RunnableGenerator,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)
from langchain_core.tools import tool
from pydantic import BaseModel
from support.own_leaves import Chat, Ledger, Notes

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.engines.fake import fake_engines

Chain = Runnable[Any, Any]
assign = RunnablePassthrough.assign
QUESTION = {"question": "why"}
WAYS = ("invoke", "ainvoke", "batch", "abatch") if os.environ.get("TEOLA_TEST_LONG") else ("invoke", "ainvoke")


def ask(text: str, model: Chain) -> Chain:
    return ChatPromptTemplate.from_template(text) | model | StrOutputParser()


def refuse(given: Any) -> Any:
    raise PermissionError("not you")


async def arefuse(given: Any) -> Any:
    raise PermissionError("not you")


def refuse_pieces(pieces: Any) -> Any:
    for _ in pieces:
        raise PermissionError("not you")
    yield ""


@tool
def guard(question: str) -> str:
    """Refuses."""
    raise PermissionError("not you")


class Guard(Chat):
    """A check that is a class of its own, with callbacks: called as it always was."""


def at_first(ledger: Ledger, check: Any) -> Chain:
    return (
        RunnableLambda(lambda x: dict(x))
        | assign(ok=check)
        | assign(a=ask("{question}", Chat(ledger=ledger, says="a")))
        | assign(b=ask("{question}", Chat(ledger=ledger, says="b")))
    )


def between(ledger: Ledger, check: Any) -> Chain:
    """Return a chain whose check fails after a first model has answered. The second model must not be called."""
    return (
        assign(a=ask("{question}", Chat(ledger=ledger, says="a")))
        | assign(ok=check)
        | assign(b=ask("{question}", Chat(ledger=ledger, says="b")))
        | assign(c=itemgetter("question") | Notes(ledger=ledger))
        | assign(d=ask("{question}", Chat(ledger=ledger, says="d")))
    )


def in_an_arm(ledger: Ledger, check: Any) -> Chain:
    both = RunnableParallel(
        question=itemgetter("question"), ok=check, a=ask("{question}", Chat(ledger=ledger, says="a"))
    )
    return both | assign(b=ask("{question}", Chat(ledger=ledger, says="b")))


def decided(ledger: Ledger, check: Any) -> Chain:
    branch = RunnableBranch((check, RunnablePassthrough()), RunnableLambda(lambda x: x))
    return (
        assign(a=ask("{question}", Chat(ledger=ledger, says="a")))
        | assign(way=branch)
        | assign(b=ask("{question}", Chat(ledger=ledger, says="b")))
    )


CHECKS: dict[str, Any] = {
    "function": refuse,
    "async function": RunnableLambda(refuse, afunc=arefuse),
    "tool": itemgetter("question") | RunnableLambda(lambda q: {"question": q}) | guard,
    "generator": RunnableGenerator(refuse_pieces),
    "a function beside": RunnablePassthrough(refuse),
    "a function behind a fallback": RunnableLambda(refuse).with_fallbacks([RunnableLambda(refuse)]),
}
SLIPS: dict[str, Any] = {
    "key of another table": lambda x: {"why not": 1}[x["question"]],
    "missing key": lambda x: x["role"],
    "missing key of an item": itemgetter("role"),
    "number": lambda x: int(x["question"]),
    "variable that is missing": ask("{role}", Chat(ledger=Ledger())),
}
"""Pure functions that fail."""
SHAPES: dict[str, Callable[[Ledger, Any], Chain]] = {
    "at first": at_first,
    "between": between,
    "in an arm": in_an_arm,
    "decided": decided,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("shape", ["at first", "between", "in an arm"])
def test_no_later_call_is_made_if_a_check_raises(shape: str, check: str, way: str) -> None:
    alone, beside = Ledger(), Ledger(jitter=0.002)
    plain = observe(SHAPES[shape](alone, CHECKS[check]), way, QUESTION)
    found = observe(accelerate(SHAPES[shape](beside, CHECKS[check])), way, QUESTION)
    assert plain.failed and found.result == plain.result
    requests = {call for call in beside.calls if not call.startswith("a: ")}  # which arms began is a race in plain, too
    assert requests == {call for call in alone.calls if not call.startswith("a: ")} == set()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("slip", SLIPS)
@pytest.mark.parametrize("shape", ["at first", "between", "in an arm"])
def test_error_of_a_pure_function_is_the_same_and_later_calls_are_made_at_most_once(
    shape: str, slip: str, way: str
) -> None:
    plain = observe(SHAPES[shape](Ledger(), SLIPS[slip]), way, QUESTION)
    beside = Ledger(jitter=0.002)
    observed = observe(accelerate(SHAPES[shape](beside, SLIPS[slip])), way, QUESTION)
    assert plain.failed and observed.result == plain.result
    assert max(beside.calls.values(), default=1) == 1


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_no_later_call_is_made_if_a_branch_condition_raises(way: str) -> None:
    ledger = Ledger(jitter=0.002)
    assert observe(accelerate(decided(ledger, refuse)), way, QUESTION).failed
    assert set(ledger.calls) == {"a: why"}


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_error_of_a_parser_is_the_same_and_later_calls_are_made_at_most_once(way: str) -> None:
    def chain(ledger: Ledger) -> Chain:
        json = ChatPromptTemplate.from_template("{question}") | Chat(ledger=ledger, says="no json") | JsonOutputParser()
        return (
            assign(a=json)
            | assign(b=ask("{question}", Chat(ledger=ledger, says="b")))
            | assign(c=itemgetter("question") | Notes(ledger=ledger))
        )

    alone, beside = Ledger(), Ledger(jitter=0.002)
    plain = observe(chain(alone), way, QUESTION)
    assert plain.failed
    assert observe(accelerate(chain(beside)), way, QUESTION) == plain
    assert set(alone.calls) <= set(beside.calls)
    assert max(beside.calls.values()) == 1


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_no_call_is_made_if_a_prompt_cannot_be_formatted(way: str) -> None:
    def chain(ledger: Ledger) -> Chain:
        prompt = ChatPromptTemplate.from_messages([MessagesPlaceholder("question")])
        return (
            assign(a=prompt | Chat(ledger=ledger, says="a") | StrOutputParser())
            | assign(b=ask("{other}", Chat(ledger=ledger, says="b")))
            | assign(c=itemgetter("other") | Notes(ledger=ledger))
        )

    alone, beside = Ledger(), Ledger(jitter=0.002)
    inputs = {"question": "no messages", "other": "what"}
    plain = observe(chain(alone), way, inputs)
    assert plain.failed
    assert observe(accelerate(chain(beside)), way, inputs) == plain
    assert beside.calls == alone.calls == {}


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("each", [lambda item: int(item), lambda item: item["none"]])
def test_error_of_a_mapped_function_is_the_same_and_later_calls_are_made_at_most_once(each: Any, way: str) -> None:
    with EnginePool.local(fake_engines()) as pool:

        def chain(ledger: Ledger) -> Chain:
            listed = ChatPromptTemplate.from_template("{question}") | ChatTeola(pool=pool) | StrOutputParser()
            answer = ChatPromptTemplate.from_template("{x}") | ChatTeola(pool=pool)
            return assign(a=listed | (lambda text: text.split()) | (RunnableLambda(each) | answer).map()) | assign(
                b=ask("{question}", Chat(ledger=ledger, says="b"))
            )

        alone, beside = Ledger(), Ledger()
        plain = observe(chain(alone), way, QUESTION)
        assert plain.failed
        assert observe(accelerate(chain(beside), pool=pool), way, QUESTION).result == plain.result
        assert max(beside.calls.values(), default=1) == 1


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_index_error_is_the_same_and_later_calls_are_made_at_most_once(way: str) -> None:
    class Empty(Notes):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> Any:
            return []

        async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> Any:
            return []

    def chain(ledger: Ledger) -> Chain:
        return (
            assign(docs=itemgetter("question") | Empty(ledger=Ledger(jitter=0.002)))
            | assign(best=lambda x: x["docs"][0])
            | assign(b=ask("{question}", Chat(ledger=ledger, says="b")))
        )

    alone, beside = Ledger(), Ledger()
    plain = observe(chain(alone), way, QUESTION)
    assert plain.result.startswith("IndexError")
    assert observe(accelerate(chain(beside)), way, QUESTION) == plain
    assert max(beside.calls.values(), default=1) == 1


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_calls_after_a_passed_check_overlap(way: str) -> None:
    """The check has succeeded: then what stands behind it is sure, and overlaps."""
    allowed = threading.Event()

    def allow(x: Any) -> str:
        time.sleep(0.01)
        allowed.set()
        return "yes"

    def chain(ledger: Ledger) -> Chain:
        return (
            assign(ok=RunnableLambda(allow))
            | assign(a=ask("{question}", Chat(ledger=ledger, says="a")))
            | assign(b=ask("{question}", Chat(ledger=ledger, says="b")))
        )

    plain = observe(chain(Ledger()), way, QUESTION)
    allowed.clear()
    ledger = Ledger(meet=2)
    ledger.look = allowed.is_set
    assert observe(accelerate(chain(ledger)), way, QUESTION) == plain
    assert ledger.most_at_once == 2 and ledger.variables == [True, True]


class Sentiment(BaseModel):
    """The schema of an answer."""

    label: str


class StructuredChat(Chat):
    """A model that answers by a schema, as those of providers do: a parser reads the text."""

    def with_structured_output(self, schema: Any, **kwargs: Any) -> Any:
        return self | PydanticOutputParser(pydantic_object=schema)


PARSED: dict[str, Callable[[Ledger], Chain]] = {
    "list": lambda ledger: Chat(ledger=ledger) | CommaSeparatedListOutputParser(),
    "JSON": lambda ledger: Chat(ledger=ledger, says='{"label": "good"}') | JsonOutputParser(),
    "Pydantic": lambda ledger: StructuredChat(ledger=ledger, says='{"label": "good"}').with_structured_output(
        Sentiment
    ),
    "pure function": lambda ledger: Chat(ledger=ledger) | (lambda message: message.content.strip()),
    "attribute": lambda ledger: Chat(ledger=ledger) | attrgetter("content"),
}


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("parsed", PARSED)
def test_calls_behind_parsers_and_pure_functions_are_prefetched(parsed: str, way: str) -> None:
    ledger = Ledger(meet=2)
    first = ChatPromptTemplate.from_template("{question}") | PARSED[parsed](ledger)
    chain = assign(a=first) | assign(b=ask("{question}", Chat(ledger=ledger, says="b")))
    plain = observe(chain, way, QUESTION)
    ledger.calls.clear()
    ledger.most_at_once = 0
    observed = observe(accelerate(chain), way, QUESTION)
    assert observed.result == plain.result
    assert ledger.most_at_once == 2
    assert set(ledger.calls.values()) == {1}


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_speculate_all_starts_calls_before_user_code_ends(way: str) -> None:
    def slow(x: Any) -> Any:
        assert ledger.began.wait(5)
        return "ok"

    class ReportingLedger(Ledger):
        def __init__(self) -> None:
            super().__init__()
            self.began = threading.Event()

        def begin(self, call: str) -> None:
            super().begin(call)
            self.began.set()

    ledger = ReportingLedger()

    async def aslow(x: Any) -> Any:
        import asyncio

        return await asyncio.to_thread(slow, x)

    chain = (
        assign(ok=RunnableLambda(slow, afunc=aslow))
        | assign(a=ask("{question}", Chat(ledger=ledger, says="a")))
        | assign(b=ask("{question}", Chat(ledger=ledger, says="b")))
    )
    assert not observe(accelerate(chain, speculate="all"), way, QUESTION).failed
