"""Tests of accelerated LlamaIndex engines: the same answers, and every request made once and early."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.evaluation import RelevancyEvaluator
from llama_index.core.indices.query.query_transform.base import HyDEQueryTransform
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.query_engine import RetrieverQueryEngine, RouterQueryEngine, TransformQueryEngine
from llama_index.core.query_engine.retry_source_query_engine import RetrySourceQueryEngine
from llama_index.core.response_synthesizers import TreeSummarize, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.tools import QueryEngineTool
from support.llamaindex_engines import ENGINES, Library, library, reply, response_parts, settings
from support.scripted_llm import ScriptedLLM

from teola_plugin import accelerate
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore
from teola_plugin.engines.fake.base import Faults
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate
from teola_plugin.shims.llamaindex.records import is_older_than

pytestmark = pytest.mark.usefixtures("loop_of_the_thread", "scripted", "immediate_client_code")
ASKED = "what is there"


def by_hand(trace: QueryTrace | None) -> list[str]:
    """Return the calls that the original had to make itself."""
    assert trace is not None
    return [span.primitive for span in trace.spans if ".call#" in span.primitive]


def wasted(trace: QueryTrace | None) -> list[str]:
    """Return the requests whose results nobody took."""
    assert trace is not None
    return [s.primitive for s in trace.spans if s.outcome == "wasted"]


def prompts_of(llm: ScriptedLLM) -> Counter[str]:
    """Return the prompts that reached the model."""
    return Counter(one.prompt.flat() for one in llm.requests)


@pytest.mark.parametrize("name", list(ENGINES))
@pytest.mark.parametrize("way", ["query", "aquery"])
def test_all_model_calls_of_a_query_engine_are_prefetched(
    stock: Library, llm: ScriptedLLM, name: str, way: str
) -> None:
    plain, fast = ENGINES[name](stock), accelerate(ENGINES[name](stock))
    answers, prompts = [], list[Counter[str]]()
    for engine in (plain, fast):
        llm.clear()
        answers.append(engine.query(ASKED) if way == "query" else asyncio.run(engine.aquery(ASKED)))
        prompts.append(prompts_of(llm))
    assert response_parts(answers[1]) == response_parts(answers[0])
    assert prompts[1] == prompts[0]
    trace = fast.last_trace()
    assert by_hand(trace) == [] and wasted(trace) == []
    assert type(answers[1]) is type(answers[0]) and isinstance(fast, type(plain))


class OwnRetriever(BaseRetriever):
    """Somebody's own: the graph does not know what it finds."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return list(self._inner.retrieve(query_bundle.query_str))


class OwnSynthesizer(TreeSummarize):
    def get_response(self, *args: Any, **kwargs: Any) -> Any:
        return super().get_response(*args, **kwargs)


def fused_with_own(stock: Library) -> RetrieverQueryEngine:
    fusion = stock.fusion()
    fusion._retrievers.append(OwnRetriever(stock.index.as_retriever(similarity_top_k=2)))
    return RetrieverQueryEngine.from_args(fusion, llm=stock.llm)


IN_PART: dict[str, Callable[[Library], Any]] = {
    "fusion": fused_with_own,
    "transform": lambda x: TransformQueryEngine(fused_with_own(x), HyDEQueryTransform(x.llm)),
    "rerank": lambda x: RetrieverQueryEngine(
        x.fusion(), OwnSynthesizer(llm=x.llm), node_postprocessors=[LLMRerank(llm=x.llm, choice_batch_size=2)]
    ),
    "router": lambda x: RouterQueryEngine(
        LLMSingleSelector.from_defaults(x.llm),
        [
            QueryEngineTool.from_defaults(one, name=name, description=name)
            for name, one in (("farm", x.fused()), ("port", fused_with_own(x)))
        ],
        llm=x.llm,
    ),
}


@pytest.mark.parametrize("name", list(IN_PART))
def test_partly_known_engine_sends_each_prompt_once(stock: Library, llm: ScriptedLLM, name: str) -> None:
    """A part that the graph knows something of is not planned by itself as well: an LLM would be asked twice."""
    engine = IN_PART[name](stock)
    answers, prompts = [], list[Counter[str]]()
    for one in (engine, fast := accelerate(engine)):
        llm.clear()
        answers.append(response_parts(one.query(ASKED)))
        prompts.append(prompts_of(llm))
    assert answers[0] == answers[1] and prompts[0] == prompts[1] and wasted(fast.last_trace()) == []


