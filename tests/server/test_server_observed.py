"""Tests of what operators see of a server, such as metrics, spans and log lines, and of what must stay hidden."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.service import RunningServer, chat_during_shutdown, key, running_server, slow_llm, until

from teola_plugin.engines import profiles
from teola_plugin.engines.fake import FakeLLM, fake_engines
from teola_plugin.errors import ConfigError
from teola_plugin.graph import Curve, PrimitiveKind
from teola_plugin.observe.spans import QueryTrace, Span
from teola_plugin.pool import EnginePool
from teola_plugin.server.logs import JsonLines, Lines, logging_to_stderr
from teola_plugin.server.settings import ServerSettings, ServiceConfig, TracingSettings
from teola_plugin.server.traces import RecentTraces
from teola_plugin.server.tracing import provider_of

SECRET = "zzyzx-the-prompt"
CHAT = {"model": "llm", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
ONE = key("one", operator=True)


def figures(http: httpx.Client) -> dict[str, float]:
    lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


# ------------------------------------------------------------ figures


def test_metrics_are_labelled_by_app() -> None:
    with running_server() as server, server.client() as http:
        for _ in range(3):
            http.post("/v1/chat/completions", json=CHAT, headers={"X-Teola-App": "farm"})
        until(lambda: figures(http).get('teola_queries_ended_total{app="farm",outcome="done"}') == 3)
        metrics = figures(http)
    assert metrics['teola_queries_accepted_total{app="farm"}'] == 3
    assert metrics['teola_query_seconds_count{app="farm"}'] == 3
    assert metrics['teola_queued_seconds_count{app="farm",engine="llm"}'] == 3
    assert metrics['teola_primitive_seconds_count{app="farm",engine="llm"}'] == 3
    assert metrics['teola_primitive_requests_bucket{app="farm",engine="llm",le="1.0"}'] == 3
    assert metrics['teola_tokens_total{app="farm",what="computed"}'] > 0
    assert metrics['teola_engine_kv_used{engine="llm"}'] >= 0
    assert metrics["process_resident_memory_bytes"] > 1e6


def test_cache_tokens_are_reported_by_app() -> None:
    with running_server(EnginePool.local([slow_llm(0.01)])) as server, server.client() as http:
        body = {"model": "llm", "input": "hello farm", "parameters": {"max_tokens": 200}}
        ids = [http.post("/v1/queries", json=body, headers={"X-Teola-App": app}).json()["id"] for app in "aab"]
        name = 'teola_engine_kv_tokens{{app="{}",engine="llm"}}'.format
        until(lambda: figures(http).get(name("b"), 0) > 10)
        metrics = figures(http)
        assert metrics[name("a")] > 1.5 * metrics[name("b")] > 0
        for id in ids:
            http.delete(f"/v1/queries/{id}")
        until(lambda: not any(key.startswith("teola_engine_kv_tokens{") for key in figures(http)))


def test_engine_metrics_sum_over_replicas() -> None:
    with running_server(EnginePool.local({"llm": [slow_llm(0.01), slow_llm(0.01)]})) as server, server.client() as http:
        body = {"model": "llm", "input": "hello", "parameters": {"max_tokens": 200}}
        ids = [http.post("/v1/queries", json=body).json()["id"] for _ in range(4)]
        engines = server.pool.replicas("llm")
        until(lambda: all(one.load().kv_tokens.get("llm", 0) > 40 for one in engines))
        used_tokens = sum(one.load().kv_tokens["llm"] for one in engines)
        metrics = figures(http)
        assert metrics['teola_engine_running{engine="llm"}'] == 4
        assert metrics['teola_engine_kv_tokens{app="llm",engine="llm"}'] >= used_tokens
        assert http.get("/pages/pool").json()["engines"][0]["requests"] == 4
        for id in ids:
            http.delete(f"/v1/queries/{id}")


def test_event_loop_lag_is_reported() -> None:
    with running_server() as server, server.client() as http:
        assert server.loop is not None
        server.loop.call_soon_threadsafe(time.sleep, 0.3)
        until(
            lambda: (
                figures(http)['teola_loop_lag_seconds_bucket{le="+Inf"}']
                > figures(http).get('teola_loop_lag_seconds_bucket{le="0.1"}', 0.0)
            )
        )


def span(query: str, primitive: str, batch: int, size: int = 1, at: float = 0.0) -> Span:
    return Span(query, "app", primitive, "EMBEDDING", at, at, None, at + 1, "embedder", "0", batch, size=size)


def test_batch_sizes_are_counted_over_all_queries() -> None:
    with running_server() as server:
        sink = server.service.metrics.primitives
        sink.query_ended(QueryTrace("q1", "a", 0.0, 1.0, (span("q1", "x", 7, 3),)))
        sink.query_ended(QueryTrace("q2", "b", 0.0, 1.0, (span("q2", "y", 7, 2),)))
        sink.query_ended(QueryTrace("q3", "b", 20.0, 21.0, ()))
        with server.client() as http:
            metrics = figures(http)
    assert metrics['teola_batch_requests_sum{engine="embedder"}'] == 5
    assert metrics['teola_batch_requests_count{engine="embedder"}'] == 1


# ------------------------------------------------------------ kept traces


def test_batch_partners_stay_known_while_traces_live() -> None:
    traces = RecentTraces(max_traces=2)
    for number, batch in enumerate((1, 1, 1, 2)):
        traces.query_ended(QueryTrace(f"q{number}", "a", 0.0, 1.0, (span(f"q{number}", "x", batch),)))
    assert len(traces) == 2 and traces.get("q0") is None
    trace = traces.get("q2")
    assert trace is not None and traces.shared_batches(trace) == []
    traces.query_ended(QueryTrace("q4", "a", 0.0, 1.0, (span("q4", "x", 2),)))
    (shared,) = traces.shared_batches(QueryTrace("q4", "a", 0.0, 1.0, (span("q4", "x", 2),)))
    assert (shared.engine, shared.batch, shared.primitives, shared.other_queries) == ("embedder", 2, ("x",), ("q3",))
    traces.forget({"q3", "gone"})
    assert traces.get("q3") is None


def test_batch_partners_of_an_llm_are_concurrent_requests() -> None:
    traces = RecentTraces()
    for name, at in (("q0", 0.0), ("q1", 0.5), ("q2", 1.0), ("q3", 5.0)):  # each runs for a second
        traces.query_ended(QueryTrace(name, "a", at, at + 1, (span(name, "x", int(at), at=at),)))
    trace = traces.get("q1")
    assert trace is not None
    assert [one.other_queries for one in traces.shared_batches(trace, ["embedder"])] == [("q0", "q2")]
    assert [one.other_queries for one in traces.shared_batches(trace)] == [("q0",)]


def test_fewer_traces_are_kept_if_they_are_large() -> None:
    traces = RecentTraces(max_traces=100, max_spans=10)
    for number in range(5):
        spans = tuple(span(f"q{number}", f"x{i}", i) for i in range(6))
        traces.query_ended(QueryTrace(f"q{number}", "a", 0.0, 1.0, spans))
    assert len(traces) == 1


# ------------------------------------------------------------ OpenTelemetry


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(exporter: InMemorySpanExporter) -> Iterator[RunningServer]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with running_server(EnginePool.local(fake_engines(), tracing=provider), tracing_provider=provider) as server:
        yield server


def spans_of(exporter: InMemorySpanExporter, minimum: int) -> dict[str, ReadableSpan]:
    until(lambda: len(exporter.get_finished_spans()) >= minimum)
    return {one.name: one for one in exporter.get_finished_spans()}


def test_request_span_joins_the_trace_of_its_caller(traced: RunningServer, exporter: InMemorySpanExporter) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with traced.client() as http:
        http.get("/health")
        answer = http.post("/v1/chat/completions?key=hidden", json=CHAT, headers={"traceparent": parent})
    spans = spans_of(exporter, 3)
    request, query = spans["POST /v1/chat/completions"], spans["llm"]
    assert request.kind.name == "SERVER" and not [name for name in spans if "health" in name]
    assert request.context.trace_id == query.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert request.parent is not None and request.parent.span_id == 0xB7AD6B7169203331
    assert query.parent is not None and query.parent.span_id == request.context.span_id
    fields = dict(request.attributes or {})
    assert (fields["http.request.method"], fields["http.response.status_code"]) == ("POST", 200)
    assert fields["teola.query.id"] == answer.headers["x-teola-query"]
    assert fields["teola.request.id"] == answer.headers["x-request-id"]
    assert (query.attributes or {})["gen_ai.operation.name"] == "invoke_workflow"


def test_internal_error_marks_the_span_and_refusal_does_not(
    traced: RunningServer, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError(SECRET)

    with traced.client() as http:
        http.post("/v1/chat/completions", json={**CHAT, "model": "nowhere"})
        until(exporter.get_finished_spans)
        assert exporter.get_finished_spans()[0].status.status_code.name == "UNSET"
        monkeypatch.setattr(type(traced.service.models["llm"]), "answer", broken)
        http.post("/v1/chat/completions", json=CHAT)
    until(lambda: any(one.status.status_code.name == "ERROR" for one in exporter.get_finished_spans()))
    assert SECRET not in "".join(one.to_json() for one in exporter.get_finished_spans())


def test_spans_are_exported_to_a_collector() -> None:
    """A real one's protocol, over a real connection."""
    grpc = pytest.importorskip("grpc")
    wire = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    services = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")
    got: list[tuple[Any, dict[str, str]]] = []

    class Collector(services.TraceServiceServicer):  # type: ignore[misc,name-defined]
        def Export(self, request: Any, context: Any) -> Any:
            got.append((request, {one.key: one.value for one in context.invocation_metadata()}))
            return wire.ExportTraceServiceResponse()

    collector = grpc.server(ThreadPoolExecutor(1))
    services.add_TraceServiceServicer_to_server(Collector(), collector)
    port = collector.add_insecure_port("127.0.0.1:0")
    collector.start()
    try:
        settings = TracingSettings(endpoint=f"http://127.0.0.1:{port}", headers={"X-Key": "k"}, service="pool-1")
        provider = provider_of(settings)
        pool = EnginePool.local(fake_engines(), tracing=provider)
        with running_server(pool, tracing_provider=provider) as server, server.client() as http:
            http.post("/v1/chat/completions", json=CHAT)
        provider.shutdown()
    finally:
        collector.stop(None)
    resource = got[0][0].resource_spans[0]
    names = {one.name for request, _ in got for r in request.resource_spans for s in r.scope_spans for one in s.spans}
    assert {"POST /v1/chat/completions", "llm"} <= names
    assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "pool-1"
    assert got[0][1]["x-key"] == "k"


