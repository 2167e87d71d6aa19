"""`tracing="opentelemetry"`: every query's trace goes to OpenTelemetry when the query has ended."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

from teola_plugin.errors import RegistrationError, extra, unknown_name
from teola_plugin.observe.otel import ModelOf, emit
from teola_plugin.observe.spans import QueryTrace

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import TracerProvider

log = logging.getLogger("teola_plugin")
_WAITING = 1000
"""Traces that may wait for an exporter; those that come meanwhile are not sent."""
_CLOSING = 5.0
"""Seconds, twice, that what waits has when the pool is closed."""


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
    """Sends traces from a thread of its own, since an exporter may wait for a network.

    The span that is current where a query is asked for becomes the parent of the query's.
    """

    def __init__(self, provider: TracerProvider | None, model_of: ModelOf) -> None:
        self._provider = provider
        self._model_of = model_of
        self._parents: dict[str, Context] = {}
        self._waiting: queue.Queue[tuple[QueryTrace, Context | None] | None] = queue.Queue(_WAITING)
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def began(self, query_id: str) -> None:
        from opentelemetry import context

        self._parents[query_id] = context.get_current()
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="teola-tracing", daemon=True)
            self._thread.start()

    def ended(self, trace: QueryTrace) -> None:
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
            self._waiting.put(None, timeout=_CLOSING)
        except queue.Full:
            return
        self._thread.join(_CLOSING)
        self._thread = None  # a pool that is started again begins another

    def _main(self) -> None:
        while (told := self._waiting.get()) is not None:
            trace, parent = told
            try:
                emit(trace, self._provider, parent=parent, model_of=self._model_of)
            except Exception:
                log.warning("the trace of query %s could not be sent", trace.query_id, exc_info=True)
