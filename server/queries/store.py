"""Where submitted queries are kept: in memory, or in PostgreSQL, from which a restarted server knows them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from teola_plugin.errors import EngineUnavailable, extra
from teola_plugin.server.queries.records import OPEN, Record

if TYPE_CHECKING:
    from psycopg import AsyncConnection
    from psycopg_pool import AsyncConnectionPool


class Store(Protocol):
    """Each tenant has ids of its own."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def put(self, record: Record) -> None:
        """Kept once this returns."""

    async def get(self, tenant: str, id: str) -> Record | None: ...

    async def latest(self, tenant: str, limit: int) -> list[Record]: ...

    async def unfinished(self) -> list[Record]: ...

    async def expire(self, now: float) -> int: ...

    async def delete(self, tenant: str, id: str | None = None) -> int:
        """One query, or all of a tenant."""


class MemoryStore:
    """Nothing outlives the process."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Record] = {}

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def put(self, record: Record) -> None:
        self._kept[record.tenant, record.id] = record

    async def get(self, tenant: str, id: str) -> Record | None:
        return self._kept.get((tenant, id))

    async def latest(self, tenant: str, limit: int) -> list[Record]:
        found = [record for record in self._kept.values() if record.tenant == tenant]
        return sorted(found, key=lambda record: -record.created)[:limit]

    async def unfinished(self) -> list[Record]:
        return [record for record in self._kept.values() if record.status in OPEN]

    async def expire(self, now: float) -> int:
        return self._drop([k for k, r in self._kept.items() if r.expires is not None and r.expires <= now])

    async def delete(self, tenant: str, id: str | None = None) -> int:
        return self._drop([key for key in self._kept if key[0] == tenant and id in (None, key[1])])

    def _drop(self, keys: Sequence[tuple[str, str]]) -> int:
        for key in keys:
            del self._kept[key]
        return len(keys)


_TABLE = """
CREATE TABLE IF NOT EXISTS teola_server_queries (
    pool text NOT NULL, tenant text NOT NULL, id text NOT NULL, status text NOT NULL,
    created double precision NOT NULL, expires double precision, record jsonb NOT NULL,
    PRIMARY KEY (pool, tenant, id));
CREATE INDEX IF NOT EXISTS teola_server_queries_latest ON teola_server_queries (pool, tenant, created DESC);
CREATE INDEX IF NOT EXISTS teola_server_queries_open ON teola_server_queries (pool, status)
    WHERE status IN ('queued', 'running')