@pytest.mark.parametrize("retries", [0, 1, 2])
@pytest.mark.parametrize("strict", [False, True])
def test_retry_source_engine_judges_sources_concurrently(
    stock: Library, llm: ScriptedLLM, retries: int, strict: bool
) -> None:
    """And the next answer, from all of them, does not wait for that."""

    def make() -> RetrySourceQueryEngine:
        judge = RelevancyEvaluator(llm=stock.llm, raise_error=strict)
        return RetrySourceQueryEngine(stock.rag(k=2), judge, llm=stock.llm, max_retries=retries)

    llm.answer = lambda request: "NO" if "YES" in request.prompt.flat() else reply(request)
    answers, prompts = [], list[Counter[str]]()
    for engine in (make(), fast := accelerate(make())):
        llm.requests.clear()
        if strict and retries:
            with pytest.raises(ValueError, match="response is invalid"):
                engine.query(ASKED)
        else:
            answers.append(response_parts(engine.query(ASKED)))
        prompts.append(prompts_of(llm))
    trace = fast.last_trace()
    assert answers[:1] == answers[1:] and prompts[0] == prompts[1] and wasted(trace) == []
    if retries and not strict:
        opinions = [span for span in trace.spans if "opinion" in span.primitive and span.kind == "PREFILLING"]
        assert len(opinions) == 2 * retries and opinions[1].queued <= (opinions[0].done or 0.0)
        assert by_hand(trace) == []


@pytest.mark.parametrize("mode", ["reciprocal_rerank", "relative_score", "dist_based_score", "simple"])
def test_fusion_in_every_mode_returns_the_originals_nodes(stock: Library, mode: str) -> None:
    plain, fast = stock.fusion(mode), accelerate(stock.fusion(mode, use_async=True))
    found = [[(n.node_id, n.score) for n in retriever.retrieve(ASKED)] for retriever in (plain, fast)]
    assert found[0] == found[1] == [(n.node_id, n.score) for n in asyncio.run(fast.aretrieve(ASKED))]
    assert by_hand(fast.last_trace()) == []


def test_fusion_handles_equal_or_too_many_generated_queries(stock: Library, llm: ScriptedLLM) -> None:
    for text in ("one\none\ntwo", f"{ASKED}\n{ASKED}", "```\none\n\n  two  \nthree\n```", "one", ""):
        llm.answer = lambda _, text=text: text  # type: ignore[misc]
        plain, fast = stock.fusion("simple"), accelerate(stock.fusion("simple"))
        found = [[(n.node_id, n.score) for n in one.retrieve(ASKED)] for one in (plain, fast)]
        assert found[0] == found[1], text


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "simple_summarize", "generation"])
def test_query_lives_until_its_streamed_answer_is_read(stock: Library, mode: str) -> None:
    plain, fast = stock.fused(mode, streaming=True), accelerate(stock.fused(mode, streaming=True))
    whole = "".join(plain.query(ASKED).response_gen)
    answer = fast.query(ASKED)
    assert inspect.isgenerator(answer.response_gen) and next(answer.response_gen)
    assert not fast.__teola_session__.last.trace.done()
    answer = fast.query(ASKED)
    assert "".join(answer.response_gen) == whole
    assert by_hand(fast.last_trace()) == []

    async def streamed() -> str:
        answer: Any = await fast.aquery(ASKED)
        assert inspect.isasyncgen(answer.response_gen)
        return "".join([piece async for piece in answer.response_gen])

    assert asyncio.run(streamed()) == whole
    assert by_hand(fast.last_trace()) == []


def test_dropped_streamed_answer_ends_its_query(stock: Library) -> None:
    fast = accelerate(stock.fused(streaming=True))
    answer = fast.query(ASKED)
    del answer
    assert fast.last_trace() is not None


def test_retrieve_and_synthesize_prefetch_when_called_directly(stock: Library) -> None:
    plain, fast = stock.fused("accumulate"), accelerate(stock.fused("accumulate"))
    nodes = [engine.retrieve(QueryBundle(ASKED)) for engine in (plain, fast)]
    assert [(n.node_id, n.score) for n in nodes[0]] == [(n.node_id, n.score) for n in nodes[1]]
    assert by_hand(fast.last_trace()) == []
    assert response_parts(plain.synthesize(ASKED, nodes[0])) == response_parts(fast.synthesize(ASKED, nodes[1]))
    assert by_hand(fast.last_trace()) == []
    synthesizer = accelerate(plain._response_synthesizer)
    assert response_parts(synthesizer.synthesize(ASKED, nodes[0])) == response_parts(plain.synthesize(ASKED, nodes[0]))
    assert by_hand(synthesizer.last_trace()) == []


