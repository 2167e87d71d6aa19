"""Stored documents of tenants: in memory, or beside submitted queries in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from teola_plugin.server.queries.store import PostgresStore, Store


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The text of a document; the document itself is not stored. Times are Unix times."""

    id: str
    tenant: str
    name: str
    purpose: str
    kind: str
    bytes: int
    """Size of the document."""
    created: float
    expires: float | None
    pages: int | None = None
    query: str = ""
    """The submitted query that it came with, and is deleted with; empty for an uploaded one."""
    text: str = ""
    """Empty in lists."""

    def to_json(self) -> dict[str, Any]:
        """Return the file in OpenAI's form."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": int(self.created),
            "expires_at": None if self.expires is None else int(self.expires),
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
            "kind": self.kind,
            "pages": self.pages,
        }


class FileStore(Protocol):
    """A store of documents. Each tenant has ids of its own."""

    async def open(self) -> None: ...

    async def put(self, file: StoredFile) -> None: ...

    async def get(self, tenant: str, id: str) -> StoredFile | None: ...

    async def uploaded(self, tenant: str) -> list[StoredFile]:
        """Return uploaded documents without their text, latest first; not those that came with a query."""

    async def total_bytes(self, tenant: str) -> int:
        """Return the size of all documents of a tenant."""

    async def delete(self, tenant: str, id: str | None = None, *, query: str | None = None) -> int:
        """Delete one document, those of a query, or all of a tenant. Return their number."""

    async def expire(self, now: float) -> int:
        """Delete the files that have expired by `now`, a Unix time. Return their number."""


class MemoryFiles:
    """A store that is lost with the process."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], StoredFile] = {}

    async def open(self) -> None: ...

    async def put(self, file: StoredFile) -> None:
        self._files[file.tenant, file.id] = file

    async def get(self, tenant: str, id: str) -> StoredFile | None:
        return self._files.get((tenant, id))

    async def uploaded(self, tenant: str) -> list[StoredFile]:
        files = [one for one in self._files.values() if one.tenant == tenant and not one.query]
        return sorted(files, key=lambda one: (-one.created, one.id))

    async def total_bytes(self, tenant: str) -> int:
        return sum(one.bytes for one in self._files.values() if one.tenant == tenant)

    async def delete(self, tenant: str, id: str | None = None, *, query: str | None = None) -> int:
        mine = [(key, one) for key, one in self._files.items() if key[0] == tenant]
        return self._drop([key for key, one in mine if id in (None, key[1]) and query in (None, one.query)])

    async def expire(self, now: float) -> int:
        return self._drop([k for k, one in self._files.items() if one.expires is not None and one.expires <= now])

    def _drop(self, keys: Sequence[tuple[str, str]]) -> int:
        """Delete the documents of these keys, each a tenant and an id. Return their number.

        Raise `KeyError` for a key that is not stored; callers pass keys that they have just read.
        """
        for key in keys:
            del self._files[key]
        return len(keys)


_TABLE = """
CREATE TABLE IF NOT EXISTS teola_server_files (
    pool text NOT NULL, tenant text NOT NULL, id text NOT NULL, query text NOT NULL, bytes bigint NOT NULL,
    created double precision NOT NULL, expires double precision, about jsonb NOT NULL, content text NOT NULL,
    PRIMARY KEY (pool, tenant, id))
"""
_PUT = """
INSERT INTO teola_server_files (pool, tenant, id, query, bytes, created, expires, about, content)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (pool, tenant, id) DO UPDATE
SET expires = excluded.expires, about = excluded.about, content = excluded.content
"""
_MINE = "FROM teola_server_files WHERE pool = %s AND tenant = %s"


class PostgresFiles:
    """A store in the database of the server's store, on its connections."""

    def __init__(self, store: PostgresStore) -> None:
        self._store, self._pool = store, store.pool

    async def open(self) -> None:
        await self._run(_TABLE)

    async def put(self, file: StoredFile) -> None:
        """Store a document, its text apart from the rest, so that lists do not read the texts."""
        from psycopg.types.json import Jsonb

        metadata = Jsonb({**asdict(file), "text": ""})
        figures = (file.query, file.bytes, file.created, file.expires)
        await self._run(_PUT, self._pool, file.tenant, file.id, *figures, metadata, file.text)

    async def get(self, tenant: str, id: str) -> StoredFile | None:
        """Return a stored document with its text; None if the tenant has none of this id.

        A document that has expired is returned until `expire` deletes it. Raise `EngineUnavailable` if the store is not
        open.
        """
        if "\0" in id:  # no text of PostgreSQL holds it
            return None
        rows = await self._rows(f"SELECT about, content {_MINE} AND id = %s", tenant, id)
        return StoredFile(**{**rows[0][0], "text": rows[0][1]}) if rows else None

    async def uploaded(self, tenant: str) -> list[StoredFile]:
        rows = await self._rows(f"SELECT about {_MINE} AND query = '' ORDER BY created DESC, id", tenant)
        return [StoredFile(**row[0]) for row in rows]

    async def total_bytes(self, tenant: str) -> int:
        return int((await self._rows(f"SELECT coalesce(sum(bytes), 0) {_MINE}", tenant))[0][0])

    async def delete(self, tenant: str, id: str | None = None, *, query: str | None = None) -> int:
        """Delete the tenant's documents that match all conditions given. Return their number.

        `id` and `query` select one document or those of one submitted query; with neither, all documents of the tenant
        go.
        """
        columns = {" AND id = %s": id, " AND query = %s": query}
        conditions = {text: value for text, value in columns.items() if value is not None}
        return await self._run(f"DELETE {_MINE}{''.join(conditions)}", self._pool, tenant, *conditions.values())

    async def expire(self, now: float) -> int:
        return await self._run("DELETE FROM teola_server_files WHERE pool = %s AND expires <= %s", self._pool, now)

    async def _rows(self, text: str, *values: Any) -> list[Any]:
        async with self._store.connection() as connection:
            return await (await connection.execute(text.encode(), (self._pool, *values))).fetchall()

    async def _run(self, text: str, *values: Any) -> int:
        async with self._store.connection() as connection:
            return (await connection.execute(text.encode(), values)).rowcount


def files_of(store: Store) -> FileStore:
    """Return the store of documents that belongs to a store of queries."""
    return PostgresFiles(store) if isinstance(store, PostgresStore) else MemoryFiles()
