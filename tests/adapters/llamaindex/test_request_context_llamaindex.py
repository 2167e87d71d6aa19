"""Tests of deadline, tenant, app and weight of a query, which work as in LangChain's `config`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import RetrieverQueryEngine
from support.llamaindex_engines import ENGINES, Library, library, reply, response_parts, settings
from support.scripted_llm import ScriptedLLM

from teola_plugin import accelerate
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore
from teola_plugin.engines.fake.base import Faults
from teola_plugin.errors import QueryTimeout
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate, Request, Result

pytestmark = pytest.mark.usefixtures("loop_of_the_thread")
ASKED = "what is there"


class Keeping(ScriptedLLM):
    """A scripted LLM that records whole engine requests as well."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = reply
        self.engine_requests: list[Request] = []

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        self.engine_requests += batch
        async for result in super().execute(batch):
            yield result


@pytest.fixture(scope="module")
def keeping() -> Keeping:
    return Keeping()


@pytest.fixture(scope="module")
def kept_library(keeping: Keeping) -> Iterator[Library]:
    with EnginePool.local([keeping, FakeEmbedder(), FakeReranker(), FakeStore()]) as pool:
        made = library(pool, "terms")
        with settings(made.llm):
            yield made


@pytest.mark.parametrize("name", ["hyde", "fusion, compact", "accumulated"])
def test_requests_have_the_tenant_of_with_request_context(kept_library: Library, keeping: Keeping, name: str) -> None:
    fast = accelerate(ENGINES[name](kept_library))
    answers = []
    for tenant in ("", "one", "two"):
        keeping.engine_requests.clear()
        one = fast.with_request_context(tenant=tenant) if tenant else fast
        answers.append(response_parts(one.query(ASKED)))
        assert keeping.engine_requests and {request.tenant for request in keeping.engine_requests} == {tenant}
    assert answers[0] == answers[1] == answers[2]


def test_subplan_of_a_chat_engine_keeps_tenant_and_app(kept_library: Library, keeping: Keeping) -> None:
    memory = ChatMemoryBuffer.from_defaults(token_limit=3000)
    engine = CondenseQuestionChatEngine.from_defaults(
        kept_library.fused("tree_summarize"), llm=kept_library.llm, memory=memory
    )
    fast = accelerate(engine).with_request_context(tenant="one", app="talk")
    keeping.engine_requests.clear()
    fast.chat(ASKED)
    assert {request.tenant for request in keeping.engine_requests} == {"one"} and fast.last_trace().app == "talk"


def test_with_request_context_keeps_other_settings_and_the_original_object(kept_library: Library) -> None:
    fast = accelerate(kept_library.fused(), app="library")
    other = fast.with_request_context(tenant="one", weight=3.0).with_request_context(deadline_s=60.0)
    other.query(ASKED)
    fast.query(ASKED)
    assert other.last_trace().app == fast.last_trace().app == "library"
    assert other.original is fast.original and type(other).__name__ == type(fast).__name__
    settings = other.__teola_session__.settings
    assert (settings.tenant, settings.weight, settings.deadline_s) == ("one", 3.0, 60.0)
    assert fast.__teola_session__.settings.tenant == "" and fast.__teola_session__.settings.deadline_s is None
    assert other.__teola_session__.entry("query") is fast.__teola_session__.entry("query")


@pytest.mark.parametrize("way", ["query", "aquery"])
def test_query_past_its_deadline_raises_query_timeout(way: str) -> None:
    def hangs(request: Any) -> bool:
        return isinstance(request.payload, Generate) and "Context information" in request.payload.prompt.flat()

    model = FakeLLM(answer=lambda prompt, _: reply(Generate(prompt)), faults=Faults(hang_on=hangs))
    with EnginePool.local([model, FakeEmbedder(), FakeReranker(), FakeStore()]) as pool:
        stock = library(pool, "late")
        with settings(stock.llm):
            for engine in (stock.fused(), stock.rag()):  # one that runs ahead, one that is only traced
                fast = accelerate(engine).with_request_context(deadline_s=0.2)
                with pytest.raises(QueryTimeout, match="deadline"):
                    fast.query(ASKED) if way == "query" else asyncio.run(fast.aquery(ASKED))
                assert fast.last_trace().outcome == "timeout"


@pytest.mark.parametrize("stream", [False, True])
def test_deadline_that_passes_between_calls_fails_the_next_call(kept_library: Library, stream: bool) -> None:
    """The object's own code takes its time; the next call fails."""

    class Slow(type(kept_library.index.as_retriever())):  # type: ignore[misc]
        def _retrieve(self, query_bundle: Any) -> Any:
            found = super()._retrieve(query_bundle)
            while not fast.__teola_session__.last.trace.done():
                time.sleep(0.001)
            return found

    retriever = Slow(kept_library.index, similarity_top_k=1)
    engine = RetrieverQueryEngine.from_args(retriever, llm=kept_library.llm, streaming=stream)
    fast = accelerate(engine).with_request_context(deadline_s=0.05)
    with pytest.raises(QueryTimeout, match="deadline"):
        made = fast.query(ASKED)
        list(made.response_gen)
