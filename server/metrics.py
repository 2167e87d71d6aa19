"""Metrics for Prometheus: requests and queries of the server, primitives and batches of the pool."""

from __future__ import annotations

from collections import Counter as TokensByApp
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from teola_plugin.engines.base import EngineLoad
from teola_plugin.observe.recorder import TraceSink
from teola_plugin.observe.spans import QueryTrace, Span
from teola_plugin.server.traces import Batch, batch_of

if TYPE_CHECKING:
    from teola_plugin.pool import EnginePool
    from teola_plugin.server.live_queries import LiveQuery
    from teola_plugin.server.service import Service

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_MAX_APPS = 256
_MAX_OPEN_BATCHES = 4096
SETTLE_S = 10.0
"""Seconds after which a batch counts as complete."""


class Metrics:
    """The metrics of one service. It listens to the pool's traces, beside the sink that the pool has already."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "HTTP requests by address and status", "route", "status")
        text = "Seconds from the first byte of an HTTP request to the last byte of its answer"
        self._seconds = self._histogram("request_seconds", text, _SECONDS, "route")
        self._queries = self._counter("queries_ended", "Queries that have ended, by outcome", "app", "outcome")
        text = "Seconds from the begin of a query to its end"
        self._query_seconds = self._histogram("query_seconds", text, _SECONDS, "app")
        self.lag = 0.0
        """Seconds by which the server's loop was late when last measured."""
        self._lags = self._histogram("loop_lag_seconds", "Seconds by which the server's event loop is late", _LAGS)
        self.registry.register(_CurrentFigures(service))
        ProcessCollector(registry=self.registry)
        self.primitives = _Primitives(self)
        add_sink(service.pool, self.primitives)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"teola_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"teola_{name}", text, labels, buckets=buckets, registry=self.registry)

    def query(self, query: LiveQuery) -> None:
        self._queries.labels(query.app, query.status).inc()
        self._query_seconds.labels(query.app).observe(query.seconds or 0.0)

    def observe_lag(self, seconds: float) -> None:
        self.lag = seconds
        self._lags.observe(seconds)

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def add_sink(pool: EnginePool, sink: TraceSink) -> None:
    """Add a sink for the traces of the pool's queries, beside the one that it has.

    Both get every query's begin and end, on the pool's loop, the earlier one first. A sink cannot be removed again.
    """
    recorder = pool.runtime.recorder
    recorder.sink = _SinkPair(recorder.sink, sink)


class _CurrentFigures:
    """A collector of figures that are read when Prometheus asks: queries, the queue, engines."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield the current figures of queries, the queue and engines. Prometheus' registry calls it at each scrape."""
        service = self._service
        admission, live = service.admission, service.live
        yield GaugeMetricFamily("teola_queries_running", "Queries that are running", value=len(live.running))
        text = "Queries that were accepted and have not ended"
        yield GaugeMetricFamily("teola_queue_requests", text, value=admission.running)
        text = "Tokens of prompts and answers of these queries, as far as known"
        yield GaugeMetricFamily("teola_queue_tokens", text, value=admission.tokens)
        for name, text in (
            ("accepted", "Queries that were accepted"),
            ("refused", "Queries that were refused, because of their goal or a full queue"),
            ("answered", "Queries that were answered"),
            ("within_goal", "Queries that were answered within their goal: the goodput"),
        ):
            family = CounterMetricFamily(f"teola_queries_{name}", text, labels=["app"])
            for app, counts in list(admission.counts.items()):
                family.add_metric([app], getattr(counts, name))
            yield family
        yield from _engines(service)


def _engines(service: Service) -> Iterator[Metric]:
    """Yield the load of each engine: running requests, share of the KV cache in use, and its tokens by app."""
    text = "Requests that run on the engine, all replicas together. Not known for a shared pool"
    running = GaugeMetricFamily("teola_engine_running", text, labels=["engine"])
    text = "Share of the KV cache in use, from 0 to 1, the mean of all replicas. Not known for a shared pool"
    kv = GaugeMetricFamily("teola_engine_kv_used", text, labels=["engine"])
    text = "Tokens in the KV cache that running generations of the app hold. A shared prefix counts for each of them"
    kv_tokens = GaugeMetricFamily("teola_engine_kv_tokens", text, labels=["engine", "app"])
    for name in service.pool.engine_names:
        load = load_of(service.pool, name)
        if load is not None:
            running.add_metric([name], load.requests)
            kv.add_metric([name], load.kv_used)
            for app, tokens in load.kv_tokens.items():
                kv_tokens.add_metric([name, app], tokens)
    yield running
    yield kv
    yield kv_tokens


