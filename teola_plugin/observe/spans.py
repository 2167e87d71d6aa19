"""What happened to a query: one span a primitive, put together into a trace.

Times are seconds on the runtime's monotonic clock. Kinds are the names of `PrimitiveKind` as text, because `observe`
lies below `graph` and works on plain data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from teola_plugin.errors import RegistrationError
from teola_plugin.observe.critical_path import PathStep, critical_path
from teola_plugin.observe.steps import Step, Wait

GraphNode = tuple[str, str, str, int, bool]
"""(id, kind, engine, depth, speculative)"""
GraphEdge = tuple[str, str, Literal["data", "order"]]
"""(from, to, "data" or "order")"""
PassRun = tuple[str, bool, float]
"""(pass name, whether it changed the graph, seconds)"""
Detail = tuple[tuple[str, str], ...]
"""(key, value) pairs; empty unless prompts and documents were asked for."""

GENERATION = "GENERATION"
"""The kind of a span that is a prefilling and its decoding."""
UNUSED = frozenset({"wasted", "cancelled"})
"""Outcomes of work whose value nobody used."""


@dataclass(frozen=True, slots=True)
class Span:
    """One primitive of one query, from entering a queue to its last piece."""

    query_id: str
    app: str
    primitive: str
    kind: str
    """Name of the `PrimitiveKind`, e.g. `EMBEDDING`; `GENERATION` for a prefilling and its decoding of which nobody can
    tell when the one ended and the other began."""
    queued: float
    started: float | None = None
    first: float | None = None
    """Time of the first piece; None if nothing was streamed."""
    done: float | None = None
    engine: str = ""
    """Empty for primitives that run at the client."""
    replica: str = ""
    batch: int = -1
    """Id of the last batch of which it was a part; -1 if there was none."""
    scope: tuple[str, ...] = ()
    depth: int = 0
    outcome: str = "done"
    """done, claimed, failed, cancelled or wasted."""
    size: int = 1
    """Number of requests."""
    tokens: int = 0
    """Number of tokens of the prompt; for a decoding, of the text."""
    cached: int = 0
    """Number of these tokens that were found in a prefix cache."""
    speculative: bool = False
    parents: tuple[str, ...] = ()
    """Ids of the primitives it waited for."""
    detail: Detail = ()
    step: int = 0
    """Id of the original's step to which it belongs, by a call or as planned; 0 if that is not known."""
    written: int = 0
    """Tokens that a `GENERATION` wrote."""
    drafted: int = 0
    """Tokens of a decoding, or of a `GENERATION`, that were drafted for the model to verify."""
    accepted: int = 0
    """Those of them that are part of its text."""
    cause: str = ""
    """Id of the primitive whose event let it begin, as the scheduler knows; empty if that is not known."""
    also: tuple[str, ...] = ()
    """Ids of other primitives with the same requests: the decoding of a `GENERATION`, those of later subplans that have
    adopted it."""

    @property
    def begin(self) -> float:
        """The time at which it started; when it was queued, if it never started."""
        return self.queued if self.started is None else self.started

    @property
    def seconds(self) -> float:
        """Time it ran; 0 when it did not finish."""
        return 0.0 if self.done is None else max(0.0, self.done - self.begin)

    @property
    def unused(self) -> bool:
        return self.outcome in UNUSED


@dataclass(frozen=True, slots=True)
class GraphView:
    """An e-graph as plain data, for drawing."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]

    @classmethod
    def of_spans(cls, spans: Iterable[Span]) -> GraphView:
        """Return the graph as far as it is known from spans: every wait is drawn as a data edge."""
        latest = {s.primitive: s for s in spans}
        nodes = tuple((s.primitive, s.kind, s.engine, s.depth, s.speculative) for s in latest.values())
        edges: tuple[GraphEdge, ...] = tuple(
            (p, s.primitive, "data") for s in latest.values() for p in s.parents if p in latest
        )
        return cls(nodes, edges)


# ------------------------------------------------------------ tokens and dollars


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a model, in dollars per million tokens.

    Args:
        input: Of tokens of prompts.
        output: Of tokens of answers, those of reasoning included.
        cached_input: Of tokens of prompts that the provider found in its cache; None if they cost as much as others.

    Raises:
        RegistrationError: A price is no number of 0 or more.
    """

    input: float
    output: float
    cached_input: float | None = None

    def __post_init__(self) -> None:
        prices = {"input": self.input, "output": self.output}
        if self.cached_input is not None:
            prices["cached_input"] = self.cached_input
        for name, value in prices.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise RegistrationError(
                    f"the price {name}={value!r} is no number of dollars.",
                    hint="give dollars per million tokens: Price(input=0.15, output=0.6)",
                )

    def dollars(self, input_tokens: float, output_tokens: float, cached_tokens: float = 0) -> float:
        """Return what these tokens cost. `cached_tokens` are among the `input_tokens`."""
        cached_price = self.input if self.cached_input is None else self.cached_input
        new_tokens = max(0, input_tokens - cached_tokens)
        return (new_tokens * self.input + cached_tokens * cached_price + output_tokens * self.output) / 1e6


