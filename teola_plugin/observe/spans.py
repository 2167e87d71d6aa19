"""What happened to a query: one span a primitive, put together into a trace.

Times are seconds on the runtime's monotonic clock. Kinds are the names of `PrimitiveKind` as text, because `observe`
lies below `graph` and works on plain data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from teola_plugin.observe.steps import Step

GraphNode = tuple[str, str, str, int, bool]
"""(id, kind, engine, depth, tentative)"""
GraphEdge = tuple[str, str, Literal["data", "order"]]
"""(from, to, "data" or "order")"""
PassRun = tuple[str, bool, float]
"""(pass name, whether it changed the graph, seconds)"""
Detail = tuple[tuple[str, str], ...]
"""(key, value) pairs; empty unless prompts and documents were asked for."""

UNUSED = frozenset({"wasted", "cancelled"})
"""Outcomes of work whose value nobody used."""


@dataclass(frozen=True, slots=True)
class Span:
    """One primitive of one query, from entering a queue to its last piece."""

    query_id: str
    app: str
    primitive: str
    kind: str
    """Name of the `PrimitiveKind`, e.g. `EMBEDDING`."""
    queued: float
    started: float | None = None
    first: float | None = None
    """When the first piece came; None where nothing streams."""
    done: float | None = None
    engine: str = ""
    """Empty for primitives that run at the client."""
    instance: str = ""
    batch: int = -1
    """Id of the batch it was last part of; -1 where there was none."""
    scope: tuple[str, ...] = ()
    depth: int = 0
    outcome: str = "done"
    """done, claimed, failed, cancelled or wasted."""
    size: int = 1
    """Requests."""
    tokens: int = 0
    cached: int = 0
    """Of the tokens, those found in a prefix cache."""
    tentative: bool = False
    parents: tuple[str, ...] = ()
    """Ids of the primitives it waited for."""
    detail: Detail = ()
    step: int = 0
    """Id of the step of the plain object that it belongs to, by a call or as planned; 0 where that is not known."""

    @property
    def begin(self) -> float:
        """When it began to run; when it was queued, if it never did."""
        return self.queued if self.started is None else self.started

    @property
    def seconds(self) -> float:
        """Time it ran; 0 when it did not finish."""
        return 0.0 if self.done is None else max(0.0, self.done - self.begin)

    @property
    def unused(self) -> bool:
        return self.outcome in UNUSED


@dataclass(frozen=True, slots=True)
class PathStep:
    """One span of the critical path, and how long it held up the query. All in seconds, none overlaps another."""

    span: Span
    idle: float
    """Before it was queued: nothing on the path was running."""
    waited: float
    """In the engine's queue."""
    seconds: float
    """Running, after the step before it was done."""

    @property
    def total(self) -> float:
        return self.idle + self.waited + self.seconds


