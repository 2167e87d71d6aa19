"""Traces of the latest queries, for their pages, and which queries shared a batch."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from teola_plugin.observe.recorder import MOST_KEPT
from teola_plugin.observe.spans import QueryTrace, Span
from teola_plugin.server.live_queries import LiveQuery

KEPT = 1000
"""Traces; fewer if they are large."""
Batch = tuple[str, str, int]
"""(engine, instance, number)"""


@dataclass(frozen=True, slots=True)
class Shared:
    """A batch of a query that others were part of, too."""

    engine: str
    instance: str
    batch: int
    """-1 at an engine whose batches have no begin and no end."""
    primitives: tuple[str, ...]
    """Of the query."""
    others: tuple[str, ...]
    """Ids of the other queries' traces."""


class KeptTraces:
    """A `TraceSink`: told on the pool's loop, read on the server's."""

    def __init__(self, keep: int = KEPT, spans: int = MOST_KEPT) -> None:
        self._keep, self._most = keep, spans
        self._lock = threading.Lock()
        self._traces: OrderedDict[str, QueryTrace] = OrderedDict()
        self._batches: dict[Batch, dict[str, None]] = {}
        self._spans = 0

    def __len__(self) -> int:
        return len(self._traces)

    def began(self, query_id: str) -> None: ...

    def ended(self, trace: QueryTrace) -> None:
        with self._lock:
            self._traces[trace.query_id] = trace
            self._spans += len(trace.spans)
            for span in trace.spans:
                if (batch := batch_of(span)) is not None:
                    self._batches.setdefault(batch, {})[trace.query_id] = None
            while len(self._traces) > self._keep or (self._spans > self._most and len(self._traces) > 1):
                self._drop(next(iter(self._traces)))

    def close(self) -> None: ...

    def get(self, id: str) -> QueryTrace | None:
        with self._lock:
            return self._traces.get(id)

    def forget(self, ids: set[str]) -> None:
        with self._lock:
            for id in ids & self._traces.keys():
                self._drop(id)

    def shared(self, trace: QueryTrace, continuous: Collection[str] = ()) -> list[Shared]:
        """Its batches that other queries were part of, in the order in which they began. At `continuous` engines a
        batch is what runs at an instance at the same time."""
        found: dict[Batch, list[Span]] = {}
        for span in sorted(trace.spans, key=lambda one: one.begin):
            if (batch := batch_of(span)) is not None:
                key = (span.engine, span.instance, -1) if span.engine in continuous else batch
                found.setdefault(key, []).append(span)
        with self._lock:
            others = {b: self._beside(trace, b, spans) for b, spans in found.items()}
        return [
            Shared(*batch, tuple(dict.fromkeys(span.primitive for span in spans)), others[batch])
            for batch, spans in found.items()
            if others[batch]
        ]

    def _beside(self, trace: QueryTrace, batch: Batch, spans: Sequence[Span]) -> tuple[str, ...]:
        engine, instance, number = batch
        if number >= 0:
            return tuple(id for id in self._batches.get(batch, ()) if id != trace.query_id)
        met = []
        for id, other in self._traces.items():
            there = (one for one in other.spans if (one.engine, one.instance) == (engine, instance))
            if id != trace.query_id and any(_meet(one, span) for one in there for span in spans):
                met.append(id)
        return tuple(met)

    def _drop(self, id: str) -> None:
        trace = self._traces.pop(id)
        self._spans -= len(trace.spans)
        for batch in {b for span in trace.spans if (b := batch_of(span)) is not None}:
            left = self._batches.get(batch, {})
            left.pop(id, None)
            if not left:
                self._batches.pop(batch, None)


def _meet(one: Span, other: Span) -> bool:
    """Whether both ran at some time."""
    if one.started is None or other.started is None or one.done is None or other.done is None:
        return False
    return one.started < other.done and other.started < one.done


def batch_of(span: Span) -> Batch | None:
    """The batch that it ran in; None where it did not, or where none is known."""
    ran = span.engine and span.batch >= 0 and span.started is not None
    return (span.engine, span.instance, span.batch) if ran else None


def whole_trace(get: Callable[[str], QueryTrace | None], query: LiveQuery) -> QueryTrace | None:
    """None for a query that is not over, or whose trace is no longer kept."""
    own = get(query.trace)
    inner = [found for id in query.traces if (found := get(id)) is not None]
    if own is None or not inner:
        return own
    if len(inner) == 1 and not own.spans:
        [only] = inner
        return replace(only, query_id=own.query_id, app=own.app, started=own.started, ended=own.ended, wall=own.wall)
    spans = [_within(span, f"{number}/") for number, one in enumerate(inner, start=1) for span in one.spans]
    return replace(own, spans=(*own.spans, *sorted(spans, key=lambda span: span.queued)), graph=None)


def _within(span: Span, path: str) -> Span:
    """With names that no other trace has."""
    parents, also = (tuple(path + name for name in names) for names in (span.parents, span.also))
    cause = path + span.cause if span.cause else ""
    return replace(span, primitive=path + span.primitive, parents=parents, also=also, cause=cause)
