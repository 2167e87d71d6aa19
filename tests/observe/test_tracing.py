"""Tests of `tracing=`: queries of a pool as OpenTelemetry spans, read from the SDK's in-memory exporter."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.schema import TextNode
from opentelemetry import trace as api
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from teola_plugin import EnginePool, RegistrationError, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.adapters.llamaindex import TeolaEmbedding, TeolaLLM
from teola_plugin.adapters.llamaindex import TeolaVectorStore as LlamaIndexStore
from teola_plugin.engines.fake import fake_engines

SCRIPT = """
import sys
sys.modules["opentelemetry"] = None
from teola_plugin import EnginePool, RegistrationError
from teola_plugin.engines.fake import fake_engines
EnginePool.local(fake_engines())
try:
    EnginePool.local(fake_engines(), tracing="opentelemetry")
except RegistrationError as error:
    assert "pip install '.[otel]'" in error.hint, error
else:
    raise SystemExit("no error")
"""


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> Iterator[TracerProvider]:
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(exporter))
    yield made
    made.shutdown()


def rag(pool: EnginePool) -> Runnable[Any, str]:
    """Return a chain whose search is prefetched, because it does not need the model's call before it."""
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="farm")
    store.add_texts(["Lambs eat grass.", "Oats are for horses."])
    llm = ChatTeola(pool=pool, max_tokens=8)
    hint = ChatPromptTemplate.from_template("A hint for {question}") | llm | StrOutputParser()
    answer = ChatPromptTemplate.from_template("Answer from the passages. {found} {hint} {question}")
    found = itemgetter("question") | store.as_retriever()
    steps = RunnablePassthrough.assign(hint=hint) | RunnablePassthrough.assign(found=found)
    return steps | answer | llm | StrOutputParser()


def ask(provider: Any, *, app: str = "farm") -> tuple[str, str]:
    """Return the original and the accelerated answer. The pool is closed, so that all spans are sent."""
    with EnginePool.local(fake_engines(), tracing=provider) as pool:
        chain = rag(pool)
        plain = chain.invoke({"question": "What do lambs eat?"})
        return plain, accelerate(chain, pool=pool, app=app).invoke({"question": "What do lambs eat?"})


def by_name(exporter: InMemorySpanExporter, app: str = "farm") -> dict[str, ReadableSpan]:
    """Return the query's spans by name, the query's own under the name of its app."""
    spans = exporter.get_finished_spans()
    root = next(s for s in spans if s.name == app)
    return {s.name: s for s in spans if s.context.trace_id == root.context.trace_id}


def test_query_span_is_the_parent_of_its_primitives(provider: TracerProvider, exporter: InMemorySpanExporter) -> None:
    plain, accelerated = ask(provider)
    assert plain == accelerated
    spans = by_name(exporter)
    root = spans.pop("farm")
    assert root.parent is None and root.attributes["gen_ai.operation.name"] == "invoke_workflow"
    assert root.attributes["gen_ai.workflow.name"] == "farm"
    assert {s.parent.span_id for s in spans.values()} == {root.context.span_id}
    kinds = {s.attributes["teola.primitive.kind"]: s for s in spans.values()}
    assert {"EMBEDDING", "SEARCHING", "DECODING"} <= set(kinds)
    assert all(root.start_time <= s.start_time <= s.end_time <= root.end_time for s in spans.values())
    searching, embedding = kinds["SEARCHING"], kinds["EMBEDDING"]
    assert [link.context.span_id for link in searching.links] == [embedding.context.span_id]


