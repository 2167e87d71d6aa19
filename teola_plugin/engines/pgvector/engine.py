"""The vector store engine: PostgreSQL with pgvector, the embedded server by default.

Ingestions of a batch go into one binary COPY per collection, whichever queries they come from; searches of a batch go
into one statement per (collection, k, filter), which also tells the collection's version. They run side by side on the
connections of a pool; writes of one collection run one after the other, in the order in which they came.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.loop_lock import LoopLock
from teola_plugin.engines.pgvector import sql
from teola_plugin.engines.pgvector.admin import Administration
from teola_plugin.engines.pgvector.measure import ESTIMATE, measure
from teola_plugin.engines.pgvector.rows import QueryVector, Row, to_query_vector, to_row
from teola_plugin.engines.pgvector.searching import search
from teola_plugin.engines.postgres.embedded import EmbeddedPostgres
from teola_plugin.engines.postgres.faults import Faults
from teola_plugin.errors import EngineError, EngineUnavailable
from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import IngestRow, SearchVector
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Done, Failed, Result

if TYPE_CHECKING:
    from psycopg_pool import AsyncConnectionPool

_K = PrimitiveKind
_T = TypeVar("_T")
_TAKES: dict[PrimitiveKind, type] = {_K.INGESTION: IngestRow, _K.SEARCHING: SearchVector}
_CONNECT_SECONDS = 10


@dataclass(slots=True)
class _Group:
    """Requests of one batch that go to the database together."""

    inbox: asyncio.Queue[Result]
    asked: dict[str, Any] = field(default_factory=dict)
    """What is asked, by request id: a `Row` or a `QueryVector` each."""
    task: asyncio.Task[None] | None = None


class PgVectorEngine(Administration):
    """Stores rows, and finds the nearest by cosine similarity. A row of an id that is there is replaced.

    `dsn` names a server of yours; None starts the embedded one, with its data in `data_dir` (None: they go when the
    engine stops) and pinned to `cores`. `dimension` is what all vectors must have; None takes that of a collection's
    first row. `index="hnsw"` makes searches of large collections faster and approximate; None compares every row.
    """

    kinds = frozenset(_TAKES)

    def __init__(
        self,
        name: str = "store",
        *,
        dsn: str | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        dimension: int | None = None,
        index: Literal["hnsw"] | None = None,
        cores: str | None = None,
        pool_size: int = 8,
    ) -> None:
        super().__init__(Faults(name))
        self.name, self.dimension, self.index, self.pool_size = name, dimension, index, pool_size
        self._server = EmbeddedPostgres(data_dir, cores=cores) if dsn is None else None
        self.embedded = self._server is not None
        """Whether its server runs on this machine, as part of it."""
        self._dsn = dsn or ""
        self._pool: AsyncConnectionPool | None = None
        self._profile = ESTIMATE
        self._died = False
        self._versions: Mapping[str, str] = {}
        self._live: dict[str, _Group] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changing = LoopLock()

    @property
    def profile(self) -> EngineProfile:
        """An estimate until `measure` was called."""
        return self._profile

    # Life cycle

    async def start(self) -> None:
        """Idempotent. Raises `EngineUnavailable`."""
        async with self._changing:
            if self._pool is None:
                await self._open()

    async def stop(self) -> None:
        """Idempotent. Requests in flight fail at once."""
        async with self._changing:
            await self._close("it was stopped.")
            if self._server is not None:
                await asyncio.to_thread(self._server.stop)

    async def restart(self) -> None:
        """Connect again; start the embedded server again if it died. What was acknowledged is there."""
        async with self._changing:
            await self._close("it is being restarted.")
            await self._open()

    async def _open(self) -> None:
        try:
            if self._server is not None:
                await asyncio.to_thread(self._server.start)
                self._dsn = self._server.dsn
            self._versions = await sql.prepare(self._dsn, _CONNECT_SECONDS)
            self._died = False
            self._pool = sql.make_pool(self._dsn, self.pool_size, _CONNECT_SECONDS)
            await self._pool.open(wait=True, timeout=_CONNECT_SECONDS)
        except BaseException as error:
            await self._close("it did not start.")
            if isinstance(error, Exception):
                raise self._faults.of_start(error) from error
            raise

    async def _close(self, why: str) -> None:
        self._fail(list(self._live), self._faults.unavailable(why))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        pool, self._pool = self._pool, None
        self._tables.clear()
        if pool is not None:
            await pool.close()

    # Requests

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """One `Done` or `Failed` per request, as soon as what it went to the database with is through."""
        inbox: asyncio.Queue[Result] = asyncio.Queue()
        groups = self._admit(batch, inbox)
        try:
            for group in groups:
                group.task = asyncio.create_task(self._run(group))
                self._tasks.add(group.task)
                group.task.add_done_callback(self._tasks.discard)
            for _ in batch:
                yield await inbox.get()
        finally:
            for group in groups:
                for request_id in [i for i in group.asked if self._live.get(i) is group]:
                    del self._live[request_id]
                if group.task is not None:
                    group.task.cancel()

    def _admit(self, batch: Sequence[Request], inbox: asyncio.Queue[Result]) -> list[_Group]:
        """The good requests by what can go together; the bad ones have failed."""
        groups: dict[Any, _Group] = {}
        for request in batch:
            try:
                asked = self._asked(request)
            except EngineError as error:
                inbox.put_nowait(Failed(request.id, error))
                continue
            key = asked.group if isinstance(asked, QueryVector) else request.payload.collection
            group = self._live[request.id] = groups.setdefault(key, _Group(inbox))
            group.asked[request.id] = asked
        return list(groups.values())

    def _asked(self, request: Request) -> Row | QueryVector:
        """The request as it goes to the database. Raises `EngineError` for one that cannot go there."""
        payload: IngestRow | SearchVector = request.payload
        if not isinstance(payload, _TAKES.get(request.kind, ())):
            got = f"{request.kind.value} of {type(payload).__name__}"
            raise self._faults.bad(f"it does ingestion of IngestRow and searching of SearchVector, not {got}")
        if self._pool is None or self._died:
            raise self._faults.unavailable("its server has died." if self._died else "it is not running.")
        if request.id in self._live:
            raise self._faults.bad(f"request {request.id!r} is already in flight")
        try:
            asked = to_row(payload) if isinstance(payload, IngestRow) else to_query_vector(payload)
        except Exception as error:  # whatever a caller's values may raise: the others of its batch go on
            raise self._faults.bad(f"request {request.id!r}: {error}") from error
        if self.dimension is not None and len(asked.vector) != self.dimension:
            raise self._faults.misfit(request.id, len(asked.vector), self.dimension)
        return asked

    async def _run(self, group: _Group) -> None:
        """Do the work; whatever happens, each of its requests is ended."""
        try:
            first = next(iter(group.asked.values()))
            if isinstance(first, Row):
                async with self._turn(first.collection):
                    await self._with_connection(self._ingest, first.collection, group)
            else:
                await self._with_connection(self._search, first.collection, group)
        except asyncio.CancelledError:
            # Only what is still its own: a request that is tried again has the same id.
            self._fail(list(self._left(group)), self._faults.bad("the request was cancelled"))
            raise
        except Exception as error:
            await self._broken(self._left(group), error)

    async def _with_connection(
        self, do: Callable[[sql.Connection, str, dict[str, Any]], Awaitable[None]], collection: str, group: _Group
    ) -> None:
        async with self._connection() as conn:
            asked = self._left(group)
            if asked:
                await do(conn, collection, asked)

    async def _broken(self, request_ids: Iterable[str], error: Exception) -> None:
        """Fail requests; with the server dead, all: they need not wait in vain for a connection."""
        found = self._faults.of(error)
        self._fail(list(request_ids), found)
        if isinstance(found, EngineUnavailable) and self._server is not None:
            self._died = not await asyncio.to_thread(lambda: self._server.alive)  # type: ignore[union-attr]
            if self._died:
                self._fail(list(self._live), found)

    def _left(self, group: _Group) -> dict[str, Any]:
        """Return the requests of the group that were not cancelled."""
        return {request_id: asked for request_id, asked in group.asked.items() if self._live.get(request_id) is group}

    def _connection(self) -> Any:
        if self._pool is None:
            raise self._faults.unavailable("it is not running.")
        return self._pool.connection()

    async def _ingest(self, conn: sql.Connection, collection: str, asked: dict[str, Row]) -> None:
        """Write rows; should the database refuse, in halves until the bad one is alone."""
        # Of several rows with one id the last counts, of those that the collection can hold.
        distinct = {(row.id, len(row.vector)): row for row in asked.values()}
        dimension = self.dimension or len(next(iter(asked.values())).vector)
        try:
            table = await sql.ingest(conn, collection, list(distinct.values()), dimension, self.index)
        except Exception as error:
            if conn.closed or len(asked) == 1 or not self._faults.may_be_one_row(error):
                return await self._broken(asked, error)
            ids = list(asked)
            for half in (ids[: len(ids) // 2], ids[len(ids) // 2 :]):
                await self._ingest(conn, collection, {i: asked[i] for i in half})
            return
        fitting = self._fitting(asked, table)
        for request_id, row in fitting.items():
            self._end(Done(request_id, row.id))

    async def _search(self, conn: sql.Connection, collection: str, asked: dict[str, QueryVector]) -> None:
        found = await search(conn, self._tables, collection, asked, self._fitting)
        for request_id, hits in found.hits.items():
            self._end(Done(request_id, hits, version=found.version))

    def _fitting(self, asked: dict[str, _T], table: sql.Table) -> dict[str, _T]:
        """Return the requests whose vector has the dimension of the collection. The others fail."""
        fits: dict[str, _T] = {}
        for request_id, each in asked.items():
            length = len(each.vector)  # type: ignore[attr-defined]
            if length == table.dimension:
                fits[request_id] = each
            else:
                self._end(Failed(request_id, self._faults.misfit(request_id, length, table.dimension)))
        return fits

    def _end(self, result: Result) -> None:
        group = self._live.pop(result.request_id, None)
        if group is not None:
            group.inbox.put_nowait(result)

    def _fail(self, request_ids: Iterable[str], error: EngineError) -> None:
        for request_id in request_ids:
            self._end(Failed(request_id, error))

    async def cancel(self, request_id: str) -> None:
        """Ends the request now; its statement is stopped when nobody else is in it. A row may have been written."""
        group = self._live.get(request_id)
        self._fail([request_id], self._faults.bad("the request was cancelled"))
        if group is not None and group.task is not None and not self._left(group):
            group.task.cancel()

    def size(self, request: Request) -> int:
        return 1

    def load(self) -> EngineLoad:
        return EngineLoad(requests=len(self._live))

    async def reset(self) -> None:
        """Do nothing: this engine keeps rows, but caches no results."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of PostgreSQL and pgvector; {} before the first start."""
        return dict(self._versions)

    async def measure(self, budget: float = 2.0) -> EngineProfile:
        """The profile with seconds by batch size, measured on a scratch collection."""
        self._profile = await measure(self, self._profile, budget)
        return self._profile
