"""Tests of LangSmith, Langfuse and Phoenix: their clients send the same runs with `accelerate`, with our spans added.

The clients are the real ones. A server on this machine receives what they send.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langgraph.graph import START, StateGraph
from llama_index.core import Document, SummaryIndex
from llama_index.core.llms import CompletionResponse, CustomLLM, LLMMetadata

from teola_plugin import EnginePool, accelerate
from teola_plugin.observe import emit

OURS = "teola_plugin"
"""The name of our tracer."""
ASK = ChatPromptTemplate.from_template


class Collector:
    """A server that takes what is sent to it, and keeps the path and the body of each request."""

    def __init__(self) -> None:
        self.received: list[tuple[str, str, bytes]] = []
        keep = self.received.append

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def _take(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                is_compressed = self.headers.get("content-encoding") == "gzip"
                keep((self.command, self.path, gzip.decompress(body) if is_compressed else body))
                self.send_response(200)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            do_POST = do_PATCH = do_GET = _take

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def take_spans(self) -> list[dict[str, Any]]:
        """Return the OTLP spans since the last time: scope, name, ids and attributes."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        spans = []
        for _, path, body in self.received:
            if not path.endswith("/v1/traces"):
                continue
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        attributes = {one.key: str(one.value) for one in span.attributes}
                        ids = {"trace": span.trace_id, "id": span.span_id, "parent": span.parent_span_id}
                        spans.append({"scope": scope.scope.name, "name": span.name, "attributes": attributes, **ids})
        self.received.clear()
        return spans


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


class Answering(BaseChatModel):
    """A model that answers with its prompt, after a moment."""

    model: str = "m"

    @property
    def _llm_type(self) -> str:
        return "answering"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        time.sleep(0.02)
        usage: Any = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
        message = AIMessage(f"answer to {messages[0].content}", usage_metadata=usage, id="fixed")
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        await asyncio.sleep(0.02)
        return self._generate(messages)


def chain() -> Any:
    """Return a chain of two independent calls, of which the second is prefetched."""
    model = Answering()
    return RunnablePassthrough.assign(a=ASK("A of {x}") | model).assign(b=ASK("B of {x}") | model)


def graph() -> Any:
    """Return a graph whose node makes two calls, of which the second is prefetched."""
    model = Answering()

    def ask(state: dict[str, Any]) -> dict[str, Any]:
        return {"answers": [model.invoke(f"{letter} of oats").content for letter in "AB"]}

    return StateGraph(dict).add_node("ask", ask).add_edge(START, "ask").compile()


APPS = {"chain": chain, "graph": graph}
WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "invoke": lambda app, config: app.invoke({"x": "oats"}, config),
    "ainvoke": lambda app, config: asyncio.run(app.ainvoke({"x": "oats"}, config)),
}
_INPUTS_AND_OUTPUTS = ("input", "output", "llm.", "langfuse.observation", "metadata")
_OF_ONE_RUN = ("completion_start_time", "session", "run_id", "langgraph_checkpoint_ns", "checkpoint_ns", "thread")
"""Parts of attributes' names, or of their texts, that differ from run to run."""


def shapes(spans: list[dict[str, Any]]) -> Counter[Any]:
    """Return the spans of the app without ids and times: each with the names around it, its inputs and outputs."""
    by_id = {span["id"]: span for span in spans}

    def path(span: dict[str, Any]) -> tuple[str, ...]:
        outer = by_id.get(span["parent"])
        return (*(path(outer) if outer else ()), span["name"])

    def content(span: dict[str, Any]) -> tuple[Any, ...]:
        compared = (
            (key, value)
            for key, value in span["attributes"].items()
            if key.startswith(_INPUTS_AND_OUTPUTS) and not any(word in key or word in value for word in _OF_ONE_RUN)
        )
        return tuple(sorted(compared))

    return Counter((path(span), content(span)) for span in spans if span["scope"] != OURS)


def assert_ours_are_in_the_trace(spans: list[dict[str, Any]], outer: str) -> None:
    """Assert that our spans have the app's trace, below the span of the given name, and name both calls."""
    ours = [span for span in spans if span["scope"] == OURS]
    (root,) = [span for span in ours if span["name"] == "notes"]
    (around,) = [span for span in spans if span["name"] == outer]
    assert root["parent"] == around["id"]
    assert {span["trace"] for span in ours} == {around["trace"]}
    assert sum("LLM" in span["attributes"].get("openinference.span.kind", "") for span in ours) == 2


# ------------------------------------------------------------ Phoenix


@pytest.fixture
def phoenix(collector: Collector) -> Iterator[Any]:
    """Return Phoenix's tracer provider, which sends to the collector."""
    otel = pytest.importorskip("phoenix.otel", reason="needs arize-phoenix-otel")
    provider = otel.register(
        endpoint=f"{collector.url}/v1/traces",
        protocol="http/protobuf",
        set_global_tracer_provider=False,
        verbose=False,
    )
    yield provider
    provider.shutdown()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", APPS)