@pytest.mark.parametrize("mode", ["tree_summarize", "accumulate", "compact_accumulate"])
def test_get_response_prefetches_calls_for_its_chunks(stock: Library, mode: Any) -> None:
    plain = get_response_synthesizer(llm=stock.llm, response_mode=mode)
    fast = accelerate(plain)
    chunks = [f"{word} " * 180 for word in ("oat", "boat", "mill", "rope")]
    whole = plain.get_response(ASKED, chunks)
    assert fast.get_response(query_str=ASKED, text_chunks=chunks) == whole
    assert by_hand(fast.last_trace()) == []
    assert asyncio.run(fast.aget_response(ASKED, chunks)) == asyncio.run(plain.aget_response(ASKED, chunks))
    assert by_hand(fast.last_trace()) == []


def test_streamed_get_response_returns_a_generator(stock: Library) -> None:
    plain = get_response_synthesizer(llm=stock.llm, response_mode="tree_summarize", streaming=True)  # type: ignore[arg-type]
    fast = accelerate(plain)
    chunks = [f"{word} " * 400 for word in ("oat", "boat", "mill", "rope")]
    made = fast.get_response(ASKED, chunks)
    assert inspect.isgenerator(made) and "".join(made) == "".join(plain.get_response(ASKED, chunks))
    assert by_hand(fast.last_trace()) == []


def test_engine_without_nodes_sends_no_synthesis_request(stock: Library, llm: ScriptedLLM) -> None:
    from llama_index.core.postprocessor import SimilarityPostprocessor

    for mode in ("tree_summarize", "accumulate", "refine", "simple_summarize"):
        engine = accelerate(stock.fused(mode, node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=2.0)]))
        llm.requests.clear()
        assert str(engine.query(ASKED)) == "Empty Response"
        assert len(llm.requests) == 1  # for the queries


def test_failing_model_raises_the_originals_error_class(stock: Library, llm: ScriptedLLM) -> None:
    def broken(_: Any) -> str:
        raise RuntimeError("out of order")

    llm.answer = broken
    for name in ("fusion, refine", "tree", "sub-questions", "router", "hyde"):
        errors = []
        for engine in (ENGINES[name](stock), accelerate(ENGINES[name](stock))):
            with pytest.raises(Exception) as caught:
                engine.query(ASKED)
            errors.append((type(caught.value), str(caught.value).split(" of request")[0]))
        assert errors[0][0] is errors[1][0]


@pytest.mark.skipif(is_older_than("0.14.16"), reason="LlamaIndex has left out failures of every kind since 0.14.16")
def test_failing_sub_question_is_left_out_of_the_answer() -> None:
    def strikes(request: Any) -> bool:
        return isinstance(request.payload, Generate) and "Query: what sails" in request.payload.prompt.flat()

    model = FakeLLM(answer=lambda prompt, _: reply(Generate(prompt)), faults=Faults(fail_on=strikes, retryable=False))
    with EnginePool.local([model, FakeEmbedder(), FakeReranker(), FakeStore()]) as pool:
        stock = library(pool, "failing")
        with settings(stock.llm):
            make = ENGINES["sub-questions"]
            plain, fast = make(stock).query(ASKED), accelerate(make(stock)).query(ASKED)
    assert response_parts(plain) == response_parts(fast)
    assert sum(n.get_content().startswith("Sub question") for n in fast.source_nodes) == 2


def test_sub_questions_are_answered_while_later_ones_are_generated(stock: Library) -> None:
    fast = accelerate(ENGINES["sub-questions"](stock))
    fast.query(ASKED)
    trace = fast.last_trace()
    assert trace is not None
    spans = {span.primitive: span for span in trace.spans}
    first = next(span for name, span in spans.items() if name.startswith("answers[0]/") and span.kind == "EMBEDDING")
    assert first.queued <= (spans["questions.parsed"].queued or 0.0)
    assert {name.partition("/")[0] for name in spans if "/" in name} == {"answers[0]", "answers[1]", "answers[2]"}
