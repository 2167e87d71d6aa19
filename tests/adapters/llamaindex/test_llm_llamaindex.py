"""Tests of `TeolaLLM`: its requests, its results, and the events that LlamaIndex gets."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable, Generator
from types import AsyncGeneratorType
from typing import Any

import pytest
from differential.llamaindex.recording import Recorder, recorded
from llama_index.core import PromptTemplate, Settings
from llama_index.core.base.llms.types import ImageBlock, TextBlock, ThinkingBlock, ToolCallBlock
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.extractors import DocumentContextExtractor
from llama_index.core.llms import ChatMessage, MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import Document
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.types import BaseOutputParser
from pydantic import BaseModel

from teola_plugin.adapters.llamaindex import TeolaLLM
from teola_plugin.errors import RegistrationError
from teola_plugin.requests.payloads import Generation, Message, Prompt, Sampling

QUESTION = [ChatMessage(role="system", content="be brief"), ChatMessage("why?")]


@pytest.fixture
def model(pool, llm):
    return TeolaLLM(pool=pool, max_tokens=32)


async def _list(made: Any) -> list[Any]:
    return [one async for one in await made]


WAYS: dict[str, Callable[[TeolaLLM], str]] = {
    "chat": lambda m: m.chat(QUESTION).message.content,
    "achat": lambda m: asyncio.run(m.achat(QUESTION)).message.content,
    "stream_chat": lambda m: list(m.stream_chat(QUESTION))[-1].message.content,
    "astream_chat": lambda m: asyncio.run(_list(m.astream_chat(QUESTION)))[-1].message.content,
    "complete": lambda m: m.complete("why?").text,
    "acomplete": lambda m: asyncio.run(m.acomplete("why?")).text,
    "stream_complete": lambda m: list(m.stream_complete("why?"))[-1].text,
    "astream_complete": lambda m: asyncio.run(_list(m.astream_complete("why?")))[-1].text,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chat", [True, False])
def test_every_llm_method_sends_its_payload(pool, llm, way, chat):
    model = TeolaLLM(pool=pool, max_tokens=32, is_chat_model=chat)
    answer = WAYS[way](model)
    wanted = model.payload_of_messages(QUESTION) if "chat" in way else model.payload_of_prompt("why?")
    assert llm.requests == [wanted]
    assert answer == f"you said: {wanted.prompt.flat()}"


def test_chat_and_text_llm_build_their_prompts(pool, llm):
    chat, text = TeolaLLM(pool=pool), TeolaLLM(pool=pool, is_chat_model=False)
    assert chat.payload_of_prompt("why?").prompt == Prompt(messages=(Message("user", "why?"),))
    assert chat.payload_of_messages(QUESTION).prompt.messages == (
        Message("system", "be brief"),
        Message("user", "why?"),
    )
    assert text.payload_of_prompt("why?").prompt == Prompt(text="why?")
    assert text.payload_of_messages(QUESTION).prompt == Prompt(text="system: be brief\nuser: why?\nassistant: ")


def test_responses_and_stream_pieces_have_text_and_usage(model, llm):
    llm.answer = lambda _: "the long answer"
    whole = model.chat(QUESTION)
    assert whole.message == ChatMessage(role="assistant", content="the long answer")
    assert whole.raw["finish_reason"] == "stop" and whole.raw["usage"]["completion_tokens"] == 3
    assert whole.additional_kwargs == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    assert model.complete("why?").raw == whole.raw
    made = model.stream_chat(QUESTION)
    assert isinstance(made, Generator)
    pieces = list(made)
    assert [p.delta for p in pieces] == ["the ", "long ", "answer", ""]
    assert [p.message.content for p in pieces] == ["the ", "the long ", "the long answer", "the long answer"]
    assert pieces[-1].model_copy(update={"delta": None}) == whole
    completed = list(model.stream_complete("why?"))
    assert [p.text for p in completed] == [p.message.content for p in pieces]
    assert completed[-1].raw == whole.raw


async def test_llm_works_inside_a_running_loop(model, llm):
    """Sync calls, async ones and both kinds of streams, and none of them holds the loop's engine."""
    llm.answer = lambda request: request.prompt.messages[-1].content
    assert model.complete("one").text == "one"
    assert (await model.acomplete("two")).text == "two"
    assert [p.delta for p in model.stream_complete("three")] == ["three", ""]
    made = await model.astream_chat([ChatMessage("four five")])
    assert isinstance(made, AsyncGeneratorType)
    assert [p.delta async for p in made] == ["four ", "five", ""]
    many = await asyncio.gather(*(model.acomplete(str(i)) for i in range(20)))
    assert [one.text for one in many] == [str(i) for i in range(20)]
    assert (await asyncio.to_thread(model.complete, "six")).text == "six"


