"""The engine of full-text search: the requests of a batch are one statement."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.fulltext import sql
from teola_plugin.engines.fulltext.documents import digest, read_documents, to_chunks
from teola_plugin.engines.loop_lock import LoopLock
from teola_plugin.engines.postgres.embedded import EmbeddedPostgres
from teola_plugin.engines.postgres.faults import Faults
from teola_plugin.engines.request_tasks import Inbox, RequestTasks
from teola_plugin.errors import EngineError
from teola_plugin.graph import Batching, Curve, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Hit, SearchText
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Done, Failed, Result

if TYPE_CHECKING:
    from psycopg_pool import AsyncConnectionPool

_CONNECT_SECONDS = 10
_PROFILE = EngineProfile(
    {PrimitiveKind.SEARCHING: Curve.linear(0.002, 0.001)},
    batching=Batching.CONTINUOUS,
    max_batch=256,
    max_efficient_batch=64,
    max_requests=512,
)
"""An estimate."""


class FullTextSearch:
    """Searches `documents` by their words, as `WebSearch` searches the web: the same requests, the same hits.

    `documents`: texts, mappings (`text`, and as you like `url`, `title`, other metadata), chunks, or the path of a
    JSONL file or a folder (`read_documents`). `dsn`: a PostgreSQL of yours; without one an embedded server runs beside
    it, whose data stay in `data_dir`. Documents that are there already are not written again. `language` is a text
    search configuration of PostgreSQL.
    Raises `RegistrationError` for documents that cannot be read.
    """

    kinds: frozenset[PrimitiveKind] = frozenset({PrimitiveKind.SEARCHING})

    def __init__(
        self,
        name: str = "web",
        documents: Iterable[Any] | str | os.PathLike[str] = (),
        *,
        dsn: str | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        language: str = "english",
        pool_size: int = 4,
    ) -> None:
        self.name, self.language, self._pool_size = name, language, pool_size
        given = read_documents(os.fspath(documents)) if isinstance(documents, str | os.PathLike) else documents
        self.documents = to_chunks(given)
        self._corpus = digest(self.documents, language)
        self._server = EmbeddedPostgres(data_dir) if dsn is None else None
        self._dsn = dsn or ""
        self._pool: AsyncConnectionPool | None = None
        self._versions: dict[str, str] = {"documents": str(len(self.documents)), "corpus": self._corpus}
        self._faults = Faults(name)
        self._tasks = RequestTasks(name)
        self._changing = LoopLock()

    @property
    def profile(self) -> EngineProfile:
        return _PROFILE

    # Life cycle

    async def start(self) -> None:
        """Write the documents, unless they are there. Idempotent. Raises `EngineUnavailable`."""
        async with self._changing:
            if self._pool is not None:
                return
            try:
                await self._open()
            except BaseException as error:
                await self._close()
                if isinstance(error, Exception):
                    raise self._faults.of_start(error) from error
                raise

    async def _open(self) -> None:
        from psycopg import AsyncConnection
        from psycopg_pool import AsyncConnectionPool

        if self._server is not None:
            await asyncio.to_thread(self._server.start)
            self._dsn = self._server.dsn
        connected = AsyncConnection.connect(self._dsn, autocommit=True, connect_timeout=_CONNECT_SECONDS)
        async with await connected as conn:
            self._versions["postgresql"] = await sql.prepare(conn, self._corpus, self.documents, self.language)
        options: dict[str, Any] = {"autocommit": True, "connect_timeout": _CONNECT_SECONDS}
        self._pool = AsyncConnectionPool(
            self._dsn,
            min_size=1,
            max_size=self._pool_size,
            timeout=_CONNECT_SECONDS,
            open=False,
            kwargs=options,
            name="teola-texts",
        )
        await self._pool.open(wait=True, timeout=_CONNECT_SECONDS)

    async def stop(self) -> None:
        """Idempotent. Searches under way fail."""
        async with self._changing:
            await self._close()

    async def restart(self) -> None:
        """Connect again; start the embedded server again if it died."""
        await self.stop()
        await self.start()

    async def _close(self) -> None:
        pool, self._pool = self._pool, None
        self._tasks.cancel_all()
        if pool is not None:
            await pool.close()
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)

    # Requests

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """One `Done` with a tuple of `Hit`, or `Failed`, for each search."""
        good = {r.id: r.payload for r in batch if self._fault(r) is None}
        searching = asyncio.create_task(self._search(good)) if good else None

        async def serve(request: Request, inbox: Inbox) -> Done | Failed:
            fault = self._fault(request)
            if fault is not None or searching is None:
                return Failed(request.id, fault or self._faults.bad("nothing is asked"))
            try:
                found, seconds = await asyncio.shield(searching)
            except Exception as error:
                return Failed(request.id, self._faults.of(error))
            return Done(request.id, found[request.id], {"seconds": seconds})

        try:
            async with aclosing(self._tasks.results(batch, serve)) as results:
                async for result in results:
                    yield result
        finally:
            if searching is not None:
                searching.cancel()
                await asyncio.gather(searching, return_exceptions=True)

    def _fault(self, request: Request) -> EngineError | None:
        """Return the error for an invalid request, None for a valid one."""
        asked = request.payload
        if request.kind not in self.kinds or not isinstance(asked, SearchText):
            got = f"{request.kind.value} of {type(asked).__name__}"
            return self._faults.bad(f"it does searching of SearchText, not {got}")
        if not isinstance(asked.query, str) or "\0" in asked.query:
            return self._faults.bad(f"request {request.id!r}: the query is no text")
        if not isinstance(asked.k, int) or asked.k < 1:
            return self._faults.bad(f"request {request.id!r}: {asked.k!r} hits are wanted; ask for 1 or more")
        return None

    async def _search(self, asked: Mapping[str, SearchText]) -> tuple[dict[str, tuple[Hit, ...]], float]:
        """The hits by request, and the seconds that it took."""
        if self._pool is None:
            raise self._faults.unavailable("it is not running.")
        begun = time.perf_counter()
        async with self._pool.connection() as conn:
            found = await sql.search(conn, self._corpus, self.language, list(asked.values()))
        return dict(zip(asked, found, strict=True)), time.perf_counter() - begun

    async def cancel(self, request_id: str) -> None:
        """Ends the request; the statement goes on for the others of its batch."""
        self._tasks.cancel(request_id)

    def size(self, request: Request) -> int:
        return 1

    def load(self) -> EngineLoad:
        return EngineLoad(requests=len(self._tasks))

    async def reset(self) -> None:
        """Do nothing: there are no caches, and documents stay."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of PostgreSQL, once it runs, and of the documents."""
        return dict(self._versions)
