"""Traces as OpenTelemetry spans. Attributes are those of OpenTelemetry's GenAI conventions and of OpenInference where
their names fit (https://github.com/open-telemetry/semantic-conventions-genai, https://github.com/Arize-ai/openinference),
else `teola.*`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from teola_plugin.errors import RegistrationError, extra, unknown_name
from teola_plugin.observe.spans import GENERATION, Cost, QueryTrace, Span
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

    Each step of the original has a span, too, nested as the steps were. A primitive is below its step, or links to it
    if it began before. Spans link to those that they waited for.

    Args:
        trace: The trace.
        provider: The tracer provider; by default the global one.
        parent: Context of the parent of the query's span; by default the current span is its parent.
        model_of: Returns the model of an engine.

    Returns:
        The number of spans: 0 if opentelemetry-api is not installed.
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
        outer, _ = steps.get(step.parent, steps[0])
        steps[step.id] = _emit_step(tracer, outer, step, trace, clock), step.began
    contexts: dict[str, SpanContext] = {}
    for span in sorted(trace.spans, key=lambda s: s.begin):
        context = _emit_span(tracer, steps, span, trace, clock, contexts, model_of)
        contexts |= dict.fromkeys((span.primitive, *span.also), context)
    root.end(clock.nanos(trace.ended))
    return 1 + len(trace.steps) + len(trace.spans)


class _Clock:
    """A converter from the runtime's clock to Unix nanoseconds."""

    def __init__(self, trace: QueryTrace) -> None:
        wall = trace.wall or time.time() - (time.monotonic() - trace.started)
        self._offset = wall - trace.started

    def nanos(self, at: float) -> int:
        return int((at + self._offset) * 1e9)


def _emit_step(tracer: Tracer, outer: Any, step: Step, trace: QueryTrace, clock: _Clock) -> Any:
    """Send a step of the original as a span below `outer`, and return that span, which may be a parent of others."""
    from opentelemetry import trace as api

    emitted = tracer.start_span(
        step.name,
        context=api.set_span_in_context(outer),
        start_time=clock.nanos(step.began),
        attributes=_step_attributes(step, trace),
    )
    if step.outcome == "failed":
        emitted.set_status(api.StatusCode.ERROR)
    emitted.end(clock.nanos(trace.ended if step.ended is None else step.ended))
    return emitted


def _emit_span(
    tracer: Tracer,
    steps: Mapping[int, tuple[Any, float]],
    span: Span,
    trace: QueryTrace,
    clock: _Clock,
    contexts: dict[str, SpanContext],
    model_of: ModelOf | None,
) -> SpanContext:
    """Send a primitive's span below its step, with links to the spans that it waited for; return its context."""
    from opentelemetry import trace as api

    links = [api.Link(contexts[p]) for p in span.parents if p in contexts]
    outer, began = steps.get(span.step, steps[0])
    if began > span.begin and span.step:  # tools take a child that begins before its parent for a wrong clock
        links.append(api.Link(outer.get_span_context(), {"teola.link": "early for"}))
        outer, _ = steps[0]
    emitted = tracer.start_span(
        span.primitive,
        context=api.set_span_in_context(outer),
        start_time=clock.nanos(span.begin),
        attributes=_span_attributes(span, model_of),
        links=links,
    )
    if span.first is not None:
        emitted.add_event("first piece", timestamp=clock.nanos(span.first))
    if span.outcome == "failed":
        emitted.set_status(api.StatusCode.ERROR)
    emitted.end(clock.nanos(trace.ended if span.done is None else span.done))
    return emitted.get_span_context()


def _query_attributes(trace: QueryTrace) -> dict[str, Any]:
    """Return the attributes of a query's span: identity, outcome, critical path, passes and wasted work."""
    wasted, wasted_tokens = trace.wasted()
    return {
        "openinference.span.kind": "CHAIN",
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.workflow.name": trace.app or "query",
        "teola.query.id": trace.query_id,
        "teola.query.outcome": trace.outcome,
        "teola.query.critical_path": [step.span.primitive for step in trace.critical_path()],
        "teola.query.passes": [name for name, fired, _ in trace.passes if fired],
        "teola.wasted.primitives": wasted,
        "teola.wasted.tokens": wasted_tokens,
        **({} if trace.cost is None else _cost_attributes(trace.cost)),
    }


def _cost_attributes(cost: Cost) -> dict[str, Any]:
    """Return the attributes of a query's span for its calls of models: `teola.cost.dollars` only where it is known.

    The names are not those of OpenTelemetry's conventions: products would add these tokens to those of the app's spans.
    """
    facts = cost.facts()
    del facts["queries"]
    unpriced = facts.pop("unpriced")
    attributes = {f"teola.cost.{name}": value for name, value in facts.items() if value is not None}
    return attributes | ({"teola.cost.unpriced": unpriced} if unpriced else {})


