"""Tokens of the calls that running code makes, at any depth, for reports of what it cost.

A `Tally` is for what a served app reports to its client. Calls of the pool are counted as they are made. Calls of
models outside the pool may be reported by a framework: its listener counts those in which no call of the pool was
counted (`ModelRun`), so that none counts twice.

A `QueryUsage` is for what the provider bills: every call that was really made, prefetched and wasted ones included.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from teola_plugin.observe.spans import GENERATION, Cost, ModelCost, Price, Span
from teola_plugin.observe.steps import PROVIDER, TracedCall
from teola_plugin.requests.payloads import Generation
from teola_plugin.runtime.provider_limits import model_name_of
from teola_plugin.runtime.query_run import QueryRun, current_call, during

T = TypeVar("T")
_END: Any = object()


@dataclass(frozen=True, slots=True)
class Tokens:
    """The numbers of tokens of prompts, of those found in a prefix cache, and of answers."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.prompt + other.prompt, self.cached + other.cached, self.completion + other.completion)


class ModelRun:
    """A call of a model that a framework reports: while its code runs, it is the `current_model_run`."""

    def __init__(self, outer: ModelRun | None = None, prompts: int = 1) -> None:
        """`outer`: the call whose model's own code makes this one. `prompts`: number of prompts yet to begin."""
        self.outer, self.prompts = outer, prompts
        self.is_counted = False
        """True if tokens of it are counted already: by the pool, or as a call that it has made itself."""
        self.is_over = False

    def mark_counted(self) -> None:
        """Note that a call which it has made is counted: its own figures, and those of outer calls, would repeat it."""
        run: ModelRun | None = self
        while run is not None:
            run.is_counted, run = True, run.outer


class Tally:
    """The tokens of calls that have ended well, prefetched ones included. Used from any thread."""

    def __init__(self, listener: Any = None) -> None:
        """`listener`: see `current_listener`."""
        self.listener = listener
        self._open_calls: set[Future[list[Any]]] = set()
        self._lock = threading.Lock()
        self._tokens = Tokens()
        self._elsewhere = Tokens()

    def watch(self, call: Future[list[Any]]) -> None:
        """Count a call of the pool once it has ended."""
        run = current_model_run.get()
        if run is not None:
            run.mark_counted()
        with self._lock:
            self._open_calls.add(call)
        call.add_done_callback(self._count)

    @property
    def tokens(self) -> Tokens:
        """All tokens so far. A call is counted before its caller has its values."""
        with self._lock:
            open_calls = list(self._open_calls)
        for call in open_calls:
            if call.done():
                self._count(call)
        return self._tokens + self._elsewhere

    @property
    def elsewhere(self) -> Tokens:
        """The part of `tokens` that is of models outside the pool."""
        return self._elsewhere

    def add(self, tokens: Tokens) -> None:
        """Add the tokens of a call of a model outside the pool."""
        with self._lock:
            self._elsewhere += tokens

    def _count(self, call: Future[list[Any]]) -> None:
        """Add the tokens of a call that has ended well, once. Called when it ends, and by `tokens`; from any thread."""
        with self._lock:
            if call not in self._open_calls:
                return
            self._open_calls.discard(call)
            if call.cancelled() or call.exception() is not None:
                return
            for value in call.result():
                if isinstance(value, Generation):
                    self._tokens += Tokens(value.prompt_tokens, value.cached_tokens, value.completion_tokens)


current_tally: ContextVar[Tally | None] = ContextVar("teola_current_tally", default=None)
current_listener: ContextVar[Any] = ContextVar("teola_current_listener", default=None)
"""The framework's listener to its models while calls are counted: for LangChain, a callback handler."""
current_model_run: ContextVar[ModelRun | None] = ContextVar("teola_current_model_run", default=None)


@contextmanager
def tallied(tally: Tally) -> Iterator[None]:
    """Count the calls in the body."""
    with during(current_tally, tally), during(current_listener, tally.listener):
        yield


