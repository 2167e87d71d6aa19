"""The tables of the vector store, and the statements that write rows and search.

Schema `teola`: the catalogue `teola.collections`, and one table per collection, named by a sequence, so that any name
of a collection is allowed and a table's name is never used twice. Writers of one collection take turns at its catalogue
row; readers never wait. How changes are counted: `versions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from teola_plugin.engines.pgvector import versions
from teola_plugin.engines.pgvector.rows import QueryVector, Row, SqlCondition
from teola_plugin.requests.payloads import Hit, Version

if TYPE_CHECKING:
    from psycopg import AsyncConnection
    from psycopg_pool import AsyncConnectionPool

    Connection: TypeAlias = AsyncConnection[tuple[Any, ...]]

_SCHEMA = """
CREATE SCHEMA IF NOT EXISTS teola;
CREATE SEQUENCE IF NOT EXISTS teola.places;
CREATE TABLE IF NOT EXISTS teola.collections (
  name text PRIMARY KEY,
  place text UNIQUE,                  -- its table; null while it has none
  dimension int,
  indexed boolean NOT NULL DEFAULT false,
  version bigint NOT NULL DEFAULT 0,  -- of what engines changed, also across deletions
  rows bigint NOT NULL DEFAULT 0,
  created timestamptz NOT NULL DEFAULT now());
"""
_STAGING = """
CREATE TEMP TABLE IF NOT EXISTS teola_rows (n int, id text, body text, metadata text, embedding vector)
ON COMMIT DELETE ROWS
"""
# `metadata` is json, not jsonb: jsonb forgets the order of keys, which shows wherever a document is printed.
# MAIN keeps vectors in the row as long as they fit: an exact scan must not look up each one elsewhere.
_TABLE = """
CREATE TABLE teola.{table} (
  id text PRIMARY KEY,
  seq bigint GENERATED ALWAYS AS IDENTITY,
  body text NOT NULL,
  metadata json NOT NULL,
  embedding vector({dimension}) STORAGE MAIN NOT NULL);
"""
# Checked before rows are written: a statement that changes nothing counts as a change, too.
_HAS_CHANGES = """
SELECT EXISTS (
  SELECT FROM pg_temp.teola_rows new LEFT JOIN LATERAL (
    SELECT body, metadata::text AS metadata, embedding FROM teola.{table} WHERE id = new.id OFFSET 0) old ON true
  WHERE vector_dims(new.embedding) = %s
    AND (old.body, old.metadata, old.embedding) IS DISTINCT FROM (new.body, new.metadata, new.embedding))
"""
_INSERT = """
WITH changed AS (
  INSERT INTO teola.{table} AS old (id, body, metadata, embedding)
  SELECT id, body, metadata::json, embedding FROM pg_temp.teola_rows WHERE vector_dims(embedding) = %s ORDER BY n
  ON CONFLICT (id) DO UPDATE SET body = excluded.body, metadata = excluded.metadata, embedding = excluded.embedding
  WHERE (old.body, old.metadata::text, old.embedding)
    IS DISTINCT FROM (excluded.body, excluded.metadata::text, excluded.embedding)
  RETURNING old.xmax = 0 AS fresh)
UPDATE teola.collections SET version = version + 1, rows = rows + (SELECT count(*) FROM changed WHERE fresh)
WHERE name = %s AND EXISTS (SELECT FROM changed)
RETURNING version
"""
_TIDY_EVERY = 32
"""Changes of a collection by engines, after which the rows that count all changes are summed up."""
# The distance to a zero vector is NaN; it counts as 1, at right angles to everything.
# One query goes without `unnest`, whose unknown length makes PostgreSQL plan each execution anew.
_SINGLE_SEARCH = """
SELECT 1::bigint AS n, id, body, metadata, coalesce(nullif(embedding <=> %b::vector, 'NaN'), 1) AS distance, seq
FROM teola.{table} WHERE {filter} ORDER BY distance, seq LIMIT {k}
"""
_EXACT_SEARCH = """
SELECT q.n, h.id, h.body, h.metadata, h.distance, h.seq
FROM unnest(%b::vector[]) WITH ORDINALITY AS q (v, n) CROSS JOIN LATERAL (
  SELECT id, body, metadata, seq, coalesce(nullif(embedding <=> q.v, 'NaN'), 1) AS distance
  FROM teola.{table} WHERE {filter} ORDER BY distance, seq LIMIT {k}) h