def checked_prices(prices: Any) -> Mapping[str, Price]:
    """Return a price table as it is. Raise `RegistrationError` unless it has a `Price` for each name of a model."""
    example = 'write prices={"gpt-4o-mini": Price(input=0.15, output=0.6)}, with `from teola_plugin import Price`'
    if not isinstance(prices, Mapping):
        raise RegistrationError(f"prices is a {type(prices).__name__}, which is no table of prices.", hint=example)
    for name, price in prices.items():
        if not isinstance(name, str) or not name:
            raise RegistrationError(f"prices has the key {name!r}, which is no name of a model.", hint=example)
        if not isinstance(price, Price):
            raise RegistrationError(f"the price of {name!r} is {price!r}, which is no Price.", hint=example)
    return dict(prices)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The calls of one model that were really made, and the tokens that they reported."""

    model: str
    price: Price | None = None
    is_wasted: bool = False
    """True for calls that were made ahead of time and whose results nobody used."""
    calls: int = 0
    calls_without_tokens: int = 0
    """Those of the calls that reported no tokens."""
    input_tokens: int = 0
    cached_tokens: int = 0
    """Those of the input tokens that the provider found in its cache."""
    output_tokens: int = 0

    @property
    def dollars(self) -> float | None:
        """The dollars of all reported tokens; None without a price, and if no call has reported any tokens."""
        if self.price is None or self.calls <= self.calls_without_tokens:
            return None
        return self.price.dollars(self.input_tokens, self.output_tokens, self.cached_tokens)

    def plus(self, other: ModelCost) -> ModelCost:
        """Return the sum of two rows of the same model."""
        numbers = ("calls", "calls_without_tokens", "input_tokens", "cached_tokens", "output_tokens")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in numbers})

    def text(self, queries: int = 1) -> str:
        """Return a line on the calls, per query: `gpt-4o-mini  2.0 calls  1,200.0 tokens in  80.0 out  $0.000228`."""
        cached = f" ({self.cached_tokens / queries:,.1f} cached)" if self.cached_tokens else ""
        line = (
            f"{self.model or 'a model without a name'}  {self.calls / queries:,.1f} calls  "
            f"{self.input_tokens / queries:,.1f} tokens in{cached}  {self.output_tokens / queries:,.1f} out"
        )
        if self.price is None:
            return f"{line}  no price"
        line += "" if self.dollars is None else f"  ${self.dollars / queries:.6f}"
        silent = self.calls_without_tokens
        return f"{line}  ({silent / queries:,.1f} calls reported no tokens)" if silent else line


@dataclass(frozen=True, slots=True)
class Cost:
    """Calls of models, their tokens and dollars: of one query, or of several."""

    models: tuple[ModelCost, ...] = ()
    """A row for each model, and another one for each model of which calls were wasted."""
    queries: int = 1

    @classmethod
    def total(cls, rows: Iterable[ModelCost], queries: int = 1) -> Cost:
        """Return the cost with the rows of each model added up: used ones first, then wasted ones."""
        sums: dict[tuple[bool, str], ModelCost] = {}
        for row in rows:
            key = (row.is_wasted, row.model)
            sums[key] = sums[key].plus(row) if key in sums else row
        return cls(tuple(sums[key] for key in sorted(sums, key=lambda key: key[0])), queries)

    @property
    def dollars(self) -> float | None:
        """The dollars of all calls, wasted ones included; None if those of one model are not known."""
        amounts = [row.dollars for row in self.models]
        return None if None in amounts else float(sum(amount for amount in amounts if amount is not None))

    @property
    def wasted(self) -> Cost:
        """The part of it for which prefetched calls that nobody used are the reason."""
        return Cost(tuple(row for row in self.models if row.is_wasted), self.queries)

    @property
    def unpriced(self) -> tuple[str, ...]:
        """The models that were called and are not in the price table."""
        return tuple(dict.fromkeys(row.model for row in self.models if row.price is None))

    def facts(self) -> dict[str, Any]:
        """Return the figures of a query, on average, as JSON-ready data; unknown dollars are None."""
        names = ("calls", "calls_without_tokens", "input_tokens", "cached_tokens", "output_tokens")
        figures: dict[str, Any] = {
            name: sum(getattr(row, name) for row in self.models) / self.queries for name in names
        }
        wasted, dollars, wasted_dollars = self.wasted, self.dollars, self.wasted.dollars
        return {
            "queries": self.queries,
            **figures,
            "dollars": None if dollars is None else dollars / self.queries,
            "wasted_calls": sum(row.calls for row in wasted.models) / self.queries,
            "wasted_dollars": None if wasted_dollars is None else wasted_dollars / self.queries,
            "unpriced": list(self.unpriced),
        }

    def text(self) -> str:
        """Return a line for each model, for wasted calls, and for the sum: means of a query."""
        lines = [f"{'wasted: ' if row.is_wasted else ''}{row.text(self.queries)}" for row in self.models]
        if not lines:
            return "No model was called."
        amounts = [row.dollars for row in self.models if row.dollars is not None]
        if not amounts:
            return "\n".join(lines)
        total = f"${sum(amounts) / self.queries:.6f} per query"
        missing = [name or "a model without a name" for name in self.unpriced]
        return "\n".join([*lines, f"{total}, without {', '.join(missing)} (no price)" if missing else total])


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
    """Number of spans between the first and the latest that were not kept, because there were too many."""
    steps: tuple[Step, ...] = ()
    """Steps of the original, if it reported any, in the order in which they began."""
    steps_left_out: int = 0
    """Number of steps between the first and the latest that were not kept."""
    waits: tuple[Wait, ...] | None = None
    """Waits of the original; None if there was no original."""
    cost: Cost | None = None
    """Calls of models, their tokens and dollars, of an app with a price table; None without one."""

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended - self.started)

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the engines that were used, in the order of first use; the client is not among them."""
        return tuple(dict.fromkeys(s.engine for s in sorted(self.spans, key=lambda s: s.begin) if s.engine))

    def view(self) -> GraphView:
        """Return the e-graph for drawing, made from the spans if none was recorded."""
        return self.graph or GraphView.of_spans(self.spans)

    def finished(self) -> dict[str, Span]:
        """Return the finished spans by id of their primitive, and by ids of other primitives that are the same request.

        For a primitive that was retried, the last span.
        """
        shared = {name: s for s in self.spans if s.done is not None for name in s.also}
        return shared | {s.primitive: s for s in self.spans if s.done is not None}

    def critical_path(self) -> tuple[PathStep, ...]:
        """Return what the answer waited for at each moment of the query.

        The steps cover the query without a gap, and their seconds add up to its own: primitives, their time in
        queues, and code of the original. See `observe.critical_path`.
        """
        return critical_path(self)

    def waited_for(self) -> dict[str, float]:
        """Return the seconds of the critical path: by engine, in its order of first use ("" is the client), in queues
        (`queued`), and in code of the original (`code`). They add up to those of the query."""
        path, by_engine = self.critical_path(), dict.fromkeys(self.engines, 0.0)
        for step in path:
            if not step.is_code:
                by_engine[step.span.engine] = by_engine.get(step.span.engine, 0.0) + step.seconds + step.idle
        queued = sum(step.waited for step in path if not step.is_code)
        return {**by_engine, "queued": queued, "code": sum(step.total for step in path if step.is_code)}

    def busy(self, engine: str) -> float:
        """Return the seconds during which at least one span of the query ran on `engine` ("" is the client)."""
        runs = sorted((s.begin, s.done) for s in self.spans if s.engine == engine and s.done is not None)
        total, until = 0.0, float("-inf")
        for begin, done in runs:
            total += max(0.0, done - max(begin, until))
            until = max(until, done)
        return total

    def wasted(self) -> tuple[int, int]:
        """Return the numbers of spans and tokens of requests that engines began and whose results nobody used.

        Tokens are those of the prompts and those generated. Requests that never began cost nothing, and do not count.
        """
        wasted = [s for s in self.spans if s.unused and s.started is not None and s.engine]
        return len(wasted), sum(s.tokens + s.written for s in wasted)

    def summary(self) -> dict[str, Any]:
        """Return the figures of the query as JSON-ready data; all times in seconds."""
        path, waited_for = self.critical_path(), self.waited_for()
        wasted, wasted_tokens = self.wasted()
        return {
            "query_id": self.query_id,
            "app": self.app,
            "outcome": self.outcome,
            "seconds": self.seconds,
            "primitives": len({s.primitive for s in self.spans}),
            "requests": sum(s.size for s in self.spans),
            "tokens": sum(s.tokens + s.written for s in self.spans),
            "cached_tokens": sum(s.cached for s in self.spans),
            "drafted_tokens": sum(s.drafted for s in self.spans),
            "accepted_tokens": sum(s.accepted for s in self.spans),
            "work_seconds": sum(s.seconds for s in self.spans if s.engine),
            "critical_primitives": len({step.span.primitive for step in path if not step.is_code}),
            "critical_seconds": sum(step.seconds for step in path if not step.is_code),
            "critical_waited": sum(step.waited + step.idle for step in path if not step.is_code),
            "critical_code": waited_for["code"],
            "waited_for": waited_for,
            "wasted_primitives": wasted,
            "wasted_tokens": wasted_tokens,
            "left_out": self.left_out,
            "steps": len(self.steps),
            "busy": {engine: self.busy(engine) for engine in self.engines},
            "passes": [name for name, fired, _ in self.passes if fired],
            **({} if self.cost is None else {"cost": self.cost.facts()}),
        }
