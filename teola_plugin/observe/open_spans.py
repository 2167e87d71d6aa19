"""Spans and queries under way, as a `TraceRecorder` writes them down."""

from __future__ import annotations

from collections import deque

from teola_plugin.observe.spans import Detail, GraphView, PassRun, Span


class OpenSpan:
    """A span under way. Plain slots: this is written several times a primitive."""

    __slots__ = (
        "about", "accepted", "also", "batch", "cached", "cause", "cut", "done", "drafted", "engine", "first",
        "instance", "kind", "merged", "name", "outcome", "queued", "started", "step", "tokens", "written",
    )  # fmt: skip

    def __init__(self, queued: float, about: tuple[str, str, tuple[str, ...], int, int, bool, tuple[str, ...], Detail]):
        self.queued = queued
        self.about = about
        self.started: float | None = None
        self.first: float | None = None
        self.done: float | None = None
        self.outcome = ""
        self.instance = ""
        self.batch = -1
        self.tokens = self.cached = self.step = self.written = self.drafted = self.accepted = 0
        self.cause = self.name = ""
        self.kind, self.engine = about[:2]
        self.also: tuple[str, ...] = ()
        self.cut = False
        """Whether who asked for it has given it up."""
        self.merged = False
        """Whether another span stands for it."""

    def end_by(self, at: float) -> None:
        """Move all times of the span that are later than `at` to `at`."""
        if self.queued > at or (self.done is not None and self.done > at):
            self.queued = min(self.queued, at)
            self.started = None if self.started is None else min(self.started, at)
            self.first = None if self.first is None else min(self.first, at)
            self.done = None if self.done is None else min(self.done, at)


class OpenQuery:
    """A query under way: its live spans by primitive, and all of them in the order they were queued. Of more than
    `most` the first half is kept, and the latest."""

    __slots__ = (
        "_first", "_half", "_latest", "app", "graph", "graph_text", "left_out", "live", "passes", "pgraph_text",
        "started", "tenant", "wall",
    )  # fmt: skip

    def __init__(self, app: str, started: float, wall: float, most: int, tenant: str = "") -> None:
        self.app = app
        self.tenant: str | None = tenant
        """None once that is forgotten: no trace of it is kept."""
        self.started = started
        self.wall = wall
        self.live: dict[str, OpenSpan] = {}
        self.left_out = 0
        self._half = max(1, most // 2)
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
        self.live[primitive] = span
        if len(self._first) < self._half:
            self._first.append((primitive, span))
            return
        self._latest.append((primitive, span))
        if len(self._latest) > self._half:
            name, gone = self._latest.popleft()
            self.left_out += 1
            if self.live.get(name) is gone:
                del self.live[name]


def told(name: str, span: OpenSpan, began: float) -> str:
    engine = f" at {span.engine}" if span.engine else ""
    times = [("queued", span.queued), ("started", span.started), ("first piece", span.first), ("ended", span.done)]
    told = ", ".join(f"{what} {1000 * (at - began):.1f} ms" for what, at in times if at is not None)
    return f"{name}{engine}: {span.outcome or 'not ended'} ({told})"


def closed(query_id: str, app: str, primitive: str, span: OpenSpan, until: float) -> Span:
    """Return the span as it was at `until`, the end of its query."""
    span.end_by(until)
    _, _, scope, depth, size, tentative, parents, detail = span.about
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
        instance=span.instance,
        batch=span.batch,
        scope=scope,
        depth=depth,
        outcome=span.outcome or ("cancelled" if span.done is None else "done"),
        size=size,
        tokens=span.tokens,
        cached=span.cached,
        tentative=tentative,
        parents=parents,
        detail=detail,
        step=span.step,
        written=span.written,
        drafted=span.drafted,
        accepted=span.accepted,
        cause=span.cause,
        also=span.also,
    )
