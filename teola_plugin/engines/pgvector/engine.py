"""The vector store engine: PostgreSQL with pgvector, the embedded server by default.

Ingestions of a batch go into one binary COPY per collection, whichever queries they come from; searches of a batch go
into one statement per (collection, k, filter), which also tells the collection's version. They run side by side on the
connections of a pool; writes of one collection run one after the other, in the order in which they came.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.loop_lock import LoopLock
from teola_plugin.engines.pgvector import sql, versions
from teola_plugin.engines.pgvector.admin import Administration, Tables
from teola_plugin.engines.pgvector.rows import QueryVector, Row, to_query_vector, to_row
from teola_plugin.engines.postgres.embedded import EmbeddedPostgres
from teola_plugin.engines.postgres.faults import PostgresErrors, is_missing
from teola_plugin.errors import EngineError, EngineUnavailable
from teola_plugin.graph import Batching, Curve, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Chunk, Done, Failed, Hit, IngestRow, Request, Result, SearchVector, Version

if TYPE_CHECKING:
    from psycopg_pool import AsyncConnectionPool

_K = PrimitiveKind
_T = TypeVar("_T")
_PAYLOADS: dict[PrimitiveKind, type] = {_K.INGESTION: IngestRow, _K.SEARCHING: SearchVector}
_CONNECT_SECONDS = 10


@dataclass(slots=True)
class _Group:
    """Requests of one batch that go to the database together."""

    inbox: asyncio.Queue[Result]
    items: dict[str, Any] = field(default_factory=dict)
    """The rows, or the query vectors, by request id."""
    task: asyncio.Task[None] | None = None


class PgVectorEngine(Administration):
    """A vector store that finds the nearest rows by cosine similarity. A row with the same id is replaced.

    `dsn` names your own server; None starts the embedded one, with its data in `data_dir` (None: deleted when the
    engine stops) and pinned to `cores`. `dimension` is that of all vectors; None takes that of a collection's first
    row. `index="hnsw"` makes searches of large collections faster and approximate; None compares every row.
    """

    kinds = frozenset(_PAYLOADS)

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
        super().__init__(PostgresErrors(name))
        self.name, self.dimension, self.index, self.pool_size = name, dimension, index, pool_size
        self._server = EmbeddedPostgres(data_dir, cores=cores) if dsn is None else None
        self.embedded = self._server is not None
        """True if its server runs on this machine, as part of the engine."""
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
        """The profile, an estimate until `measure` was called."""
        return self._profile

    # Life cycle

    async def start(self) -> None:
        """Start the engine. Idempotent. Raises `EngineUnavailable`."""
        async with self._changing:
            if self._pool is None:
                await self._open()

    async def stop(self) -> None:
        """Stop the engine. Idempotent. Requests in flight fail at once."""
        async with self._changing:
            await self._close("it was stopped.")
            if self._server is not None:
                await asyncio.to_thread(self._server.stop)

    async def restart(self) -> None:
        """Connect again, and start the embedded server again if it died. Acknowledged rows are there."""
        async with self._changing:
            await self._close("it is being restarted.")
            await self._open()

    async def _open(self) -> None:
        """Start the embedded server if there is one, create the schema and open the pool of connections.

        Callers hold the lock `_changing`. Raise `EngineUnavailable` if that fails.
        """
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
                raise self._errors.of_start(error) from error
            raise

    async def _close(self, reason: str) -> None:
        """Fail all requests in flight, as unavailable for this reason, and close the pool of connections."""
        self._fail(list(self._live), self._errors.unavailable(reason))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        pool, self._pool = self._pool, None
        self._tables.clear()
        if pool is not None:
            await pool.close()

    # Requests

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """Yield one `Done` or `Failed` per request, as soon as the statement of its group is complete."""
        inbox: asyncio.Queue[Result] = asyncio.Queue()
        groups = self._admit(batch, inbox)
        try:
            for group in groups:
                group.task = asyncio.create_task(self._serve_group(group))
                self._tasks.add(group.task)
                group.task.add_done_callback(self._tasks.discard)
            for _ in batch:
                yield await inbox.get()
        finally:
            for group in groups:
                for request_id in [i for i in group.items if self._live.get(i) is group]:
                    del self._live[request_id]
                if group.task is not None:
                    group.task.cancel()

    def _admit(self, batch: Sequence[Request], inbox: asyncio.Queue[Result]) -> list[_Group]:
        """Return the valid requests in groups that go to the database together. The others fail."""
        groups: dict[Any, _Group] = {}
        for request in batch:
            try:
                item = self._to_item(request)
            except EngineError as error:
                inbox.put_nowait(Failed(request.id, error))
                continue
            key = item.group if isinstance(item, QueryVector) else request.payload.collection
            group = self._live[request.id] = groups.setdefault(key, _Group(inbox))
            group.items[request.id] = item
        return list(groups.values())

    def _to_item(self, request: Request) -> Row | QueryVector:
        """Return a request as it is sent to the database. Raise EngineError for an invalid one."""
        payload: IngestRow | SearchVector = request.payload
        if not isinstance(payload, _PAYLOADS.get(request.kind, ())):
            got = f"{request.kind.value} of {type(payload).__name__}"
            raise self._errors.bad(f"it does ingestion of IngestRow and searching of SearchVector, not {got}")
        if self._pool is None or self._died:
            raise self._errors.unavailable("its server has died." if self._died else "it is not running.")
        if request.id in self._live:
            raise self._errors.bad(f"request {request.id!r} is already in flight")
        try:
            item = to_row(payload) if isinstance(payload, IngestRow) else to_query_vector(payload)
        except Exception as error:  # a caller's values may raise anything: the others of the batch go on
            raise self._errors.bad(f"request {request.id!r}: {error}") from error
        if self.dimension is not None and len(item.vector) != self.dimension:
            raise self._errors.misfit(request.id, len(item.vector), self.dimension)
        return item

    async def _serve_group(self, group: _Group) -> None:
        """Do the work of a group. Each of its requests ends, whatever happens."""
        try:
            first = next(iter(group.items.values()))
            if isinstance(first, Row):
                async with self._write_lock(first.collection):
                    await self._with_connection(self._ingest, first.collection, group)
            else:
                await self._with_connection(self._search, first.collection, group)
        except asyncio.CancelledError:
            # Only what is still its own: a request that is tried again has the same id.
            self._fail(list(self._pending_items(group)), self._errors.bad("the request was cancelled"))
            raise
        except Exception as error:
            await self._handle_failure(self._pending_items(group), error)

    async def _with_connection(
        self, do: Callable[[sql.Connection, str, dict[str, Any]], Awaitable[None]], collection: str, group: _Group
    ) -> None:
        """Run the statement of a group on a connection of the pool, for its requests that were not cancelled."""
        async with self._connection() as conn:
            items = self._pending_items(group)
            if items:
                await do(conn, collection, items)

    async def _handle_failure(self, request_ids: Iterable[str], error: Exception) -> None:
        """Fail requests. If the server is dead, all fail: they need not wait in vain for a connection."""
        failure = self._errors.of(error)
        self._fail(list(request_ids), failure)
        if isinstance(failure, EngineUnavailable) and self._server is not None:
            self._died = not await asyncio.to_thread(lambda: self._server.alive)  # type: ignore[union-attr]
            if self._died:
                self._fail(list(self._live), failure)

    def _pending_items(self, group: _Group) -> dict[str, Any]:
        """Return the requests of the group that were not cancelled."""
        return {request_id: item for request_id, item in group.items.items() if self._live.get(request_id) is group}

    def _connection(self) -> Any:
        """Return a context manager of a connection from the pool. Raise `EngineUnavailable` if the engine is not
        running."""
        if self._pool is None:
            raise self._errors.unavailable("it is not running.")
        return self._pool.connection()

    async def _ingest(self, conn: sql.Connection, collection: str, items: dict[str, Row]) -> None:
        """Write rows. If the database refuses them, write them in halves until the bad one is alone."""
        # Of several rows with one id the last counts, of those that the collection can hold.
        distinct = {(row.id, len(row.vector)): row for row in items.values()}
        dimension = self.dimension or len(next(iter(items.values())).vector)
        try:
            table = await sql.ingest(conn, collection, list(distinct.values()), dimension, self.index)
        except Exception as error:
            if conn.closed or len(items) == 1 or not self._errors.may_be_one_row(error):
                return await self._handle_failure(items, error)
            ids = list(items)
            for half in (ids[: len(ids) // 2], ids[len(ids) // 2 :]):
                await self._ingest(conn, collection, {i: items[i] for i in half})
            return
        fitting = self._fitting(items, table)
        for request_id, row in fitting.items():
            self._deliver(Done(request_id, row.id))

    async def _search(self, conn: sql.Connection, collection: str, items: dict[str, QueryVector]) -> None:
        result = await search(conn, self._tables, collection, items, self._fitting)
        for request_id, hits in result.hits.items():
            self._deliver(Done(request_id, hits, version=result.version))

    def _fitting(self, items: dict[str, _T], table: sql.Table) -> dict[str, _T]:
        """Return the requests whose vector has the dimension of the collection. The others fail."""
        fits: dict[str, _T] = {}
        for request_id, item in items.items():
            length = len(item.vector)  # type: ignore[attr-defined]
            if length == table.dimension:
                fits[request_id] = item
            else:
                self._deliver(Failed(request_id, self._errors.misfit(request_id, length, table.dimension)))
        return fits

    def _deliver(self, result: Result) -> None:
        """Hand a result to the batch that its request came with; drop it if the request has ended or was cancelled."""
        group = self._live.pop(result.request_id, None)
        if group is not None:
            group.inbox.put_nowait(result)

    def _fail(self, request_ids: Iterable[str], error: EngineError) -> None:
        for request_id in request_ids:
            self._deliver(Failed(request_id, error))

    async def cancel(self, request_id: str) -> None:
        """End a request now, and its statement if no other request is in it. A row may have been written."""
        group = self._live.get(request_id)
        self._fail([request_id], self._errors.bad("the request was cancelled"))
        if group is not None and group.task is not None and not self._pending_items(group):
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
        """Measure seconds by batch size on a scratch collection, adopt and return the profile.

        `budget`: about the seconds that it may take. The scratch collection gets about 1,400 rows.
        """
        self._profile = await _measure(self, self._profile, budget)
        return self._profile


_TRIES = 3
"""Maximum number of tries of a search while others replace its collection."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The hits of searches of one collection, and the version that they are valid for."""

    hits: Mapping[str, tuple[Hit, ...]]
    """Hits by request id."""
    version: Version | None


