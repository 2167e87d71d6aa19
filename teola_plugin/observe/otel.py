"""Traces as OpenTelemetry spans. Attributes are those of OpenTelemetry's GenAI conventions and of OpenInference where
their names fit (https://github.com/open-telemetry/semantic-conventions-genai, https://github.com/Arize-ai/openinference),
else `teola.*`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from teola_plugin.observe.spans import GENERATION, QueryTrace, Span
from teola_plugin.observe.steps import Step

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanContext, Tracer, TracerProvider

ModelOf = Callable[[str], str]
"""The model of an engine by the engine's name; empty where it has none."""

_SPAN_KINDS = {
    "EMBEDDING": "EMBEDDING",
    "SEARCHING": "RETRIEVER",
    "RERANKING": "RERANKER",
    "PREFILLING": "LLM",
    "PARTIAL_PREFILLING": "LLM",
    "FULL_PREFILLING": "LLM",
    "DECODING": "LLM",
    "PARTIAL_DECODING": "LLM",
    "GENERATION": "LLM",
    "TOOL": "TOOL",
}
"""`openinference.span.kind` of each kind of primitive; CHAIN for the others."""
_OPERATIONS = {"EMBEDDING": "embeddings", "RETRIEVER": "retrieval", "LLM": "text_completion", "TOOL": "execute_tool"}
"""`gen_ai.operation.name` by `openinference.span.kind`, where there is one. A completion is two spans or more."""
PROVIDER = "teola_plugin"
"""`gen_ai.provider.name`: it serves the engines, whatever they run on."""


def emit(
    trace: QueryTrace,
    provider: TracerProvider | None = None,
    *,
    parent: Context | None = None,
    model_of: ModelOf | None = None,
) -> int:
    """Send `trace` to OpenTelemetry: one span for the query and below it one for each primitive.

    Where the plain object told of steps, there is one for each of those, too, inside of each other as they were; a
    primitive is below its step, or links to it if it began before. Uses the global tracer provider unless one is given.
    Spans link to those that they waited for. The query's span is a child of the one in `parent`, or of the current one.
    Returns how many spans were made: 0 when opentelemetry-api is not installed.
    """
    try:
        from opentelemetry import trace as api
    except ImportError:
        return 0
    tracer = api.get_tracer("teola_plugin", tracer_provider=provider)
    clock = _Clock(trace)
    root = tracer.start_span(
        trace.app or "query",
        context=parent,
        start_time=clock.nanos(trace.started),
        attributes=_query_attributes(trace),
    )
    if trace.outcome == "failed":
        root.set_status(api.StatusCode.ERROR)
    steps = {0: (root, trace.started)}
    for step in trace.steps:
        around, _ = steps.get(step.parent, steps[0])
        steps[step.id] = _emit_step(tracer, around, step, trace, clock), step.began
    made: dict[str, SpanContext] = {}
    for span in sorted(trace.spans, key=lambda s: s.begin):
        made |= dict.fromkeys(
            (span.primitive, *span.also), _emit_span(tracer, steps, span, trace, clock, made, model_of)
        )
    root.end(clock.nanos(trace.ended))
    return 1 + len(trace.steps) + len(trace.spans)


class _Clock:
    """A converter from the runtime's clock to Unix nanoseconds."""

    def __init__(self, trace: QueryTrace) -> None:
        wall = trace.wall or time.time() - (time.monotonic() - trace.started)
        self._offset = wall - trace.started

    def nanos(self, at: float) -> int:
        return int((at + self._offset) * 1e9)


def _emit_step(tracer: Tracer, around: Any, step: Step, trace: QueryTrace, clock: _Clock) -> Any:
    from opentelemetry import trace as api

    one = tracer.start_span(
        step.name,
        context=api.set_span_in_context(around),
        start_time=clock.nanos(step.began),
        attributes=_step_attributes(step, trace),
    )
    if step.outcome == "failed":
        one.set_status(api.StatusCode.ERROR)
    one.end(clock.nanos(trace.ended if step.ended is None else step.ended))
    return one


