"""Where submitted queries are kept, and names of tenants in the pool: in memory, or in PostgreSQL, from which a
restarted server knows them."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from teola_plugin.errors import EngineUnavailable, extra
from teola_plugin.server.queries.records import UNFINISHED, Record

if TYPE_CHECKING:
    from psycopg import AsyncConnection
    from psycopg_pool import AsyncConnectionPool


class Store(Protocol):
    """Each tenant has ids of its own."""

    @property
    def dsn(self) -> str:
        """Of its database, once it is open; empty for one in memory."""

    @property
    def pool(self) -> str:
        """The name of the pool whose queries these are."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def put(self, record: Record) -> None:
        """Kept once this returns."""

    async def get(self, tenant: str, id: str) -> Record | None: ...

    async def latest(self, tenant: str, limit: int, status: str = "") -> list[Record]:
        """`status`: only those that are so; empty for all."""

    async def unfinished(self) -> list[Record]: ...

    async def expire(self, now: float) -> int: ...

    async def delete(self, tenant: str, id: str | None = None) -> int:
        """One query, or all of a tenant."""

    async def names(self) -> dict[str, str]:
        """Tenants that were forgotten, and the names that they have in the pool since then."""

    async def put_name(self, tenant: str, name: str) -> None:
        """Kept once this returns, in place of an earlier one."""


class MemoryStore:
    """Nothing outlives the process."""

    dsn = ""

    def __init__(self, pool: str = "default") -> None:
        self.pool = pool
        self._kept: dict[tuple[str, str], Record] = {}
        self._names: dict[str, str] = {}

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def put(self, record: Record) -> None:
        self._kept[record.tenant, record.id] = record

    async def get(self, tenant: str, id: str) -> Record | None:
        return self._kept.get((tenant, id))

    async def latest(self, tenant: str, limit: int, status: str = "") -> list[Record]:
        mine = (record for record in self._kept.values() if record.tenant == tenant)
        found = [record for record in mine if status in ("", record.status)]
        return sorted(found, key=lambda record: -record.created)[:limit]

    async def unfinished(self) -> list[Record]:
        return [record for record in self._kept.values() if record.status in UNFINISHED]

    async def expire(self, now: float) -> int:
        return self._drop([k for k, r in self._kept.items() if r.expires is not None and r.expires <= now])

    async def delete(self, tenant: str, id: str | None = None) -> int:
        return self._drop([key for key in self._kept if key[0] == tenant and id in (None, key[1])])

    async def names(self) -> dict[str, str]:
        return dict(self._names)

    async def put_name(self, tenant: str, name: str) -> None:
        self._names[tenant] = name

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
CREATE INDEX IF NOT EXISTS teola_server_queries_unfinished ON teola_server_queries (pool, status)
    WHERE status IN ('queued', 'running', 'waiting');
CREATE TABLE IF NOT EXISTS teola_server_names (
    pool text NOT NULL, tenant text NOT NULL, name text NOT NULL, PRIMARY KEY (pool, tenant))