async def search(
    conn: sql.Connection,
    tables: Tables,
    collection: str,
    queries: dict[str, QueryVector],
    fitting: Callable[[dict[str, QueryVector], sql.Table], dict[str, QueryVector]],
    tries: int = _TRIES,
) -> SearchResult:
    """Search a collection, whatever others do to it meanwhile.

    `fitting` returns the queries that have the dimension of a table, and fails the others. Raises errors of psycopg.
    """
    table = await tables.locate(conn, collection, {len(query.vector) for query in queries.values()})
    if isinstance(table, Version):
        return SearchResult(dict.fromkeys(queries, ()), table)
    queries = fitting(queries, table)
    if not queries:
        return SearchResult({}, None)
    try:
        result = await sql.search(conn, table, list(queries.values()))
    except Exception as error:
        if not is_missing(error) or tries == 1:
            raise
        tables.forget(collection)  # deleted meanwhile, perhaps by another process
        return await search(conn, tables, collection, queries, fitting, tries - 1)
    if table.counted and result.version is None:
        tables.forget(collection)
    if result.parts > versions.MANY_CHANGES:
        await versions.tidy(conn, table.oid)
    return SearchResult(dict(zip(queries, result.hits, strict=True)), result.version)


ESTIMATE = EngineProfile(
    {_K.INGESTION: Curve.linear(0.004, 0.00003), _K.SEARCHING: Curve.linear(0.001, 0.001)},
    batching=Batching.CONTINUOUS,
    max_batch=1024,
    max_efficient_batch=256,
    max_requests=2048,
)
"""The profile until it was measured."""
_INGESTIONS = (1, 4, 16, 64, 256, 1024)
_SEARCHES = (1, 4, 16, 64)
_DIMENSION = 384
_TEXT = "What a chunk of a document says, in about forty words. " * 5