def _step_attributes(step: Step, trace: QueryTrace) -> dict[str, Any]:
    """Return the attributes of a step's span. A tool has those of OpenTelemetry's conventions, too."""
    attributes: dict[str, Any] = {f"teola.step.{key}": value for key, value in step.facts}
    attributes |= {"teola.query.id": trace.query_id, "teola.step.kind": step.kind, "teola.outcome": step.outcome}
    if step.kind == "tool":
        tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": step.name}
        return attributes | tool | {"openinference.span.kind": "TOOL", "tool.name": step.name}
    return attributes | {"openinference.span.kind": "CHAIN"}


def _span_attributes(span: Span, model_of: ModelOf | None) -> dict[str, Any]:
    """Return the attributes of a primitive's span: where and how it ran, its model, tokens and drafts."""
    attributes: dict[str, Any] = {
        "openinference.span.kind": _SPAN_KINDS.get(span.kind, "CHAIN"),
        "teola.query.id": span.query_id,
        "teola.primitive.kind": span.kind,
        "teola.engine": span.engine or "client",
        "teola.engine.replica": span.replica,
        "teola.batch": span.batch,
        "teola.scope": list(span.scope),
        "teola.depth": span.depth,
        "teola.outcome": span.outcome,
        "teola.requests": span.size,
        "teola.speculative": span.speculative,
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
    attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER} if operation else {}
    return attributes | ({"gen_ai.request.model": model} if model else {})


def _token_attributes(span: Span) -> dict[str, int]:
    """Return the attributes for tokens; the cached ones are among those of the prompt."""
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


log = logging.getLogger("teola_plugin")
_MAX_WAITING = 1000
"""Traces that may wait for an exporter; others are dropped meanwhile."""
_CLOSE_TIMEOUT_S = 5.0
"""Time, twice, for the waiting traces when the pool is closed."""


def tracing_sink(tracing: str | TracerProvider, model_of: ModelOf) -> OpenTelemetrySink:
    """Return the sink for a pool's `tracing=`: `"opentelemetry"` for the global tracer provider, or a provider.

    Raises:
        RegistrationError: The name is unknown, or OpenTelemetry is not installed.
    """
    if isinstance(tracing, str) and tracing != "opentelemetry":
        raise unknown_name("tracing", tracing, ["opentelemetry"])
    try:
        import opentelemetry.trace  # noqa: F401
    except ImportError as error:
        raise RegistrationError("tracing needs OpenTelemetry, which is not installed.", hint=extra("otel")) from error
    return OpenTelemetrySink(None if isinstance(tracing, str) else tracing, model_of)


class OpenTelemetrySink:
    """A `TraceSink` that sends traces from a thread of its own, since an exporter may wait for a network.

    The span that is current where a query is called becomes the parent of the query's.
    """

    def __init__(self, provider: TracerProvider | None, model_of: ModelOf) -> None:
        self._provider = provider
        self._model_of = model_of
        self._parents: dict[str, Context] = {}
        self._waiting: queue.Queue[tuple[QueryTrace, Context | None] | None] = queue.Queue(_MAX_WAITING)
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def query_began(self, query_id: str) -> None:
        """Remember the span that is current in the caller as the query's parent. The first query starts the thread."""
        from opentelemetry import context

        self._parents[query_id] = context.get_current()
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="teola-tracing", daemon=True)
            self._thread.start()

    def query_ended(self, trace: QueryTrace) -> None:
        """Queue a trace for the thread that sends it; drop it if too many wait."""
        try:
            self._waiting.put_nowait((trace, self._parents.pop(trace.query_id, None)))
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                log.warning("OpenTelemetry takes traces too slowly: some queries' are not sent")

    def close(self) -> None:
        """Send the traces in the queue, for at most 10 s. Idempotent.

        Spans inside the tracer provider are sent when the provider is shut down.
        """
        if self._thread is None:
            return
        try:
            self._waiting.put(None, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._thread = None  # a pool that is started again begins another

    def _main(self) -> None:
        """Send traces until `close`. This is the body of the thread; a trace that cannot be sent is logged."""
        while (item := self._waiting.get()) is not None:
            trace, parent = item
            try:
                emit(trace, self._provider, parent=parent, model_of=self._model_of)
            except Exception:
                log.warning("the trace of query %s could not be sent", trace.query_id, exc_info=True)
