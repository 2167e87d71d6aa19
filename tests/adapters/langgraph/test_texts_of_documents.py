"""Nodes that write documents or messages into their prompts, as research agents do: their calls are prefetched."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, TypedDict

import pytest
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_messages,
    filter_messages,
    get_buffer_string,
    message_to_dict,
    messages_to_dict,
    trim_messages,
)
from langgraph.graph import START, StateGraph
from support.hosted_model import HostedModel

from teola_plugin import accelerate

MAX_CHARACTERS = 40


class State(TypedDict, total=False):
    """Search results and documents; two answers."""

    results: dict[str, dict[str, Any]]
    documents: list[Document]
    messages: list[BaseMessage]
    summary: str
    title: str


STATE: State = {
    "results": {f"https://farm.example/{i}": {"content": "oats grow here " * i, "title": f"T{i}"} for i in range(5)},
    "documents": [
        Document("Oats are sown\n\nin spring", metadata={"title": "Oats", "source": "a.pdf", "page": 1, "score": 0.91}),
        Document("Ivy {climbs}", metadata={"title": "Ivy", "source": "b.pdf", "page": 2, "score": 0.3}),
        Document("Oats are cut", metadata={"title": "Oats", "source": "a.pdf", "page": 9, "score": 0.77}),
    ],
}


def between_dashes(state: State) -> str:
    texts = []
    for url, result in state["results"].items():
        content = result.get("content", "")
        texts.append(f"URL: {url}\nContent: {content}")
    separator = "\n" + "-" * 40 + "\n"
    return separator.join(texts)


def cut_off(state: State) -> str:
    texts = []
    for url, result in state["results"].items():
        content = result.get("content", "")
        if len(content) > MAX_CHARACTERS:
            content = content[:MAX_CHARACTERS] + "... [content truncated]"
        texts.append(f"URL: {url}\nContent: {content}")
    return "\n\n".join(texts)


def numbered_with_rules(state: State) -> str:
    parts = []
    for i, document in enumerate(state["documents"]):
        title, source = document.metadata.get("title", "No title"), document.metadata.get("source", "")
        parts.append(f"Document {i + 1}:\nTitle: {title}\nSource: {source}\n{document.page_content}")
    return ("\n" + "=" * 80 + "\n").join(parts)


def with_scores(state: State) -> str:
    lines = []
    for i, document in enumerate(state["documents"], 1):
        title = document.metadata.get("title") or "Untitled"
        source = document.metadata.get("source") or document.metadata.get("url") or "unknown"
        score = document.metadata.get("score", 0.0)
        page = document.metadata["page"]
        text = document.page_content.replace("\n\n", "\n").replace("{", "{{").replace("}", "}}")
        lines.append(f"[{i}] {title} - {source}, page {page}, relevance {round(score, 2)}\n{text[:500]}\n{'-' * 60}")
    return f"\n{'*' * 80}\n".join(lines)


FORMATS: dict[str, Callable[[State], str]] = {
    one.__name__: one for one in (between_dashes, cut_off, numbered_with_rules, with_scores)
}


def compiled(model: HostedModel, to_text: Callable[[State], str]) -> Any:
    """Return a graph of one node that writes a text into the prompts of two calls."""

    def write(state: State) -> State:
        text = to_text(state)
        summary = model.invoke(f"Sum up\n{text}")
        title = model.invoke(f"Title of\n{text}")
        return {"summary": summary.text, "title": title.text}

    return StateGraph(State).add_node("write", write).add_edge(START, "write").compile()


class ShoutingMessage(HumanMessage):
    """A message of the user's, which prints itself."""

    def pretty_repr(self, html: bool = False) -> str:
        return str(self.content).upper()


CONVERSATION = [
    SystemMessage("You are a farmer."),
    HumanMessage("What of oats?"),
    AIMessage("Sown in spring.", tool_calls=[{"name": "look_up", "args": {"plant": "oats"}, "id": "1"}]),
    ToolMessage("oats: April", tool_call_id="1"),
    HumanMessage([{"type": "text", "text": "And ivy?"}]),
]
MESSAGE_TEXTS: dict[str, Callable[[Any], Any]] = {
    "buffer string": lambda messages: get_buffer_string(messages),
    "buffer string of the last ones": lambda messages: get_buffer_string(messages[-2:], human_prefix="User"),
    "buffer string in XML": lambda messages: get_buffer_string(messages, format="xml"),
    "chosen by class": lambda messages: "\n".join([m.text for m in messages if isinstance(m, HumanMessage)]),
    "chosen by classes": lambda messages: [m for m in messages if isinstance(m, (HumanMessage, SystemMessage))],
    "filtered": lambda messages: filter_messages(messages, include_types=[HumanMessage, "ai"]),
    "converted": lambda messages: convert_to_messages(messages),
    "dictionaries": lambda messages: messages_to_dict(messages),
    "dictionary of the last": lambda messages: message_to_dict(messages[-1]),
    "pretty": lambda messages: "\n".join(m.pretty_repr() for m in messages),
    "trimmed": lambda messages: trim_messages(messages, max_tokens=2, token_counter=len, start_on="human"),
    "trimmed by a counter": lambda messages: trim_messages(
        messages, max_tokens=9, token_counter=count_words, include_system=True
    ),
}


