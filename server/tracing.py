"""Requests as OpenTelemetry spans, by its conventions for HTTP; below each are its query and the query's primitives.

A request with a `traceparent` header is part of its caller's trace. No span holds a prompt, an answer, a key or a query
string.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from teola_plugin import __version__
from teola_plugin.errors import EngineUnavailable, RegistrationError, extra
from teola_plugin.server.settings import TracingSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

_UNTRACED = frozenset({"/health", "/ready", "/metrics"})
"""Addresses that machines poll every few seconds."""


def provider_of(settings: TracingSettings) -> TracerProvider:
    """Return a provider that exports to the endpoint. Raise `EngineUnavailable` if packages are missing."""
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise EngineUnavailable("server.tracing needs OpenTelemetry's SDK.", hint=extra("otel")) from error
    resource = Resource.create({"service.name": settings.service, "service.version": __version__})
    provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(settings.share)))
    provider.add_span_processor(BatchSpanProcessor(_exporter(settings)))
    return provider


def _exporter(settings: TracingSettings) -> SpanExporter:
    """Return the exporter that sends spans to the collector of the settings, by gRPC or HTTP.

    Raise `EngineUnavailable` if its package is not installed.
    """
    headers = {name.lower(): value for name, value in settings.headers.items()}
    kind = settings.protocol.partition("/")[0]
    try:
        exporter = import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter").OTLPSpanExporter
    except ImportError as error:
        package = f"opentelemetry-exporter-otlp-proto-{kind}"
        raise EngineUnavailable(
            f"server.tracing needs {package}, which is not installed.",
            hint=f"pip install {package}",
        ) from error
    if kind == "grpc":
        span_exporter: SpanExporter = exporter(
            settings.endpoint, insecure=settings.endpoint.startswith("http://"), headers=headers
        )
    else:
        span_exporter = exporter(f"{settings.endpoint.rstrip('/')}/v1/traces", headers=headers)
    return span_exporter


class RequestSpans:
    """The spans of one server's requests; there are none without a provider."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._tracer: Any = None
        if provider is not None:
            try:
                from opentelemetry import trace
            except ImportError as error:
                raise RegistrationError("tracing needs OpenTelemetry.", hint=extra("otel")) from error
            self._tracer = trace.get_tracer("teola_plugin.server", __version__, tracer_provider=provider)

    def around(self, scope: Mapping[str, Any], headers: Mapping[str, str]) -> AbstractContextManager[Any]:
        """Return the span of a request, current in the body; None if the request is not traced."""
        if self._tracer is None or scope["path"] in _UNTRACED:
            return nullcontext()
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        span: AbstractContextManager[Any] = self._tracer.start_as_current_span(
            scope["method"],
            context=extract(headers),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "url.scheme": scope.get("scheme", "http")},
            record_exception=False,  # its message may repeat the prompt
            set_status_on_exception=False,
        )
        return span


def set_span_attributes(span: Any, fields: Mapping[str, Any]) -> None:
    """Give the span the fields that the request's line in the log has."""
    if span is None or not span.is_recording():
        return
    from opentelemetry.trace import StatusCode

    span.update_name(f"{fields['method']} {fields['route']}")
    span.set_attributes({"http.route": fields["route"], "http.response.status_code": fields["status"]})
    span.set_attribute("teola.request.id", fields["request"])
    for key in ("query", "app", "tokens"):
        if key in fields:
            span.set_attribute(f"teola.{'query.id' if key == 'query' else key}", fields[key])
    if fields["status"] >= 500:
        span.set_attribute("error.type", str(fields["status"]))
        span.set_status(StatusCode.ERROR)
