"""The engine of full-text search: the requests of a batch are one statement.

One table holds the documents of all engines, distinguished by `corpus`. A question is searched by any of its words
(`plainto_tsquery` with "or" between them): few documents have all words of a question. Titles weigh more than texts;
the rank is divided by 1 + log(length), so that long texts do not win alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.loop_lock import LoopLock
from teola_plugin.engines.postgres.embedded import EmbeddedPostgres
from teola_plugin.engines.postgres.faults import PostgresErrors
from teola_plugin.engines.request_tasks import Inbox, RequestTasks
from teola_plugin.errors import EngineError, RegistrationError
from teola_plugin.graph import Batching, Curve, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Chunk, Done, Failed, Hit, Request, Result, SearchText

if TYPE_CHECKING:
    from psycopg import AsyncConnection
    from psycopg_pool import AsyncConnectionPool

    Connection = AsyncConnection[Any]

_CONNECT_SECONDS = 10
_PROFILE = EngineProfile(
    {PrimitiveKind.SEARCHING: Curve.linear(0.002, 0.001)},
    batching=Batching.CONTINUOUS,
    max_batch=256,
    max_efficient_batch=64,
    max_requests=512,
)
"""An estimated profile."""


class FullTextSearch:
    """A search of `documents` by their words, with the requests and hits of `WebSearchEngine`.

    `documents`: texts, mappings (`text`, and optionally `url`, `title` and other metadata), chunks, or the path of a
    JSONL file or a folder (`read_documents`). `dsn`: your own PostgreSQL; without one the engine starts an embedded
    server, whose data stay in `data_dir`. Documents that are there already are not written again. `language` is a text
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
        chunks = read_documents(os.fspath(documents)) if isinstance(documents, str | os.PathLike) else documents
        self.documents = to_chunks(chunks)
        self._corpus = digest(self.documents, language)
        self._server = EmbeddedPostgres(data_dir) if dsn is None else None
        self._dsn = dsn or ""
        self._pool: AsyncConnectionPool | None = None
        self._versions: dict[str, str] = {"documents": str(len(self.documents)), "corpus": self._corpus}
        self._errors = PostgresErrors(name)
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
                    raise self._errors.of_start(error) from error
                raise

    async def _open(self) -> None:
        """Start the embedded server if there is one, write the documents, and open the pool of connections."""
        from psycopg import AsyncConnection
        from psycopg_pool import AsyncConnectionPool

        if self._server is not None:
            await asyncio.to_thread(self._server.start)
            self._dsn = self._server.dsn
        connected = AsyncConnection.connect(self._dsn, autocommit=True, connect_timeout=_CONNECT_SECONDS)
        async with await connected as conn:
            self._versions["postgresql"] = await _prepare(conn, self._corpus, self.documents, self.language)
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
        """Stop the engine. Idempotent. Searches under way fail."""
        async with self._changing:
            await self._close()

    async def restart(self) -> None:
        """Connect again; start the embedded server again if it died."""
        await self.stop()
        await self.start()

    async def _close(self) -> None:
        """Cancel searches under way, close the connections and stop the embedded server."""
        pool, self._pool = self._pool, None
        self._tasks.cancel_all()
        if pool is not None:
            await pool.close()
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)

    # Requests

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """Yield one `Done` with a tuple of `Hit`, or `Failed`, for each search."""
        good = {r.id: r.payload for r in batch if self._request_error(r) is None}
        searching = asyncio.create_task(self._search(good)) if good else None

        async def serve(request: Request, inbox: Inbox) -> Done | Failed:
            """Return one request's part of the batch's only statement. Cancelling one request leaves the statement to
            the others."""
            fault = self._request_error(request)
            if fault is not None or searching is None:
                return Failed(request.id, fault or self._errors.bad("nothing is asked"))
            try:
                hits, seconds = await asyncio.shield(searching)
            except Exception as error:
                return Failed(request.id, self._errors.of(error))
            return Done(request.id, hits[request.id], {"seconds": seconds})

        try:
            async with aclosing(self._tasks.results(batch, serve)) as results:
                async for result in results:
                    yield result
        finally:
            if searching is not None:
                searching.cancel()
                await asyncio.gather(searching, return_exceptions=True)

    def _request_error(self, request: Request) -> EngineError | None:
        """Return the error for an invalid request, None for a valid one."""
        payload = request.payload
        if request.kind not in self.kinds or not isinstance(payload, SearchText):
            got = f"{request.kind.value} of {type(payload).__name__}"
            return self._errors.bad(f"it does searching of SearchText, not {got}")
        if not isinstance(payload.query, str) or "\0" in payload.query:
            return self._errors.bad(f"request {request.id!r}: the query is no text")
        if not isinstance(payload.k, int) or payload.k < 1:
            return self._errors.bad(f"request {request.id!r}: {payload.k!r} hits are wanted; ask for 1 or more")
        return None

    async def _search(self, searches: Mapping[str, SearchText]) -> tuple[dict[str, tuple[Hit, ...]], float]:
        """Return the hits by request, and the seconds that the statement took."""
        if self._pool is None:
            raise self._errors.unavailable("it is not running.")
        start = time.perf_counter()
        async with self._pool.connection() as conn:
            hits = await _search_corpus(conn, self._corpus, self.language, list(searches.values()))
        return dict(zip(searches, hits, strict=True)), time.perf_counter() - start

    async def cancel(self, request_id: str) -> None:
        """End a request. The statement goes on for the others of its batch."""
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