async def atallied(tally: Tally, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Yield the items, and count the calls that are made for each."""
    async with aclosing(items):  # type: ignore[type-var]
        while True:
            with tallied(tally):
                item = await anext(items, _END)
            if item is _END:
                return
            yield item


# ------------------------------------------------------------ calls, tokens and dollars of queries


@dataclass(slots=True, eq=False)
class MeteredCall:
    """A call of the user's own model that was really made, with the tokens that it has reported so far."""

    model: str
    class_name: str
    """Of the model's object."""
    traced: TracedCall | None
    """Its row in the trace of its query; None for a call outside of a query, and once the query is over."""
    tokens: Tokens = Tokens()
    has_reported: bool = False
    is_wasted: bool = False
    """Set when the query is over: nobody has used the result."""


class QueryUsage:
    """The calls of models that one query made, or the queries of one batch. Used from any thread.

    It is a `CallObserver` of the user's own models. Engines' work is read from the trace of the query.
    """

    def __init__(
        self,
        price_of: Callable[[str], Price | None],
        read_tokens: Callable[[Any], Tokens | None],
        queries: int = 1,
    ) -> None:
        """Begin without calls.

        Args:
            price_of: Returns the price of a model; None if it has none.
            read_tokens: Returns the tokens that a model reports with a result or a chunk; None if it reports none.
            queries: Number of queries that share it.
        """
        self.queries = queries
        self._price_of, self._read_tokens = price_of, read_tokens
        self._engine_model: Callable[[str], str] = str
        self._is_attached = False
        self._calls: list[MeteredCall] = []
        self._engine_rows: list[ModelCost] = []
        self._lock = threading.Lock()

    def attach(self, run: QueryRun, engine_model: Callable[[str], str]) -> None:
        """Let the trace of a live query have the cost. `engine_model`: returns the model of an engine by its name.

        Without effect for a query inside another one, and for one that has a usage.
        """
        if run.usage is not None or (self._is_attached and self.queries == 1):
            return
        self._is_attached, self._engine_model, run.usage = True, engine_model, self

    def call_began(self, target: Any, options: Mapping[str, Any], /) -> MeteredCall:
        """Note a call; see `CallObserver`. The model is that of the call's own arguments, if they name one."""
        name = options.get("model")
        model = name if isinstance(name, str) and name else model_name_of(target)
        call = MeteredCall(model, type(target).__name__, current_call.get())
        with self._lock:
            self._calls.append(call)
        return call

    def result_came(self, call: MeteredCall, value: Any, /) -> None:
        """Add the tokens that a call reports with a result or a chunk, if it reports any."""
        tokens = self._read_tokens(value)
        if tokens is not None:
            with self._lock:
                call.tokens, call.has_reported = call.tokens + tokens, True

    def cost(self) -> Cost:
        """Return the cost so far."""
        with self._lock:
            return Cost.total([*self._own_rows(self._calls), *self._engine_rows], self.queries)

    def end_run(self, provider_calls: Iterable[TracedCall], spans: Iterable[Span]) -> Cost:
        """Note that a query is over, with these provider calls and spans. Return its own cost, for its trace."""
        ids = {id(call) for call in provider_calls}
        engine_rows = list(self._rows_of_engines(spans))
        with self._lock:
            run_calls = [call for call in self._calls if id(call.traced) in ids]
            rows = list(self._own_rows(self._calls if self.queries == 1 else run_calls))
            latest = self._latest_calls()
            for call in run_calls:
                call.is_wasted = self._is_wasted(call, latest)
            for call in run_calls:  # the rows of the trace lead to all that the query was asked
                call.traced = None
            self._engine_rows += engine_rows
        return Cost.total([*rows, *engine_rows])

    def _own_rows(self, calls: Iterable[MeteredCall]) -> Iterator[ModelCost]:
        """Yield a row for each of these calls of the user's own models. The caller holds the lock."""
        latest = self._latest_calls()
        for call in calls:
            yield ModelCost(
                call.model,
                self._price_of(call.model),
                self._is_wasted(call, latest),
                calls=1,
                calls_without_tokens=int(not call.has_reported),
                input_tokens=call.tokens.prompt,
                cached_tokens=call.tokens.cached,
                output_tokens=call.tokens.completion,
            )

    def _latest_calls(self) -> dict[int, MeteredCall]:
        """Return the latest call by the identity of its row in the trace: one that was made again has several."""
        return {id(call.traced): call for call in self._calls if call.traced is not None}

    @staticmethod
    def _is_wasted(call: MeteredCall, latest: Mapping[int, MeteredCall]) -> bool:
        """Return True if nobody has used the result of a call, or if it was made again."""
        traced = call.traced
        if traced is None:
            return call.is_wasted
        is_of_model = traced.name == call.class_name  # else it is of a retriever that calls the model, maybe often
        return not traced.used or (is_of_model and latest[id(traced)] is not call)

    def _rows_of_engines(self, spans: Iterable[Span]) -> Iterator[ModelCost]:
        """Yield the requests to LLM engines, of which the prompt and the text may be spans of their own."""
        for span in spans:
            has_prompt = span.kind == GENERATION or span.kind.endswith("PREFILLING")
            is_text = span.kind.endswith("DECODING")
            if span.engine in ("", PROVIDER) or span.started is None or not (has_prompt or is_text):
                continue
            model = self._engine_model(span.engine)
            yield ModelCost(
                model or span.engine,
                self._price_of(model) or self._price_of(span.engine),
                span.unused,
                calls=span.size if has_prompt else 0,
                calls_without_tokens=span.size if has_prompt and not span.tokens else 0,
                input_tokens=span.tokens if has_prompt else 0,
                cached_tokens=span.cached if has_prompt else 0,
                output_tokens=span.tokens if is_text else span.written,
            )


MAX_METERED_QUERIES = 100
"""The latest queries whose calls a report is about."""


class CostMeter:
    """The calls of models of one accelerated app and its copies, over the latest queries. Used from any thread."""

    def __init__(self, prices: Mapping[str, Price], read_tokens: Callable[[Any], Tokens | None]) -> None:
        """Begin without queries. `prices`: the price of each model by its name. `read_tokens`: see `QueryUsage`."""
        self.prices = prices
        self._read_tokens = read_tokens
        self._recent: deque[QueryUsage] = deque(maxlen=MAX_METERED_QUERIES)

    def new_query(self, queries: int = 1) -> QueryUsage:
        """Return the usage of a query that begins, or of a batch of several."""
        usage = QueryUsage(self.prices.get, self._read_tokens, queries)
        self._recent.append(usage)
        return usage

    def cost(self) -> Cost | None:
        """Return the cost of the latest queries; None before the first one."""
        costs = [usage.cost() for usage in list(self._recent)]
        rows = (row for cost in costs for row in cost.models)
        return Cost.total(rows, sum(cost.queries for cost in costs)) if costs else None