def test_predict_sends_the_payload_of_the_template(pool, llm):
    template = PromptTemplate("Context: {context}\nAnswer {question}")
    given = {"context": "none", "question": "why?"}
    parser = Loud()
    for options in (
        {},
        {"system_prompt": "be brief"},
        {"is_chat_model": False, "system_prompt": "be brief", "query_wrapper_prompt": PromptTemplate("<{query_str}>")},
        {"is_chat_model": False, "completion_to_prompt": lambda text: f"[{text}]"},
        {"output_parser": parser},
    ):
        model = TeolaLLM(pool=pool, **options)
        llm.requests.clear()
        text = model.predict(template, **given)
        list(model.stream(template, **given)) if "output_parser" not in options else None
        payload = model.payload_of_template(template, **given)
        assert all(one == payload for one in llm.requests) and llm.requests
        assert text == model.text_of(Generation(f"you said: {payload.prompt.flat()}"))


class Loud(BaseOutputParser):
    def parse(self, output: str) -> str:
        return output.upper()

    def format(self, query: str) -> str:
        return f"{query} LOUD"


def test_sampling_arguments_reach_the_request(model, llm):
    model.complete("why?", temperature=0.5, top_p=0.9, top_k=3, seed=1, stop=["x"], max_tokens=5)
    assert llm.requests[-1].sampling == Sampling(5, 0.5, 0.9, 3, 1, ("x",))
    model.chat(QUESTION, json_schema={"type": "object"})
    assert llm.requests[-1].sampling == Sampling(32, json_schema='{"type": "object"}')
    with pytest.raises(RegistrationError, match="argument of TeolaLLM"):
        model.complete("why?", tempreature=1)
    with pytest.raises(RegistrationError, match="engine"):
        TeolaLLM(pool=model.pool, engine="lmm")


def test_prompt_includes_tool_calls_and_omits_thoughts(model):
    blocks = [
        ThinkingBlock(content="hm"),
        TextBlock(text="calling"),
        ToolCallBlock(tool_name="f", tool_kwargs={"a": 1}),
    ]
    payload = model.payload_of_messages(
        [ChatMessage("go"), ChatMessage(role="assistant", blocks=blocks), ChatMessage(role="tool", content="2")]
    )
    assert payload.prompt.messages[1:] == (
        Message("assistant", 'calling\n{"name": "f", "arguments": {"a": 1}}'),
        Message("tool", "2"),
    )
    two = ChatMessage(blocks=[TextBlock(text="a"), TextBlock(text="b")])
    assert model.payload_of_messages([two]).prompt.messages == (Message("user", two.content),)


def test_images_and_empty_messages_raise(model, llm):
    picture = ChatMessage(role="user", blocks=[ImageBlock(image=b"\x89PNG\r\n\x1a\n", image_mimetype="image/png")])
    with pytest.raises(RegistrationError, match="image"):
        model.chat([picture])
    with pytest.raises(RegistrationError, match="no messages"):
        model.chat([])
    assert llm.requests == []


