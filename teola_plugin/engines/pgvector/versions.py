"""The version of a collection, which the database itself keeps: writes of every process and program count.

Triggers on a collection's table add one row to `teola.changes` per writing statement, in the writer's own transaction;
the counter is the sum of the rows that a snapshot sees. Why that is exact: a snapshot sees a change exactly when it
sees the rows that were changed, and later snapshots see more changes, never fewer, so equal sums are of equal rows.
A counter in one row would be exact, too, but its lock would make all writers wait for each other's commits (and fail at
the stricter isolation levels); a sequence would be seen before the rows are. `teola.tidy` sums rows up now and then.

The identity is a random word, made when counting began, with what the server's catalogue says of the table, of its
triggers and of the server's start: whatever writes without triggers (a rewritten or exchanged table, triggers that were
off, a restored backup, a server that took over) changes it. A collection that is not there holds nothing, so all its
versions are true. What is not covered: a server that goes on after it lost commits that others had seen
(`synchronous_commit = off` and a crash), and superusers who write to the catalogue or to `teola.changes`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from teola_plugin.requests.payloads import Version

if TYPE_CHECKING:
    from psycopg import AsyncConnection

ABSENT = "absent"
"""The identity of a collection that has no table."""
MANY_CHANGES = 1000
"""Number of rows of a table's changes from which a search sums them up."""
_LOCK_SECONDS = 2

SCHEMA = """
CREATE TABLE IF NOT EXISTS teola.changes (
  place oid NOT NULL,            -- a collection's table
  life text,                     -- a random word; one row of each table has it, and what was summed up
  n bigint NOT NULL DEFAULT 1);
CREATE INDEX IF NOT EXISTS changes_place ON teola.changes (place);

-- Of every statement that writes; without the table to count in, nothing is counted, and nobody is disturbed.
CREATE OR REPLACE FUNCTION teola.changed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF to_regclass('teola.changes') IS NOT NULL THEN
    INSERT INTO teola.changes (place) VALUES (TG_RELID);
  END IF;
  RETURN NULL;
END $$;

-- No row for a table of which not every write is counted. STABLE: it sees what the statement that calls it sees.
CREATE OR REPLACE FUNCTION teola.version_of(name text) RETURNS TABLE (identity text, counter bigint, parts bigint)
LANGUAGE plpgsql STABLE PARALLEL RESTRICTED SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN QUERY
  SELECT concat_ws('.', w.life, extract(epoch FROM pg_postmaster_start_time()), c.oid, c.relfilenode, c.xmin,
                   a.oid, a.xmin, r.oid, r.xmin), w.counter, w.parts
  FROM pg_class c
  JOIN pg_trigger a ON a.tgrelid = c.oid AND a.tgname = 'teola_changed' AND a.tgenabled = 'A'
  JOIN pg_trigger r ON r.tgrelid = c.oid AND r.tgname = 'teola_replicated' AND r.tgenabled = 'R'
  CROSS JOIN LATERAL (
    SELECT max(life) AS life, sum(n)::bigint AS counter, count(*) AS parts FROM teola.changes WHERE place = c.oid) w
  WHERE c.relname = name AND c.relnamespace = (SELECT n.oid FROM pg_namespace n WHERE nspname = 'teola')
    AND c.relkind = 'r' AND c.relpersistence = 'p' AND NOT c.relhassubclass AND w.life IS NOT NULL;
END $$;

-- Count the writes of a table from now on. Logical replication fires triggers of rows only, and only such as these.
CREATE OR REPLACE FUNCTION teola.watch(name text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE t regclass := format('teola.%I', name)::regclass;
BEGIN
  IF (SELECT relkind <> 'r' OR relpersistence <> 'p' OR relhassubclass FROM pg_catalog.pg_class WHERE oid = t) THEN
    RETURN;
  END IF;
  EXECUTE format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE', t);
  IF NOT EXISTS (SELECT FROM pg_catalog.pg_trigger WHERE tgrelid = t AND tgname = 'teola_changed') THEN
    EXECUTE format('CREATE TRIGGER teola_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON %s
                    FOR EACH STATEMENT EXECUTE FUNCTION teola.changed()', t);
  END IF;
  IF NOT EXISTS (SELECT FROM pg_catalog.pg_trigger WHERE tgrelid = t AND tgname = 'teola_replicated') THEN
    EXECUTE format('CREATE TRIGGER teola_replicated AFTER INSERT OR UPDATE OR DELETE ON %s
                    FOR EACH ROW EXECUTE FUNCTION teola.changed()', t);
  END IF;
  EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER teola_changed, ENABLE REPLICA TRIGGER teola_replicated', t);
  DELETE FROM teola.changes WHERE place = t;
  INSERT INTO teola.changes (place, life, n) VALUES (t, gen_random_uuid()::text, 0);
END $$;

-- Sum up the changes of a table, one at a time; forget those of one that is gone.
CREATE OR REPLACE FUNCTION teola.tidy(t oid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF NOT pg_try_advisory_xact_lock(hashtextextended('teola.changes', t::bigint)) THEN
    RETURN;
  END IF;
  IF EXISTS (SELECT FROM pg_class WHERE oid = t) THEN
    WITH gone AS (DELETE FROM teola.changes WHERE place = t AND life IS NULL RETURNING n)
    UPDATE teola.changes SET n = n + (SELECT coalesce(sum(gone.n), 0) FROM gone) WHERE place = t AND life IS NOT NULL;
  ELSE
    DELETE FROM teola.changes WHERE place = t;
  END IF;
END $$;
"""
COUNTED = """
(to_regclass('teola.changes') IS NOT NULL
 AND coalesce(has_function_privilege(to_regprocedure('teola.version_of(text)')::oid, 'EXECUTE'), false))
"""
"""An SQL condition that is true if `teola.version_of` may be called."""