async def _measure(engine: PgVectorEngine, before: EngineProfile, budget: float) -> EngineProfile:
    """Return `before` with curves for INGESTION and SEARCHING (among about 1,400 rows), in about `budget` seconds."""
    import numpy as np

    dimension = engine.dimension or _DIMENSION
    vectors = np.random.default_rng(0).standard_normal((max(_INGESTIONS), dimension)).astype(np.float32)
    scratch = f"teola measure {uuid.uuid4()}"
    deadline = time.perf_counter() + budget
    try:
        rows = await _points(engine, _INGESTIONS, PrimitiveKind.INGESTION, scratch, vectors, deadline - budget / 2)
        searches = await _points(engine, _SEARCHES, PrimitiveKind.SEARCHING, scratch, vectors, deadline)
    finally:
        await engine.forget(scratch)
    best = min(seconds / size for size, seconds in rows)
    efficient = next(size for size, seconds in rows if seconds / size <= 1.5 * best)
    curves = {PrimitiveKind.INGESTION: Curve(rows), PrimitiveKind.SEARCHING: Curve(searches)}
    return replace(before, curves=curves, max_efficient_batch=efficient)


async def _points(
    engine: PgVectorEngine, sizes: Sequence[int], kind: PrimitiveKind, scratch: str, vectors: object, deadline: float
) -> tuple[tuple[int, float], ...]:
    """Return the better of two measurements per size. A first one, which starts things lazily, is ignored."""
    await _timed(engine, _batch(kind, scratch, vectors, 1))
    points: list[tuple[int, float]] = []
    for size in sizes:
        if points and time.perf_counter() + points[-1][1] * size / points[-1][0] > deadline:
            break
        points.append((size, min([await _timed(engine, _batch(kind, scratch, vectors, size)) for _ in range(2)])))
    return tuple(points)


def _batch(kind: PrimitiveKind, scratch: str, vectors: object, size: int) -> list[Request]:
    """Return `size` new requests of a kind on the scratch collection, for measuring."""
    mark = uuid.uuid4().hex  # fresh ids: rows that are there already would cost less
    requests = []
    for n in range(size):
        vector = vectors[n]  # type: ignore[index]
        payload = (
            IngestRow(scratch, Chunk(f"{mark}-{n}", _TEXT, {"n": n}), vector)
            if kind is PrimitiveKind.INGESTION
            else SearchVector(scratch, vector)
        )
        requests.append(Request(f"measure-{mark}-{n}", kind, payload))
    return requests


async def _timed(engine: PgVectorEngine, batch: list[Request]) -> float:
    """Return the seconds that a batch takes. Raise the error of a request that fails."""
    start = time.perf_counter()
    async for result in engine.execute(batch):
        if isinstance(result, Failed):
            raise result.error
    return time.perf_counter() - start
