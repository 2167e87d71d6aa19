"""Measures a run: queries by their traces, replicas by the batches that they get and the results that they give."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from teola_plugin.observe.recorder import TraceSink
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.requests.payloads import Done, Generation, Request, Result

number: ContextVar[int] = ContextVar("teola_simulated_query", default=-1)
"""Number of the query whose code runs; -1 for none."""


@dataclass(slots=True)
class QueryOutcome:
    """The outcome of one query. Times in seconds after the start."""

    app: str
    at: float
    ended_at: float = float("nan")
    first_token: float | None = None
    """When the first token of the last generation came; None if nothing was generated."""
    error: str = ""
    """Why it failed; empty if it did not."""
    queued: float = 0.0
    """Seconds that all its engine work together waited in the queues of engine schedulers."""
    work: float = 0.0
    """Seconds that all its engine work together ran."""
    wasted: float = 0.0
    """The part of `work` whose value nobody used."""
    wasted_tokens: int = 0

    @property
    def seconds(self) -> float:
        return self.ended_at - self.at

    def note(self, trace: QueryTrace) -> None:
        """Add what was observed of the query, or of a part of it."""
        for span in trace.spans:
            if span.engine and span.started is not None:
                self.queued += span.started - span.queued
                self.work += span.seconds
                self.wasted += span.seconds if span.unused else 0.0
        self.wasted_tokens += trace.wasted()[1]


class Meter(TraceSink):
    """The meter of one run with these queries."""

    def __init__(self, queries: Sequence[QueryOutcome]) -> None:
        self._queries = queries
        self._numbers: dict[str, int] = {}
        """Numbers of queries by the runtime's name of the query, or of a part of it."""
        self._busy: dict[tuple[str, int], Busy] = {}
        self._loop = asyncio.get_running_loop()
        self._started_at = 0.0

    def start(self) -> None:
        """Begin the run's time."""
        self._started_at = self._loop.time()
        for busy in self._busy.values():
            busy.forget()

    def now(self) -> float:
        """Return the seconds of the run."""
        return self._loop.time() - self._started_at

    # ------------------------------------------------------------ queries

    def query_began(self, query_id: str) -> None:
        self._numbers[query_id] = number.get()

    def query_ended(self, trace: QueryTrace) -> None:
        if (query := self._query(trace.query_id)) is not None:
            query.note(trace)

    def close(self) -> None:
        pass

    def _query(self, query: str) -> QueryOutcome | None:
        index = self._numbers.get(query, -1)
        return self._queries[index] if index >= 0 else None

    # ------------------------------------------------------------ replicas

    def watch(self, engines: Mapping[str, Sequence[Any]]) -> None:
        """Measure these replicas from now on.

        The `execute` method of each replica is replaced by one that counts its busy seconds.
        """
        for name, replicas in engines.items():
            for index, engine in enumerate(replicas):
                self._busy[name, index] = busy = Busy()
                engine.execute = partial(self._executed, engine.execute, busy)

    def busy(self, engine: str, replicas: int) -> tuple[float, ...]:
        """Return the seconds up to now in which each replica had something to do."""
        return tuple(self._busy[engine, index].until(self.now()) for index in range(replicas))

    async def _executed(
        self, execute: Callable[[Sequence[Request]], AsyncIterator[Result]], busy: Busy, batch: Sequence[Request]
    ) -> AsyncIterator[Result]:
        """Execute a batch as `execute` does. Meanwhile the replica counts as busy, and first tokens are recorded."""
        now = self.now
        queries = {request.id: request.query for request in batch}
        busy.begin(now())
        try:
            async for result in execute(batch):
                if isinstance(result, Done) and isinstance(result.value, Generation):
                    self._generated(queries[result.request_id], now() - result.stats.get("decode_s", 0.0), now())
                yield result
        finally:
            busy.end(now())

    def _generated(self, query: str, first: float, end: float) -> None:
        measured_query = self._query(query)
        if measured_query is not None and not end > measured_query.ended_at:  # not a number while it goes on
            measured_query.first_token = first


class Busy:
    """Measures how long at least one batch ran."""

    def __init__(self) -> None:
        self._running, self._since, self._total = 0, 0.0, 0.0

    def begin(self, at: float) -> None:
        """Count a batch that begins at `at`, in seconds: the replica is busy while at least one runs."""
        if not self._running:
            self._since = at
        self._running += 1

    def end(self, at: float) -> None:
        """Count a batch that ends at `at`. If no other one runs, add the busy time, in seconds, to the total."""
        self._running -= 1
        if not self._running:
            self._total += at - self._since

    def forget(self) -> None:
        self._since, self._total = 0.0, 0.0

    def until(self, at: float) -> float:
        return self._total + (at - self._since if self._running else 0.0)