def test_teola_llm_sends_the_events_of_mock_llm(pool, llm):
    """The same callbacks, events and spans, under other names, as of LlamaIndex's own MockLLM."""

    def event_kinds(model: Any) -> list[Any]:
        recorder = Recorder()
        model.callback_manager = CallbackManager([recorder])
        with recorded(recorder):
            model.complete("why?")
            model.predict(PromptTemplate("{q}"), q="why?")
        assert not any("not recorded" in event for event in recorder.events)
        kinds = [
            sorted(str(text).replace("TeolaLLM", "MockLLM").partition("(")[0].partition("{")[0] for text in entries)
            for entries in (recorder.callbacks, recorder.events, recorder.spans)
        ]
        return kinds

    llm.answer = lambda _: "so"
    assert event_kinds(TeolaLLM(pool=pool, is_chat_model=False)) == event_kinds(MockLLM(max_tokens=2))


def test_token_counting_handler_counts_tokens(model):
    counter = TokenCountingHandler(tokenizer=lambda text: text.split())
    model.callback_manager = CallbackManager([counter])
    model.chat(QUESTION)
    assert counter.prompt_llm_token_count == 7 and counter.completion_llm_token_count > 0


def test_structured_predict_returns_the_parsed_object(model, llm):
    class Answer(BaseModel):
        text: str

    llm.answer = lambda _: '{"text": "so"}'
    assert model.structured_predict(Answer, PromptTemplate("{q}"), q="why?") == Answer(text="so")


def test_llm_answers_after_a_stream_was_closed_early(model, llm):
    llm.answer = lambda _: "a b c"
    made = model.stream_complete("why?")
    next(made)
    made.close()  # nothing to assert but that it neither hangs nor raises; whether it was over already is a race
    assert model.complete("again").text == "a b c"


def test_stream_belongs_to_the_query_that_started_it(pool, model, llm):
    with pool.watching() as run:
        made = model.stream_complete("why?")
    assert list(made)[-1].text
    assert [span.engine for span in run.trace.result(10).spans] == ["llm"]


def test_copies_share_the_pool_and_pickling_raises(model):
    for made in (copy.copy(model), copy.deepcopy(model), model.model_copy()):
        assert made.pool is model.pool and made.complete("why?").text
    with pytest.raises(RegistrationError, match="cannot be pickled"):
        pickle.dumps(model)
    assert "pool" not in model.to_dict() and "pool" not in repr(model)


def test_llm_metadata_has_limits_and_model_name(pool, llm):
    model = TeolaLLM(pool=pool, max_tokens=17)
    assert model.metadata.num_output == 17 and model.metadata.is_chat_model
    assert model.metadata.model_name == "scripted-1" == model.model_name
    assert model.metadata.context_window == MockLLM().metadata.context_window  # the engine tells no limit
    assert TeolaLLM(pool=pool, context_window=99).metadata.context_window == 99
    assert getattr(model, "to_payload", model.to_dict)()["class_name"] == "TeolaLLM"


def test_llm_of_the_settings_works_in_threads(model, llm):
    Settings.llm = model
    try:
        found: list[str] = []
        threads = [threading.Thread(target=lambda: found.append(Settings.llm.complete("x").text)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4 and len(set(found)) == 1
    finally:
        Settings.llm = None


async def test_document_context_extractor_works_with_teola_llm(model: TeolaLLM) -> None:
    """The extractor passes headers of a hosted API to every LLM, and treats an error as missing context."""
    document = Document(text="Lambs eat oats. " * 40)
    documents = SimpleDocumentStore()
    documents.add_documents([document])
    nodes = SentenceSplitter(chunk_size=64, chunk_overlap=0).get_nodes_from_documents([document])
    extractor = DocumentContextExtractor(docstore=documents, llm=model, max_context_length=1000)
    found = await extractor.aextract(nodes)
    assert len(found) == len(nodes) > 1 and all(one["context"] for one in found)