_SCHEMA = """
CREATE SCHEMA IF NOT EXISTS teola;
CREATE TABLE IF NOT EXISTS teola.texts (
  corpus text NOT NULL, id text NOT NULL, seq int NOT NULL, body text NOT NULL, metadata json NOT NULL,
  words tsvector NOT NULL, PRIMARY KEY (corpus, id));
CREATE INDEX IF NOT EXISTS texts_words ON teola.texts USING gin (words);
"""
_INSERT = """
INSERT INTO teola.texts (corpus, id, seq, body, metadata, words)
VALUES (%s, %s, %s, %s, %s, setweight(to_tsvector(%s, %s), 'A') || setweight(to_tsvector(%s, %s), 'B'))
ON CONFLICT DO NOTHING
"""
_SEARCH = """
SELECT q.n, h.id, h.body, h.metadata, h.rank
FROM (SELECT n, replace(plainto_tsquery(%s::regconfig, asked)::text, ' & ', ' | ')::tsquery AS words
      FROM unnest(%s::text[]) WITH ORDINALITY AS given (asked, n)) AS q
CROSS JOIN LATERAL (
  SELECT t.id, t.body, t.metadata, t.seq, ts_rank(t.words, q.words, 1)::float8 AS rank
  FROM teola.texts AS t WHERE t.corpus = %s AND t.words @@ q.words ORDER BY rank DESC, t.seq LIMIT %s) AS h
ORDER BY q.n, h.rank DESC, h.seq
"""


async def _prepare(conn: Connection, corpus: str, chunks: Sequence[Chunk], language: str) -> str:
    """Write the documents unless they are there. Return the server's version."""
    async with conn.transaction():
        await conn.execute("SET LOCAL client_min_messages = warning")
        await conn.execute("SELECT pg_advisory_xact_lock(hashtext('teola.texts'))")
        table = await (await conn.execute("SELECT to_regclass('teola.texts')")).fetchone()
        if table is None or table[0] is None:  # a role may be allowed to use it and not to create it
            await conn.execute(_SCHEMA)
        row = await (await conn.execute("SELECT count(*) FROM teola.texts WHERE corpus = %s", (corpus,))).fetchone()
        if row is None or row[0] != len(chunks):
            async with conn.cursor() as cursor:
                await cursor.executemany(_INSERT, [_row(corpus, n, chunk, language) for n, chunk in enumerate(chunks)])
    version = await (await conn.execute("SELECT current_setting('server_version')")).fetchone()
    return "" if version is None else str(version[0]).split()[0]


def _row(corpus: str, number: int, chunk: Chunk, language: str) -> tuple[Any, ...]:
    """Return the parameters of the statement that inserts one document; `number` is its position in the corpus.

    The language comes once for the title and once for the text, since PostgreSQL gives their words different weights.
    """
    metadata = json.dumps(dict(chunk.metadata))
    title = str(chunk.metadata.get("title", ""))
    return corpus, chunk.id, number, chunk.text, metadata, language, title, language, chunk.text


