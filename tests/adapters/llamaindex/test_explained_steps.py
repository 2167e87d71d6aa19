"""Tests of what `explain()` says of the calls in a workflow's steps."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.response_synthesizers import TreeSummarize
from llama_index.core.schema import TextNode
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step
from support.hosted_steps import HostedLLM, compared

from teola_plugin import accelerate
from teola_plugin.adapters.plan_report import CallRow, Reason, Status


class Loaded(Event):
    """Texts were loaded."""

    texts: list[str]


class ModelWorkflow(Workflow):
    """A workflow with a model."""

    def __init__(self, llm: HostedLLM) -> None:
        super().__init__(timeout=60)
        self.llm = llm
        self.queue: deque[str] = deque()
        self.summarizer = TreeSummarize(llm=llm)
        index = VectorStoreIndex([TextNode(text="text", id_="0")], embed_model=MockEmbedding(embed_dim=2))
        self.retriever = index.as_retriever()


def load(path: str) -> list[str]:
    """Return the texts in a file."""
    with open(path) as file:
        return [str(text) for text in json.load(file)]


async def ask_twice(llm: Any, prompt: str) -> str:
    """Return what a model answers when it is asked in a way that is not read."""
    with open("/dev/null"):
        return str(await llm.acomplete(prompt))


class LoadsFirst(ModelWorkflow):
    """The first step calls no model."""

    @step
    async def load(self, ctx: Context, ev: StartEvent) -> Loaded:
        Path("/dev/null").write_text("")
        with open("/dev/null") as file:
            texts = [file.read(), "oats"]
        return Loaded(texts=texts)

    @step
    async def answer(self, ev: Loaded) -> StopEvent:
        return StopEvent(result=[str(await self.llm.acomplete(f"answer {text}")) for text in ev.texts])


class CallsInAHelper(ModelWorkflow):
    """A step whose code is not understood calls a model in a function."""

    @step
    async def answer(self, ev: StartEvent) -> StopEvent:
        return StopEvent(result=[await ask_twice(self.llm, ev.query), await ask_twice(self.llm, "again")])


class UnreadCalls(ModelWorkflow):
    """Calls of models and engines in forms that are not read."""

    @step
    async def answer(self, ev: StartEvent) -> StopEvent:
        first = await self.llm.acomplete(ev.query, **ev.options)
        chat = await self.llm.achat(*ev.messages)
        return StopEvent(result=[first.text, chat.message.content, str(await self.llm.acomplete("last"))])


class UnknownQueue(ModelWorkflow):
    """Code that is not understood stands before the calls: nothing behind it is prefetched."""

    @step
    async def answer(self, ev: StartEvent) -> StopEvent:
        self.queue.append(ev.query)
        first = await self.llm.acomplete(f"first {ev.query}")
        second = await self.llm.acomplete(f"second {ev.query}")
        return StopEvent(result=[str(first), str(second)])


def rows_of(make: type[ModelWorkflow]) -> dict[str, CallRow]:
    return {row.name: row for row in accelerate(make(HostedLLM())).report().calls}


def test_step_without_calls_has_no_row() -> None:
    assert {name.split(".")[0] for name in rows_of(LoadsFirst)} == {"answer"}


def test_calls_in_helpers_that_are_not_understood_have_a_row() -> None:
    row = rows_of(CallsInAHelper)["answer"]

    assert row.status is Status.NOT_SEEN
    assert row.reason is Reason.UNKNOWN_CODE


def test_calls_that_are_not_read_have_rows() -> None:
    rows = rows_of(UnreadCalls)

    for name, text in (("answer.acomplete", "**ev.options"), ("answer.achat", "*ev.messages")):
        path, _, line = rows[name].source.rpartition(":")
        assert rows[name].status is Status.IN_PLACE
        assert rows[name].reason is Reason.UNREAD_CALL
        assert rows[name].target == "HostedLLM"
        assert text in Path(path).read_text().splitlines()[int(line) - 1]


@pytest.mark.parametrize("make", [UnknownQueue, LoadsFirst])
def test_rows_say_prefetched_where_calls_are(make: type[ModelWorkflow]) -> None:
    original_llm, llm = compared(make)
    is_faster = llm.most_at_once > original_llm.most_at_once

    assert (Status.PREFETCHED in {row.status for row in rows_of(make).values()}) == is_faster
