"""The recorder of traces: it collects spans while queries run. Only the pool's loop calls it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from teola_plugin.observe.spans import GENERATION, Cost, Detail, GraphView, PassRun, QueryTrace, Span
from teola_plugin.observe.steps import StepLog, Wait


class OpenSpan:
    """A span under way. It has plain slots, since it is written several times for each primitive."""

    __slots__ = (
        "accepted",
        "also",
        "attributes",
        "batch",
        "cached",
        "cause",
        "cut",
        "done",
        "drafted",
        "engine",
        "first",
        "kind",
        "merged",
        "name",
        "outcome",
        "queued",
        "replica",
        "started",
        "step",
        "tokens",
        "written",
    )  # fmt: skip

    def __init__(
        self, queued: float, attributes: tuple[str, str, tuple[str, ...], int, int, bool, tuple[str, ...], Detail]
    ) -> None:
        self.queued = queued
        self.attributes = attributes
        """(kind, engine, scope, depth, size, speculative, parents, detail)"""
        self.started: float | None = None
        self.first: float | None = None
        self.done: float | None = None
        self.outcome = ""
        self.replica = ""
        self.batch = -1
        self.tokens = self.cached = self.step = self.written = self.drafted = self.accepted = 0
        self.cause = self.name = ""
        self.kind, self.engine = attributes[:2]
        self.also: tuple[str, ...] = ()
        self.cut = False
        """True once its caller has given it up."""
        self.merged = False
        """True once another span stands for it."""

    def end_by(self, at: float) -> None:
        """Move all times of the span that are later than `at` to `at`."""
        if self.queued > at or (self.done is not None and self.done > at):
            self.queued = min(self.queued, at)
            self.started = None if self.started is None else min(self.started, at)
            self.first = None if self.first is None else min(self.first, at)
            self.done = None if self.done is None else min(self.done, at)


class OpenQuery:
    """A query under way: its live spans by primitive, and all of them in the order in which they were queued.

    If there are more than `max_spans`, the first half of that number is kept, and the latest.
    """

    __slots__ = (
        "_first", "_half", "_latest", "app", "graph", "graph_text", "left_out", "live", "passes", "pgraph_text",
        "started", "tenant", "wall",
    )  # fmt: skip

    def __init__(self, app: str, started: float, wall: float, max_spans: int, tenant: str = "") -> None:
        self.app = app
        self.tenant: str | None = tenant
        """None once the tenant is forgotten: then no trace of the query is kept."""
        self.started = started
        self.wall = wall
        self.live: dict[str, OpenSpan] = {}
        self.left_out = 0
        self._half = max(1, max_spans // 2)
        self._first: list[tuple[str, OpenSpan]] = []
        self._latest: deque[tuple[str, OpenSpan]] = deque()
        self.graph: GraphView | None = None
        self.graph_text = self.pgraph_text = ""
        self.passes: tuple[PassRun, ...] = ()

    @property
    def order(self) -> list[tuple[str, OpenSpan]]:
        """The spans that are kept, in the order in which they were queued."""
        return [*self._first, *self._latest]

    def add(self, primitive: str, span: OpenSpan) -> None:
        """Add a span that is queued. If there are too many, drop one from the middle: the oldest of the latest half."""
        self.live[primitive] = span
        if len(self._first) < self._half:
            self._first.append((primitive, span))
            return
        self._latest.append((primitive, span))
        if len(self._latest) > self._half:
            name, dropped = self._latest.popleft()
            self.left_out += 1
            if self.live.get(name) is dropped:
                del self.live[name]


def describe_span(name: str, span: OpenSpan, began: float) -> str:
    """Return a line about a span, with its times in milliseconds since `began`."""
    engine = f" at {span.engine}" if span.engine else ""
    times = [("queued", span.queued), ("started", span.started), ("first piece", span.first), ("ended", span.done)]
    listed = ", ".join(f"{event} {1000 * (at - began):.1f} ms" for event, at in times if at is not None)
    return f"{name}{engine}: {span.outcome or 'not ended'} ({listed})"


def close_span(query_id: str, app: str, primitive: str, span: OpenSpan, until: float) -> Span:
    """Return the span as it was at `until`, the end of its query."""
    span.end_by(until)
    _, _, scope, depth, size, speculative, parents, detail = span.attributes
    return Span(
        query_id=query_id,
        app=app,
        primitive=span.name or primitive,
        kind=span.kind,
        queued=span.queued,
        started=span.started,
        first=span.first,
        done=span.done,
        engine=span.engine,
        replica=span.replica,
        batch=span.batch,
        scope=scope,
        depth=depth,
        outcome=span.outcome or ("cancelled" if span.done is None else "done"),
        size=size,
        tokens=span.tokens,
        cached=span.cached,
        speculative=speculative,
        parents=parents,
        detail=detail,
        step=span.step,
        written=span.written,
        drafted=span.drafted,
        accepted=span.accepted,
        cause=span.cause,
        also=span.also,
    )


class TraceSink(Protocol):
    """A listener to queries. The pool's loop calls it, so it must neither wait nor raise."""

    def query_began(self, query_id: str) -> None:
        """Note that a query begins. Context variables are those of its caller."""

    def query_ended(self, trace: QueryTrace) -> None:
        """Note that a query has ended."""

    def close(self) -> None:
        """Pass on all traces so far, within a bounded time. Called by the thread that closes the pool."""