"""
_OWN = "SELECT pg_try_advisory_lock(hashtextextended(%s, 0))"
_PATIENCE = 10.0
"""Seconds that a server may take to end after the next one was started."""
_PUT = """
INSERT INTO teola_server_queries (pool, tenant, id, status, created, expires, record)
VALUES (%s, %s, %s, %s, %s, %s, %s) ON CONFLICT (pool, tenant, id) DO UPDATE
SET status = excluded.status, expires = excluded.expires, record = excluded.record
"""
_PUT_NAME = """
INSERT INTO teola_server_names (pool, tenant, name) VALUES (%s, %s, %s)
ON CONFLICT (pool, tenant) DO UPDATE SET name = excluded.name
"""


class PostgresStore:
    """In a table of a database that may hold other things. `pool`: names of pools keep servers apart."""

    def __init__(self, dsn: str, pool: str = "default") -> None:
        self.dsn, self.pool = dsn, pool
        self._connections: AsyncConnectionPool[AsyncConnection[Any]] | None = None
        self._owning: AsyncConnection[Any] | None = None

    async def open(self) -> None:
        """Raises `EngineUnavailable` where the database cannot be reached, or where another server keeps the queries of
        this pool there: what it runs is not to be begun again."""
        try:
            import psycopg
            from psycopg_pool import AsyncConnectionPool, PoolTimeout
        except ImportError as error:
            raise EngineUnavailable("the server's store needs psycopg.", hint=extra("postgres")) from error
        made: AsyncConnectionPool[AsyncConnection[Any]] = AsyncConnectionPool(
            self.dsn, min_size=1, max_size=8, open=False, kwargs={"autocommit": True}
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
        try:
            self._owning = await self._own()
        except BaseException:
            await self.close()
            raise

    async def _own(self) -> AsyncConnection[Any]:
        """A connection that holds the pool's lock, which PostgreSQL drops when this process ends."""
        import psycopg

        made = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)
        until = time.monotonic() + _PATIENCE
        while True:
            found = await (await made.execute(_OWN, (f"teola serve {self.pool}",))).fetchone()
            if found is not None and found[0]:
                return made
            if time.monotonic() > until:
                await made.close()
                what = f"another server keeps the queries of the pool {self.pool!r} in this store."
                raise EngineUnavailable(what, hint="stop it, or give the pool of this one another name")
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        owning, self._owning = self._owning, None
        if owning is not None:
            await owning.close()
        if self._connections is not None:
            await self._connections.close()
            self._connections = None

    async def put(self, record: Record) -> None:
        from psycopg.types.json import Jsonb

        about = (record.tenant, record.id, record.status, record.created, record.expires)
        await self._run(_PUT, self.pool, *about, Jsonb(_storable(record.to_json())))

    async def get(self, tenant: str, id: str) -> Record | None:
        if "\0" in id:  # of which PostgreSQL has none
            return None
        found = await self._read("tenant = %s AND id = %s", tenant, id)
        return found[0] if found else None

    async def latest(self, tenant: str, limit: int, status: str = "") -> list[Record]:
        wanted, values = (" AND status = %s", [status]) if status else ("", [])
        return await self._read(f"tenant = %s{wanted} ORDER BY created DESC LIMIT %s", tenant, *values, limit)

    async def unfinished(self) -> list[Record]:
        return await self._read("status IN ('queued', 'running', 'waiting') ORDER BY created")

    async def expire(self, now: float) -> int:
        return await self._run("DELETE FROM teola_server_queries WHERE pool = %s AND expires <= %s", self.pool, now)

    async def delete(self, tenant: str, id: str | None = None) -> int:
        one = "" if id is None else " AND id = %s"
        wanted = (self.pool, tenant) if id is None else (self.pool, tenant, id)
        return await self._run(f"DELETE FROM teola_server_queries WHERE pool = %s AND tenant = %s{one}", *wanted)

    async def names(self) -> dict[str, str]:
        text = "SELECT tenant, name FROM teola_server_names WHERE pool = %s"
        async with self._open().connection() as connection:
            return dict(await (await connection.execute(text.encode(), (self.pool,))).fetchall())

    async def put_name(self, tenant: str, name: str) -> None:
        await self._run(_PUT_NAME, self.pool, tenant, name)

    async def _read(self, where: str, *values: Any) -> list[Record]:
        text = f"SELECT record FROM teola_server_queries WHERE pool = %s AND {where}"
        async with self._open().connection() as connection:
            rows = await (await connection.execute(text.encode(), (self.pool, *values))).fetchall()
        return [Record.of_json(row[0]) for row in rows]

    async def _run(self, text: str, *values: Any) -> int:
        async with self._open().connection() as connection:
            return (await connection.execute(text.encode(), values)).rowcount

    def connection(self) -> AbstractAsyncContextManager[AsyncConnection[Any]]:
        """For what else the server keeps in the same database. Raises `EngineUnavailable`."""
        return self._open().connection()

    def _open(self) -> AsyncConnectionPool[AsyncConnection[Any]]:
        if self._connections is None:
            raise EngineUnavailable("the server's store is not open.", hint="start the server")
        return self._connections


_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


def _storable(value: Any) -> Any:
    """Return the value as PostgreSQL's jsonb takes it: without characters of code 0, and halves of characters."""
    if isinstance(value, str):
        return _UNSTORABLE.sub("\ufffd", value)
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
        from teola_plugin.engines.postgres.embedded import EmbeddedPostgres

        self._server = EmbeddedPostgres(self._folder)
        await asyncio.to_thread(self._server.start)
        self.dsn = self._server.dsn
        await super().open()

    async def close(self) -> None:
        await super().close()
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)


def store_of(given: str, folder: str, pool: str) -> Store:
    """`memory`, `embedded` or a DSN. `folder`: of the embedded one; empty for the user's own."""
    if given == "memory":
        return MemoryStore(pool)
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