@pytest.mark.parametrize("setting", ["endpoint: 'localhost:4317'", "endpoint: 'http://me:pw@host'", "{}", "share: 2"])
def test_invalid_tracing_settings_raise_without_secrets(tmp_path: Any, setting: str) -> None:
    text = f"engines: {{llm: {{kind: fake}}}}\nserver: {{tracing: {{headers: {{k: 12345}}, {setting.strip('{}')}}}}}\n"
    (tmp_path / "pool.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        ServiceConfig.read(tmp_path / "pool.yaml")
    assert "server.tracing" in str(caught.value) and "12345" not in str(caught.value)


def test_missing_exporter_package_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from teola_plugin.errors import EngineUnavailable
    from teola_plugin.server import tracing

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(tracing, "import_module", missing)
    settings = TracingSettings(endpoint="http://127.0.0.1:4318", protocol="http/protobuf")
    with pytest.raises(EngineUnavailable, match="pip install opentelemetry-exporter-otlp-proto-http"):
        provider_of(settings)


# ------------------------------------------------------------ the log, and what is in nothing


@pytest.fixture
def lines() -> Iterator[tuple[logging.Handler, io.StringIO]]:
    """Return the lines that the server logs, parsed as JSON."""
    written = io.StringIO()
    handler, logger = logging.StreamHandler(written), logging.getLogger("teola_plugin")
    handler.setFormatter(JsonLines(details=False))
    before = logger.level
    logger.addHandler(handler)
    logging.getLogger("teola_plugin.server").setLevel(logging.INFO)
    yield handler, written
    logger.removeHandler(handler)
    logger.setLevel(before)
    logging.getLogger("teola_plugin.server").setLevel(logging.NOTSET)


def test_log_lines_are_json_with_ids(lines: tuple[logging.Handler, io.StringIO], monkeypatch: Any) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError(f"cannot read {SECRET}")

    with running_server(log="json") as server, server.client() as http:
        answer = http.post("/v1/chat/completions", json=CHAT, headers={"X-Request-ID": "mine"})
        monkeypatch.setattr(type(server.service.models["llm"]), "answer", broken)
        http.post("/v1/chat/completions", json=CHAT)
        until(lambda: lines[1].getvalue().count("\n") >= 3)
    first, fault, last = (json.loads(line) for line in lines[1].getvalue().splitlines())
    assert (first["request"], first["query"]) == ("mine", answer.headers["x-teola-query"])
    assert (first["status"], first["route"], first["level"], first["app"]) == (
        200,
        "/v1/chat/completions",
        "info",
        "llm",
    )
    assert fault["level"] == "error" and "ValueError" in fault["error"] and "test_server_observed.py" in fault["error"]
    assert last["status"] == 500
    assert SECRET not in lines[1].getvalue()


@pytest.mark.parametrize("details", [False, True])
def test_exception_messages_are_logged_only_with_details(details: bool) -> None:
    try:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise ValueError(SECRET) from error
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("teola_plugin", logging.ERROR, "", 0, "request %s failed", ("r1",), info)
    plain_line = logging.Formatter().format(record)  # which Python keeps
    line = Lines(details=details).format(record)
    assert SECRET in plain_line and logging.Formatter().format(record) == plain_line
    assert "r1" in line and "ValueError" in line
    assert (SECRET in line) is details


def test_secrets_never_appear_in_outputs(
    lines: tuple[logging.Handler, io.StringIO], exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys, prompts and answers are planted on all ways in; logs, spans, figures, pages and lists are searched."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    answer = "zzyzx-the-answer"
    llm = replace_answer(answer)
    with running_server(
        EnginePool.local([llm, *(one for one in fake_engines() if one.name != "llm")], tracing=provider),
        keys=[ONE.settings],
        log="json",
        tracing_provider=provider,
    ) as server:
        output = asked_everywhere(server)
    spans = "".join(one.to_json() for one in exporter.get_finished_spans())
    assert len(exporter.get_finished_spans()) > 5 and lines[1].getvalue().count("\n") > 5
    for where, text in {**output, "the log": lines[1].getvalue(), "spans": spans}.items():
        for secret in (SECRET, answer, ONE.secret, str(ONE.settings["hash"])):
            assert secret not in text, f"{where} tells {secret}"


def replace_answer(answer: str) -> FakeLLM:
    curves = {kind: Curve.linear(0.0, 0.0) for kind in (PrimitiveKind.PREFILLING, PrimitiveKind.DECODING)}
    return FakeLLM("llm", replace(profiles.noop()["llm"], curves=curves), answer=lambda *_: answer)


def asked_everywhere(server: RunningServer) -> dict[str, str]:
    """Send requests of every kind, right and wrong. Return what pages, lists and metrics show then."""
    with server.client(ONE.secret) as http:
        id = http.post("/v1/chat/completions", json=CHAT).headers["x-teola-query"]
        http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        http.post("/v1/chat/completions", json={**CHAT, "messages": [{"role": SECRET, "content": SECRET}]})
        http.post("/v1/completions", json={"model": "llm", "prompt": SECRET})
        http.post("/v1/embeddings", json={"model": "embedder", "input": [SECRET]})
        http.post("/v1/responses", json={"model": "llm", "input": SECRET})
        http.post("/v1/rerank", json={"model": "reranker", "query": SECRET, "documents": [SECRET]})
        submitted = http.post("/v1/queries", json={"model": "llm", "input": SECRET}).json()["id"]
        http.get(f"/v1/queries/{submitted}?wait=5")
        http.get("/v1/models", headers={"Authorization": f"Bearer {ONE.secret}x"})
        http.get(f"/v1/models?key={ONE.secret}")
        until(lambda: http.post(f"/pages/tickets/{id}").status_code == 200)
        return {
            "the page": http.get(http.post(f"/pages/tickets/{id}").json()["url"]).text,
            "the list": http.get("/v1/activity").text,
            "the pool": http.get("/pages/pool").text,
            "figures": http.get("/metrics").text,
            "the version": http.get("/version").text,
            "settings": repr(server.service.settings),
        }


# ------------------------------------------------------------ the end


def test_draining_server_refuses_new_requests_with_retry_after() -> None:
    with (
        running_server(EnginePool.local([slow_llm()])) as server,
        chat_during_shutdown(server, {**CHAT, "max_tokens": 20}),
        server.client() as http,  # a new connection
    ):
        refusal = http.post("/v1/chat/completions", json=CHAT)
        assert http.get("/ready").status_code == 503 and http.get("/health").status_code == 200
        assert refusal.status_code == 503 and int(refusal.headers["retry-after"]) > 0


def test_requests_beyond_the_drain_time_are_cut_off() -> None:
    with running_server(EnginePool.local([slow_llm(30.0)]), drain=0.3) as server:
        asking = threading.Thread(target=lambda: _broken(server))
        asking.start()
        until(lambda: server.service.live.running)
        server.server.should_exit = True
        asking.join(15)
        assert not asking.is_alive()


def _broken(server: RunningServer) -> None:
    with server.client() as http, pytest.raises((httpx.TransportError, AssertionError)):
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_logging_is_restored_when_the_server_ends(capsys: pytest.CaptureFixture[str]) -> None:
    ours = logging.getLogger("teola_plugin")
    before = (list(ours.handlers), ours.propagate, ours.level)
    with logging_to_stderr(ServerSettings(log="json")):
        ours.warning("within")
    assert (list(ours.handlers), ours.propagate, ours.level) == before
    assert json.loads(capsys.readouterr().err)["message"] == "within"


def test_repr_of_settings_hides_secrets() -> None:
    options = {
        "tracing": {"endpoint": "http://127.0.0.1:4317", "headers": {"key": "planted"}},
        "store": "postgres://u:planted@h",
    }
    assert "planted" not in repr(ServerSettings.model_validate(options))
