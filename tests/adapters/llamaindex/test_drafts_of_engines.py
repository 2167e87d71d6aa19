"""Tests of the draft texts of LlamaIndex engines: labels, list formats and earlier answers, as `explain` shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from llama_index.core.evaluation import RelevancyEvaluator
from llama_index.core.llms import ChatMessage
from llama_index.core.query_engine import RouterQueryEngine, SubQuestionQueryEngine
from llama_index.core.query_engine.retry_source_query_engine import RetrySourceQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.selectors import LLMSingleSelector
from support.llamaindex_engines import Library, library, reply, response_parts, settings
from support.recording import record

from teola_plugin import accelerate
from teola_plugin.engines import profiles
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore
from teola_plugin.llamaindex import TeolaLLM
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate

pytestmark = pytest.mark.usefixtures("loop_of_the_thread")
QUICK = replace(profiles.noop()["llm"], drafts=8)


@pytest.fixture(scope="module")
def llm() -> FakeLLM:
    return FakeLLM("llm", QUICK, answer=lambda prompt, sampling: reply(Generate(prompt, sampling)))


@pytest.fixture(scope="module")
def stock(llm: FakeLLM) -> Iterator[Library]:
    with EnginePool.local(
        {"llm": llm, "embedder": FakeEmbedder(), "reranker": FakeReranker(), "store": FakeStore()}
    ) as pool:
        made = library(pool, "drafted")
        with settings(made.llm):
            yield made


def judged(stock: Library) -> Any:
    return RetrySourceQueryEngine(stock.rag(k=2), RelevancyEvaluator(llm=stock.llm), llm=stock.llm, max_retries=1)


def routed(stock: Library) -> Any:
    return RouterQueryEngine(LLMSingleSelector.from_defaults(stock.llm), stock.tools(), llm=stock.llm)


def questioned(stock: Library) -> Any:
    generator = LLMQuestionGenerator.from_defaults(llm=stock.llm)
    return SubQuestionQueryEngine.from_defaults(stock.tools(), llm=stock.llm, question_gen=generator, use_async=True)


ENGINES: dict[str, tuple[Callable[[Library], Any], str, str, str]] = {
    "judge": (judged, "YES/ NO", "YES\ue000", "the labels that are understood"),
    "selector": (routed, "choices", '[\n    {\n        "choice":', "the form of its list"),
    "questions": (questioned, "sub-questions", '```json\n{\n    "items": [', "the form of its list"),
    "fusion": (lambda stock: stock.fused(), "search queries", "1. \ue000\n2. ", "the form of its list"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_requests_of_engines_draft_known_answer_texts(stock: Library, llm: FakeLLM, name: str) -> None:
    make, marked, first, what = ENGINES[name]
    plain = response_parts(make(stock).query("what is there"))
    fast = accelerate(make(stock))
    assert what in fast.explain(details=True)
    requests = record(llm)
    assert response_parts(fast.query("what is there")) == plain
    drafts = [
        one.drafts for one in requests if isinstance(one.payload, Generate) and marked in one.payload.prompt.flat()
    ]
    assert drafts and any(text.startswith(first) for text in drafts[0])


def test_request_outside_a_plan_drafts_tool_calls(stock: Library, llm: FakeLLM) -> None:
    tool = {
        "type": "function",
        "function": {"name": "look_up", "parameters": {"properties": {"a": {"type": "string"}}}},
    }
    made = TeolaLLM(pool=stock.llm.pool, is_function_calling_model=True)
    requests = record(llm)
    made.chat([ChatMessage("Hi")], tools=[tool])
    [request] = [one for one in requests if isinstance(one.payload, Generate)]
    assert '{"name": "look_up", "arguments": {"a": "\ue000"}}' in request.drafts
