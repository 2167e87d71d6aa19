"""Tests of values that are changed in place while a query runs: own models get the requests of the original."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest
from differential.recording import observe
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from pydantic import Field
from support.own_leaves import Chat, Ledger

from teola_plugin import accelerate

Chain = Runnable[Any, Any]
assign = RunnablePassthrough.assign


class Reader(Chat):
    """Answers with all that it was given, and may do something to it first."""

    act: Any = None
    seen: list[str] = Field(default_factory=list)

    def _said(self, messages: list[BaseMessage]) -> str:
        text = "|".join(str(m.content) for m in messages)
        self.seen.append(text)
        if self.act is not None:
            self.act(messages)
        return text

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        return self._answer([*messages[:-1], HumanMessage(self._said(messages))], None, None)

    async def _agenerate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        return self._answer([*messages[:-1], HumanMessage(self._said(messages))], None, None)


def appending(inputs: dict[str, Any]) -> str:
    inputs["history"].append(HumanMessage("B"))
    return "done"


def editing(inputs: dict[str, Any]) -> str:
    inputs["history"][0].content = "C"
    return "done"


def tagging(inputs: dict[str, Any]) -> str:
    inputs["history"][0].additional_kwargs["n"] = 1
    return "done"


def same_but_typed(inputs: dict[str, Any]) -> str:
    inputs["history"][0].additional_kwargs["flag"] = 1  # was True
    return "done"


def first(model: Chain) -> Chain:
    return ChatPromptTemplate.from_template("first {question}") | model | StrOutputParser()


def over_history(model: Chain, change: Callable[[dict[str, Any]], str]) -> Chain:
    """Return a chain of a first answer, a function that changes the history, and an answer to the history."""
    prompt = ChatPromptTemplate.from_messages([MessagesPlaceholder("history"), ("human", "{question}")])
    return (
        assign(a=first(Reader(ledger=Ledger(jitter=0.002))))
        .assign(changed=RunnableLambda(change))
        .assign(b=prompt | model | StrOutputParser())
        .assign(bare=itemgetter("history") | model | StrOutputParser())
    )


def make_input() -> dict[str, Any]:
    return {"question": "why", "history": [HumanMessage("A", additional_kwargs={"flag": True})]}


WAYS = ("invoke", "ainvoke")
"""Inputs of a batch would share what is changed: a race in the plain object, too."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", [appending, editing, tagging, same_but_typed])
@pytest.mark.parametrize("speculate", ["auto", "all"])
def test_model_gets_history_that_a_function_changed_in_place(
    change: Callable[[dict[str, Any]], str], way: str, speculate: Any
) -> None:
    alone, beside = Reader(), Reader()
    plain = observe(over_history(alone, change), way, make_input())
    fast = accelerate(over_history(beside, change), speculate=speculate)
    found = observe(fast, way, make_input())
    assert found == plain
    if speculate == "auto":
        assert Counter(beside.seen) == Counter(alone.seen)
    else:  # it was asked before the function ran, too: for nothing
        assert not Counter(alone.seen) - Counter(beside.seen)


@pytest.mark.parametrize("way", WAYS)
def test_model_that_changes_its_input_changes_the_callers_objects(way: str) -> None:
    """The second model is asked early, of the messages as they are; the first one changes them meanwhile."""

    def shout(messages: list[BaseMessage]) -> None:
        messages[0].content = str(messages[0].content) + "!"

    def chain(one: Reader, two: Reader) -> Chain:
        read = itemgetter("history")
        return (
            assign(a=read | one | StrOutputParser())
            .assign(b=read | two | StrOutputParser())
            .assign(c=read | two | StrOutputParser())
        )

    def made() -> tuple[Reader, Reader]:
        return Reader(ledger=Ledger(), act=shout), Reader(ledger=Ledger(), act=shout)

    plain_input, fast_input = make_input(), make_input()
    plain = observe(chain(*made()), way, plain_input)
    fast = accelerate(chain(*made()))
    assert fast._prefetch_plan is not None
    assert observe(fast, way, fast_input) == plain
    assert fast_input == plain_input


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_model_that_changed_its_input_is_no_longer_prefetched(way: str) -> None:
    def clearing(messages: list[BaseMessage]) -> None:
        messages[0].content = "gone"

    two = Reader(act=clearing)
    chain = assign(a=first(Reader(ledger=Ledger(jitter=0.002)))).assign(b=itemgetter("history") | two)
    fast = accelerate(chain)
    for _ in range(3):
        observe(fast, way, make_input())
    assert len(two.seen) <= 4


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_edited_answer_of_a_model_reaches_the_next_model(way: str) -> None:
    """A function edits the first answer; the next model is asked of the edited one, in the plain object and here."""

    def edit(x: dict[str, Any]) -> dict[str, Any]:
        x["a"].content += " (edited)"
        return x

    def chain(last: Reader) -> Chain:
        prompt = ChatPromptTemplate.from_messages([("human", "{question}")])
        talk = ChatPromptTemplate.from_messages([MessagesPlaceholder("talk")])
        return (
            assign(a=prompt | Reader())
            .assign(talk=lambda x: [x["a"]])
            .assign(other=first(Reader(ledger=Ledger(jitter=0.002))))
            | RunnableLambda(edit)
            | assign(b=talk | last | StrOutputParser())
            | itemgetter("b")
        )

    alone, beside = Reader(), Reader()
    for mode in ("auto", "all"):
        plain = observe(chain(alone), way, {"question": "why"})
        assert observe(accelerate(chain(beside), speculate=mode), way, {"question": "why"}) == plain


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_call_with_uncopyable_input_is_not_prefetched(way: str) -> None:
    class Mine(HumanMessage):
        pass

    two = Reader()
    chain = assign(a=first(Reader())).assign(b=itemgetter("history") | two | StrOutputParser())
    inputs = {"question": "why", "history": [Mine("A")]}
    fast = accelerate(chain)
    assert fast._prefetch_plan is not None
    assert observe(fast, way, inputs).result == observe(chain, way, inputs).result
    assert two.seen == ["A", "A"]


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_documents_changed_by_a_function_reach_the_next_prompt(way: str) -> None:
    """A retriever's own documents, changed by a function before the next step reads them."""
    from support.own_leaves import Notes

    def label(x: dict[str, Any]) -> list[Document]:
        for document in x["docs"]:
            document.metadata["seen"] = True
        return list(x["docs"])

    def chain(ledger: Ledger) -> Chain:
        shown = ChatPromptTemplate.from_template("{docs} {labelled}") | Chat(ledger=ledger, says="b")
        return (
            assign(a=first(Chat(ledger=ledger, says="a")))
            .assign(docs=itemgetter("question") | Notes(ledger=ledger))
            .assign(labelled=RunnableLambda(label))
            | shown
            | StrOutputParser()
        )

    alone, beside = Ledger(), Ledger()
    plain = observe(chain(alone), way, {"question": "why"})
    assert observe(accelerate(chain(beside)), way, {"question": "why"}) == plain
    assert beside.calls == alone.calls
