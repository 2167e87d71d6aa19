"""Stores of submitted queries, and of names of tenants in the pool: in memory, or in PostgreSQL for restarts."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from teola_plugin.errors import EngineUnavailable, extra
from teola_plugin.server.queries.records import UNFINISHED, Record

if TYPE_CHECKING:
    from psycopg import AsyncConnection
    from psycopg_pool import AsyncConnectionPool


class Store(Protocol):
    """A store of submitted queries. Each tenant has ids of its own."""

    @property
    def dsn(self) -> str:
        """Return the DSN of its database once it is open; empty for a store in memory."""

    @property
    def pool(self) -> str:
        """Return the name of the pool whose queries these are."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def put(self, record: Record) -> None:
        """Store the record durably."""

    async def get(self, tenant: str, id: str) -> Record | None: ...

    async def latest(self, tenant: str, limit: int, status: str = "") -> list[Record]:
        """Return the tenant's latest queries. `status`: only those of this status; empty for all."""

    async def unfinished(self) -> list[Record]: ...

    async def expire(self, now: float) -> int:
        """Delete the queries that have expired by `now`, a Unix time. Return their number."""

    async def delete(self, tenant: str, id: str | None = None) -> int:
        """Delete one query, or all of a tenant. Return their number."""

    async def new_names(self) -> dict[str, str]:
        """Return the names that deleted tenants have in the pool from then on, by tenant. Read once, at the start."""

    async def put_new_name(self, tenant: str, name: str) -> None:
        """Store the tenant's name durably, in place of an earlier one."""


class MemoryStore:
    """A store that is lost with the process."""

    dsn = ""

    def __init__(self, pool: str = "default") -> None:
        self.pool = pool
        self._records: dict[tuple[str, str], Record] = {}
        self._names: dict[str, str] = {}

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def put(self, record: Record) -> None:
        self._records[record.tenant, record.id] = record

    async def get(self, tenant: str, id: str) -> Record | None:
        return self._records.get((tenant, id))

    async def latest(self, tenant: str, limit: int, status: str = "") -> list[Record]:
        """Return at most `limit` queries of the tenant, latest first, by when they were created.

        An empty `status` stands for all.
        """
        mine = (record for record in self._records.values() if record.tenant == tenant)
        records = [record for record in mine if status in ("", record.status)]
        return sorted(records, key=lambda record: -record.created)[:limit]

    async def unfinished(self) -> list[Record]:
        return [record for record in self._records.values() if record.status in UNFINISHED]

    async def expire(self, now: float) -> int:
        return self._drop([k for k, r in self._records.items() if r.expires is not None and r.expires <= now])

    async def delete(self, tenant: str, id: str | None = None) -> int:
        return self._drop([key for key in self._records if key[0] == tenant and id in (None, key[1])])

    async def new_names(self) -> dict[str, str]:
        return dict(self._names)

    async def put_new_name(self, tenant: str, name: str) -> None:
        self._names[tenant] = name

    def _drop(self, keys: Sequence[tuple[str, str]]) -> int:
        """Delete the queries of these keys, each a tenant and an id. Return their number.

        Raise `KeyError` for a key that is not stored; callers pass keys that they have just read.
        """
        for key in keys:
            del self._records[key]
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
_LOCK = "SELECT pg_try_advisory_lock(hashtextextended(%s, 0))"
_LOCK_TIMEOUT_S = 10.0
"""Seconds for which a new server waits until the one before has ended."""
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
    """A store in tables of a database that may hold other things. `pool`: keeps servers apart."""

    def __init__(self, dsn: str, pool: str = "default") -> None:
        self.dsn, self.pool = dsn, pool
        self._connections: AsyncConnectionPool[AsyncConnection[Any]] | None = None
        self._owner: AsyncConnection[Any] | None = None

    async def open(self) -> None:
        """Open the store.

        Raise `EngineUnavailable` if the database cannot be reached, or if another server stores this pool's queries
        there, whose running queries must not be begun again.
        """
        try:
            import psycopg
            from psycopg_pool import AsyncConnectionPool, PoolTimeout
        except ImportError as error:
            raise EngineUnavailable("the server's store needs psycopg.", hint=extra("postgres")) from error
        connections: AsyncConnectionPool[AsyncConnection[Any]] = AsyncConnectionPool(
            self.dsn, min_size=1, max_size=8, open=False, kwargs={"autocommit": True}
        )
        try:
            await connections.open(wait=True, timeout=15)
            async with connections.connection() as connection:
                for statement in _TABLE.split(";"):
                    await connection.execute(statement.encode())
        except (psycopg.Error, PoolTimeout) as error:
            await connections.close()
            raise EngineUnavailable(
                f"the server's store cannot be reached: {type(error).__name__}.", hint="see server.store, a DSN"
            ) from error
        self._connections = connections
        try:
            self._owner = await self._lock()
        except BaseException:
            await self.close()
            raise

    async def _lock(self) -> AsyncConnection[Any]:
        """Return a connection that holds the pool's lock, which PostgreSQL releases when this process ends."""
        import psycopg

        connection = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)
        until = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            row = await (await connection.execute(_LOCK, (f"teola serve {self.pool}",))).fetchone()
            if row is not None and row[0]:
                return connection
            if time.monotonic() > until:
                await connection.close()
                message = f"another server keeps the queries of the pool {self.pool!r} in this store."
                raise EngineUnavailable(message, hint="stop it, or give the pool of this one another name")
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """Release the pool's lock and close all connections. Idempotent."""
        owner, self._owner = self._owner, None
        if owner is not None:
            await owner.close()
        if self._connections is not None:
            await self._connections.close()
            self._connections = None

    async def put(self, record: Record) -> None:
        """Store the record durably, in place of an earlier one of the same tenant and id.

        Characters that PostgreSQL's jsonb does not take are replaced. The record is committed when this returns. Raise
        `EngineUnavailable` if the store is not open, and what psycopg raises.
        """
        from psycopg.types.json import Jsonb

        columns = (record.tenant, record.id, record.status, record.created, record.expires)
        await self._run(_PUT, self.pool, *columns, Jsonb(_storable(asdict(record))))

    async def get(self, tenant: str, id: str) -> Record | None:
        """Return the record of a tenant's query; None if there is none.

        A record that has expired is returned until `expire` deletes it. Raise `EngineUnavailable` if the store is not
        open.
        """
        if "\0" in id:  # no text of PostgreSQL holds it
            return None
        records = await self._read("tenant = %s AND id = %s", tenant, id)
        return records[0] if records else None

    async def latest(self, tenant: str, limit: int, status: str = "") -> list[Record]:
        condition, values = (" AND status = %s", [status]) if status else ("", [])
        return await self._read(f"tenant = %s{condition} ORDER BY created DESC LIMIT %s", tenant, *values, limit)

    async def unfinished(self) -> list[Record]:
        return await self._read("status IN ('queued', 'running', 'waiting') ORDER BY created")

    async def expire(self, now: float) -> int:
        return await self._run("DELETE FROM teola_server_queries WHERE pool = %s AND expires <= %s", self.pool, now)

    async def delete(self, tenant: str, id: str | None = None) -> int:
        """Delete one query of a tenant, or all of them if `id` is None. Return their number.

        Only records of this pool are deleted; other servers may share the database.
        """
        condition = "" if id is None else " AND id = %s"
        values = (self.pool, tenant) if id is None else (self.pool, tenant, id)
        return await self._run(f"DELETE FROM teola_server_queries WHERE pool = %s AND tenant = %s{condition}", *values)

    async def new_names(self) -> dict[str, str]:
        """Return the names in the pool of tenants that were deleted, by tenant.

        `PoolNames.open` reads them when the server starts, since the caches of engines may outlive the server before
        it.
        """
        text = "SELECT tenant, name FROM teola_server_names WHERE pool = %s"
        async with self._open_connections().connection() as connection:
            return dict(await (await connection.execute(text.encode(), (self.pool,))).fetchall())

    async def put_new_name(self, tenant: str, name: str) -> None:
        await self._run(_PUT_NAME, self.pool, tenant, name)

    async def _read(self, where: str, *values: Any) -> list[Record]:
        """Return the records of this pool for which an SQL condition holds. `where` may also order and limit them.

        `where` is SQL of this class alone, with `%s` for each of `values`; what clients send comes only in `values`.
        Raise `EngineUnavailable` if the store is not open.
        """
        text = f"SELECT record FROM teola_server_queries WHERE pool = %s AND {where}"
        async with self._open_connections().connection() as connection:
            rows = await (await connection.execute(text.encode(), (self.pool, *values))).fetchall()
        return [Record.from_json(row[0]) for row in rows]

    async def _run(self, text: str, *values: Any) -> int:
        async with self._open_connections().connection() as connection:
            return (await connection.execute(text.encode(), values)).rowcount

    def connection(self) -> AbstractAsyncContextManager[AsyncConnection[Any]]:
        """Return a connection, also for what else the server stores in the database. Raise `EngineUnavailable`."""
        return self._open_connections().connection()

    def _open_connections(self) -> AsyncConnectionPool[AsyncConnection[Any]]:
        """Return the pool of connections. Raise `EngineUnavailable` before `open` and after `close`."""
        if self._connections is None:
            raise EngineUnavailable("the server's store is not open.", hint="start the server")
        return self._connections