def _emit_span(
    tracer: Tracer,
    steps: Mapping[int, tuple[Any, float]],
    span: Span,
    trace: QueryTrace,
    clock: _Clock,
    made: dict[str, SpanContext],
    model_of: ModelOf | None,
) -> SpanContext:
    from opentelemetry import trace as api

    links = [api.Link(made[p]) for p in span.parents if p in made]
    around, began = steps.get(span.step, steps[0])
    if began > span.begin and span.step:  # a child that begins before its parent is taken for a clock that is wrong
        links.append(api.Link(around.get_span_context(), {"teola.link": "early for"}))
        around, _ = steps[0]
    one = tracer.start_span(
        span.primitive,
        context=api.set_span_in_context(around),
        start_time=clock.nanos(span.begin),
        attributes=_span_attributes(span, model_of),
        links=links,
    )
    if span.first is not None:
        one.add_event("first piece", timestamp=clock.nanos(span.first))
    if span.outcome == "failed":
        one.set_status(api.StatusCode.ERROR)
    one.end(clock.nanos(trace.ended if span.done is None else span.done))
    return one.get_span_context()


def _query_attributes(trace: QueryTrace) -> dict[str, Any]:
    lost, lost_tokens = trace.wasted()
    return {
        "openinference.span.kind": "CHAIN",
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.workflow.name": trace.app or "query",
        "teola.query.id": trace.query_id,
        "teola.query.outcome": trace.outcome,
        "teola.query.critical_path": [step.span.primitive for step in trace.critical_path()],
        "teola.query.passes": [name for name, fired, _ in trace.passes if fired],
        "teola.wasted.primitives": lost,
        "teola.wasted.tokens": lost_tokens,
    }


def _step_attributes(step: Step, trace: QueryTrace) -> dict[str, Any]:
    told: dict[str, Any] = {f"teola.step.{key}": value for key, value in step.facts}
    told |= {"teola.query.id": trace.query_id, "teola.step.kind": step.kind, "teola.outcome": step.outcome}
    if step.kind == "tool":
        tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": step.name}
        return told | tool | {"openinference.span.kind": "TOOL", "tool.name": step.name}
    return told | {"openinference.span.kind": "CHAIN"}


def _span_attributes(span: Span, model_of: ModelOf | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "openinference.span.kind": _SPAN_KINDS.get(span.kind, "CHAIN"),
        "teola.query.id": span.query_id,
        "teola.primitive.kind": span.kind,
        "teola.engine": span.engine or "client",
        "teola.engine.instance": span.instance,
        "teola.batch": span.batch,
        "teola.scope": list(span.scope),
        "teola.depth": span.depth,
        "teola.outcome": span.outcome,
        "teola.requests": span.size,
        "teola.tentative": span.tentative,
        "teola.queued.seconds": max(0.0, span.begin - span.queued),
    }
    attributes.update(_operation_attributes(span, model_of))
    attributes.update(_token_attributes(span))
    if span.drafted:
        attributes |= {"teola.drafts.drafted": span.drafted, "teola.drafts.accepted": span.accepted}
    attributes.update({f"teola.detail.{key}": value for key, value in span.detail})
    return attributes


def _operation_attributes(span: Span, model_of: ModelOf | None) -> dict[str, str]:
    """Return the attributes of OpenTelemetry's conventions for a call of a model, a store or a tool."""
    operation = _OPERATIONS.get(_SPAN_KINDS.get(span.kind, ""))
    model = model_of(span.engine) if model_of and span.engine else ""
    named = {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER} if operation else {}
    return named | ({"gen_ai.request.model": model} if model else {})


def _token_attributes(span: Span) -> dict[str, int]:
    """Tokens, cached ones among those of the prompt."""
    if not (span.tokens or span.written):
        return {}
    written = {"llm.token_count.completion": span.written, "gen_ai.usage.output_tokens": span.written}
    if span.kind == GENERATION or span.kind.endswith("PREFILLING"):
        return {
            **(written if span.kind == GENERATION else {}),
            "llm.token_count.prompt": span.tokens,
            "llm.token_count.prompt_details.cache_read": span.cached,
            "gen_ai.usage.input_tokens": span.tokens,
            "gen_ai.usage.cache_read.input_tokens": span.cached,
        }
    if span.kind.endswith("DECODING"):
        return {"llm.token_count.completion": span.tokens, "gen_ai.usage.output_tokens": span.tokens}
    return {"llm.token_count.total": span.tokens, "gen_ai.usage.input_tokens": span.tokens}
