"""Figures for Prometheus: requests and queries of the server, primitives and batches of the pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from teola_plugin.observe.recorder import TraceSink
from teola_plugin.observe.spans import QueryTrace

if TYPE_CHECKING:
    from teola_plugin.server.service import Service

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_MOST_APPS = 256


class Metrics:
    """Of one service. It hears of the pool's traces, beside whoever hears of them already."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests by address and status", "route", "status")
        self._seconds = Histogram(
            "teola_request_seconds", "Until the last byte", ["route"], buckets=_SECONDS, registry=self.registry
        )
        self.registry.register(_State(service))
        self._primitives = _Primitives(self)
        recorder = service.pool.runtime.recorder
        recorder.sink = _Both(recorder.sink, self._primitives)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"teola_{name}", text, labels, registry=self.registry)

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """In Prometheus' own form."""
        return generate_latest(self.registry)


class _State:
    """What is so now, asked for when somebody looks."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        admission, live = service.admission, service.live
        yield GaugeMetricFamily("teola_queries_running", "Queries under way", value=len(live.running))
        yield GaugeMetricFamily("teola_queue_requests", "Queries that have a place", value=admission.running)
        yield GaugeMetricFamily("teola_queue_tokens", "Their tokens, as far as known", value=admission.tokens)
        for name, text in (
            ("accepted", "Queries that were taken"),
            ("refused", "Queries that were refused, for their goal or a full queue"),
            ("answered", "Queries that were answered"),
            ("within_goal", "Those of them that were answered within their goal: the goodput"),
        ):
            family = CounterMetricFamily(f"teola_queries_{name}", text, labels=["app"])
            for app, counts in list(admission.counts.items()):
                family.add_metric([app], getattr(counts, name))
            yield family
        yield from _engines(service)


def _engines(service: Service) -> Iterator[Metric]:
    running = GaugeMetricFamily("teola_engine_running", "Requests at the engine", labels=["engine"])
    kv = GaugeMetricFamily("teola_engine_kv_used", "Share of its KV cache that is in use", labels=["engine"])
    for name in service.pool.engine_names:
        load = loads(service.pool.engine(name))
        if load is not None:
            running.add_metric([name], load.requests)
            kv.add_metric([name], load.kv_used)
    yield running
    yield kv


def loads(engine: Any) -> Any:
    """Of the engine's (first) instance; None where it runs elsewhere and does not tell here."""
    try:
        return engine.load()
    except Exception:
        return None


class _Primitives:
    """A `TraceSink`: counts what queries were made of. On the pool's loop; counters are safe there."""

    def __init__(self, metrics: Metrics) -> None:
        made = metrics._counter
        self._apps: set[str] = set()
        self._done = made("primitives", "Primitives by kind, engine and outcome", "app", "kind", "engine", "outcome")
        self._tokens = made("tokens", "Tokens: computed, cached, written, drafted, accepted, wasted", "app", "what")
        registry = metrics.registry
        self._queued = Histogram(
            "teola_queued_seconds", "In the engine's queue", ["engine"], buckets=_SECONDS, registry=registry
        )
        self._batches = Histogram(
            "teola_primitive_requests", "Requests of one primitive", ["engine"], buckets=_SIZES, registry=registry
        )

    def began(self, query_id: str) -> None: ...

    def ended(self, trace: QueryTrace) -> None:
        app = trace.app if trace.app in self._apps or len(self._apps) < _MOST_APPS else "other"
        self._apps.add(app)
        for span in trace.spans:
            self._done.labels(app, span.kind, span.engine or "client", span.outcome).inc()
            if span.engine and span.started is not None:
                self._queued.labels(span.engine).observe(max(0.0, span.started - span.queued))
                self._batches.labels(span.engine).observe(span.size)
            wasted = span.tokens + span.written if span.unused and span.started is not None else 0
            figures = {
                "computed": span.tokens - span.cached,
                "cached": span.cached,
                "written": span.written,
                "drafted": span.drafted,
                "accepted": span.accepted,
                "wasted": wasted,
            }
            for what, number in figures.items():
                if number > 0:
                    self._tokens.labels(app, what).inc(number)

    def close(self) -> None: ...


class _Both:
    """Two sinks as one."""

    def __init__(self, first: TraceSink | None, second: TraceSink) -> None:
        self._sinks = [second] if first is None else [first, second]

    def began(self, query_id: str) -> None:
        for sink in self._sinks:
            sink.began(query_id)

    def ended(self, trace: QueryTrace) -> None:
        for sink in self._sinks:
            sink.ended(trace)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
