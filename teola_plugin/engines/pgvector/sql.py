"""The tables of the vector store, and the statements that write rows and search.

Schema `teola`: the catalogue `teola.collections`, and one table per collection, named by a sequence, so that any name
of a collection will do and a table's name is never used twice. Writers of one collection take turns at its catalogue
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
CREATE TABLE teola.{place} (
  id text PRIMARY KEY,
  seq bigint GENERATED ALWAYS AS IDENTITY,
  body text NOT NULL,
  metadata json NOT NULL,
  embedding vector({dimension}) STORAGE MAIN NOT NULL);
"""
# Asked before rows are written: a statement that changes nothing counts as a change, too.
_NEWS = """
SELECT EXISTS (
  SELECT FROM pg_temp.teola_rows new LEFT JOIN LATERAL (
    SELECT body, metadata::text AS metadata, embedding FROM teola.{place} WHERE id = new.id OFFSET 0) old ON true
  WHERE vector_dims(new.embedding) = %s
    AND (old.body, old.metadata, old.embedding) IS DISTINCT FROM (new.body, new.metadata, new.embedding))
"""
_INSERT = """
WITH changed AS (
  INSERT INTO teola.{place} AS old (id, body, metadata, embedding)
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
_ONE = """
SELECT 1::bigint AS n, id, body, metadata, coalesce(nullif(embedding <=> %b::vector, 'NaN'), 1) AS distance, seq
FROM teola.{place} WHERE {filter} ORDER BY distance, seq LIMIT {k}
"""
_EXACT = """
SELECT q.n, h.id, h.body, h.metadata, h.distance, h.seq
FROM unnest(%b::vector[]) WITH ORDINALITY AS q (v, n) CROSS JOIN LATERAL (
  SELECT id, body, metadata, seq, coalesce(nullif(embedding <=> q.v, 'NaN'), 1) AS distance
  FROM teola.{place} WHERE {filter} ORDER BY distance, seq LIMIT {k}) h
"""
_INDEXED = """
SELECT q.n, h.id, h.body, h.metadata, coalesce(nullif(h.distance, 'NaN'), 1) AS distance, h.seq
FROM unnest(%b::vector[]) WITH ORDINALITY AS q (v, n) CROSS JOIN LATERAL (
  SELECT id, body, metadata, seq, embedding <=> q.v AS distance
  FROM teola.{place} WHERE {filter} ORDER BY embedding <=> q.v LIMIT {k}) h
"""
# The version comes first, as row 0, of the same statement and so of the same snapshot as the hits.
_WITH_VERSION = """
SELECT 0::bigint AS n, identity AS id, counter::text AS body, NULL::json AS metadata, 0.0::float8 AS distance,
  parts AS seq
FROM teola.version_of('{place}') UNION ALL ({search})
"""
_ORDERED = "SELECT * FROM ({search}) AS found ORDER BY n, distance, seq"
_IS_ONE_OF = "coalesce((metadata -> %s)::jsonb, 'null') = ANY(%s::jsonb[])"
MAX_INDEXED = 2000
"""Dimensions that pgvector can index."""


@dataclass(frozen=True, slots=True)
class Table:
    """The table that holds a collection."""

    place: str
    dimension: int
    indexed: bool
    oid: int
    counted: bool
    """Whether the database may be asked for its version."""


@dataclass(frozen=True, slots=True)
class Found:
    """The hits of a search, and the version that they are valid for."""

    hits: list[tuple[Hit, ...]]
    """Of each query."""
    version: Version | None
    parts: int = 0
    """Rows that the version was summed up from."""


async def prepare(dsn: str, seconds: int) -> dict[str, str]:
    """Make the extension and the catalogue unless they are there; returns the versions of what runs below."""
    from psycopg import AsyncConnection

    connection = await AsyncConnection.connect(dsn, autocommit=True, connect_timeout=seconds)
    async with connection as conn, conn.transaction():
        await conn.execute("SET LOCAL client_min_messages = warning")
        await conn.execute("SELECT pg_advisory_xact_lock(hashtext('teola.schema'))")
        # Asked first: who may use what is there need not be allowed to create it, and a replica cannot.
        if await first(conn, "SELECT FROM pg_extension WHERE extname = 'vector'") is None:
            await conn.execute("CREATE EXTENSION IF NOT EXISTS vector")
        found = await _row(conn, "SELECT to_regclass('teola.collections')")
        if found[0] is None:
            await conn.execute(_SCHEMA)
        await versions.prepare(conn)
        running = await _row(
            conn, "SELECT current_setting('server_version'), extversion FROM pg_extension WHERE extname = 'vector'"
        )
    return {"postgresql": running[0].split()[0], "pgvector": running[1]}


def make_pool(dsn: str, size: int, seconds: int) -> AsyncConnectionPool:
    """A pool that is not open yet; `seconds` is how long a caller waits for a connection at most."""
    from psycopg_pool import AsyncConnectionPool

    options: dict[str, Any] = {"autocommit": True, "connect_timeout": seconds}
    return AsyncConnectionPool(
        dsn,
        min_size=1,
        max_size=size,
        timeout=seconds,
        open=False,
        configure=configure,
        reset=_as_it_is,
        kwargs=options,
        name="teola",
    )


async def _as_it_is(conn: Connection) -> None:
    """Reset nothing. With this function the pool takes a connection back in a task of its own.

    Without it, the caller that returns a connection resets it, and a cancelled caller loses the connection.
    """


async def configure(conn: Connection) -> None:
    """Settings of each connection of the pool."""
    from pgvector.psycopg import register_vector_async

    await register_vector_async(conn)
    await conn.execute("SET client_min_messages = warning; SET jit = off; SET hnsw.iterative_scan = strict_order")
    # A snapshot must be younger than the locks that are waited for, or what TRUNCATE did could be seen without its
    # version.
    await conn.execute("SET default_transaction_isolation = 'read committed'")


async def look(conn: Connection, collection: str) -> Table | Version:
    """Return the table of a collection; its version if there is no table."""
    found = await first(
        conn,
        f"SELECT c.place, c.dimension, c.indexed, t.oid, {versions.COUNTED}, c.version FROM teola.collections c"
        " LEFT JOIN pg_class t ON t.relname = c.place AND t.relnamespace = to_regnamespace('teola') WHERE c.name = %s",
        collection,
    )
    if found is None or found[3] is None:  # never there, deleted, or its table was dropped by others
        return Version(versions.ABSENT, 0 if found is None else found[5])
    return Table(*found[:5])


async def find(conn: Connection, collection: str) -> Table | None:
    found = await look(conn, collection)
    return found if isinstance(found, Table) else None


async def ingest(conn: Connection, collection: str, rows: Sequence[Row], dimension: int, index: str | None) -> Table:
    """Write rows in one transaction; a row whose id is there is replaced, an equal one left alone.

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
        table = await _claim(conn, collection, dimension, index)
        [news] = await _row(conn, _NEWS.format(place=table.place), table.dimension)
        if news:
            changed = await first(conn, _INSERT.format(place=table.place), table.dimension, collection)
            if changed is not None and changed[0] % _TIDY_EVERY == 0:
                await versions.tidy(conn, table.oid)
    return table