def count_words(messages: list[Any]) -> int:
    return sum(len(message.content) for message in messages)


@pytest.mark.parametrize("name", MESSAGE_TEXTS)
@pytest.mark.parametrize("conversation", [CONVERSATION, [*CONVERSATION, ShoutingMessage("What of moss?")], []])
def test_calls_on_converted_messages_are_those_of_the_original(name: str, conversation: list[BaseMessage]) -> None:
    """Messages of LangChain's own classes are converted ahead of their place, and others are not."""

    def to_text(state: State) -> str:
        return f"Messages: {MESSAGE_TEXTS[name](state['messages'])}"

    model, original_model = HostedModel(), HostedModel()
    if name == "dictionary of the last" and not conversation:
        pytest.skip("there is no last message")
    state: State = {"messages": conversation}
    assert accelerate(compiled(model, to_text)).invoke(state) == compiled(original_model, to_text).invoke(state)
    assert model.prompts == original_model.prompts
    assert model.most_at_once == (1 if any(isinstance(one, ShoutingMessage) for one in conversation) else 2)


def change_filtered(state: State) -> str:
    for message in filter_messages(state["messages"], include_types="human"):
        message.content = "changed"
    return get_buffer_string(state["messages"])


def change_chosen(state: State) -> str:
    chosen = [message for message in state["messages"] if message.type == "human"]
    for message in chosen:
        message.content = "changed"
    return "\n".join(str(message.content) for message in state["messages"])


@pytest.mark.parametrize("to_text", [change_filtered, change_chosen])
def test_messages_changed_through_a_list_of_some_of_them_are_not_read_before(to_text: Callable[[State], str]) -> None:
    model, original_model = HostedModel(), HostedModel()
    fast = accelerate(compiled(model, to_text))
    asyncio.run(fast.ainvoke({"messages": [HumanMessage("oats"), AIMessage("ivy")]}))
    compiled(original_model, to_text).invoke({"messages": [HumanMessage("oats"), AIMessage("ivy")]})
    assert model.prompts == original_model.prompts


@pytest.mark.parametrize("name", [name for name in MESSAGE_TEXTS if name != "pretty"])
def test_values_that_are_no_messages_raise_the_error_of_the_original(name: str) -> None:
    state: State = {"messages": [3]}  # type: ignore[list-item]
    model = HostedModel()
    graph = compiled(model, lambda state: str(MESSAGE_TEXTS[name](state["messages"])))
    try:
        answer = graph.invoke(state)
    except Exception as original:
        with pytest.raises(type(original), match=re.escape(str(original))):
            accelerate(graph).invoke(state)
        assert model.prompts == []
    else:
        assert accelerate(graph).invoke(state) == answer


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_async", [False, True])
def test_calls_on_formatted_documents_run_at_the_same_time(name: str, is_async: bool) -> None:
    model, original_model = HostedModel(), HostedModel()
    fast = accelerate(compiled(model, FORMATS[name]))
    answer = asyncio.run(fast.ainvoke(STATE)) if is_async else fast.invoke(STATE)
    assert answer == compiled(original_model, FORMATS[name]).invoke(STATE)
    assert sorted(model.prompts) == sorted(original_model.prompts)
    assert model.most_at_once == 2


@pytest.mark.parametrize("name", FORMATS)
def test_documents_without_a_field_raise_the_error_of_the_original(name: str) -> None:
    state: State = {"results": {"url": ["no dictionary"]}, "documents": ["no document"]}  # type: ignore[dict-item, list-item]
    model = HostedModel()
    graph = compiled(model, FORMATS[name])
    with pytest.raises(Exception) as original:
        graph.invoke(state)
    with pytest.raises(type(original.value)) as accelerated:
        accelerate(graph).invoke(state)
    assert str(accelerated.value) == str(original.value)
    assert model.prompts == []