def test_phoenix_gets_original_spans_and_the_plugins(name: str, way: str, collector: Collector, phoenix: Any) -> None:
    instrumentors = pytest.importorskip("openinference.instrumentation.langchain", reason="needs its package")
    instrumentor = instrumentors.LangChainInstrumentor()
    instrumentor.instrument(tracer_provider=phoenix, skip_dep_check=True)
    tracer, app = phoenix.get_tracer("app"), APPS[name]()
    try:
        with tracer.start_as_current_span("question"):
            expected_answer = WAYS[way](app, {})
        expected = collector.take_spans()

        with EnginePool.local(tracing=phoenix) as pool:
            fast = accelerate(app, pool=pool, app="notes")
            with tracer.start_as_current_span("question"):
                answer = WAYS[way](fast, {})
        spans = collector.take_spans()
    finally:
        instrumentor.uninstrument()

    assert answer == expected_answer
    assert fast.report().prefetched
    assert shapes(expected)
    assert shapes(spans) == shapes(expected)
    assert_ours_are_in_the_trace(spans, "question")


class Echo(CustomLLM):
    """An LLM that answers with its prompt, after a moment."""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(model_name="echo")

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        time.sleep(0.02)
        return CompletionResponse(text=f"answer to {prompt}")

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_phoenix_gets_original_spans_of_llamaindex(collector: Collector, phoenix: Any) -> None:
    instrumentors = pytest.importorskip("openinference.instrumentation.llama_index", reason="needs its package")
    instrumentor = instrumentors.LlamaIndexInstrumentor()
    index = SummaryIndex.from_documents([Document(text=f"text {number}", id_=str(number)) for number in range(3)])
    engine = index.as_query_engine(llm=Echo(), response_mode="accumulate")
    fast, tracer = accelerate(engine, app="notes", concurrent=[Echo]), phoenix.get_tracer("app")
    instrumentor.instrument(tracer_provider=phoenix, skip_dep_check=True)
    try:
        expected_answer = str(engine.query("oats"))
        expected = collector.take_spans()
        with tracer.start_as_current_span("question"):
            answer = str(fast.query("oats"))
            trace = fast.last_trace()
            assert trace is not None
            emit(trace, phoenix)
        spans = [span for span in collector.take_spans() if span["name"] != "question"]
    finally:
        instrumentor.uninstrument()

    assert answer == expected_answer
    assert fast.report().prefetched
    assert shapes(expected)
    assert shapes(spans) == shapes(expected)
    assert len({span["trace"] for span in spans}) == 1
    assert {"notes"} < {span["name"] for span in spans if span["scope"] == OURS}


def test_single_trace_is_sent_below_the_current_span(collector: Collector, phoenix: Any) -> None:
    fast = accelerate(chain(), app="notes")

    with phoenix.get_tracer("app").start_as_current_span("question"):
        fast.invoke({"x": "oats"})
        trace = fast.last_trace()
        assert trace is not None
        emit(trace, phoenix)

    assert_ours_are_in_the_trace(collector.take_spans(), "question")


# ------------------------------------------------------------ Langfuse


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", APPS)
def test_langfuse_gets_original_observations_and_the_plugins(name: str, way: str, collector: Collector) -> None:
    langfuse = pytest.importorskip("langfuse", reason="needs langfuse")
    from langfuse.langchain import CallbackHandler
    from opentelemetry.sdk.trace import TracerProvider

    provider, key = TracerProvider(), f"pk-{name}-{way}"
    client = langfuse.Langfuse(
        public_key=key,
        secret_key="sk",
        base_url=collector.url,
        tracer_provider=provider,
        should_export_span=lambda span: True,
    )
    app = APPS[name]()

    def ask(obj: Any) -> Any:
        with client.start_as_current_observation(name="question"):
            answer = WAYS[way](obj, {"callbacks": [CallbackHandler(public_key=key)]})
        client.flush()
        return answer

    try:
        expected_answer, expected = ask(app), collector.take_spans()
        with EnginePool.local(tracing=provider) as pool:
            fast = accelerate(app, pool=pool, app="notes")
            answer = ask(fast)
        client.flush()
        spans = collector.take_spans()
    finally:
        client.shutdown()

    assert answer == expected_answer
    assert shapes(expected)
    assert shapes(spans) == shapes(expected)
    assert_ours_are_in_the_trace(spans, "question")


# ------------------------------------------------------------ LangSmith


