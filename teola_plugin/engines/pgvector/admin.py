"""Administrative methods of the vector store, beside its requests: counting, looking up, deleting."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

from teola_plugin.engines.pgvector import sql, versions
from teola_plugin.engines.pgvector.rows import SqlCondition, to_conditions
from teola_plugin.engines.postgres.faults import PostgresErrors
from teola_plugin.requests.payloads import Chunk, Version

_T = TypeVar("_T")


class Administration(ABC):
    """Administrative methods of the engine. All of them raise EngineError."""

    def __init__(self, errors: PostgresErrors) -> None:
        self._errors = errors
        self._tables = Tables()
        self._write_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @abstractmethod
    def _connection(self) -> Any:
        """Return an async context manager that takes a connection from the engine's connection pool.

        `PgVectorEngine` implements it, and uses it for its searches and writes, too. Raise `EngineUnavailable` if the
        engine is not running.
        """

    def _write_lock(self, collection: str) -> asyncio.Lock:
        """Return the lock of all writes to a collection: of two rows with one id, the later one must stay."""
        return self._write_locks.setdefault(collection, asyncio.Lock())

    async def version(self, collection: str) -> Version | None:
        """Return the version of a collection, which is equal while its rows are, whoever writes them.

        The database counts changes. None if it cannot: the role may not add triggers to the collection's table.
        """
        return await self._run_with_connection(self._tables.version, collection)

    async def count(self, collection: str) -> int:
        return await self._run_with_connection(_count, collection)

    async def collections(self) -> list[str]:
        """Return the names of the collections that have rows."""
        return await self._run_with_connection(_collections)

    async def get(self, collection: str, ids: Sequence[str]) -> list[Chunk]:
        """Return the chunks with these ids, in their order. Unknown ids are left out."""
        return await self._run_with_connection(_get, collection, ids)

    async def find(self, collection: str, filter: Sequence[tuple[str, Any]]) -> list[Chunk]:
        """Return the chunks whose metadata meets a filter, in the order of insertion."""
        return await self._run_with_connection(lambda conn: _find_chunks(conn, collection, to_conditions(filter)))

    async def delete(self, collection: str, ids: Sequence[str]) -> int:
        """Delete rows after all earlier writes. Return their number."""
        return await self._change(_delete, collection, tuple(ids))

    async def delete_collection(self, collection: str) -> None:
        await self._change(_delete_collection, collection)

    async def forget(self, collection: str) -> None:
        """Delete a collection and its version, as if it had never been there."""
        await self._change(_forget, collection)

    async def _change(self, do: Callable[..., Awaitable[_T]], collection: str, *args: Any) -> _T:
        async with self._write_lock(collection):
            return await self._run_with_connection(do, collection, *args)

    async def _run_with_connection(self, do: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        """Run an administrative statement on a connection of the pool. Errors of psycopg become `EngineError`."""
        try:
            async with self._connection() as conn:
                return await do(conn, *args)
        except Exception as error:
            raise self._errors.of(error) from error


async def _count(conn: sql.Connection, collection: str) -> int:
    row = await sql.first(conn, "SELECT rows FROM teola.collections WHERE name = %s", collection)
    return int(row[0]) if row is not None else 0


async def _collections(conn: sql.Connection) -> list[str]:
    cursor = await conn.execute("SELECT name FROM teola.collections WHERE rows > 0")
    return sorted([name async for (name,) in cursor])


async def _get(conn: sql.Connection, collection: str, ids: Sequence[str]) -> list[Chunk]:
    """Return the chunks of a collection with these ids, in their order; unknown ids are left out."""
    table = await sql.find(conn, collection)
    if table is None:
        return []
    statement = f"SELECT id, body, metadata FROM teola.{table.name} WHERE id = ANY(%s)"
    chunks = {row[0]: Chunk(*row) async for row in await conn.execute(statement, (list(ids),))}
    return [chunks[i] for i in ids if i in chunks]


async def _find_chunks(conn: sql.Connection, collection: str, conditions: Sequence[SqlCondition]) -> list[Chunk]:
    """Return the chunks of a collection whose metadata meets the conditions, in the order of insertion."""
    table = await sql.find(conn, collection)
    if table is None:
        return []
    statement = f"SELECT id, body, metadata FROM teola.{table.name} WHERE {sql.where_clause(conditions)} ORDER BY seq"
    return [Chunk(*row) async for row in await conn.execute(cast(Any, statement), sql.where_parameters(conditions))]


async def _delete(conn: sql.Connection, collection: str, ids: Sequence[str]) -> int:
    """Delete rows of a collection in one transaction, and count the change. Return the number of deleted rows."""
    async with _locked(conn, collection) as table:
        if table is None:
            return 0
        statement = f"SELECT FROM teola.{table.name} WHERE id = ANY(%s) LIMIT 1"
        if await sql.first(conn, statement, list(ids)) is None:
            return 0  # a statement that changes nothing counts as a change, too
        cursor = await conn.execute(f"DELETE FROM teola.{table.name} WHERE id = ANY(%s)", (list(ids),))
        deleted = cursor.rowcount
        if deleted:
            change = "UPDATE teola.collections SET version = version + 1, rows = rows - %s WHERE name = %s"
            await conn.execute(change, (deleted, collection))
        return deleted


async def _delete_collection(conn: sql.Connection, collection: str) -> None:
    """Drop the table of a collection in one transaction; its version goes on, so that no version comes again."""
    async with _locked(conn, collection) as table:
        if table is not None:
            await conn.execute(f"DROP TABLE teola.{table.name}")
            await conn.execute(
                "UPDATE teola.collections SET version = version + 1, rows = 0, place = NULL,"
                " dimension = NULL WHERE name = %s",
                (collection,),
            )
            await versions.tidy(conn, table.oid)


async def _forget(conn: sql.Connection, collection: str) -> None:
    """Delete a collection, and the record of its version, which `_delete_collection` keeps.

    A table that was made meanwhile (`place`) stays.
    """
    await _delete_collection(conn, collection)
    await conn.execute("DELETE FROM teola.collections WHERE name = %s AND place IS NULL", (collection,))


@asynccontextmanager
async def _locked(conn: sql.Connection, collection: str) -> AsyncIterator[sql.Table | None]:
    """Open a transaction in which no other writes to a collection, and yield the collection's table; None without one.

    The lock is that of the collection's row in `teola.collections`, and ends with the transaction.
    """
    async with conn.transaction():
        await conn.execute("SELECT FROM teola.collections WHERE name = %s FOR UPDATE", (collection,))
        yield await sql.find(conn, collection)


class Tables:
    """The tables of collections that an engine remembers, until a statement shows that others have changed them."""

    def __init__(self) -> None:
        self._tables: dict[str, sql.Table] = {}

    def clear(self) -> None:
        self._tables.clear()

    def forget(self, collection: str) -> None:
        self._tables.pop(collection, None)

    async def locate(self, conn: sql.Connection, collection: str, dimensions: Set[int]) -> sql.Table | Version:
        """Return the table for vectors of these dimensions; the collection's version if there is no table."""
        table = self._tables.get(collection)
        if table is not None and dimensions <= {table.dimension}:
            return table
        located = await sql.look(conn, collection)  # with another dimension it may have been replaced
        if isinstance(located, Version):
            self.forget(collection)
            return located
        if located.counted:
            located = replace(located, counted=await versions.watch(conn, collection, located.name) is not None)
        self._tables[collection] = located
        return located

    async def version(self, conn: sql.Connection, collection: str) -> Version | None:
        """Return the version of a collection; None if not all writes to its table are counted."""
        for _ in range(2):
            table = await self.locate(conn, collection, frozenset())
            if isinstance(table, Version):
                return table
            version = await versions.read(conn, table.name) if table.counted else None
            if version is not None or not table.counted:
                return version
            self.forget(collection)  # replaced, or its triggers are gone
        return None
