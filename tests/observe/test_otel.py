"""Tests of OpenTelemetry spans, read from the SDK's in-memory exporter."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from teola_plugin.observe import emit

from .sample_traces import FAST, PLAIN, stepped, trace

SCRIPT = """
import sys
sys.modules["opentelemetry"] = None
sys.path.insert(0, sys.argv[1])
from sample_traces import trace
from teola_plugin.observe import emit
assert emit(trace()) == 0
"""


@pytest.fixture
def exported() -> tuple[Any, Any]:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter


def test_trace_becomes_spans_below_one_root(exported: tuple[Any, Any]) -> None:
    provider, exporter = exported
    assert emit(trace(), provider) == len(FAST) + 1
    spans = {s.name: s for s in exporter.get_finished_spans()}
    root = spans["accelerated"]
    assert root.parent is None and root.start_time == 1_700_000_000 * 10**9
    assert root.attributes["openinference.span.kind"] == "CHAIN"
    assert root.attributes["teola.query.critical_path"][-2:] == ("answer.decoding", "your code")
    decode = spans["answer.decoding"]
    assert decode.parent.span_id == root.context.span_id
    assert (decode.end_time - decode.start_time) / 1e9 == pytest.approx(0.65, abs=1e-6)
    assert [e.name for e in decode.events] == ["first piece"]
    assert [link.context.span_id for link in decode.links] == [spans["answer.full_prefilling"].context.span_id]


def test_attributes_use_openinference_names(exported: tuple[Any, Any]) -> None:
    provider, exporter = exported
    emit(trace(), provider)
    spans = {s.name: s.attributes for s in exporter.get_finished_spans()}
    kinds = {name: a["openinference.span.kind"] for name, a in spans.items()}
    assert kinds["rerank"] == "RERANKER" and kinds["retrieve.searching.1"] == "RETRIEVER"
    assert kinds["index.embedding.1"] == "EMBEDDING" and kinds["index.chunking"] == "CHAIN"
    assert spans["answer.decoding"]["llm.token_count.completion"] == 195
    assert spans["answer.full_prefilling"]["llm.token_count.prompt_details.cache_read"] == 32
    assert spans["lookahead.searching"]["teola.outcome"] == "wasted"


def test_steps_are_spans_around_the_primitives(exported: tuple[Any, Any]) -> None:
    from opentelemetry.trace import StatusCode

    provider, exporter = exported
    found = stepped()
    assert emit(found, provider) == 1 + len(found.steps) + len(found.spans)
    spans = {s.name: s for s in exporter.get_finished_spans()}
    names = {s.context.span_id: s.name for s in spans.values()}
    around = {name: names[s.parent.span_id] for name, s in spans.items() if s.parent is not None}
    assert around == {
        "1": "graph", "2": "graph", "search": "1", "grade": "1", "lookup": "grade",
        "grade.prefilling": "grade", "grade.decoding": "grade", "llm.call#1": "grade",
        "search.embedding": "graph", "search.searching": "graph", "lookahead": "graph", "answer.decoding": "graph",
    }  # fmt: skip
    early = {link.attributes.get("teola.link"): names[link.context.span_id] for link in spans["search.embedding"].links}
    assert early == {"early for": "search"}, "it began before its node"
    tool = spans["lookup"].attributes
    assert (tool["gen_ai.operation.name"], tool["gen_ai.tool.name"], tool["teola.step.early"]) == (
        "execute_tool", "lookup", True,
    )  # fmt: skip
    assert spans["1"].attributes["teola.step.nodes"] == "grade, search"
    assert spans["grade"].status.status_code is StatusCode.ERROR
    assert spans["2"].end_time == spans["graph"].end_time


def test_failed_span_has_error_status(exported: tuple[Any, Any]) -> None:
    import dataclasses

    from opentelemetry.trace import StatusCode

    provider, exporter = exported
    base = trace("plain", PLAIN)
    broken = dataclasses.replace(base.spans[-1], outcome="failed", done=None)
    emit(dataclasses.replace(base, outcome="failed", spans=(*base.spans[:-1], broken)), provider)
    failed = [s.name for s in exporter.get_finished_spans() if s.status.status_code is StatusCode.ERROR]
    assert sorted(failed) == ["answer.decoding", "plain"]


def test_emit_without_opentelemetry_does_not_raise(request: pytest.FixtureRequest) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, str(request.path.parent)], check=True)