def runs_of(collector: Collector) -> dict[str, dict[str, Any]]:
    """Return the runs that LangSmith was sent since the last time, by id, as they were at their end."""
    runs: dict[str, dict[str, Any]] = {}
    for command, path, body in collector.received:
        if not path.startswith("/runs") or command == "GET":
            continue
        data = json.loads(body)
        run_id = data.get("id") or path.rsplit("/", 1)[-1]
        runs.setdefault(run_id, {}).update({key: value for key, value in data.items() if value is not None})
    collector.received.clear()
    return runs


def run_shapes(runs: dict[str, dict[str, Any]]) -> Counter[Any]:
    """Return the runs without ids and times: each with the names around it, its kind, inputs and outputs."""

    def path(run: dict[str, Any]) -> tuple[str, ...]:
        outer = runs.get(run.get("parent_run_id", ""))
        return (*(path(outer) if outer else ()), run["name"])

    return Counter(
        (path(run), run["run_type"], json.dumps([run.get("inputs"), run.get("outputs")], sort_keys=True))
        for run in runs.values()
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", APPS)
def test_langsmith_gets_original_runs_and_the_plugins(name: str, way: str, collector: Collector) -> None:
    from langchain_core.tracers import LangChainTracer
    from langsmith import Client
    from langsmith.run_helpers import trace as langsmith_trace
    from langsmith.run_helpers import tracing_context

    client = Client(api_url=collector.url, api_key="key", auto_batch_tracing=False, info={})
    app = APPS[name]()
    fast = accelerate(app, app="notes")

    def ask(obj: Any) -> Any:
        tracer = LangChainTracer(client=client, project_name="p")
        answer = WAYS[way](obj, {"callbacks": [tracer]})
        tracer.wait_for_futures()
        return answer

    expected_answer, expected = ask(app), runs_of(collector)
    answer, runs = ask(fast), runs_of(collector)

    assert answer == expected_answer
    assert run_shapes(expected)
    assert run_shapes(runs) == run_shapes(expected)

    with tracing_context(enabled=True, client=client), langsmith_trace("question", client=client) as run:
        WAYS[way](fast, {})
        query = fast.last_trace()
        assert query is not None
        at = lambda seconds: datetime.fromtimestamp(query.wall + seconds - query.started, UTC)  # noqa: E731
        for span in query.spans:
            child = run.create_child(span.primitive, run_type="chain", start_time=at(span.begin))
            child.end(outputs={"outcome": span.outcome}, end_time=at(query.ended if span.done is None else span.done))
            child.post()
    client.flush()
    sent = runs_of(collector)
    (root,) = [run_id for run_id, one in sent.items() if one["name"] == "question"]
    ours = [one for one in sent.values() if one["name"] in {span.primitive for span in query.spans}]
    assert len(ours) == len(query.spans) >= 2
    assert {one["parent_run_id"] for one in ours} == {root}
    assert {one["trace_id"] for one in sent.values()} == {root}


# ------------------------------------------------------------ the recipes of the documents

RECIPES = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
from observe.test_tracing_products import Answering, ASK
from langchain_core.runnables import RunnablePassthrough
from support.documents import code
from pathlib import Path
model = Answering()
my_chain = RunnablePassthrough.assign(a=ASK("A of {question}") | model).assign(b=ASK("B of {question}") | model)
blocks = [block for block in code(Path(sys.argv[1], "docs", "tracing.md")) if "def ask_with_" in block]
assert len(blocks) == 3
for block in blocks:
    exec(block)
print(globals()[f"ask_with_{sys.argv[2]}"]("oats")["b"].content)
"""


@pytest.mark.parametrize("product", ["phoenix", "langfuse", "langsmith"])
def test_recipe_of_the_documents_sends_both(product: str, collector: Collector) -> None:
    pytest.importorskip({"phoenix": "phoenix.otel"}.get(product, product), reason="needs its package")
    settings = {
        "PHOENIX_COLLECTOR_ENDPOINT": collector.url,
        "LANGFUSE_PUBLIC_KEY": "pk",
        "LANGFUSE_SECRET_KEY": "sk",
        "LANGFUSE_BASE_URL": collector.url,
        **({"LANGSMITH_TRACING": "true"} if product == "langsmith" else {}),
        "LANGSMITH_API_KEY": "key",
        "LANGSMITH_ENDPOINT": collector.url,
    }
    root = Path(__file__).parents[2]

    ran = subprocess.run(
        [sys.executable, "-c", RECIPES, str(root), product],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "answer to B of oats"
    if product == "langsmith":
        sent = b"".join(body for _, path, body in collector.received if path.startswith("/runs"))
        assert b'"question"' in sent
        assert b"Answering" in sent
        assert b'"outcome"' in sent
        return
    spans = collector.take_spans()
    (around,) = [span for span in spans if span["name"] == "question"]
    (query,) = [span for span in spans if span["scope"] == OURS and span["name"] == "search"]
    assert query["parent"] == around["id"]
    assert sum(span["name"] == "Answering" for span in spans) == 2
    assert len({span["trace"] for span in spans}) == 1
