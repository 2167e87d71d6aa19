"""Collects spans while queries run; the pool's loop calls it, and nothing else does."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from teola_plugin.observe.open_spans import OpenQuery, OpenSpan, closed, told
from teola_plugin.observe.spans import GENERATION, Detail, GraphView, PassRun, QueryTrace
from teola_plugin.observe.steps import StepLog
from teola_plugin.observe.waits import Wait


class TraceSink(Protocol):
    """Is told of queries, by the pool's loop: it must neither wait nor raise."""

    def began(self, query_id: str) -> None:
        """A query begins. Context variables are those of its caller."""

    def ended(self, trace: QueryTrace) -> None:
        """A query that began has ended."""

    def close(self) -> None:
        """Pass on all traces so far, within a bounded time. Called by the thread that closes the pool."""


MOST_SPANS = 1024
"""Spans of one query that are kept."""
MOST_KEPT = 16 * MOST_SPANS
"""Spans of all finished traces that are kept."""


class TraceRecorder:
    """Owns the spans of every running query and keeps the last `keep` traces, fewer if they are large. Of a query with
    more than `most` spans the first and the latest are kept, the trace says how many are not.

    Not thread-safe: all calls come from one thread. Events of a query that is unknown or already finished are
    ignored, since cancelled work may still report. `details=True` keeps prompts and documents given as `detail`.
    `wall` gives the Unix time, for exporters; None leaves it unknown (virtual time). `sink` is told of every query.
    """

    def __init__(
        self,
        keep: int = 64,
        *,
        details: bool = False,
        wall: Callable[[], float] | None = time.time,
        most: int = MOST_SPANS,
        sink: TraceSink | None = None,
    ) -> None:
        self.details = details
        self.sink = sink
        self._wall = wall
        self._most = most
        self._open: dict[str, OpenQuery] = {}
        self._keep = keep
        self._kept: deque[QueryTrace] = deque()
        self._tenants: deque[str] = deque()
        """Whose they are."""
        self._spans = 0

    @property
    def traces(self) -> tuple[QueryTrace, ...]:
        """The finished traces that are kept, oldest first."""
        return tuple(self._kept)

    @property
    def open_queries(self) -> tuple[str, ...]:
        return tuple(self._open)

    def get(self, query_id: str) -> QueryTrace | None:
        """The kept trace of a finished query."""
        return next((t for t in reversed(self._kept) if t.query_id == query_id), None)

    def begin(self, query_id: str, app: str, at: float, *, ago: float = 0.0, tenant: str = "") -> None:
        """A query starts, or did so `ago` seconds; `at` as everywhere in seconds on the runtime's clock."""
        self._open[query_id] = OpenQuery(app, at, self._wall() - ago if self._wall else 0.0, self._most, tenant)
        if self.sink is not None:
            self.sink.began(query_id)

    def describe(
        self,
        query_id: str,
        *,
        graph: GraphView | None = None,
        graph_text: str = "",
        pgraph_text: str = "",
        passes: tuple[PassRun, ...] = (),
    ) -> None:
        """Set the plan of a query. Call it again when the graph has grown."""
        query = self._open.get(query_id)
        if query is None:
            return
        query.graph = graph or query.graph
        query.graph_text = graph_text or query.graph_text
        query.pgraph_text = pgraph_text or query.pgraph_text
        query.passes = passes or query.passes

    def queued(
        self,
        query_id: str,
        primitive: str,
        at: float,
        *,
        kind: str,
        engine: str = "",
        scope: tuple[str, ...] = (),
        depth: int = 0,
        size: int = 1,
        tentative: bool = False,
        parents: tuple[str, ...] = (),
        detail: Detail = (),
        step: int = 0,
        cause: str = "",
    ) -> None:
        """A primitive entered a queue. A second time is a retry: it gets a span of its own."""
        query = self._open.get(query_id)
        if query is None:
            return
        about = (kind, engine, scope, depth, size, tentative, parents, detail if self.details else ())
        span = OpenSpan(at, about)
        span.step, span.cause = step, cause
        query.add(primitive, span)

    def same(self, query_id: str, primitive: str, of: str, *, kind: str = "") -> bool:
        """A primitive is the very work of another, whose span stands for both. Whether that is known.

        With a `kind` it knows better what that work is: name and kind are its own from now on.
        """
        query, span = self._open.get(query_id), self._find(query_id, of)
        if query is None or span is None:
            return False
        if primitive != of:
            query.live[primitive] = span
            span.also = (*span.also, primitive)
        if kind and not span.name:
            span.name, span.kind, span.also = primitive, kind, (*span.also, of)
        return True

    def names(self, query_id: str, primitive: str) -> tuple[str, ...]:
        """The primitives that the span of this one stands for."""
        span = self._find(query_id, primitive)
        return (primitive,) if span is None else tuple(dict.fromkeys((primitive, *span.also)))

    def merge(
        self,
        query_id: str,
        primitive: str,
        others: Iterable[str],
        *,
        kind: str = "",
        name: str = "",
        engine: str | None = None,
    ) -> None:
        """One span from now on, where there were several: of that kind, name and engine, if those are given."""
        query, span = self._open.get(query_id), self._find(query_id, primitive)
        if query is None or span is None:
            return
        if kind:
            span.kind, span.first = kind, None
        span.engine = span.engine if engine is None else engine
        if name and not span.name:
            span.name, span.also = name, (*span.also, primitive)
        for other in others:
            found = query.live.get(other)
            if found is None or found is span:
                continue
            found.merged, query.live[other] = True, span
            span.written += found.tokens
            span.drafted, span.accepted = span.drafted + found.drafted, span.accepted + found.accepted
            span.also = (*span.also, other)
            if found.done is not None:
                span.done = max(span.done or found.done, found.done)

    def lasted(self, query_id: str, primitive: str, began: float | None, ended: float | None) -> None:
        """Correct the times of a primitive that become known later only; `began` is None if it never ran."""
        span = self._find(query_id, primitive)
        if span is not None:
            span.queued = span.queued if began is None else min(span.queued, began)
            span.started, span.done = began, span.done if ended is None else ended

    def started(self, query_id: str, primitive: str, at: float, *, instance: str = "", batch: int = -1) -> None:
        """Record that a primitive started. Later batches of the same primitive keep the first start."""
        span = self._find(query_id, primitive)
        if span is None:
            return
        if span.started is None:
            span.started = at
        span.instance = instance or span.instance
        span.batch = batch if batch >= 0 else span.batch

    def first(self, query_id: str, primitive: str, at: float) -> None:
        """A piece came; only the first one counts."""
        span = self._find(query_id, primitive)
        if span is not None and span.first is None:
            span.first = at

    def done(
        self,
        query_id: str,
        primitive: str,
        at: float,
        *,
        outcome: str = "done",
        tokens: int = 0,
        cached: int = 0,
    ) -> None:
        """Record that a primitive ended. A later call may add facts, but does not move the end."""
        span = self._find(query_id, primitive)
        if span is None:
            return
        if span.done is None or (span.cut and outcome == "done"):
            span.done, span.queued = at, min(span.queued, at)  # that it waited may be heard late
        span.cut = outcome == "cancelled"  # until it is known that others go on with it
        span.outcome = outcome
        span.tokens, span.cached = tokens or span.tokens, cached or span.cached

    def goes_on(self, query_id: str, primitive: str, at: float) -> None:
        """One of several requests has ended: it ends with the last of them."""
        span = self._find(query_id, primitive)
        if span is not None and span.done is not None and span.about[4] > 1:
            span.done = max(span.done, at)

    def wrote(self, query_id: str, primitive: str, tokens: int) -> None:
        """Set the number of generated tokens of a generation without a decoding of its own."""
        span = self._find(query_id, primitive)
        if span is not None and span.kind == GENERATION:
            span.written = tokens

    def verified(self, query_id: str, primitive: str, drafted: int, accepted: int) -> None:
        """Tokens that were drafted for its text, and those of them that it has."""
        span = self._find(query_id, primitive)
        if span is not None:
            span.drafted, span.accepted = drafted, accepted

    def settle(self, query_id: str, primitive: str, outcome: str) -> None:
        """Set the outcome of a value that is known later only: `claimed` by the original, or `wasted`."""
        span = self._find(query_id, primitive)
        if span is not None:
            span.outcome = outcome

    def at_step(self, query_id: str, primitive: str, step: int) -> None:
        """Which step of the plain object it belongs to, known only later."""
        span = self._find(query_id, primitive)
        if span is not None:
            span.step = step

    def finish(
        self,
        query_id: str,
        at: float,
        *,
        outcome: str = "done",
        steps: StepLog | None = None,
        waits: tuple[Wait, ...] | None = None,
    ) -> QueryTrace | None:
        """The query ended: its trace, which is also kept. Spans still open count as cancelled; what happened after `at`
        is none of its time.

        None when the query is unknown or already finished.
        """
        query = self._open.pop(query_id, None)
        if query is None:
            return None
        trace = QueryTrace(
            query_id,
            query.app,
            query.started,
            at,
            tuple(closed(query_id, query.app, name, span, at) for name, span in query.order if not span.merged),
            query.graph_text,
            query.pgraph_text,
            query.passes,
            outcome,
            query.graph,
            query.wall,
            query.left_out,
            steps.told() if steps is not None else (),
            steps.left_out if steps is not None else 0,
            waits,
        )
        if query.tenant is not None:
            self._keep_trace(trace, query.tenant)
        if self.sink is not None:
            self.sink.ended(trace)
        return trace

    def story(self, query_id: str, most: int = 50) -> tuple[str, ...]:
        """Return one line for each of the last `most` primitives of a running query."""
        query = self._open.get(query_id)
        lines = [told(name, span, query.started) for name, span in query.order[-most:]] if query is not None else []
        return tuple(lines)

    def forget(self, tenant: str) -> None:
        """Drop all traces of a tenant's queries, running ones included."""
        for query in self._open.values():
            query.tenant = None if query.tenant == tenant else query.tenant
        rest = [(trace, whose) for trace, whose in zip(self._kept, self._tenants, strict=True) if whose != tenant]
        self._kept, self._tenants = deque(trace for trace, _ in rest), deque(whose for _, whose in rest)
        self._spans = sum(map(_size, self._kept))

    def _keep_trace(self, trace: QueryTrace, tenant: str) -> None:
        self._kept.append(trace)
        self._tenants.append(tenant)
        self._spans += _size(trace)
        while len(self._kept) > self._keep or (self._spans > MOST_KEPT and len(self._kept) > 1):
            self._spans -= _size(self._kept.popleft())
            self._tenants.popleft()

    def _find(self, query_id: str, primitive: str) -> OpenSpan | None:
        query = self._open.get(query_id)
        return None if query is None else query.live.get(primitive)


def _size(trace: QueryTrace) -> int:
    return len(trace.spans) + len(trace.steps)
