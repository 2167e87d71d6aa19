"""Queries that are under way, of one request each or of all requests that name the same one; and the requests."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from teola_plugin.adapters.calls import joined
from teola_plugin.errors import QueryCancelled
from teola_plugin.graph import Query
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.query_run import CallPosition, QueryRun, current_position, during
from teola_plugin.server.admission import Ticket
from teola_plugin.server.callers import Caller

_FORGET_GRACE_S = 10.0
"""Grace period, in seconds, for running queries of a deleted tenant."""
MAX_ENDED = 1000
"""Number of ended queries that are still listed."""


@dataclass(frozen=True, slots=True)
class QueryPart:
    """A submitted query, or a query that an app began in the pool, that ran as part of a live query."""

    id: str
    submitted: bool = False
    """True for a submitted query, whose answer is stored; False for an app's query in the pool, which has a trace."""


@dataclass(slots=True, eq=False)
class LiveQuery:
    """One query of the server: its state while it runs, and its figures afterwards."""

    id: str
    tenant: str
    app: str
    run: QueryRun | None
    """Its run in the pool; None once it has ended."""
    trace: str
    """Id of its trace in the pool."""
    ticket: Ticket
    began: float
    """On the server's clock."""
    began_unix: float
    joined: bool
    """True if requests join it by name; otherwise it ends with its only request."""
    goal: float | None = None
    users: int = 0
    """Requests of it that are under way."""
    requests: int = 0
    last: float = 0.0
    """When the last request of it ended."""
    status: str = "running"
    """running, done, failed or cancelled."""
    seconds: float | None = None
    models: dict[str, int] = field(default_factory=dict)
    """Requests by model."""
    parts: list[QueryPart] = field(default_factory=list)
    """In the order in which they began."""

    def add_part(self, id: str, *, submitted: bool = False) -> None:
        """Record a query that begins as part of this one."""
        self.parts.append(QueryPart(id, submitted))

    @property
    def traces(self) -> tuple[str, ...]:
        """Ids in the pool of the queries that its apps began, without its own."""
        return tuple(part.id for part in self.parts if not part.submitted)

    @property
    def submitted(self) -> tuple[str, ...]:
        """Ids of submitted queries that were run as part of it."""
        return tuple(part.id for part in self.parts if part.submitted)


