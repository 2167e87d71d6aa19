"""Traces of the latest queries, for their pages, and which queries shared a batch."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from teola_plugin.observe.recorder import MAX_KEPT_SPANS
from teola_plugin.observe.spans import QueryTrace, Span
from teola_plugin.server.live_queries import LiveQuery

MAX_TRACES = 1000
"""Number of traces that are kept; fewer if they are large."""
Batch = tuple[str, str, int]
"""(engine, replica, number)"""


@dataclass(frozen=True, slots=True)
class SharedBatch:
    """A batch of a query that other queries were part of, too."""

    engine: str
    replica: str
    batch: int
    """Its number; -1 at an engine with continuous batching."""
    primitives: tuple[str, ...]
    """Primitives of the query in it."""
    other_queries: tuple[str, ...]
    """Ids of the other queries' traces."""


class RecentTraces:
    """A `TraceSink` that keeps the latest traces. It is written on the pool's loop, and read on the server's."""

    def __init__(self, max_traces: int = MAX_TRACES, max_spans: int = MAX_KEPT_SPANS) -> None:
        """Keep at most `max_traces` traces with `max_spans` spans in all; one trace may be larger.

        `_batches` tells which queries took part in a batch. All state is guarded by the lock.
        """
        self._max_traces, self._max_spans = max_traces, max_spans
        self._lock = threading.Lock()
        self._traces: OrderedDict[str, QueryTrace] = OrderedDict()
        self._batches: dict[Batch, dict[str, None]] = {}
        self._spans = 0

    def __len__(self) -> int:
        return len(self._traces)

    def query_began(self, query_id: str) -> None: ...

    def query_ended(self, trace: QueryTrace) -> None:
        """Keep the trace of a query that has ended; drop the oldest traces if there are too many.

        Called on the pool's loop.
        """
        with self._lock:
            self._traces[trace.query_id] = trace
            self._spans += len(trace.spans)
            for span in trace.spans:
                if (batch := batch_of(span)) is not None:
                    self._batches.setdefault(batch, {})[trace.query_id] = None
            while len(self._traces) > self._max_traces or (self._spans > self._max_spans and len(self._traces) > 1):
                self._drop(next(iter(self._traces)))

    def close(self) -> None: ...

    def get(self, id: str) -> QueryTrace | None:
        with self._lock:
            return self._traces.get(id)

    def forget(self, ids: set[str]) -> None:
        """Delete the traces of these ids, when a tenant is deleted; ids without a trace are ignored.

        Takes the lock, so that it may be called on any thread.
        """
        with self._lock:
            for id in ids & self._traces.keys():
                self._drop(id)

    def shared_batches(self, trace: QueryTrace, continuous: Collection[str] = ()) -> list[SharedBatch]:
        """Return the trace's batches that other queries were part of, in the order in which they began.

        At `continuous` engines, what runs at a replica at the same time is one batch.
        """
        spans_by_batch: dict[Batch, list[Span]] = {}
        for span in sorted(trace.spans, key=lambda one: one.begin):
            if (batch := batch_of(span)) is not None:
                key = (span.engine, span.replica, -1) if span.engine in continuous else batch
                spans_by_batch.setdefault(key, []).append(span)
        with self._lock:
            other_ids = {b: self._queries_in(trace, b, spans) for b, spans in spans_by_batch.items()}
        return [
            SharedBatch(*batch, tuple(dict.fromkeys(span.primitive for span in spans)), other_ids[batch])
            for batch, spans in spans_by_batch.items()
            if other_ids[batch]
        ]

    def _queries_in(self, trace: QueryTrace, batch: Batch, spans: Sequence[Span]) -> tuple[str, ...]:
        """Return the other queries that were part of a batch. The caller holds the lock.

        `batch`: with the number -1, which stands for continuous batching, these are the queries that ran at the replica
        at the same time as one of `spans`.
        """
        engine, replica, number = batch
        if number >= 0:
            return tuple(id for id in self._batches.get(batch, ()) if id != trace.query_id)
        overlapping = []
        for id, other in self._traces.items():
            spans_there = (one for one in other.spans if (one.engine, one.replica) == (engine, replica))
            if id != trace.query_id and any(_overlap(one, span) for one in spans_there for span in spans):
                overlapping.append(id)
        return tuple(overlapping)

    def _drop(self, id: str) -> None:
        """Forget a trace, and its part in batches. The caller holds the lock."""
        trace = self._traces.pop(id)
        self._spans -= len(trace.spans)
        for batch in {b for span in trace.spans if (b := batch_of(span)) is not None}:
            queries = self._batches.get(batch, {})
            queries.pop(id, None)
            if not queries:
                self._batches.pop(batch, None)


def _overlap(one: Span, other: Span) -> bool:
    """Return True if both spans ran at some time."""
    if one.started is None or other.started is None or one.done is None or other.done is None:
        return False
    return one.started < other.done and other.started < one.done


def batch_of(span: Span) -> Batch | None:
    """Return the batch that a span ran in; None if it ran in none, or if that is not known."""
    ran = span.engine and span.batch >= 0 and span.started is not None
    return (span.engine, span.replica, span.batch) if ran else None


def whole_trace(get: Callable[[str], QueryTrace | None], query: LiveQuery) -> QueryTrace | None:
    """Return a query's trace together with those of queries that its apps began.

    None for a query that has not ended, or whose trace is no longer kept.
    """
    query_trace = get(query.trace)
    inner = [trace for id in query.traces if (trace := get(id)) is not None]
    if query_trace is None or not inner:
        return query_trace
    if len(inner) == 1 and not query_trace.spans:
        [only] = inner
        return replace(
            only,
            query_id=query_trace.query_id,
            app=query_trace.app,
            started=query_trace.started,
            ended=query_trace.ended,
            wall=query_trace.wall,
        )
    spans = [_prefixed(span, f"{number}/") for number, one in enumerate(inner, start=1) for span in one.spans]
    return replace(query_trace, spans=(*query_trace.spans, *sorted(spans, key=lambda span: span.queued)), graph=None)


def _prefixed(span: Span, path: str) -> Span:
    """Return the span with `path` before all names, so that no other trace has the same.

    Names of the primitives that it depends on, and of the one that caused it, get the same prefix, so that the edges of
    the joined trace stay right.
    """
    parents, more_parents = (tuple(path + name for name in names) for names in (span.parents, span.also))
    cause = path + span.cause if span.cause else ""
    return replace(span, primitive=path + span.primitive, parents=parents, also=more_parents, cause=cause)