def test_attributes_follow_the_conventions_for_generative_ai(
    provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    ask(provider)
    kinds = {s.attributes.get("teola.primitive.kind"): dict(s.attributes) for s in by_name(exporter).values()}
    operations = {kind: found.get("gen_ai.operation.name") for kind, found in kinds.items()}
    assert operations["EMBEDDING"] == "embeddings" and operations["SEARCHING"] == "retrieval"
    assert operations["DECODING"] == "text_completion" and operations["CALL"] is None
    assert kinds["DECODING"]["gen_ai.usage.output_tokens"] == 8
    prefilling = kinds["PREFILLING"]
    assert prefilling["gen_ai.operation.name"] == "text_completion"
    assert prefilling["gen_ai.usage.input_tokens"] > prefilling["gen_ai.usage.cache_read.input_tokens"] >= 0
    assert kinds["DECODING"]["teola.engine"] == "llm"
    assert not any("lambs" in str(value).lower() for found in kinds.values() for value in found.values())


def engine(pool: EnginePool) -> Any:
    """Return a query engine of LlamaIndex."""
    storage = StorageContext.from_defaults(vector_store=LlamaIndexStore(pool=pool, collection="notes"))
    nodes = [TextNode(id_=f"n{i}", text=text) for i, text in enumerate(["Lambs eat grass.", "Oats are for horses."])]
    index = VectorStoreIndex(nodes, storage_context=storage, embed_model=TeolaEmbedding(pool=pool))
    fast: Any = accelerate(index.as_query_engine(llm=TeolaLLM(pool=pool, max_tokens=8)), pool=pool)
    return fast.with_request_context(app="farm")


QUESTION = {"question": "What do lambs eat?"}
ENTRIES: dict[str, tuple[Callable[[EnginePool], Any], Callable[[Any], Any], int]] = {
    "invoke": (rag, lambda fast: fast.invoke(QUESTION), 1),
    "ainvoke": (rag, lambda fast: asyncio.run(fast.ainvoke(QUESTION)), 1),
    "stream": (rag, lambda fast: list(fast.stream(QUESTION)), 1),
    "batch": (rag, lambda fast: fast.batch([QUESTION, {"question": "b"}]), 2),
    "abatch": (rag, lambda fast: asyncio.run(fast.abatch([QUESTION, {"question": "b"}])), 2),
    "query": (engine, lambda fast: fast.query("What do lambs eat?"), 1),
    "aquery": (engine, lambda fast: asyncio.run(fast.aquery("What do lambs eat?")), 1),
}
"""Entry -> what is accelerated, how it is called, and how many queries that makes."""


@pytest.mark.parametrize("entry", ENTRIES)
def test_span_around_a_call_is_its_parent(entry: str, provider: TracerProvider, exporter: InMemorySpanExporter) -> None:
    make, call, queries = ENTRIES[entry]
    with EnginePool.local(fake_engines(), tracing=provider) as pool:
        made = make(pool)
        fast = made if make is engine else accelerate(made, pool=pool, app="farm")
        with provider.get_tracer("app").start_as_current_span("request"):
            call(fast)
    spans = exporter.get_finished_spans()
    (around,) = (s.context.span_id for s in spans if s.name == "request")
    assert [s.parent.span_id for s in spans if s.name == "farm"] == [around] * queries


def test_tracing_opentelemetry_uses_the_global_provider(
    provider: TracerProvider, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_TRACER_PROVIDER", provider)
    ask("opentelemetry")
    assert "farm" in by_name(exporter)


def test_spans_name_their_models(provider: TracerProvider, exporter: InMemorySpanExporter) -> None:
    engines = fake_engines()
    for engine in engines:
        engine.versions = lambda name=engine.name: {"model": f"{name}-model"}  # type: ignore[method-assign]
    with EnginePool.local(engines, tracing=provider) as pool:
        accelerate(rag(pool), pool=pool, app="farm").invoke({"question": "a"})
    kinds = {s.attributes.get("teola.primitive.kind"): s.attributes for s in by_name(exporter).values()}
    assert kinds["DECODING"]["gen_ai.request.model"] == "llm-model"
    assert kinds["EMBEDDING"]["gen_ai.request.model"] == "embedder-model"
    assert "gen_ai.request.model" not in kinds["CALL"]


class Slow(SpanExporter):
    """Waits until it is told to go on."""

    def __init__(self) -> None:
        self.go, self.seen = threading.Event(), 0

    def export(self, spans: Any) -> SpanExportResult:
        assert self.go.wait(60)
        self.seen += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


def test_slow_exporter_does_not_block_queries() -> None:
    provider, slow = TracerProvider(), Slow()
    provider.add_span_processor(SimpleSpanProcessor(slow))
    with EnginePool.local(fake_engines(), tracing=provider) as pool:
        fast = accelerate(rag(pool), pool=pool, app="farm")
        for _ in range(3):
            fast.invoke({"question": "a"})
        assert slow.seen == 0
        slow.go.set()
    assert slow.seen > 3
    provider.shutdown()


def test_raising_provider_is_logged_and_does_not_fail_queries(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TracerProvider):
        def get_tracer(self, *args: Any, **kwargs: Any) -> Any:
            raise OSError("no way out")

    with caplog.at_level(logging.WARNING, "teola_plugin"):
        plain, accelerated = ask(Broken())
    assert plain == accelerated
    assert "could not be sent" in caplog.text and "no way out" in caplog.text


def test_unknown_tracing_name_raises_with_the_known_one() -> None:
    with pytest.raises(RegistrationError, match="opentelemetry"):
        EnginePool.local(fake_engines(), tracing="opentelemtry")


def test_missing_opentelemetry_names_the_install_command() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