def load_of(pool: EnginePool, name: str) -> EngineLoad | None:
    """Return the load of all replicas of an engine; the share of its cache is their mean.

    None where the engine runs elsewhere and its load cannot be read here.
    """
    loads = []
    for replica in pool.replicas(name):
        with suppress(Exception):
            loads.append(replica.load())
    if not loads:
        return None
    tokens: TokensByApp[str] = TokensByApp()
    for load in loads:
        tokens.update(load.kv_tokens)
    return EngineLoad(sum(load.requests for load in loads), sum(load.kv_used for load in loads) / len(loads), tokens)


class _Primitives:
    """A `TraceSink` that counts primitives and tokens of queries on the pool's loop. Counters are thread-safe."""

    def __init__(self, metrics: Metrics) -> None:
        counter, histogram = metrics._counter, metrics._histogram
        self._apps: set[str] = set()
        self._done = counter("primitives", "Primitives by kind, engine and outcome", "app", "kind", "engine", "outcome")
        self._unused = counter("wasted_primitives", "Primitives that ran, and whose value nobody used", "app", "engine")
        text = "Tokens: computed and cached of prompts; written, drafted and accepted of answers; wasted"
        self._tokens = counter("tokens", text, "app", "what")
        text = "Seconds of a primitive in the queue of its engine"
        self._queued = histogram("queued_seconds", text, _SECONDS, "app", "engine")
        self._ran = histogram("primitive_seconds", "Seconds of a primitive on its engine", _SECONDS, "app", "engine")
        self._sizes = histogram("primitive_requests", "Number of requests of one primitive", _SIZES, "app", "engine")
        text = "Number of requests of one batch, all queries together. Known about ten seconds later"
        self.batches = BatchSizes(histogram("batch_requests", text, _SIZES, "engine"))

    def query_began(self, query_id: str) -> None: ...

    def query_ended(self, trace: QueryTrace) -> None:
        """Count the primitives and tokens of a query that has ended, and their times at engines.

        Beyond `_MAX_APPS` names of apps, further ones count as `other`.
        """
        app = trace.app if trace.app in self._apps or len(self._apps) < _MAX_APPS else "other"
        self._apps.add(app)
        for span in trace.spans:
            self._done.labels(app, span.kind, span.engine or "client", span.outcome).inc()
            if span.engine and span.started is not None:
                self._observe_engine_run(app, span)
            for use, number in _tokens(span).items():
                if number > 0:
                    self._tokens.labels(app, use).inc(number)
        self.batches.settle(trace.ended)

    def _observe_engine_run(self, app: str, span: Span) -> None:
        """Record the queueing time, running time, size and batch of a primitive that ran on an engine."""
        self._queued.labels(app, span.engine).observe(max(0.0, span.begin - span.queued))
        self._ran.labels(app, span.engine).observe(span.seconds)
        self._sizes.labels(app, span.engine).observe(span.size)
        if span.unused:
            self._unused.labels(app, span.engine).inc()
        if (batch := batch_of(span)) is not None:
            self.batches.add(batch, span.size, span.begin)

    def close(self) -> None: ...


def _tokens(span: Span) -> dict[str, int]:
    """Return the numbers of tokens of a primitive, by what became of them.

    `wasted` are all tokens of a primitive that ran and whose value nobody used.
    """
    ran = span.unused and span.started is not None
    return {
        "computed": span.tokens - span.cached,
        "cached": span.cached,
        "written": span.written,
        "drafted": span.drafted,
        "accepted": span.accepted,
        "wasted": span.tokens + span.written if ran else 0,
    }


class BatchSizes:
    """Sizes of batches, summed over the queries that were part of them, which end one after the other.

    A size is observed `SETTLE_S` seconds after its batch began, or earlier if too many batches are open. Used on the
    pool's loop.
    """

    def __init__(self, histogram: Histogram) -> None:
        self._sizes = histogram
        self._open: dict[Batch, tuple[float, int]] = {}

    def add(self, batch: Batch, requests: int, began: float) -> None:
        first, size = self._open.get(batch, (began, 0))
        self._open[batch] = first, size + requests

    def settle(self, now: float) -> None:
        """Observe the sizes of batches that began more than `SETTLE_S` seconds before `now`.

        If there are none, the oldest of too many open batches are observed early, so that memory stays bounded. Called
        at the end of each query.
        """
        settled = [batch for batch, (began, _) in self._open.items() if now - began > SETTLE_S]
        for batch in settled or list(self._open)[: max(0, len(self._open) - _MAX_OPEN_BATCHES)]:
            self._sizes.labels(batch[0]).observe(self._open.pop(batch)[1])


class _SinkPair:
    """Two sinks as one."""

    def __init__(self, first: TraceSink | None, second: TraceSink) -> None:
        self._sinks = [second] if first is None else [first, second]

    def query_began(self, query_id: str) -> None:
        for sink in self._sinks:
            sink.query_began(query_id)

    def query_ended(self, trace: QueryTrace) -> None:
        for sink in self._sinks:
            sink.query_ended(trace)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
