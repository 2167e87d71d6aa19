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
from teola_plugin.runtime.context import CallPlace, current_place, during
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.server.admission import Ticket
from teola_plugin.server.callers import Caller

_ENDING = 10.0
"""Seconds that queries have to end which are forgotten."""
KEPT = 1000
"""Queries that have ended and are still told of."""


@dataclass(frozen=True, slots=True)
class Part:
    """What ran as part of a query."""

    id: str
    submitted: bool = False
    """Whether it is a submitted query, whose answer is kept; else one that an app has begun in the pool, which has a
    trace."""


@dataclass(slots=True, eq=False)
class LiveQuery:
    """One query: what happens to it, for everybody who may know."""

    id: str
    tenant: str
    app: str
    run: QueryRun | None
    """None once it is over."""
    trace: str
    """Its id in the pool."""
    ticket: Ticket
    began: float
    wall: float
    joined: bool
    """Whether requests name it; else it is over with its only one."""
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
    parts: list[Part] = field(default_factory=list)
    """In the order in which they began."""

    def ran(self, id: str, *, submitted: bool = False) -> None:
        """Something begins as part of it."""
        self.parts.append(Part(id, submitted))

    @property
    def traces(self) -> tuple[str, ...]:
        """Ids in the pool of queries that its apps have begun, beside its own."""
        return tuple(part.id for part in self.parts if not part.submitted)

    @property
    def submitted(self) -> tuple[str, ...]:
        """Ids of submitted queries that were run as part of it."""
        return tuple(part.id for part in self.parts if part.submitted)


class LiveQueries:
    """One owner: the server's loop. `idle`: seconds without a request after which a joined query is over."""

    def __init__(self, pool: EnginePool, idle: float, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._pool, self._idle, self._clock, self._wall = pool, idle, clock, wall
        self._joined: dict[tuple[str, str], LiveQuery] = {}
        self.running: set[LiveQuery] = set()
        self.ended: deque[LiveQuery] = deque(maxlen=KEPT)
        self.on_end: Callable[[LiveQuery], object] = lambda _: None
        """Told of every query that is over."""

    def joined(self, tenant: str, id: str) -> LiveQuery | None:
        """The query of this name that is under way; each tenant has names of its own."""
        return self._joined.get((tenant, id)) if id else None

    def begin(self, query: Query, ticket: Ticket, *, tenant: str, id: str, goal: float | None) -> LiveQuery:
        """`tenant`: whose it is, by whatever name the pool knows it. `id`: that of requests which join it; empty for a
        query of one request. It has begun when its request began to come."""
        run = self._pool.runtime.watch(query, joins=True)
        now = self._clock()
        made = LiveQuery(
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
        self.running.add(made)
        if id:
            self._joined[tenant, id] = made
        return made

    def leave(self, query: LiveQuery, outcome: str) -> None:
        """A request of it has ended so: done, failed or cancelled."""
        query.users -= 1
        query.last = self._clock()
        if not query.joined:
            self.close(query, outcome, query.last)
        elif outcome != "done":
            query.status = outcome

    def close(self, query: LiveQuery, outcome: str, at: float) -> None:
        """It is over, and was at that time. Idempotent."""
        if query not in self.running:
            return
        self.ended.append(query)  # first: whoever looks from another thread finds it in either
        self.running.discard(query)
        if query.joined:
            self._joined.pop((query.tenant, query.id), None)
        query.status = outcome if query.status == "running" else query.status
        query.seconds = at - query.began
        run, query.run = query.run, None
        if run is not None:
            (run.cancel if outcome == "cancelled" else run.close)()
        query.ticket.end(whole=query.status == "done")
        self.on_end(query)

    def sweep(self) -> None:
        """Queries that nobody has joined for a while are over since then."""
        now = self._clock()
        for one in [q for q in self._joined.values() if not q.users and now - q.last > self._idle]:
            self.close(one, "done", one.last)

    def by_trace(self, tenant: str) -> dict[str, LiveQuery]:
        """This tenant's queries by the ids of their traces, those that their apps have begun included."""
        known = [query for query in (*self.ended, *self.running) if query.tenant == tenant]
        return {trace: query for query in known for trace in (query.trace, *query.traces)}

    def find(self, tenant: str, id: str) -> LiveQuery | None:
        """Under way or ended, of this tenant."""
        known = [*self.running, *reversed(self.ended)]
        return next((q for q in known if q.id == id and q.tenant == tenant), None)

    async def forget(self, tenant: str) -> set[str]:
        """Ends its queries, and forgets what happened to them; the ids of their traces."""
        under_way = [(one, one.run) for one in self.running if one.tenant == tenant]
        for one, _ in under_way:
            self.close(one, "cancelled", self._clock())
        traces = [asyncio.wrap_future(run.trace) for _, run in under_way if run is not None]
        if traces:
            await asyncio.wait(traces, timeout=_ENDING)
        gone = {id for one in self.ended if one.tenant == tenant for id in (one.trace, *one.traces)}
        kept = [one for one in self.ended if one.tenant != tenant]
        self.ended.clear()
        self.ended.extend(kept)
        return gone

    def of(self, tenant: str) -> list[LiveQuery]:
        """Of this tenant, latest first."""
        known = [q for q in (*self.ended, *self.running) if q.tenant == tenant]
        return sorted(known, key=lambda q: -q.wall)


@dataclass(frozen=True, slots=True)
class Kept:
    """A submitted query: what of it outlives the process."""

    id: str
    """Also the name of its thread, in graphs with checkpoints."""
    goes_on: Literal["", "checkpoint", "told"] = ""
    """Empty: it begins. From its last `checkpoint`; or from there, `told` what it has asked somebody for."""
    value: Any = None
    """What it is told."""


@dataclass(slots=True, eq=False)
class Visit:
    """Has a place in the queue until `end`. Handed to models, which work within it."""

    request_id: str
    caller: Caller
    query: LiveQuery
    place: CallPlace
    on_end: Callable[[Visit, str], None]
    tokens: int = 0
    """That it has cost so far."""
    elsewhere: int = 0
    """Those of them that models outside the pool have taken: no trace tells of these."""
    ended: bool = False
    kept: Kept | None = None
    """None for a request that waits for its answer."""

    @property
    def run(self) -> QueryRun:
        """Raises `QueryCancelled` where the query was ended meanwhile, by a request of its own."""
        if self.query.run is None:
            raise QueryCancelled("the query is over.", query_id=self.query.id, hint="begin another one")
        return self.query.run

    @contextmanager
    def placed(self) -> Iterator[QueryRun]:
        """Calls in the body are made where the request says that it stands in its query."""
        with during(current_place, self.place):
            yield self.run

    @contextmanager
    def inside(self) -> Iterator[QueryRun]:
        """Code in the body belongs to the query: whatever it calls of the pool joins it."""
        with self.placed() as run, joined(run):
            yield run

    def cost(self, tokens: int, *, elsewhere: int = 0) -> None:
        """`elsewhere`: those of `tokens` that models outside the pool have taken."""
        self.tokens += tokens
        self.elsewhere += elsewhere

    def end(self, outcome: str) -> None:
        """done, failed or cancelled. Idempotent."""
        if not self.ended:
            self.ended = True
            self.on_end(self, outcome)

    def about(self) -> dict[str, Any]:
        """For the log: ids and figures, no content."""
        return {"query": self.query.id, "app": self.query.app, "key": self.caller.key.name, "tokens": self.tokens}