async def _search_corpus(
    conn: Connection, corpus: str, language: str, requests: Sequence[SearchText]
) -> list[tuple[Hit, ...]]:
    """Return the hits of each search, best first, in one round trip."""
    max_hits = max(request.k for request in requests)
    cursor = await conn.execute(_SEARCH, (language, [request.query for request in requests], corpus, max_hits))
    hits_of_searches: list[list[Hit]] = [[] for _ in requests]
    async for n, address, body, metadata, rank in cursor:
        hits_of_searches[n - 1].append(Hit(address, body, metadata, rank))
    return [tuple(hits[: request.k]) for request, hits in zip(requests, hits_of_searches, strict=True)]


_TEXTS = (".txt", ".md", ".rst")


def read_documents(path: str | Path) -> list[Chunk]:
    """Read documents from a JSONL file or from the text files of a folder.

    Args:
        path: A JSONL file with one object per line (`text`, and optionally `url`, `title` and other metadata), or a
            folder with .txt, .md or .rst files, whose names become their addresses.

    Raises:
        RegistrationError: The file or folder cannot be read, or has no documents.
    """
    folder_or_file = Path(path).expanduser()
    try:
        if folder_or_file.is_dir():
            files = sorted(file for file in folder_or_file.rglob("*") if file.suffix in _TEXTS and file.is_file())
            documents = [_of_file(file, folder_or_file) for file in files]
        else:
            lines = folder_or_file.read_text(encoding="utf-8-sig").split("\n")  # not splitlines(): JSON may hold U+2028
            documents = [_parse_line(folder_or_file, n, line) for n, line in enumerate(lines, start=1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise RegistrationError(
            f"the documents of {str(folder_or_file)!r} cannot be read: {error}.",
            hint="give a JSONL file in UTF-8, or a folder",
        ) from error
    if not documents:
        raise RegistrationError(
            f"{str(folder_or_file)!r} has no documents.", hint=f"give a JSONL file, or {', '.join(_TEXTS)}"
        )
    return documents


def _of_file(file: Path, folder: Path) -> Chunk:
    name = file.relative_to(folder).as_posix()
    return Chunk(name, file.read_text(encoding="utf-8"), {"title": file.stem, "source": name})


def _parse_line(file: Path, number: int, line: str) -> Chunk:
    """Return the document in one line of a JSONL file. Raise `RegistrationError`, which names file and line."""
    try:
        value: Any = json.loads(line)
        return to_chunk(value)
    except (ValueError, RegistrationError) as error:
        raise RegistrationError(
            f"{str(file)!r}, line {number}: {getattr(error, 'message', error)}",
            hint='write {"url": "...", "title": "...", "text": "..."}, one object a line',
        ) from None


def to_chunk(document: Any) -> Chunk:
    """Return a document as a chunk with `source` and `title` in its metadata. Raise RegistrationError."""
    if isinstance(document, Chunk):
        return Chunk(document.id, document.text, {"source": document.id, **document.metadata})
    if isinstance(document, str):
        document = {"text": document}
    if not isinstance(document, Mapping) or not isinstance(document.get("text"), str):
        raise RegistrationError(
            f"a document is {type(document).__name__} without a text.",
            hint="give texts, mappings with `text`, or chunks",
        )
    text = document["text"]
    url = str(document.get("url") or document.get("id") or "text:" + hashlib.sha256(text.encode()).hexdigest()[:16])
    more = {key: value for key, value in document.items() if key not in ("text", "url", "id")}
    return Chunk(url, text, {"source": url, "title": "", **more})


def to_chunks(documents: Iterable[Any]) -> tuple[Chunk, ...]:
    """Return documents as chunks. Raise RegistrationError, also for two documents of one address."""
    chunks = tuple(to_chunk(one) for one in documents)
    seen: set[str] = set()
    for chunk in chunks:
        if chunk.id in seen:
            raise RegistrationError(f"two documents have the address {chunk.id!r}.", hint="give each its own `url`")
        seen.add(chunk.id)
    return chunks


def digest(chunks: Iterable[Chunk], language: str) -> str:
    """Return a digest of documents, which is equal for equal ones.

    It is 32 hex digits of SHA-256 over the language and each document's id, text and metadata, in their order.
    """
    content_hash = hashlib.sha256(language.encode())
    for chunk in chunks:
        content_hash.update(json.dumps([chunk.id, chunk.text, chunk.metadata], sort_keys=True, default=str).encode())
    return content_hash.hexdigest()[:32]