async def prepare(conn: AsyncConnection[Any]) -> None:
    """Create what counts changes unless it exists, or this role or server does not allow it."""
    import psycopg

    names = (
        "to_regclass('teola.changes')",
        *(
            f"to_regprocedure('teola.{function}')"
            for function in ("changed()", "version_of(text)", "watch(text)", "tidy(oid)")
        ),
    )
    cursor = await conn.execute(f"SELECT num_nulls({', '.join(names)})")  # type: ignore[arg-type]
    [missing] = await cursor.fetchone() or (0,)
    if missing:
        with suppress(psycopg.DatabaseError):
            async with conn.transaction():
                await conn.execute(SCHEMA)


async def read(conn: AsyncConnection[Any], table: str) -> Version | None:
    """Return the version of a table; None if not all its writes are counted."""
    cursor = await conn.execute("SELECT identity, counter FROM teola.version_of(%s)", (table,))
    row = await cursor.fetchone()
    return Version(*row) if row is not None else None


async def watch(conn: AsyncConnection[Any], collection: str, table: str) -> Version | None:
    """Return the version of a table, counting its writes from now on if necessary; None if that is impossible."""
    import psycopg

    version = await read(conn, table)
    if version is not None:
        return version
    with suppress(psycopg.DatabaseError):  # no rights, a server that only reads, a lock that is held for long
        async with conn.transaction():
            await conn.execute(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'")
            await conn.execute("SELECT FROM teola.collections WHERE name = %s FOR UPDATE", (collection,))
            if await read(conn, table) is None:  # another process may have been here
                await conn.execute("SELECT teola.watch(%s)", (table,))
    return await read(conn, table)


async def begin(conn: AsyncConnection[Any], table: str) -> None:
    """Count the changes of a table that was just created, if possible."""
    import psycopg

    with suppress(psycopg.DatabaseError):
        async with conn.transaction():
            await conn.execute("SELECT teola.watch(%s)", (table,))


async def tidy(conn: AsyncConnection[Any], oid: int | None) -> None:
    """Sum up the changes of a table, or delete them if the table is gone, if this role may."""
    import psycopg

    with suppress(psycopg.DatabaseError):
        async with conn.transaction():
            await conn.execute("SELECT teola.tidy(%s::oid)", (oid,))