_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


def _storable(value: Any) -> Any:
    """Return the value without characters that PostgreSQL's jsonb does not take: code 0, and lone surrogates."""
    if isinstance(value, str):
        return _UNSTORABLE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {str(_storable(key)): _storable(inner) for key, inner in value.items()}
    return [_storable(inner) for inner in value] if isinstance(value, list | tuple) else value


class EmbeddedStore(PostgresStore):
    """A store in a PostgreSQL of the server's own, whose data stay in a folder."""

    def __init__(self, folder: str | Path, pool: str = "default") -> None:
        """Prepare the store in `folder`. Nothing is started, and no DSN is known, before `open`."""
        super().__init__("", pool)
        self._folder = Path(folder)
        self._server: Any = None

    async def open(self) -> None:
        """Start the PostgreSQL server of this store, in a thread because that takes seconds, and open the store."""
        from teola_plugin.engines.postgres.embedded import EmbeddedPostgres

        self._server = EmbeddedPostgres(self._folder)
        await asyncio.to_thread(self._server.start)
        self.dsn = self._server.dsn
        await super().open()

    async def close(self) -> None:
        """Close the connections, then stop the PostgreSQL server of this store.

        It is stopped in a thread, because that may take seconds. The data stay in the folder.
        """
        await super().close()
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)


def store_of(setting: str, folder: str, pool: str) -> Store:
    """Return the store that the setting names: `memory`, `embedded` or a DSN. `folder`: of the embedded one; empty for
    the user's own."""
    if setting == "memory":
        return MemoryStore(pool)
    if setting == "embedded":
        return EmbeddedStore(folder or data_folder() / pool, pool)
    return PostgresStore(setting, pool)


def data_folder() -> Path:
    """Return the folder for data of this user's servers.

    PostgreSQL runs as another user if this one is root, and has to reach the folder.
    """
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return Path("/var/lib/teola-plugin/server")
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "teola-plugin" / "server"