class LiveQueries:
    """The queries of a server. `idle`: seconds without a request after which a joined query ends. One loop uses it."""

    def __init__(self, pool: EnginePool, idle: float, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._pool, self._idle, self._clock, self._wall = pool, idle, clock, wall
        self._joined: dict[tuple[str, str], LiveQuery] = {}
        self.running: set[LiveQuery] = set()
        self.ended_queries: deque[LiveQuery] = deque(maxlen=MAX_ENDED)
        self.on_end: Callable[[LiveQuery], object] = lambda _: None
        """Called with every query that has ended."""

    def joined(self, tenant: str, id: str) -> LiveQuery | None:
        """Return the running query that requests join by this name; each tenant has names of its own."""
        return self._joined.get((tenant, id)) if id else None

    def begin(self, query: Query, ticket: Ticket, *, tenant: str, id: str, goal: float | None) -> LiveQuery:
        """Begin a query. It counts as begun when its request began to arrive.

        `tenant`: its owner, by whatever name the pool knows it. `id`: the name by which requests join it; empty for a
        query of one request.
        """
        run = self._pool.runtime.watch(query, joins=True)
        now = self._clock()
        live = LiveQuery(
            id or f"query_{secrets.token_hex(12)}",
            tenant,
            query.app,
            run,
            run.id,
            ticket,
            ticket.since,
            self._wall() - (now - ticket.since),
            bool(id),
            goal,
            last=now,
        )
        self.running.add(live)
        if id:
            self._joined[tenant, id] = live
        return live

    def leave(self, query: LiveQuery, outcome: str) -> None:
        """Record that a request of the query ended with this outcome: done, failed or cancelled."""
        query.users -= 1
        query.last = self._clock()
        if not query.joined:
            self.close(query, outcome, query.last)
        elif outcome != "done":
            query.status = outcome

    def close(self, query: LiveQuery, outcome: str, at: float) -> None:
        """End the query, which was over at the time `at`. Idempotent."""
        if query not in self.running:
            return
        self.ended_queries.append(query)  # first, so that other threads find it in one of both
        self.running.discard(query)
        if query.joined:
            self._joined.pop((query.tenant, query.id), None)
        query.status = outcome if query.status == "running" else query.status
        query.seconds = at - query.began
        run, query.run = query.run, None
        if run is not None:
            (run.cancel if outcome == "cancelled" else run.close)()
        query.ticket.end(answered=query.status == "done")
        self.on_end(query)

    def sweep(self) -> None:
        """End the joined queries that no request has joined for a while, as of their last request.

        The server calls it about once a second. The idle seconds do not count as time of the query.
        """
        now = self._clock()
        for query in [q for q in self._joined.values() if not q.users and now - q.last > self._idle]:
            self.close(query, "done", query.last)

    def by_trace(self, tenant: str) -> dict[str, LiveQuery]:
        """Return this tenant's queries by the ids of their traces, those that their apps began included.

        The page of a query finds with it which other queries shared its batches. Running and ended queries are
        included, but only the latest `MAX_ENDED` ended ones are known.
        """
        queries = [query for query in (*self.ended_queries, *self.running) if query.tenant == tenant]
        return {trace: query for query in queries for trace in (query.trace, *query.traces)}

    def find(self, tenant: str, id: str) -> LiveQuery | None:
        """Return this tenant's query of that id, running or ended; None if there is none.

        Where a name was used again after its query had ended, the running query is returned, or else the latest.
        """
        queries = [*self.running, *reversed(self.ended_queries)]
        return next((q for q in queries if q.id == id and q.tenant == tenant), None)

    async def forget(self, tenant: str) -> set[str]:
        """End the tenant's queries and forget them. Return the ids of their traces."""
        under_way = [(one, one.run) for one in self.running if one.tenant == tenant]
        for one, _ in under_way:
            self.close(one, "cancelled", self._clock())
        ends = [asyncio.wrap_future(run.trace) for _, run in under_way if run is not None]
        if ends:
            await asyncio.wait(ends, timeout=_FORGET_GRACE_S)
        traces = {id for one in self.ended_queries if one.tenant == tenant for id in (one.trace, *one.traces)}
        kept_queries = [one for one in self.ended_queries if one.tenant != tenant]
        self.ended_queries.clear()
        self.ended_queries.extend(kept_queries)
        return traces

    def of_tenant(self, tenant: str) -> list[LiveQuery]:
        """Return this tenant's queries, latest first.

        These are the running ones and those of the latest `MAX_ENDED` ended queries of all tenants that belong to this
        one.
        """
        queries = [q for q in (*self.ended_queries, *self.running) if q.tenant == tenant]
        return sorted(queries, key=lambda q: -q.began_unix)


@dataclass(frozen=True, slots=True)
class SubmittedQueryRef:
    """A submitted query that a request session runs, as its model sees it."""

    id: str
    """Also the name of its thread, in graphs with checkpoints."""
    resumes_from: Literal["", "checkpoint", "answer"] = ""
    """Empty: it begins. `checkpoint`: it continues from its last one. `answer`: so, with the answer in `value`."""
    value: Any = None
    """The answer to the question that its graph has stopped to ask."""


@dataclass(slots=True, eq=False)
class RequestSession:
    """One request of a client, with its query, its caller and its cost. It has a place in the queue until `end`."""

    request_id: str
    caller: Caller
    query: LiveQuery
    call_position: CallPosition
    on_end: Callable[[RequestSession, str], None]
    tokens: int = 0
    """Tokens that it has cost so far."""
    outside_tokens: int = 0
    """Those of `tokens` that models outside the pool computed: no trace counts these."""
    has_ended: bool = False
    submitted: SubmittedQueryRef | None = None
    """The submitted query that it runs; None for a request that waits for its answer."""

    @property
    def run(self) -> QueryRun:
        """Return the query's run in the pool. Raise `QueryCancelled` if the query is over.

        That happens to a request whose query was ended under it, for instance because its tenant was deleted.
        """
        if self.query.run is None:
            raise QueryCancelled("the query is over.", query_id=self.query.id, hint="begin another one")
        return self.query.run

    @contextmanager
    def at_call_position(self) -> Iterator[QueryRun]:
        """Make the calls in the body at the place in the query that the request's headers name.

        The place is a depth (steps to the query's end) and a gang (equal calls whose results are put together).
        """
        with during(current_position, self.call_position):
            yield self.run

    @contextmanager
    def inside_query(self) -> Iterator[QueryRun]:
        """Let all calls of the pool in the body join the query.

        Apps run in it: their accelerated objects would otherwise begin queries of their own. Raise `QueryCancelled` if
        the query is over.
        """
        with self.at_call_position() as run, joined(run):
            yield run

    def add_cost(self, tokens: int, *, outside_tokens: int = 0) -> None:
        """Add tokens to its cost. `outside_tokens`: those of them that models outside the pool computed.

        The key is charged when the session ends. Tokens that the query's trace counts beyond these are charged after
        it.
        """
        self.tokens += tokens
        self.outside_tokens += outside_tokens

    def end(self, outcome: str) -> None:
        """End the request with this outcome: done, failed or cancelled. Idempotent.

        The first call counts. It charges the key, and ends the query unless other requests may join it by name.
        """
        if not self.has_ended:
            self.has_ended = True
            self.on_end(self, outcome)

    def log_fields(self) -> dict[str, Any]:
        """Return ids and figures for the log, no content."""
        return {"query": self.query.id, "app": self.query.app, "key": self.caller.key.name, "tokens": self.tokens}
