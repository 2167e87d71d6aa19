"""Tests of the object that `accelerate` returns: its class, attributes and parts, and the reasons of refusals."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from typing import Any

import pytest
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.callbacks import CallbackManager
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
    SimpleChatEngine,
)
from llama_index.core.chat_engine.types import StreamingAgentChatResponse
from llama_index.core.evaluation import RelevancyEvaluator
from llama_index.core.indices.query.query_transform.base import StepDecomposeQueryTransform
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms import ChatMessage, ChatResponse, MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import MultiStepQueryEngine, RetrieverQueryEngine, RetryQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import QueryBundle
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from support.llamaindex_engines import ENGINES, Library, reply, response_parts
from support.scripted_llm import ScriptedLLM

from teola_plugin import accelerate
from teola_plugin.engines.fake import FakeEmbedder
from teola_plugin.errors import RegistrationError, TraceError
from teola_plugin.pool import EnginePool

pytestmark = pytest.mark.usefixtures("loop_of_the_thread", "scripted", "immediate_client_code")
ASKED = "what is there"


def ran_ahead(fast: Any) -> set[str]:
    """Return the plans from which the primitives of the last query come."""
    trace = fast.last_trace()
    assert trace is not None
    return {span.primitive.partition("/")[0] for span in trace.spans if ".call#" not in span.primitive}


# ------------------------------------------------------------ the object


def test_accelerated_engine_keeps_class_and_shares_attributes(stock: Library) -> None:
    engine = stock.fused()
    fast = accelerate(engine)
    assert isinstance(fast, RetrieverQueryEngine) and isinstance(fast, BaseQueryEngine)
    assert fast is not engine and fast.original is engine
    assert fast.retriever is engine.retriever
    manager = CallbackManager([])
    fast.callback_manager = manager
    assert engine.callback_manager is manager
    assert fast.get_prompts().keys() == engine.get_prompts().keys()


def test_updated_prompts_apply_to_the_next_query(stock: Library, llm: ScriptedLLM) -> None:
    engine = stock.fused("tree_summarize")
    fast = accelerate(engine)
    fast.query(ASKED)
    fast.update_prompts(
        {"response_synthesizer:summary_template": PromptTemplate("Sum up {context_str} for {query_str} now")}
    )
    llm.requests.clear()
    fast.query(ASKED)
    assert any("for what is there now" in request.prompt.flat() for request in llm.requests)
    assert not any(".call#" in span.primitive for span in fast.last_trace().spans)


def test_changed_retriever_settings_apply_to_the_next_query(stock: Library) -> None:
    engine = stock.fused("accumulate")
    fast = accelerate(engine)
    before = len(fast.query(ASKED).source_nodes)
    engine.retriever.similarity_top_k = 2
    engine.retriever._retrievers.pop()
    assert len(fast.query(ASKED).source_nodes) == 2 < before
    assert not any(".call#" in span.primitive for span in fast.last_trace().spans)


def test_copies_of_an_accelerated_engine_are_accelerated(stock: Library) -> None:
    fast = accelerate(stock.fused())
    for made in (copy.copy(fast), copy.deepcopy(fast)):
        assert made is not fast and made.original is not fast.original
        assert response_parts(made.query(ASKED)) == response_parts(fast.query(ASKED))
        assert made.last_trace() is not None


def test_query_bundle_with_embedding_or_texts_is_supported(stock: Library) -> None:
    vector = stock.index._embed_model.get_query_embedding("boats")
    for more in (
        {"embedding": vector},
        {"custom_embedding_strs": ["boats", "mills"]},
        {"custom_embedding_strs": ["boats"]},
    ):
        plain, fast = stock.rag("accumulate"), accelerate(stock.rag("accumulate"))
        assert response_parts(plain.query(QueryBundle(ASKED, **more))) == response_parts(
            fast.query(QueryBundle(ASKED, **more))
        )
        by_hand = [span.primitive for span in fast.last_trace().spans if ".call#" in span.primitive]
        assert bool(by_hand) is ("embedding" in more)


def test_report_and_explain_describe_a_lowered_engine(stock: Library) -> None:
    fast = accelerate(stock.fused("refine", node_postprocessors=[stock.reranker]))
    assert [row.level for row in fast.report().parts] == ["lowered"] * 5
    assert [row.path for row in fast.report().parts][-2:] == [
        "engine._node_postprocessors[0]",
        "engine._response_synthesizer",
    ]
    explanation = fast.explain(details=True)
    assert "FOLD" in explanation and "decoding-pipelining" in explanation and "e-graph" in explanation


@pytest.mark.parametrize("name", list(ENGINES))
def test_engine_with_a_missing_attribute_is_reported(stock: Library, name: str) -> None:
    """Another version of LlamaIndex, or a subclass that did not call its base."""
    engine = ENGINES[name](stock)
    for part in (engine, *(value for value in vars(engine).values() if type(value).__module__.startswith("llama_"))):
        for attribute, value in list(vars(part).items()):
            del vars(part)[attribute]
            fast = accelerate(engine, pool=stock.llm.pool)
            assert fast.report().parts.nodes and "What was understood" in fast.explain(ASKED, details=True)
            vars(part)[attribute] = value
    assert {row.level for row in accelerate(engine).report().parts} == {"lowered"}


def test_report_names_the_missing_attribute(stock: Library) -> None:
    engine = stock.fused()
    del engine.retriever._retrievers[0]._similarity_top_k
    fast = accelerate(engine)
    reasons = [row.reason for row in fast.report().parts if row.level != "lowered"]
    assert reasons and reasons[0].startswith("it has no '_similarity_top_k'")
    with pytest.raises(AttributeError, match="_similarity_top_k"):
        fast.query(ASKED)


def test_query_without_gain_is_only_traced(stock: Library) -> None:
    fast = accelerate(stock.rag())
    fast.query(ASKED)
    assert ran_ahead(fast) == set()


# ------------------------------------------------------------ parts


def talks(stock: Library) -> dict[str, Any]:
    history = [ChatMessage(role="user", content="hello"), ChatMessage(role="assistant", content="hi")]

    def memory() -> Any:
        return ChatMemoryBuffer.from_defaults(chat_history=list(history), token_limit=3000)

    return {
        "condense question": lambda: CondenseQuestionChatEngine.from_defaults(
            stock.fused("tree_summarize"), llm=stock.llm, memory=memory()
        ),
        "context": lambda: ContextChatEngine.from_defaults(stock.fusion(), llm=stock.llm, memory=memory()),
        "condense plus context": lambda: CondensePlusContextChatEngine.from_defaults(
            stock.fusion(), llm=stock.llm, memory=memory()
        ),
    }


@pytest.mark.parametrize("name", ["condense question", "context", "condense plus context"])
def test_engine_of_a_chat_engine_is_prefetched(stock: Library, name: str) -> None:
    plain, fast = talks(stock)[name](), accelerate(talks(stock)[name]())
    assert isinstance(fast, type(plain))
    assert str(plain.chat("and now")) == str(fast.chat("and now"))
    assert "part1" in ran_ahead(fast)
    assert "".join(plain.stream_chat("more").response_gen) == "".join(fast.stream_chat("more").response_gen)
    assert "part1" in ran_ahead(fast)

    async def talked(engine: Any) -> list[str]:
        one = str(await engine.achat("third"))
        stream = await engine.astream_chat("fourth")
        return [one, "".join([piece async for piece in stream.async_response_gen()])]

    assert asyncio.run(talked(plain)) == asyncio.run(talked(fast))
    assert plain.chat_history == fast.chat_history and len(fast.chat_history) == 10
    assert "lowered" in {row.level for row in fast.report().parts}


def short_talks(stock: Library) -> dict[str, Any]:
    """Return a chat engine whose answers take one call."""
    nearest, memory = stock.index.as_retriever(similarity_top_k=1), ChatMemoryBuffer.from_defaults(token_limit=3000)
    return {
        "condense question": lambda: CondenseQuestionChatEngine.from_defaults(
            stock.rag(k=1), llm=stock.llm, memory=memory
        ),
        "context": lambda: ContextChatEngine.from_defaults(nearest, llm=stock.llm, memory=memory),
        "condense plus context": lambda: CondensePlusContextChatEngine.from_defaults(
            nearest, llm=stock.llm, memory=memory
        ),
    }


@pytest.mark.parametrize("name", ["condense question", "context", "condense plus context"])
@pytest.mark.parametrize("way", ["stream_chat", "astream_chat"])
def test_streamed_chat_is_traced_to_its_end(stock: Library, llm: ScriptedLLM, name: str, way: str) -> None:
    """The writer of its history reads the stream, on a thread or in a task that outlives the call."""
    fast, spoken = accelerate(short_talks(stock)[name]()), threading.Event()

    def late(request: Any) -> str:
        assert spoken.wait(10)
        return reply(request)

    def open_still() -> bool:
        still = not fast.__teola_session__.last.trace.done()
        spoken.set()
        return still

    async def streamed() -> tuple[bool, str]:
        made = await fast.astream_chat("and now")
        return open_still(), "".join([piece async for piece in made.async_response_gen()])

    llm.answer = late
    if way == "stream_chat":
        made = fast.stream_chat("and now")
        still, text = open_still(), "".join(made.response_gen)
    else:
        still, text = asyncio.run(streamed())
    assert still and text.startswith("said ")
    assert all(span.done is not None for span in fast.last_trace().spans)


class ReadByTheCaller(SimpleChatEngine):
    """Streams as context chat engines did before llama-index-core 0.14.17: no thread or task reads the answer."""

    def stream_chat(self, message: str, chat_history: Any = None) -> StreamingAgentChatResponse:
        pieces = (piece for piece in ANSWER)
        return StreamingAgentChatResponse(chat_stream=pieces, is_writing_to_memory=False)

    async def astream_chat(self, message: str, chat_history: Any = None) -> StreamingAgentChatResponse:
        async def pieces() -> Any:
            for piece in ANSWER:
                yield piece

        return StreamingAgentChatResponse(achat_stream=pieces(), is_writing_to_memory=False)


ANSWER = [ChatResponse(message=ChatMessage(content=text), delta=text) for text in ("oats ", "grow")]


@pytest.mark.parametrize("way", ["stream_chat", "astream_chat"])
def test_chat_stream_read_by_caller_is_traced_to_its_end(stock: Library, way: str) -> None:
    memory = ChatMemoryBuffer.from_defaults(token_limit=3000)
    fast = accelerate(ReadByTheCaller.from_defaults(llm=stock.llm, memory=memory))

    def is_open() -> bool:
        return not fast.__teola_session__.last.trace.done()

    async def stream() -> tuple[bool, str]:
        response = await fast.astream_chat("and now")
        return is_open(), "".join([piece async for piece in response.async_response_gen()])

    if way == "stream_chat":
        response = fast.stream_chat("and now")
        open_before, text = is_open(), "".join(response.response_gen)
    else:
        open_before, text = asyncio.run(stream())
    until = time.monotonic() + 10
    while is_open() and time.monotonic() < until:  # its loop hears of the end a moment later
        time.sleep(0.01)
    assert open_before
    assert text == "oats grow"
    assert not is_open()


@pytest.mark.parametrize("name", ["condense question", "condense plus context"])
def test_first_chat_message_is_not_condensed(stock: Library, llm: ScriptedLLM, name: str) -> None:
    """Without a history the retriever starts at once, with the message itself."""
    fast = accelerate(talks(stock)[name]())
    fast.reset()
    llm.requests.clear()
    fast.chat("what sails")
    assert "search queries" in llm.requests[0].prompt.flat() and "what sails" in llm.requests[0].prompt.flat()
    assert not any("tandalone question" in request.prompt.flat() for request in llm.requests)


def test_steps_of_an_unplanned_composite_are_prefetched(stock: Library, llm: ScriptedLLM) -> None:
    def stepwise(request: Any) -> str:
        text = request.prompt.flat()
        return (
            ("None" if "Passage" in text or "said" in text else "what sails")
            if "New question" in text
            else reply(request)
        )

    llm.answer = stepwise

    def make() -> MultiStepQueryEngine:
        return MultiStepQueryEngine(
            stock.fused("accumulate"), StepDecomposeQueryTransform(stock.llm), index_summary="things", num_steps=2
        )

    plain, fast = make(), accelerate(make())
    assert response_parts(plain.query(ASKED)) == response_parts(fast.query(ASKED))
    assert "part1" in ran_ahead(fast)


@pytest.mark.parametrize("way", ["query", "aquery"])
def test_each_retry_of_an_engine_is_prefetched(stock: Library, llm: ScriptedLLM, way: str) -> None:
    judged: list[str] = []

    def strict(request: Any) -> str:
        if "YES" not in request.prompt.flat():
            return reply(request)
        judged.append(request.prompt.flat())
        return "NO" if len(judged) <= 2 else "YES"

    llm.answer = strict
    answers = []
    for engine in (
        RetryQueryEngine(stock.fused("accumulate"), RelevancyEvaluator(llm=stock.llm)),
        fast := accelerate(RetryQueryEngine(stock.fused("accumulate"), RelevancyEvaluator(llm=stock.llm))),
    ):
        judged.clear()
        answers.append(engine.query(ASKED) if way == "query" else asyncio.run(engine.aquery(ASKED)))
        assert len(judged) > 2
    assert response_parts(answers[0]) == response_parts(answers[1])
    assert {"part1", "part2"} <= ran_ahead(fast)


def test_accelerated_engine_nested_in_another_gives_the_same_answer(stock: Library) -> None:
    from llama_index.core.query_engine import RouterQueryEngine
    from llama_index.core.selectors import LLMSingleSelector
    from llama_index.core.tools import QueryEngineTool

    def make(inner: Any) -> RouterQueryEngine:
        tools = [QueryEngineTool.from_defaults(inner, name=name, description=name) for name in ("a", "b")]
        return RouterQueryEngine(LLMSingleSelector.from_defaults(stock.llm), tools, llm=stock.llm)

    plain, fast = make(stock.fused()), accelerate(make(accelerate(stock.fused())))
    assert response_parts(plain.query(ASKED)) == response_parts(fast.query(ASKED))
    assert "part1" in ran_ahead(fast)


# ------------------------------------------------------------ bind


def test_bound_llm_of_an_engine_runs_on_the_pool(stock: Library, pool: EnginePool, llm: ScriptedLLM) -> None:
    own = MockLLM(max_tokens=3)
    engine = RetrieverQueryEngine.from_args(stock.fusion(llm=own), llm=own, response_mode="refine")  # type: ignore[arg-type]
    fast = accelerate(engine, pool=pool, bind=[(own, "llm")])
    llm.requests.clear()
    assert str(fast.query(ASKED)).startswith("said ") and llm.requests
    assert not any(".call#" in span.primitive for span in fast.last_trace().spans)
    assert engine._response_synthesizer._llm is own and engine.retriever._llm is own
    llm.requests.clear()
    assert not str(engine.query(ASKED)).startswith("said ") and not llm.requests


def test_bind_raises_for_foreign_object_missing_pool_or_unknown_engine(stock: Library, pool: EnginePool) -> None:
    own = MockLLM()
    with pytest.raises(RegistrationError, match="not a part"):
        accelerate(stock.fused(), pool=pool, bind=[(MockLLM(), "llm")])
    with pytest.raises(RegistrationError, match="needs a pool"):
        accelerate(get_response_synthesizer(llm=own), bind=[(own, "llm")])
    with pytest.raises(RegistrationError, match="unknown engine"):
        accelerate(stock.fused(), pool=pool, bind=[(stock.llm, "nobody")])


def test_first_search_is_prefetched_before_a_user_model_call(stock: Library) -> None:
    own = MockLLM(max_tokens=5)
    engine = RetrieverQueryEngine.from_args(stock.fusion(llm=own), llm=own)
    fast = accelerate(engine)
    assert response_parts(engine.query(ASKED)) == response_parts(fast.query(ASKED))
    assert {"retrieve.own.embedding", "retrieve.own.searching"} <= {s.primitive for s in fast.last_trace().spans}
    assert {row.level for row in fast.report().parts} == {"lowered", "joined", "original"}


# ------------------------------------------------------------ what is refused


class Flow(Workflow):
    @step
    async def only(self, ev: StartEvent) -> StopEvent:
        return StopEvent(result=1)


class QueryPipeline:
    """A stand-in for the class that LlamaIndex had before 0.13."""


QueryPipeline.__module__ = "llama_index.core.query_pipeline.query"


def test_accelerate_raises_for_unsupported_objects_and_options(stock: Library) -> None:
    with pytest.raises(TraceError, match=r"removed query pipelines.*RetrieverQueryEngine"):
        accelerate(QueryPipeline())
    with pytest.raises(TraceError, match="workflows or agents"):
        accelerate(stock.llm)
    with pytest.raises(RegistrationError, match="a second time, and a workflow's steps may do anything"):
        accelerate(Flow(), shadow=0.5)
    with pytest.raises(RegistrationError, match="speculate"):
        accelerate(stock.rag(), speculate="maybe")
    with EnginePool.local([FakeEmbedder()]) as other:
        from teola_plugin.adapters.llamaindex import TeolaEmbedding

        retriever = stock.index.as_retriever(embed_model=TeolaEmbedding(pool=other))
        with pytest.raises(RegistrationError, match="2 different engine pools"):
            accelerate(retriever)


def test_original_engine_runs_without_a_pool() -> None:
    from llama_index.core import MockEmbedding, VectorStoreIndex
    from llama_index.core.schema import TextNode

    index = VectorStoreIndex([TextNode(id_="n", text="boats")], embed_model=MockEmbedding(embed_dim=4))
    engine = index.as_query_engine(llm=MockLLM(max_tokens=4))
    fast = accelerate(engine)
    assert response_parts(fast.query(ASKED)) == response_parts(engine.query(ASKED))
    assert fast.plan() is None and fast.last_trace() is None and "no gain: no part of it" in fast.explain()


def test_accelerated_pipelines_and_indexes_keep_their_class(stock: Library) -> None:
    pipeline = IngestionPipeline(transformations=[stock.index._embed_model])
    assert isinstance(accelerate(pipeline), IngestionPipeline)
    assert isinstance(accelerate(stock.index), type(stock.index))


def test_failing_plan_is_logged_and_the_original_engine_runs(
    stock: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fast = accelerate(stock.fused())

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("planned badly")

    monkeypatch.setattr(stock.llm.pool, "plan", broken)
    with caplog.at_level(logging.WARNING, logger="teola_plugin"):
        assert response_parts(fast.query(ASKED)) == response_parts(stock.fused().query(ASKED))
    assert "planning failed" in caplog.text and "ZeroDivisionError" in caplog.text


def test_accelerate_returns_original_engine_if_disabled(stock: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEOLA_DISABLE", "1")
    engine = ENGINES["tree"](stock)
    assert accelerate(engine) is engine


async def test_sync_model_call_in_aquery_does_not_block_the_loop(stock: Library, llm: ScriptedLLM) -> None:
    """LlamaIndex's `aquery` asks the LLM for its invented document without awaiting."""
    loop, ticks = asyncio.get_running_loop(), 0

    def ticking() -> None:
        nonlocal ticks
        ticks += 1
        loop.call_soon(ticking)

    seen: list[int] = []
    during = threading.Event()

    def slow(request: Any) -> str:
        if "Context information" not in request.prompt.flat() and not during.is_set():
            during.set()
            before, until = ticks, time.monotonic() + 5
            while ticks < before + 3 and time.monotonic() < until:
                time.sleep(0.001)
            seen.append(ticks - before)
        return reply(request)

    llm.answer = slow
    fast = accelerate(ENGINES["hyde"](stock))
    loop.call_soon(ticking)
    await fast.aquery(ASKED)
    assert seen and seen[0] >= 3


def test_bound_llm_is_replaced_in_every_part_of_an_engine(stock: Library, pool: EnginePool, llm: ScriptedLLM) -> None:
    own = MockLLM(max_tokens=3)
    inner = RetrieverQueryEngine.from_args(
        stock.index.as_retriever(), llm=own, node_postprocessors=[LLMRerank(llm=own)]
    )
    engine = RetryQueryEngine(inner, RelevancyEvaluator(llm=own))
    fast = accelerate(engine, pool=pool, bind=[(own, "llm")])
    prompts: list[str] = []

    def judge(request: Any) -> str:
        prompts.append(request.prompt.flat())
        return "Doc: 1, Relevance: 9" if "A list of documents" in prompts[-1] else "YES"

    llm.answer = judge
    assert str(fast.query(ASKED)) == "YES"
    for part in ("A list of documents", "Context information is below", "evaluate if the response"):
        assert any(part in prompt for prompt in prompts), part
    assert inner._response_synthesizer._llm is own
    assert fast._evaluator._llm is engine._evaluator._llm is own  # type: ignore[attr-defined]
