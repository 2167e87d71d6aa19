"""Tests of prompts and answers of an LLM that are computed without events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from differential.llamaindex.recording import Recorder, recorded
from llama_index.core import PromptTemplate
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.response_synthesizers import TreeSummarize
from llama_index.core.schema import QueryBundle
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILike

from benchmarks.llamaindex.kits import Kit, Sizes, own_kit
from teola_plugin.engines import profiles
from teola_plugin.shims.llamaindex import copies, engines, silent_calls
from teola_plugin.shims.llamaindex.records import Unreadable
from tests.support.llamaindex_own import ChattyLLM

ASK = PromptTemplate("Say {what}")


@pytest.fixture
def kit() -> Iterator[Kit]:
    yield own_kit(profiles.noop(), Sizes(chunks=2, chunk_tokens=10, answer=3), CallbackManager([]))


def predict(llm: Any) -> Any:
    return llm.predict(ASK, what="oats")


@pytest.mark.parametrize(
    ("llm", "name"),
    [
        (OpenAI(model="gpt-4o", api_key="none"), "_chat"),
        (OpenAILike(model="m", api_key="none", is_chat_model=True), "_chat"),
        (OpenAILike(model="m", api_key="none", is_chat_model=False), "_complete"),
    ],
)
def test_provider_call_of_an_openai_object_is_found(llm: Any, name: str) -> None:
    call = silent_calls.provider_call_of(llm, predict, is_async=False)
    assert (call.method, call.kwargs) == (name, {})
    assert "Say oats" in str(call.args)
    assert silent_calls.provider_call_of(llm, predict, is_async=True).method == name.replace("_", "_a", 1)
    with pytest.raises(Unreadable, match="does not ask"):
        silent_calls.provider_call_of(llm, lambda _: None, is_async=False)


def test_silent_provider_call_and_replay_notify_no_handler(kit: Kit) -> None:
    recorder = Recorder()
    kit.llm.callback_manager = CallbackManager([recorder])
    with recorded(recorder):
        call = silent_calls.provider_call_of(kit.llm, predict, is_async=False)
        response = silent_calls.silent_body(kit.llm, call.method)(kit.llm, *call.args, **call.kwargs)
        answer = silent_calls.replay(kit.llm, predict, [response.text])
    assert not recorder.events and not recorder.spans and not recorder.callbacks
    assert answer == response.text == predict(kit.llm)


def test_silent_body_that_calls_a_public_method_raises() -> None:
    llm = ChattyLLM()
    with pytest.raises(silent_calls.CallsPublicMethod):
        silent_calls.silent_body(llm, "complete")(llm, "Say it")
    assert llm.chats == 0


class ModelAskingRetriever(BaseRetriever):
    """Calls a model of the framework, if it has one."""

    def __init__(self, llm: Any = None) -> None:
        super().__init__()
        self.llm = llm

    def _retrieve(self, query_bundle: QueryBundle) -> list[Any]:
        if self.llm:
            self.llm.complete("more")
        return []

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[Any]:
        if self.llm:
            await self.llm.acomplete("more")
        return []


async def test_silent_retriever_raises_if_it_calls_a_public_method(kit: Kit) -> None:
    query = QueryBundle("oats")
    assert silent_calls.silent_body(ModelAskingRetriever(), "_retrieve")(ModelAskingRetriever(), query) == []
    assert await silent_calls.silent_body(ModelAskingRetriever(), "_aretrieve")(ModelAskingRetriever(), query) == []
    asking = ModelAskingRetriever(kit.llm)
    with pytest.raises(silent_calls.CallsPublicMethod):
        silent_calls.silent_body(asking, "_retrieve")(asking, query)
    with pytest.raises(silent_calls.CallsPublicMethod):
        await silent_calls.silent_body(asking, "_aretrieve")(asking, query)
    recorder = Recorder()
    with recorded(recorder):
        asking.retrieve(query)
    assert recorder.events, "elsewhere handlers are notified as ever"


def test_capturing_class_is_prepared_once(kit: Kit) -> None:
    silent_calls.prepare(kit.llm)
    before = silent_calls._capturing_class.cache_info().misses
    silent_calls.provider_call_of(kit.llm, predict, is_async=False)
    assert silent_calls._capturing_class.cache_info().misses == before


def test_prompt_functions_of_the_user_are_detected(kit: Kit) -> None:
    assert not silent_calls.has_own_prompt_code(kit.llm)
    kit.llm.completion_to_prompt = lambda prompt: f"<{prompt}>"
    assert silent_calls.has_own_prompt_code(kit.llm)


def test_runs_in_loop_follows_the_use_async_setting(kit: Kit) -> None:
    assert not engines.runs_in_loop(TreeSummarize(kit.llm))
    assert engines.runs_in_loop(TreeSummarize(kit.llm, use_async=True))
    assert not engines.runs_in_loop(object())


def test_transformers_tokenizer_is_not_thread_safe() -> None:
    class Tokenizer:
        def encode(self, text: str) -> list[int]:
            return [1]

    assert copies.has_thread_safe_tokenizer(PromptHelper())
    assert copies.has_thread_safe_tokenizer(PromptHelper(tokenizer=Tokenizer().encode))
    Tokenizer.__module__ = "transformers.tokenization_utils_fast"
    assert not copies.has_thread_safe_tokenizer(PromptHelper(tokenizer=Tokenizer().encode))
