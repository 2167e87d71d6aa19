"""Chains inside `RunnableWithMessageHistory`: certain calls are prefetched, and the stored messages are the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, SystemMessagePromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.runnables.history import RunnableWithMessageHistory
from support.hosted_model import HostedModel

from teola_plugin import accelerate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
QUESTIONS = ("oats?", "rye?")
Build = Callable[[HostedModel], Runnable[Any, Any]]


def _question(task: str, model: HostedModel) -> Runnable[Any, Any]:
    """Return a chain that answers the question, after the history."""
    prompt = ChatPromptTemplate.from_messages([("system", task), MessagesPlaceholder("history"), ("human", "{text}")])
    return prompt | model | StrOutputParser()


def steps(model: HostedModel) -> Runnable[Any, Any]:
    """Two steps that do not need each other, and one that needs both."""
    first = RunnablePassthrough.assign(topic=_question("name the topic", model))
    second = RunnablePassthrough.assign(tone=_question("name the tone", model))
    return first | second | ChatPromptTemplate.from_template("{topic}, {tone}: {text}") | model


def function(model: HostedModel) -> Runnable[Any, Any]:
    def answer(values: dict[str, Any]) -> str:
        notes = []
        for kind in ("tone", "facts", "style"):
            notes.append(str(model.invoke(f"{kind} of {values['text']} after {len(values['history'])}").content))
        return str(model.invoke("; ".join(notes)).content)

    return RunnableLambda(answer)


def one_after_the_other(model: HostedModel) -> Runnable[Any, Any]:
    topic = RunnablePassthrough.assign(topic=_question("name the topic", model))
    return topic | ChatPromptTemplate.from_template("{topic}: {text}") | model


class Talk(NamedTuple):
    """What a chain with a history answered and stored, and what it asked its model."""

    answers: list[Any]
    stored: list[tuple[str, str]]
    prompts: list[str]


WAYS = ("invoke", "ainvoke", "stream", "astream_events")


def talk(build: Build, way: str, change: Callable[[Any], Any], model: HostedModel) -> Talk:
    """Ask all questions in one session. An error is an answer."""
    histories: dict[str, InMemoryChatMessageHistory] = {}

    def history(session_id: str) -> InMemoryChatMessageHistory:
        return histories.setdefault(session_id, InMemoryChatMessageHistory())

    keys = {"input_messages_key": "text", "history_messages_key": "history"}
    chain = change(RunnableWithMessageHistory(build(model), history, **keys))
    answers = []
    for question in QUESTIONS:
        try:
            answers.append(_answer(chain, way, {"text": question}))
        except Exception as error:
            answers.append((type(error), str(error)))
    stored = [(type(one).__name__, str(one.content)) for one in histories["1"].messages]
    return Talk(answers, stored, model.prompts)


def _answer(chain: Any, way: str, chain_input: dict[str, str]) -> Any:
    config: Any = {"configurable": {"session_id": "1"}}

    async def read_events() -> list[Any]:
        events = chain.astream_events(chain_input, config, version="v2")
        return [(event["event"], event["name"]) async for event in events]

    if way == "invoke":
        return _text(chain.invoke(chain_input, config))
    if way == "ainvoke":
        return _text(asyncio.run(chain.ainvoke(chain_input, config)))
    if way == "stream":
        return [_text(piece) for piece in chain.stream(chain_input, config)]
    return asyncio.run(read_events())


def _text(answer: Any) -> str:
    return str(getattr(answer, "content", answer))


def original(chain: Any) -> Any:
    return chain


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", [steps, function])
def test_certain_calls_of_a_chain_with_a_history_overlap(build: Build, way: str) -> None:
    plain, fast = HostedModel(), HostedModel()
    expected = talk(build, way, original, plain)

    result = talk(build, way, accelerate, fast)

    assert result == expected
    assert len(result.stored) == 2 * len(QUESTIONS)
    assert plain.most_at_once == 1
    assert fast.most_at_once > 1


@pytest.mark.parametrize("way", WAYS)
def test_calls_that_need_each_other_stay_in_place(way: str) -> None:
    plain, fast = HostedModel(), HostedModel()
    expected = talk(one_after_the_other, way, original, plain)

    result = talk(one_after_the_other, way, accelerate, fast)

    assert result == expected
    assert fast.most_at_once == 1


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("failing", ["name the topic", "name the tone"])
def test_failed_answers_are_not_stored(failing: str, way: str) -> None:
    expected = talk(steps, way, original, HostedModel(fails_on=failing))

    result = talk(steps, way, accelerate, HostedModel(fails_on=failing))

    assert result[:2] == expected[:2]
    assert result.stored == []


def test_listener_that_hears_of_starts_keeps_calls_in_place() -> None:
    model = HostedModel()
    heard: list[str] = []

    def build(model: HostedModel) -> Runnable[Any, Any]:
        return steps(model).with_listeners(on_start=lambda run: heard.append("start"))

    talk(build, "invoke", accelerate, model)

    assert model.most_at_once == 1
    assert heard == ["start"] * len(QUESTIONS)


def test_listener_that_hears_of_ends_hears_of_each_call_once() -> None:
    ends: list[list[str]] = []
    for change in (original, accelerate):
        heard: list[str] = []
        chain = change(steps(HostedModel()).with_listeners(on_end=lambda run, heard=heard: heard.append(str(run.name))))
        chain.invoke({"text": "oats?", "history": []})
        ends.append(heard)

    assert ends[0] == ends[1]


def test_changed_chain_is_planned_again() -> None:
    plain, fast = HostedModel(), HostedModel()
    talks = []
    for change, model in ((original, plain), (accelerate, fast)):
        chain = steps(model)
        with_history = change(
            RunnableWithMessageHistory(
                chain,
                lambda session_id: InMemoryChatMessageHistory(),
                input_messages_key="text",
                history_messages_key="history",
            )
        )
        texts = [_answer(with_history, "invoke", {"text": "oats?"})]
        prompt = chain.steps[0].mapper.steps__["topic"].steps[0]  # type: ignore[attr-defined]
        prompt.messages[0] = SystemMessagePromptTemplate.from_template("another task")
        texts.append(_answer(with_history, "invoke", {"text": "oats?"}))
        talks.append((texts, model.prompts))

    assert talks[0] == talks[1]


def test_explanation_is_that_of_the_chain_inside() -> None:
    chain = RunnableWithMessageHistory(
        steps(HostedModel()),
        lambda session_id: InMemoryChatMessageHistory(),
        input_messages_key="text",
        history_messages_key="history",
    )

    explained = accelerate(chain).explain()

    assert "2 model calls (topic.model and tone.model) side by side" in explained