async def _claim(conn: Connection, collection: str, dimension: int, index: str | None) -> Table:
    """Lock the collection for writing until the transaction ends; make it if it is new."""
    await conn.execute("INSERT INTO teola.collections (name) VALUES (%s) ON CONFLICT DO NOTHING", (collection,))
    await conn.execute("SELECT FROM teola.collections WHERE name = %s FOR UPDATE", (collection,))
    return await find(conn, collection) or await _make(conn, collection, dimension, index)


async def _make(conn: Connection, collection: str, dimension: int, index: str | None) -> Table:
    indexed = index is not None and dimension <= MAX_INDEXED
    [place] = await _row(
        conn,
        "UPDATE teola.collections SET place = 'c' || nextval('teola.places'), dimension = %s, indexed = %s, rows = 0"
        " WHERE name = %s RETURNING place",
        dimension,
        indexed,
        collection,
    )
    await conn.execute(_TABLE.format(place=place, dimension=dimension))
    if indexed:
        await conn.execute(f"CREATE INDEX ON teola.{place} USING {index} (embedding vector_cosine_ops)")
    await versions.begin(conn, place)
    table = await find(conn, collection)
    assert table is not None
    return table


async def search(conn: Connection, table: Table, queries: Sequence[QueryVector]) -> Found:
    """The hits of queries of one group, in one round trip; by distance, then in the order of insertion."""
    from pgvector.psycopg.vector import Vector  # the place that all versions have in common

    _, k, conditions = queries[0].group
    vectors = [Vector(query.vector) for query in queries]
    alone = len(vectors) == 1 and not table.indexed
    form = _ONE if alone else _INDEXED if table.indexed else _EXACT
    statement = form.format(place=table.place, filter=where_clause(conditions), k=k)
    if table.counted:
        statement = _WITH_VERSION.format(place=table.place, search=statement)
    values: list[Any] = [vectors[0] if alone else vectors, *where_parameters(conditions)]
    cursor = await conn.execute(cast(Any, _ORDERED.format(search=statement)), values)
    hits: list[list[Hit]] = [[] for _ in queries]
    version, parts = None, 0
    async for n, row_id, body, metadata, distance, seq in cursor:
        if n:
            hits[n - 1].append(Hit(row_id, body, metadata, max(-1.0, min(1.0, 1.0 - distance))))
        else:
            version, parts = Version(row_id, int(body)), seq
    return Found([tuple(each) for each in hits], version, parts)


def where_clause(conditions: Sequence[SqlCondition]) -> str:
    """Return the SQL of a filter; its parameters are `where_parameters`."""
    return " AND ".join(f"NOT ({_IS_ONE_OF})" if one.negated else _IS_ONE_OF for one in conditions) or "true"


def where_parameters(conditions: Sequence[SqlCondition]) -> list[str | list[str]]:
    return [parameter for one in conditions for parameter in (one.key, list(one.values))]


async def _row(conn: Connection, statement: str, *values: Any) -> tuple[Any, ...]:
    found = await first(conn, statement, *values)
    assert found is not None
    return found


async def first(conn: Connection, statement: str, *values: Any) -> tuple[Any, ...] | None:
    cursor = await conn.execute(cast(Any, statement), values)
    return await cursor.fetchone()
