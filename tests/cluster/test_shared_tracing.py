"""Tests of `tracing=` of a shared pool: the app's process makes the spans, which name what ran in the cluster."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.small_chains import QUESTION, two_steps

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola


def test_queries_on_a_shared_pool_are_traced(fakes_address: str) -> None:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with EnginePool.connect(fakes_address, pool="fakes", tracing=provider) as pool:
        accelerate(two_steps(ChatTeola(pool=pool, max_tokens=4)), pool=pool, app="shared").invoke(QUESTION)
    spans = exporter.get_finished_spans()
    (root,) = (s for s in spans if s.name == "shared")
    decoded = [s for s in spans if s.attributes.get("teola.primitive.kind") == "DECODING"]  # first tokens are told
    assert len(decoded) == 2 and all(s.parent.span_id == root.context.span_id for s in decoded)
    assert {s.attributes["teola.engine"] for s in decoded} == {"llm"}
    provider.shutdown()