"""
_INDEXED_SEARCH = """
SELECT q.n, h.id, h.body, h.metadata, coalesce(nullif(h.distance, 'NaN'), 1) AS distance, h.seq
FROM unnest(%b::vector[]) WITH ORDINALITY AS q (v, n) CROSS JOIN LATERAL (
  SELECT id, body, metadata, seq, embedding <=> q.v AS distance
  FROM teola.{table} WHERE {filter} ORDER BY embedding <=> q.v LIMIT {k}) h
"""
# The version comes first, as row 0, of the same statement and so of the same snapshot as the hits.
_WITH_VERSION = """
SELECT 0::bigint AS n, identity AS id, counter::text AS body, NULL::json AS metadata, 0.0::float8 AS distance,
  parts AS seq
FROM teola.version_of('{table}') UNION ALL ({search})
"""
_ORDERED = "SELECT * FROM ({search}) AS found ORDER BY n, distance, seq"
_IS_ONE_OF = "coalesce((metadata -> %s)::jsonb, 'null') = ANY(%s::jsonb[])"
MAX_INDEXED = 2000
"""Dimensions that pgvector can index."""


@dataclass(frozen=True, slots=True)
class Table:
    """The table that holds a collection."""

    name: str
    dimension: int
    indexed: bool
    oid: int
    counted: bool
    """True if the database counts its changes, so that it has a version."""


@dataclass(frozen=True, slots=True)
class QueryHits:
    """The hits of a search, and the version that they are valid for."""

    hits: list[tuple[Hit, ...]]
    """Hits of each query."""
    version: Version | None
    parts: int = 0
    """Number of rows of changes that make up the version."""


async def prepare(dsn: str, seconds: int) -> dict[str, str]:
    """Create the extension and the catalogue unless they exist. Return the versions of PostgreSQL and pgvector."""
    from psycopg import AsyncConnection

    connection = await AsyncConnection.connect(dsn, autocommit=True, connect_timeout=seconds)
    async with connection as conn, conn.transaction():
        await conn.execute("SET LOCAL client_min_messages = warning")
        await conn.execute("SELECT pg_advisory_xact_lock(hashtext('teola.schema'))")
        # Checked first: a role may be allowed to use the extension and not to create it, and a replica cannot.
        if await first(conn, "SELECT FROM pg_extension WHERE extname = 'vector'") is None:
            await conn.execute("CREATE EXTENSION IF NOT EXISTS vector")
        row = await _fetch_row(conn, "SELECT to_regclass('teola.collections')")
        if row[0] is None:
            await conn.execute(_SCHEMA)
        await versions.prepare(conn)
        running = await _fetch_row(
            conn, "SELECT current_setting('server_version'), extversion FROM pg_extension WHERE extname = 'vector'"
        )
    return {"postgresql": running[0].split()[0], "pgvector": running[1]}


def make_pool(dsn: str, size: int, seconds: int) -> AsyncConnectionPool:
    """Return a pool that is not open yet. A caller waits for a connection for at most `seconds`."""
    from psycopg_pool import AsyncConnectionPool

    options: dict[str, Any] = {"autocommit": True, "connect_timeout": seconds}
    return AsyncConnectionPool(
        dsn,
        min_size=1,
        max_size=size,
        timeout=seconds,
        open=False,
        configure=configure,
        reset=_reset_nothing,
        kwargs=options,
        name="teola",
    )


async def _reset_nothing(conn: Connection) -> None:
    """Reset nothing. With this function the pool takes a connection back in a task of its own.

    Without it, the caller that returns a connection resets it, and a cancelled caller loses the connection.
    """


async def configure(conn: Connection) -> None:
    """Set up a new connection of the pool."""
    from pgvector.psycopg import register_vector_async

    await register_vector_async(conn)
    await conn.execute("SET client_min_messages = warning; SET jit = off; SET hnsw.iterative_scan = strict_order")
    # A snapshot must be younger than the locks that are waited for, or what TRUNCATE did could be seen without its
    # version.
    await conn.execute("SET default_transaction_isolation = 'read committed'")


async def look(conn: Connection, collection: str) -> Table | Version:
    """Return the table of a collection; its version if there is no table."""
    row = await first(
        conn,
        f"SELECT c.place, c.dimension, c.indexed, t.oid, {versions.COUNTED}, c.version FROM teola.collections c"
        " LEFT JOIN pg_class t ON t.relname = c.place AND t.relnamespace = to_regnamespace('teola') WHERE c.name = %s",
        collection,
    )
    if row is None or row[3] is None:  # never there, deleted, or its table was dropped by others
        return Version(versions.ABSENT, 0 if row is None else row[5])
    return Table(*row[:5])


async def find(conn: Connection, collection: str) -> Table | None:
    table = await look(conn, collection)
    return table if isinstance(table, Table) else None


async def ingest(conn: Connection, collection: str, rows: Sequence[Row], dimension: int, index: str | None) -> Table:
    """Write rows in one transaction. A row with the same id is replaced, an equal one left alone.

    A new collection gets `dimension`. Rows of other dimensions than the collection's are passed over; the others must
    have distinct ids.
    """
    async with conn.transaction():
        await conn.execute(_STAGING)
        columns = "pg_temp.teola_rows (n, id, body, metadata, embedding)"
        async with conn.cursor() as cursor, cursor.copy(f"COPY {columns} FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(["int4", "text", "text", "text", "vector"])
            for n, row in enumerate(rows):
                await copy.write_row((n, row.id, row.body, row.metadata, row.vector))
        table = await _lock_for_writing(conn, collection, dimension, index)
        [news] = await _fetch_row(conn, _HAS_CHANGES.format(table=table.name), table.dimension)
        if news:
            changed = await first(conn, _INSERT.format(table=table.name), table.dimension, collection)
            if changed is not None and changed[0] % _TIDY_EVERY == 0:
                await versions.tidy(conn, table.oid)
    return table


async def _lock_for_writing(conn: Connection, collection: str, dimension: int, index: str | None) -> Table:
    """Lock a collection for writing until the transaction ends. Create it if it is new."""
    await conn.execute("INSERT INTO teola.collections (name) VALUES (%s) ON CONFLICT DO NOTHING", (collection,))
    await conn.execute("SELECT FROM teola.collections WHERE name = %s FOR UPDATE", (collection,))
    return await find(conn, collection) or await _create_table(conn, collection, dimension, index)


async def _create_table(conn: Connection, collection: str, dimension: int, index: str | None) -> Table:
    """Create the table of a collection, its index if one is wanted, and the counting of its changes.

    The caller holds the lock of the collection's row in the catalogue. Vectors of more than `MAX_INDEXED` dimensions
    get no index.
    """
    indexed = index is not None and dimension <= MAX_INDEXED
    [name] = await _fetch_row(
        conn,
        "UPDATE teola.collections SET place = 'c' || nextval('teola.places'), dimension = %s, indexed = %s, rows = 0"
        " WHERE name = %s RETURNING place",
        dimension,
        indexed,
        collection,
    )
    await conn.execute(_TABLE.format(table=name, dimension=dimension))
    if indexed:
        await conn.execute(f"CREATE INDEX ON teola.{name} USING {index} (embedding vector_cosine_ops)")
    await versions.begin(conn, name)
    table = await find(conn, collection)
    assert table is not None
    return table


async def search(conn: Connection, table: Table, queries: Sequence[QueryVector]) -> QueryHits:
    """Return the hits of queries of one group, by distance, then in the order of insertion, in one round trip."""
    from pgvector.psycopg.vector import Vector  # the module that all versions have in common

    _, k, conditions = queries[0].group
    vectors = [Vector(query.vector) for query in queries]
    is_single = len(vectors) == 1 and not table.indexed
    form = _SINGLE_SEARCH if is_single else _INDEXED_SEARCH if table.indexed else _EXACT_SEARCH
    statement = form.format(table=table.name, filter=where_clause(conditions), k=k)
    if table.counted:
        statement = _WITH_VERSION.format(table=table.name, search=statement)
    values: list[Any] = [vectors[0] if is_single else vectors, *where_parameters(conditions)]
    cursor = await conn.execute(cast(Any, _ORDERED.format(search=statement)), values)
    hits: list[list[Hit]] = [[] for _ in queries]
    version, parts = None, 0
    async for n, row_id, body, metadata, distance, seq in cursor:
        if n:
            hits[n - 1].append(Hit(row_id, body, metadata, max(-1.0, min(1.0, 1.0 - distance))))
        else:
            version, parts = Version(row_id, int(body)), seq
    return QueryHits([tuple(query_hits) for query_hits in hits], version, parts)


def where_clause(conditions: Sequence[SqlCondition]) -> str:
    """Return the SQL of a filter; its parameters are `where_parameters`."""
    return " AND ".join(f"NOT ({_IS_ONE_OF})" if one.negated else _IS_ONE_OF for one in conditions) or "true"


def where_parameters(conditions: Sequence[SqlCondition]) -> list[str | list[str]]:
    return [parameter for one in conditions for parameter in (one.key, list(one.values))]


async def _fetch_row(conn: Connection, statement: str, *values: Any) -> tuple[Any, ...]:
    row = await first(conn, statement, *values)
    assert row is not None
    return row


async def first(conn: Connection, statement: str, *values: Any) -> tuple[Any, ...] | None:
    cursor = await conn.execute(cast(Any, statement), values)
    return await cursor.fetchone()
