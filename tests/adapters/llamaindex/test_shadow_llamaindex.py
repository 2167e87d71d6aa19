"""Tests of `accelerate(engine, shadow=)`, which runs the original again in the background and compares the results."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
from differential.llamaindex.recording import Recorder, recorded
from llama_index.core.callbacks import CallbackManager
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from support.llamaindex_engines import ENGINES, Library, response_parts

from teola_plugin import accelerate
from teola_plugin.adapters.shadow import ShadowReport
from teola_plugin.errors import RegistrationError

pytestmark = pytest.mark.usefixtures("loop_of_the_thread", "scripted", "immediate_client_code")
ASKED = "what is there"


def counted(fast: Any, expected: int = 1) -> ShadowReport:
    for _ in range(1000):
        report: ShadowReport = fast.shadow
        if report.compared + report.failed + report.skipped >= expected:
            break
        time.sleep(0.01)
    return report


def ask(fast: Any, way: str, given: Any = ASKED, expected: int = 1) -> tuple[Any, ShadowReport]:
    async def in_a_loop() -> Any:
        value = await getattr(fast, way)(given)
        await asyncio.to_thread(counted, fast, expected)
        return value

    value = asyncio.run(in_a_loop()) if way.startswith("a") else getattr(fast, way)(given)
    return value, counted(fast, expected)


@pytest.mark.parametrize("way", ["query", "aquery"])
@pytest.mark.parametrize("name", ENGINES)
def test_shadow_finds_no_difference_for_any_engine(stock: Library, name: str, way: str) -> None:
    fast = accelerate(ENGINES[name](stock), shadow=1.0)
    value, report = ask(fast, way)
    assert report == ShadowReport(compared=1)
    assert response_parts(value) == response_parts(ENGINES[name](stock).query(ASKED))


@pytest.mark.parametrize("way", ["retrieve", "aretrieve"])
def test_shadow_compares_the_nodes_of_retrievers(stock: Library, way: str) -> None:
    query = QueryBundle(ASKED)
    found, report = ask(accelerate(stock.fusion(), shadow=1.0), way, query)
    assert found and report == ShadowReport(compared=1)


def test_shadow_compares_synthesizers_and_steps_of_engines(stock: Library) -> None:
    nodes = [NodeWithScore(node=TextNode(text="oats"), score=0.5)]
    synthesizer = accelerate(get_response_synthesizer(llm=stock.llm), shadow=1.0)
    synthesizer.synthesize(ASKED, nodes)
    synthesizer.get_response(ASKED, ["oats"])
    assert counted(synthesizer, 2) == ShadowReport(compared=2)
    engine = accelerate(stock.rag(), shadow=1.0)
    engine.synthesize(QueryBundle(ASKED), engine.retrieve(QueryBundle(ASKED)))
    assert counted(engine, 2) == ShadowReport(compared=2)


# ------------------------------------------------------------ what is said and counted


class Own(CustomQueryEngine):
    """Answers with what `answer` gives, call after call."""

    answer: Callable[[str], Any]

    def custom_query(self, query_str: str) -> Any:
        return self.answer(query_str)


def test_shadow_logs_and_counts_a_difference(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter(["oats", "barley"])
    _, report = ask(accelerate(Own(answer=lambda _: next(answers)), shadow=1.0), "query")
    assert (report.compared, report.different) == (1, 1)
    assert "oats" in report.last_difference and "barley" in report.last_difference
    assert "shadow: the accelerated answer" in caplog.text


def test_failure_of_the_shadow_run_is_counted_and_not_raised() -> None:
    answers = iter(["oats"])
    value, report = ask(accelerate(Own(answer=lambda _: next(answers)), shadow=1.0), "query")
    assert str(value) == "oats" and report == ShadowReport(failed=1)


@pytest.mark.parametrize("way", ["query", "aquery"])
def test_shadow_counts_equal_failures_as_equal(way: str) -> None:
    def fail(_: str) -> str:
        raise ValueError("mine")

    fast = accelerate(Own(answer=fail), shadow=1.0)

    async def in_a_loop() -> None:
        with pytest.raises(ValueError, match="mine"):
            await fast.aquery(ASKED)
        await asyncio.to_thread(counted, fast)

    if way == "aquery":
        asyncio.run(in_a_loop())
    else:
        with pytest.raises(ValueError, match="mine"):
            fast.query(ASKED)
    assert counted(fast) == ShadowReport(compared=1)


def test_shadow_skips_streamed_answers(stock: Library) -> None:
    fast = accelerate(stock.rag(streaming=True), shadow=1.0)
    response = fast.query(ASKED)
    assert "".join(response.response_gen) and counted(fast) == ShadowReport(skipped=1)


def test_shadow_compares_its_share_and_copies_start_empty() -> None:
    fast = accelerate(Own(answer=str), shadow=0.5)
    for _ in range(20):
        fast.query(ASKED)
    time.sleep(0.1)
    report = fast.shadow
    assert 3 <= report.compared + report.skipped <= 17
    assert copy.copy(fast).shadow == ShadowReport() == accelerate(Own(answer=str)).shadow
    assert fast.with_request_context(tenant="acme").shadow == report


# ------------------------------------------------------------ unseen


@pytest.mark.parametrize("way", ["query", "aquery"])
@pytest.mark.parametrize("name", ["fusion, compact", "sub-questions", "cited", "chosen by the model"])
def test_shadow_run_sends_no_callbacks(stock: Library, name: str, way: str) -> None:
    """The shadow run calls neither callback managers nor the instrumentation."""
    recordings = []
    for share in (0.0, 1.0):
        recorder = Recorder()
        engine = ENGINES[name](stock)
        engine.callback_manager = CallbackManager([recorder])
        with recorded(recorder):
            ask(accelerate(engine, shadow=share), way, expected=int(share))
        recordings.append((recorder.callbacks, recorder.events, recorder.spans))
    assert recordings[0] == recordings[1] and recordings[0][1]


def test_shadow_ignores_later_changes_by_the_caller() -> None:
    query, nodes = QueryBundle(ASKED), [NodeWithScore(node=TextNode(text="oats"), score=0.5)]

    class Late(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> Any:
            time.sleep(0.05)
            return [NodeWithScore(node=TextNode(text=query_bundle.query_str), score=nodes[0].score)]

    fast = accelerate(Late(), shadow=1.0)
    found = fast.retrieve(query)
    found[0].score, query.query_str = 0.0, "another"
    assert counted(fast) == ShadowReport(compared=1)


# ------------------------------------------------------------ refused


def test_shadow_raises_for_objects_with_side_effects(stock: Library) -> None:
    chat = ContextChatEngine.from_defaults(
        retriever=stock.index.as_retriever(), llm=stock.llm, memory=ChatMemoryBuffer.from_defaults(llm=stock.llm)
    )
    for one, why in (
        (chat, "keeps its history"),
        (IngestionPipeline(transformations=[]), "writes into its stores"),
        (stock.index, "writes into its stores"),
    ):
        with pytest.raises(RegistrationError, match=why):
            accelerate(one, shadow=0.5)
    with pytest.raises(RegistrationError, match="no share of calls"):
        accelerate(stock.rag(), shadow=2.0)
    assert isinstance(accelerate(stock.rag(), shadow=0.5), RetrieverQueryEngine)
