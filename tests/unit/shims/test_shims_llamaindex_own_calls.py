"""Bodies of models and stores, as `shims.llamaindex.own_calls` tells them from the events around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from differential.llamaindex.recording import Recorder, recorded
from llama_index.core import PromptTemplate
from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import MockLLM
from llama_index.core.response_synthesizers import TreeSummarize
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILike

from benchmarks.llamaindex.kits import Kit, Sizes, own_kit
from teola_plugin.engines import profiles
from teola_plugin.shims.llamaindex import copies, engines, own_calls
from teola_plugin.shims.llamaindex.records import Unreadable
from tests.support.llamaindex_own import ChattyLLM

ASK = PromptTemplate("Say {what}")


@pytest.fixture
def kit() -> Iterator[Kit]:
    yield own_kit(profiles.noop(), Sizes(chunks=2, chunk_tokens=10, answer=3), CallbackManager([]))


def predict(llm: Any) -> Any:
    return llm.predict(ASK, what="oats")


def test_bodies_by_class(kit: Kit) -> None:
    assert own_calls.bodies(type(kit.llm)) == ("complete", "acomplete")  # `chat` asks `complete`
    assert own_calls.bodies(OpenAILike) == ("_complete", "_acomplete", "_chat", "_achat")
    assert own_calls.bodies(type(kit.embedding)) == own_calls.EMBED
    assert own_calls.bodies(type(kit.reports.vector_store)) == own_calls.SEARCH
    with pytest.raises(Unreadable, match="int is not known"):
        own_calls.bodies(int)


def test_a_class_that_changes_what_the_framework_does_is_not_read() -> None:
    class Own(MockLLM):
        def predict(self, *_: Any, **__: Any) -> str:
            return "mine"

    with pytest.raises(Unreadable, match="has a 'predict' of its own"):
        own_calls.bodies(Own)


@pytest.mark.parametrize(
    ("llm", "name"),
    [
        (OpenAI(model="gpt-4o", api_key="none"), "_chat"),
        (OpenAILike(model="m", api_key="none", is_chat_model=True), "_chat"),
        (OpenAILike(model="m", api_key="none", is_chat_model=False), "_complete"),
    ],
)
def test_what_an_openai_object_is_asked(llm: Any, name: str) -> None:
    found, args, kwargs = own_calls.asked_by(llm, predict, is_async=False)
    assert found == name and "Say oats" in str(args) and kwargs == {}
    assert own_calls.asked_by(llm, predict, is_async=True)[0] == name.replace("_", "_a", 1)
    with pytest.raises(Unreadable, match="does not ask"):
        own_calls.asked_by(llm, lambda _: None, is_async=False)


def test_classes_are_made_once(kit: Kit) -> None:
    own_calls.warm(kit.llm)
    assert type(own_calls.leaf_of(kit.llm, predict, predict)) is type(own_calls.leaf_of(kit.llm, predict, predict))


def test_nobody_hears_of_what_is_found_out_and_made_below(kit: Kit) -> None:
    recorder = Recorder()
    kit.llm.callback_manager = CallbackManager([recorder])
    with recorded(recorder):
        name, args, kwargs = own_calls.asked_by(kit.llm, predict, is_async=False)
        made = own_calls.below(kit.llm, name)(*args, **kwargs)
        said = own_calls.answered(kit.llm, predict, made.text)
    assert not recorder.events and not recorder.spans and not recorder.callbacks
    assert said == made.text == predict(kit.llm)


def test_a_leaf_has_its_class_name_events_and_attributes(kit: Kit) -> None:
    asked: list[Any] = []

    def call(own: Any, name: str, body: Any, args: Any, kwargs: Any) -> Any:
        asked.append((name, args))
        return body(own, *args, **kwargs)

    leaf = own_calls.leaf_of(kit.llm, call, call)
    heard = []
    for one in (kit.llm, leaf):
        recorder = Recorder()
        kit.llm.callback_manager = CallbackManager([recorder])
        with recorded(recorder):
            said = predict(one)
        heard.append((said, recorder.events, recorder.spans, recorder.callbacks))
    assert heard[0] == heard[1] and heard[0][1]
    assert asked == [("complete", ("Say oats",))] and type(leaf).__name__ == type(kit.llm).__name__
    assert vars(leaf) is vars(kit.llm)


def test_a_body_that_asks_another_method_is_not_made_below() -> None:
    llm = ChattyLLM()
    with pytest.raises(own_calls.AsksAnother):
        own_calls.below(llm, "complete")("Say it")
    assert llm.chats == 0 and own_calls.body_of(ChattyLLM, "complete") is not ChattyLLM.complete
    with pytest.raises(Unreadable, match="no method 'sing'"):
        own_calls.body_of(ChattyLLM, "sing")


def test_functions_of_the_users_own_in_prompts(kit: Kit) -> None:
    assert not own_calls.writes_own_prompts(kit.llm)
    kit.llm.completion_to_prompt = lambda prompt: f"<{prompt}>"
    assert own_calls.writes_own_prompts(kit.llm)


def test_who_makes_lists_of_calls_in_a_loop(kit: Kit) -> None:
    assert not engines.runs_in_loop(TreeSummarize(kit.llm))
    assert engines.runs_in_loop(TreeSummarize(kit.llm, use_async=True))
    assert not engines.runs_in_loop(object())


def test_tokenizers_that_take_one_call_at_a_time() -> None:
    class Tokenizer:
        def encode(self, text: str) -> list[int]:
            return [1]

    assert copies.counts_anywhere(PromptHelper())
    assert copies.counts_anywhere(PromptHelper(tokenizer=Tokenizer().encode))
    Tokenizer.__module__ = "transformers.tokenization_utils_fast"
    assert not copies.counts_anywhere(PromptHelper(tokenizer=Tokenizer().encode))