MAX_SPANS = 1024
"""Spans of one query that are kept."""
MAX_KEPT_SPANS = 16 * MAX_SPANS
"""Spans of all finished traces that are kept."""


class TraceRecorder:
    """The recorder of the spans of all running queries, and of the last traces.

    Not thread-safe: all calls come from one thread. Events of a query that is unknown or already finished are ignored,
    since cancelled requests may still report.
    """

    def __init__(
        self,
        keep: int = 64,
        *,
        details: bool = False,
        wall: Callable[[], float] | None = time.time,
        max_spans: int = MAX_SPANS,
        sink: TraceSink | None = None,
    ) -> None:
        """Create a recorder that keeps the last `keep` traces, fewer if they are large.

        Args:
            keep: Number of traces.
            details: True to keep prompts and documents, which are given as `detail`.
            wall: Returns the Unix time, for exporters; None if it is not known (virtual time).
            max_spans: Number of spans of one query that are kept: the first and the latest.
            sink: Hears of every query.
        """
        self.details = details
        self.sink = sink
        self._wall = wall
        self._max_spans = max_spans
        self._open: dict[str, OpenQuery] = {}
        self._keep = keep
        self._traces: deque[QueryTrace] = deque()
        self._tenants: deque[str] = deque()
        """Tenants of the traces, in the same order."""
        self._spans = 0

    @property
    def traces(self) -> tuple[QueryTrace, ...]:
        """The finished traces that are kept, oldest first."""
        return tuple(self._traces)

    @property
    def open_queries(self) -> tuple[str, ...]:
        return tuple(self._open)

    def get(self, query_id: str) -> QueryTrace | None:
        """Return the trace of a finished query, if it is kept."""
        return next((t for t in reversed(self._traces) if t.query_id == query_id), None)

    def begin(self, query_id: str, app: str, at: float, *, ago: float = 0.0, tenant: str = "") -> None:
        """Note that a query starts, or did so `ago` seconds before. `at`: seconds on the runtime's clock.

        The sink for traces, if there is one, is informed at once.
        """
        self._open[query_id] = OpenQuery(app, at, self._wall() - ago if self._wall else 0.0, self._max_spans, tenant)
        if self.sink is not None:
            self.sink.query_began(query_id)

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
        speculative: bool = False,
        parents: tuple[str, ...] = (),
        detail: Detail = (),
        step: int = 0,
        cause: str = "",
    ) -> None:
        """Record that a primitive entered a queue. A second time is a retry, with a span of its own."""
        query = self._open.get(query_id)
        if query is None:
            return
        span = OpenSpan(at, (kind, engine, scope, depth, size, speculative, parents, detail if self.details else ()))
        span.step, span.cause = step, cause
        query.add(primitive, span)

    def share_span(self, query_id: str, primitive: str, of: str, *, kind: str = "") -> bool:
        """Record that a primitive has the same requests as `of`, whose span stands for both.

        With a `kind`, the span gets the name and kind of the primitive, which describe it better. Return False if `of`
        has no span.
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
        """Return the primitives for which the span of this one stands.

        One span stands for several primitives where an engine ran them as one request.
        """
        span = self._find(query_id, primitive)
        return (primitive,) if span is None else tuple(dict.fromkeys((primitive, *span.also)))

    def merge(
        self,
        query_id: str,
        primitive: str,
        merged_names: Iterable[str],
        *,
        kind: str = "",
        name: str = "",
        engine: str | None = None,
    ) -> None:
        """Merge the spans of other primitives into that of one, with a kind, a name and an engine if given."""
        query, span = self._open.get(query_id), self._find(query_id, primitive)
        if query is None or span is None:
            return
        if kind:
            span.kind, span.first = kind, None
        span.engine = span.engine if engine is None else engine
        if name and not span.name:
            span.name, span.also = name, (*span.also, primitive)
        for merged_name in merged_names:
            merged = query.live.get(merged_name)
            if merged is None or merged is span:
                continue
            merged.merged, query.live[merged_name] = True, span
            span.written += merged.tokens
            span.drafted, span.accepted = span.drafted + merged.drafted, span.accepted + merged.accepted
            span.also = (*span.also, merged_name)
            if merged.done is not None:
                span.done = max(span.done or merged.done, merged.done)

    def correct_times(self, query_id: str, primitive: str, began: float | None, end: float | None) -> None:
        """Correct the times of a primitive that become known later only; `began` is None if it never ran.

        Times are seconds on the runtime's clock. An `end` of None leaves the recorded one.
        """
        span = self._find(query_id, primitive)
        if span is not None:
            span.queued = span.queued if began is None else min(span.queued, began)
            span.started, span.done = began, span.done if end is None else end

    def started(self, query_id: str, primitive: str, at: float, *, replica: str = "", batch: int = -1) -> None:
        """Record that a primitive started. Later batches of the same primitive keep the first start."""
        span = self._find(query_id, primitive)
        if span is None:
            return
        if span.started is None:
            span.started = at
        span.replica = replica or span.replica
        span.batch = batch if batch >= 0 else span.batch

    def first(self, query_id: str, primitive: str, at: float) -> None:
        """Record that a piece came. Only the first one counts.

        `at`: seconds on the runtime's clock. Unknown queries and primitives are ignored.
        """
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
            span.done, span.queued = at, min(span.queued, at)  # its queueing may be recorded late
        span.cut = outcome == "cancelled"  # until others are known to go on with it
        span.outcome = outcome
        span.tokens, span.cached = tokens or span.tokens, cached or span.cached

    def goes_on(self, query_id: str, primitive: str, at: float) -> None:
        """Record that one of several requests has ended: the primitive ends with the last of them."""
        span = self._find(query_id, primitive)
        if span is not None and span.done is not None and span.attributes[4] > 1:
            span.done = max(span.done, at)

    def wrote(self, query_id: str, primitive: str, tokens: int) -> None:
        """Set the number of generated tokens of a generation without a decoding of its own."""
        span = self._find(query_id, primitive)
        if span is not None and span.kind == GENERATION:
            span.written = tokens

    def verified(self, query_id: str, primitive: str, drafted: int, accepted: int) -> None:
        """Record how many tokens were drafted for a text, and how many of them are part of it."""
        span = self._find(query_id, primitive)
        if span is not None:
            span.drafted, span.accepted = drafted, accepted

    def settle(self, query_id: str, primitive: str, outcome: str) -> None:
        """Set the outcome of a value that is known later only: `claimed` by the original, or `wasted`."""
        span = self._find(query_id, primitive)
        if span is not None:
            span.outcome = outcome

    def at_step(self, query_id: str, primitive: str, step: int) -> None:
        """Set the step of the original to which a primitive belongs, if it becomes known later only."""
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
        cost_of: Callable[[Sequence[Span]], Cost] | None = None,
    ) -> QueryTrace | None:
        """End a query at `at`. Return its trace, which is also kept, or None if the query is unknown or finished.

        Open spans count as cancelled. Times later than `at` are cut off. `cost_of`: returns the cost of a query with
        these spans.
        """
        query = self._open.pop(query_id, None)
        if query is None:
            return None
        spans = tuple(close_span(query_id, query.app, name, span, at) for name, span in query.order if not span.merged)
        trace = QueryTrace(
            query_id,
            query.app,
            query.started,
            at,
            spans,
            query.graph_text,
            query.pgraph_text,
            query.passes,
            outcome,
            query.graph,
            query.wall,
            query.left_out,
            steps.steps() if steps is not None else (),
            steps.left_out if steps is not None else 0,
            waits,
            None if cost_of is None else cost_of(spans),
        )
        if query.tenant is not None:
            self._keep_trace(trace, query.tenant)
        if self.sink is not None:
            self.sink.query_ended(trace)
        return trace

    def story(self, query_id: str, max_lines: int = 50) -> tuple[str, ...]:
        """Return one line for each of the last `max_lines` primitives of a running query.

        A `QueryError` carries these lines, so that a failed query says how far it came. Return () once the query has
        ended.
        """
        query = self._open.get(query_id)
        if query is None:
            return ()
        return tuple(describe_span(name, span, query.started) for name, span in query.order[-max_lines:])

    def forget(self, tenant: str) -> None:
        """Drop all traces of a tenant's queries, running ones included."""
        for query in self._open.values():
            query.tenant = None if query.tenant == tenant else query.tenant
        rest = [(trace, owner) for trace, owner in zip(self._traces, self._tenants, strict=True) if owner != tenant]
        self._traces, self._tenants = deque(trace for trace, _ in rest), deque(owner for _, owner in rest)
        self._spans = sum(map(_size, self._traces))

    def _keep_trace(self, trace: QueryTrace, tenant: str) -> None:
        """Keep a finished trace, and drop the oldest ones if there are too many traces or spans."""
        self._traces.append(trace)
        self._tenants.append(tenant)
        self._spans += _size(trace)
        while len(self._traces) > self._keep or (self._spans > MAX_KEPT_SPANS and len(self._traces) > 1):
            self._spans -= _size(self._traces.popleft())
            self._tenants.popleft()

    def _find(self, query_id: str, primitive: str) -> OpenSpan | None:
        query = self._open.get(query_id)
        return None if query is None else query.live.get(primitive)


def _size(trace: QueryTrace) -> int:
    return len(trace.spans) + len(trace.steps)