@dataclass(frozen=True, slots=True)
class GraphView:
    """An e-graph as plain data, for drawing."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]

    @classmethod
    def of_spans(cls, spans: Iterable[Span]) -> GraphView:
        """The graph as far as the spans tell: every wait is drawn as a data edge."""
        latest = {s.primitive: s for s in spans}
        nodes = tuple((s.primitive, s.kind, s.engine, s.depth, s.tentative) for s in latest.values())
        edges: tuple[GraphEdge, ...] = tuple(
            (p, s.primitive, "data") for s in latest.values() for p in s.parents if p in latest
        )
        return cls(nodes, edges)


@dataclass(frozen=True, slots=True)
class QueryTrace:
    """Everything observed about one finished query."""

    query_id: str
    app: str
    started: float
    ended: float
    spans: tuple[Span, ...] = ()
    """In the order they were queued. A primitive that was retried has several; the last one counts."""
    graph_text: str = ""
    """The e-graph."""
    pgraph_text: str = ""
    """The graph before the passes."""
    passes: tuple[PassRun, ...] = ()
    outcome: str = "done"
    graph: GraphView | None = None
    wall: float = 0.0
    """Unix time of `started`; 0 where unknown (virtual time)."""
    left_out: int = 0
    """Spans between the first and the latest that were not kept, because there were too many."""
    steps: tuple[Step, ...] = ()
    """Of the plain object, where it told of any, in the order in which they began."""
    steps_left_out: int = 0
    """Those between the first and the latest that were not kept."""

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended - self.started)

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the engines that were used, in the order of first use; the client is not among them."""
        return tuple(dict.fromkeys(s.engine for s in sorted(self.spans, key=lambda s: s.begin) if s.engine))

    def view(self) -> GraphView:
        """The e-graph for drawing; worked out from the spans where none was recorded."""
        return self.graph or GraphView.of_spans(self.spans)

    def critical_path(self) -> tuple[PathStep, ...]:
        """The chain of spans that made the query take as long as it did, in order.

        Walks back from the span that finished last (unused work aside), always to the parent that finished last.
        A parent that outlasted its child (it streamed to it) did not hold it up at its end, so it is not followed.
        The steps' totals add up to the time from the query's start to the end of the last step.
        """
        chain = self._latest_chain()
        steps, at = [], self.started
        for span in chain:
            assert span.done is not None
            started = max(at, min(span.begin, span.done))
            idle = max(0.0, min(span.queued, started) - at)
            steps.append(PathStep(span, idle, started - at - idle, max(0.0, span.done - started)))
            at = max(at, span.done)
        return tuple(steps)

    def _latest_chain(self) -> list[Span]:
        finished = {s.primitive: s for s in self.spans if s.done is not None}
        used = [s for s in finished.values() if not s.unused]
        span = max(used or finished.values(), key=lambda s: (s.done, -s.depth), default=None)
        chain: list[Span] = []
        while span is not None:
            chain.append(span)
            del finished[span.primitive]  # a span is visited once, whatever the parents say
            parents = [finished[p] for p in span.parents if p in finished]
            in_time = [p for p in parents if p.done <= span.done]  # type: ignore[operator]
            span = max(in_time, key=lambda s: s.done or 0.0, default=None)
        return chain[::-1]

    def busy(self, engine: str) -> float:
        """Seconds during which at least one of this query's spans ran on `engine` ("" is the client)."""
        runs = sorted((s.begin, s.done) for s in self.spans if s.engine == engine and s.done is not None)
        total, until = 0.0, float("-inf")
        for begin, done in runs:
            total += max(0.0, done - max(begin, until))
            until = max(until, done)
        return total

    def wasted(self) -> tuple[int, int]:
        """(spans, tokens) of work of engines that was begun and that nobody used."""
        lost = [s for s in self.spans if s.unused and s.started is not None and s.engine]
        return len(lost), sum(s.tokens for s in lost)

    def summary(self) -> dict[str, Any]:
        """The figures of the query as JSON-ready data; all times in seconds."""
        path = self.critical_path()
        lost, lost_tokens = self.wasted()
        return {
            "query_id": self.query_id,
            "app": self.app,
            "outcome": self.outcome,
            "seconds": self.seconds,
            "primitives": len({s.primitive for s in self.spans}),
            "requests": sum(s.size for s in self.spans),
            "tokens": sum(s.tokens for s in self.spans),
            "cached_tokens": sum(s.cached for s in self.spans),
            "work_seconds": sum(s.seconds for s in self.spans),
            "critical_primitives": len(path),
            "critical_seconds": sum(step.seconds for step in path),
            "critical_waited": sum(step.waited + step.idle for step in path),
            "wasted_primitives": lost,
            "wasted_tokens": lost_tokens,
            "left_out": self.left_out,
            "steps": len(self.steps),
            "busy": {engine: self.busy(engine) for engine in self.engines},
            "passes": [name for name, fired, _ in self.passes if fired],
        }