"""
_PUT = """
INSERT INTO teola_server_queries (pool, tenant, id, status, created, expires, record)
VALUES (%s, %s, %s, %s, %s, %s, %s) ON CONFLICT (pool, tenant, id) DO UPDATE
SET status = excluded.status, expires = excluded.expires, record = excluded.record
"""


class PostgresStore:
    """In a table of a database that may hold other things. `pool`: names of pools keep servers apart."""

    def __init__(self, dsn: str, pool: str = "default") -> None:
        self._dsn, self._name = dsn, pool
        self._connections: AsyncConnectionPool[AsyncConnection[Any]] | None = None

    async def open(self) -> None:
        """Raises `EngineUnavailable` where the database cannot be reached."""
        try:
            import psycopg
            from psycopg_pool import AsyncConnectionPool, PoolTimeout
        except ImportError as error:
            raise EngineUnavailable("the server's store needs psycopg.", hint=extra("postgres")) from error
        made: AsyncConnectionPool[AsyncConnection[Any]] = AsyncConnectionPool(
            self._dsn, min_size=1, max_size=8, open=False, kwargs={"autocommit": True}
        )
        try:
            await made.open(wait=True, timeout=15)
            async with made.connection() as connection:
                for statement in _TABLE.split(";"):
                    await connection.execute(statement.encode())
        except (psycopg.Error, PoolTimeout) as error:
            await made.close()
            raise EngineUnavailable(
                f"the server's store cannot be reached: {type(error).__name__}.", hint="see server.store, a DSN"
            ) from error
        self._connections = made

    async def close(self) -> None:
        if self._connections is not None:
            await self._connections.close()
            self._connections = None

    async def put(self, record: Record) -> None:
        from psycopg.types.json import Jsonb

        about = (record.tenant, record.id, record.status, record.created, record.expires)
        await self._run(_PUT, self._name, *about, Jsonb(_storable(record.to_json())))

    async def get(self, tenant: str, id: str) -> Record | None:
        found = await self._read("tenant = %s AND id = %s", tenant, id)
        return found[0] if found else None

    async def latest(self, tenant: str, limit: int) -> list[Record]:
        return await self._read("tenant = %s ORDER BY created DESC LIMIT %s", tenant, limit)

    async def unfinished(self) -> list[Record]:
        return await self._read("status IN ('queued', 'running') ORDER BY created")

    async def expire(self, now: float) -> int:
        return await self._run("DELETE FROM teola_server_queries WHERE pool = %s AND expires <= %s", self._name, now)

    async def delete(self, tenant: str, id: str | None = None) -> int:
        one = "" if id is None else " AND id = %s"
        wanted = (self._name, tenant) if id is None else (self._name, tenant, id)
        return await self._run(f"DELETE FROM teola_server_queries WHERE pool = %s AND tenant = %s{one}", *wanted)

    async def _read(self, where: str, *values: Any) -> list[Record]:
        text = f"SELECT record FROM teola_server_queries WHERE pool = %s AND {where}"
        async with self._open().connection() as connection:
            rows = await (await connection.execute(text.encode(), (self._name, *values))).fetchall()
        return [Record.of_json(row[0]) for row in rows]

    async def _run(self, text: str, *values: Any) -> int:
        async with self._open().connection() as connection:
            return (await connection.execute(text.encode(), values)).rowcount

    @property
    def pool(self) -> str:
        """The name under which its rows stand."""
        return self._name

    def connection(self) -> AbstractAsyncContextManager[AsyncConnection[Any]]:
        """For what else the server keeps in the same database. Raises `EngineUnavailable`."""
        return self._open().connection()

    def _open(self) -> AsyncConnectionPool[AsyncConnection[Any]]:
        if self._connections is None:
            raise EngineUnavailable("the server's store is not open.", hint="start the server")
        return self._connections


def _storable(value: Any) -> Any:
    """PostgreSQL's jsonb has no character of code 0."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    if isinstance(value, dict):
        return {str(_storable(key)): _storable(one) for key, one in value.items()}
    return [_storable(one) for one in value] if isinstance(value, list | tuple) else value


class EmbeddedStore(PostgresStore):
    """A PostgreSQL of the server's own, whose data stay in a folder."""

    def __init__(self, folder: str | Path, pool: str = "default") -> None:
        super().__init__("", pool)
        self._folder = Path(folder)
        self._server: Any = None

    async def open(self) -> None:
        import asyncio

        from teola_plugin.engines.postgres.embedded import EmbeddedPostgres

        self._server = EmbeddedPostgres(self._folder)
        await asyncio.to_thread(self._server.start)
        self._dsn = self._server.dsn
        await super().open()

    async def close(self) -> None:
        import asyncio

        await super().close()
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)


def store_of(given: str, folder: str, pool: str) -> Store:
    """`memory`, `embedded` or a DSN. `folder`: of the embedded one; empty for the user's own."""
    if given == "memory":
        return MemoryStore()
    if given == "embedded":
        return EmbeddedStore(folder or data_folder() / pool, pool)
    return PostgresStore(given, pool)


def data_folder() -> Path:
    """Where servers of this user keep what has to stay. PostgreSQL runs as somebody else where this user is root, and
    has to get there."""
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return Path("/var/lib/teola-plugin/server")
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "teola-plugin" / "server"
