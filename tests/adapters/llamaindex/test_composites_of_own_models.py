"""Tests of fusion, sub-questions and lists of answers with an own embedding class: faster, and never slower."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from differential.llamaindex.compare import settled
from llama_index.core import VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager
from llama_index.core.query_engine import RetrieverQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import TextNode
from llama_index.core.tools import QueryEngineTool
from llama_index.llms.openai_like import OpenAILike

from teola_plugin import accelerate
from teola_plugin.observe.spans import Span
from tests.support.llamaindex_own import Diary, DiaryHandler, run_with_diary
from tests.support.openai_stub import MODEL, OpenAIStub, openai_stub

pytestmark = pytest.mark.usefixtures("loop_of_the_thread")
QUESTION = "What grows?"
TEXTS = [f"Field {i} has {crop}." for i, crop in enumerate(("oats", "barley", "ivy", "clover", "rye"))]


class ServerEmbedding(BaseEmbedding):
    """An embedding class whose source shows that its calls share nothing."""

    url: str
    delay_s: float = 0.02

    def _get_query_embedding(self, query: str) -> list[float]:
        time.sleep(self.delay_s)
        vector: list[float] = self._embed([query])[0]
        return vector

    def _get_text_embedding(self, text: str) -> list[float]:
        vector: list[float] = self._embed([text])[0]
        return vector

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._embed(texts)

    def _embed(self, texts: list[str]) -> Any:
        reply = httpx.post(f"{self.url}/embeddings", json={"input": texts})
        return [item["embedding"] for item in reply.json()["data"]]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        await asyncio.sleep(self.delay_s)
        async with httpx.AsyncClient() as client:
            reply = await client.post(f"{self.url}/embeddings", json={"input": [query]})
        vector: list[float] = reply.json()["data"][0]["embedding"]
        return vector


class SlowEmbedding(ServerEmbedding):
    """Takes so long that calls overlap on a busy machine, too."""

    delay_s: float = 0.5


class CountingEmbedding(ServerEmbedding):
    """An embedding class whose calls may share data."""

    calls: int = 0

    def _get_query_embedding(self, query: str) -> list[float]:
        self.calls += 1
        time.sleep(self.delay_s)
        vector: list[float] = self._embed([query])[0]
        return vector


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """Write what the prompt asks for."""
    prompt = str(body["messages"][-1]["content"])
    if "search queries" in prompt:
        time.sleep(0.5)
        return {"content": "What is sown?\nWhat is mown?\nWhat climbs?"}
    if "sub_question" in prompt:
        questions = [("What is sown?", "notes_0"), ("What climbs?", "notes_2"), ("What is sown?", "notes_4")]
        items = [{"sub_question": question, "tool_name": tool} for question, tool in questions]
        return {"content": f"```json\n{json.dumps({'items': items})}\n```"}
    return {"content": f"An answer to {len(prompt)} characters."}


@pytest.fixture
def stub() -> Iterator[OpenAIStub]:
    with openai_stub(answer) as made:
        yield made


class Kit:
    """The parts of the engines of these tests."""

    def __init__(self, stub: OpenAIStub, kind: type[ServerEmbedding], manager: CallbackManager | None = None) -> None:
        self.stub, self.kind, self.manager = stub, kind, manager or CallbackManager()
        common: dict[str, Any] = {"api_base": stub.base_url, "api_key": "none", "max_retries": 0}
        self.llm = OpenAILike(model=MODEL, is_chat_model=True, callback_manager=self.manager, **common)

    def index(self, texts: list[str]) -> VectorStoreIndex:
        model = self.kind(url=self.stub.base_url, callback_manager=self.manager)
        nodes = [TextNode(id_=text, text=text) for text in texts]
        return VectorStoreIndex(nodes, embed_model=model, callback_manager=self.manager)


def fusion(kit: Kit) -> Any:
    retriever = QueryFusionRetriever(
        [kit.index(TEXTS).as_retriever(similarity_top_k=2)],
        llm=kit.llm,
        num_queries=4,
        similarity_top_k=3,
        mode="reciprocal_rerank",  # type: ignore[arg-type]
        use_async=False,
        callback_manager=kit.manager,
    )
    return RetrieverQueryEngine.from_args(retriever, llm=kit.llm, callback_manager=kit.manager)


def sub_questions(kit: Kit) -> Any:
    tools = [
        QueryEngineTool.from_defaults(
            kit.index(TEXTS[start : start + 2]).as_query_engine(llm=kit.llm),
            name=f"notes_{start}",
            description=f"Useful for notes {start}",
        )
        for start in (0, 2, 4)
    ]
    return SubQuestionQueryEngine.from_defaults(
        tools,
        llm=kit.llm,
        question_gen=LLMQuestionGenerator.from_defaults(llm=kit.llm),
        response_synthesizer=get_response_synthesizer(llm=kit.llm, callback_manager=kit.manager),
        verbose=False,
        use_async=False,
    )


def answers(mode: str) -> Callable[[Kit], Any]:
    return lambda kit: kit.index(TEXTS).as_query_engine(llm=kit.llm, similarity_top_k=4, response_mode=mode)


MAKERS: dict[str, Callable[[Kit], Any]] = {
    "fusion": fusion,
    "sub-questions": sub_questions,
    "accumulate": answers("accumulate"),
    "tree": answers("tree_summarize"),
    "refine": answers("refine"),
}


def result_of(engine: Any, *, is_async: bool) -> str:
    loop = asyncio.get_event_loop()
    response = loop.run_until_complete(engine.aquery(QUESTION)) if is_async else engine.query(QUESTION)
    return f"{response} {[(node.node.get_content(), node.score) for node in response.source_nodes]}"


def requests(stub: OpenAIStub) -> Counter[str]:
    return Counter(map(str, stub.requests))


def most_at_once(spans: list[Span]) -> int:
    times = [(span.started, span.done) for span in spans if span.started is not None and span.done is not None]
    return max(sum(began <= at < ended for began, ended in times) for at, _ in times)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", [ServerEmbedding, CountingEmbedding])
@pytest.mark.parametrize("name", MAKERS)
def test_engine_of_user_models_sends_the_originals_requests(
    stub: OpenAIStub, name: str, kind: Any, is_async: bool
) -> None:
    engine = MAKERS[name](Kit(stub, kind))
    stub.requests.clear()
    expected = result_of(engine, is_async=is_async)
    expected_requests = requests(stub)
    stub.requests.clear()
    assert result_of(accelerate(engine), is_async=is_async) == expected
    settled()
    assert requests(stub) == expected_requests


@pytest.mark.parametrize("name", MAKERS)
def test_engine_of_user_models_sends_events_in_original_order(stub: OpenAIStub, name: str) -> None:
    diary = Diary()
    engine = MAKERS[name](Kit(stub, ServerEmbedding, CallbackManager([DiaryHandler(diary)])))
    events = []
    for one in (engine, accelerate(engine)):
        diary.events.clear()
        run_with_diary(diary, lambda one=one: one.query(QUESTION))
        events.append(list(diary.events))
    assert events[0] == events[1]


@pytest.mark.parametrize("name", ["fusion", "sub-questions"])
def test_embeddings_of_an_independent_class_overlap(stub: OpenAIStub, name: str) -> None:
    fast = accelerate(MAKERS[name](Kit(stub, SlowEmbedding)))
    fast.query(QUESTION)
    spans = fast.last_trace().spans
    assert most_at_once([span for span in spans if span.kind == "EMBEDDING"]) >= 3


def test_embeddings_of_an_unknown_class_overlap_only_with_the_llm(stub: OpenAIStub) -> None:
    fast = accelerate(fusion(Kit(stub, CountingEmbedding)))
    fast.query(QUESTION)
    spans = fast.last_trace().spans
    embeddings = [span for span in spans if span.kind == "EMBEDDING"]
    assert most_at_once(embeddings) == 1
    assert most_at_once([embeddings[0], *(span for span in spans if span.kind == "GENERATION")]) == 2


def test_an_error_of_an_embedding_is_the_originals(stub: OpenAIStub) -> None:
    engine = fusion(Kit(stub, ServerEmbedding))
    for retriever in engine.retriever._retrievers:
        retriever._embed_model.url = "http://127.0.0.1:9"
    errors = []
    for one in (engine, accelerate(engine)):
        with pytest.raises(httpx.ConnectError) as raised:
            one.query(QUESTION)
        errors.append(str(raised.value))
    settled()
    assert errors[0] == errors[1]
