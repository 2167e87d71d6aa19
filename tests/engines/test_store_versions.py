"""Tests of versions of collections on PostgreSQL: equal versions have equal rows, whoever writes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import psycopg
import pytest

from teola_plugin.engines.conformance import collect, ends
from teola_plugin.engines.pgvector import PgVectorEngine
from teola_plugin.engines.pgvector.sql import MAX_INDEXED
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Chunk, Done, Hit, IngestRow, Request, SearchVector, Version

K = PrimitiveKind
pytestmark = pytest.mark.postgres
_numbers = itertools.count(1)
Started = Callable[..., AbstractAsyncContextManager[PgVectorEngine]]
COUNTING = "changed() CASCADE", "version_of(text)", "watch(text)", "tidy(oid)"


@asynccontextmanager
async def started(dsn: str, **options: Any) -> AsyncIterator[PgVectorEngine]:
    engine = PgVectorEngine(dsn=dsn, **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@pytest.fixture(scope="module")
def database(postgres_dsn: str) -> Iterator[str]:
    """Create a database for this module, whose version counters the tests delete."""
    name = "versions"
    with psycopg.connect(postgres_dsn, autocommit=True) as conn:
        conn.execute(cast(Any, f"CREATE DATABASE {name}"))
        yield postgres_dsn.replace("dbname=postgres", f"dbname={name}")
        conn.execute(cast(Any, f"DROP DATABASE {name} WITH (FORCE)"))


async def write(engine: PgVectorEngine, collection: str, *ids: str, text: str = "text") -> None:
    batch = [
        Request(f"w{next(_numbers)}", K.INGESTION, IngestRow(collection, Chunk(id, text), (1.0, 2.0))) for id in ids
    ]
    found = ends(await collect(engine, batch), batch)
    assert all(isinstance(found[request.id], Done) for request in batch), found


async def searched(engine: PgVectorEngine, collection: str) -> tuple[Version | None, tuple[Hit, ...]]:
    request = Request(f"s{next(_numbers)}", K.SEARCHING, SearchVector(collection, (1.0, 2.0), 100))
    end = ends(await collect(engine, [request]), [request])[request.id]
    assert isinstance(end, Done), end
    return end.version, end.value


async def version_of(engine: PgVectorEngine, collection: str) -> Version:
    """Return the version of a collection, which a search reports, too."""
    found = await engine.version(collection)
    assert found is not None
    assert (await searched(engine, collection))[0] == found
    return found


def position_of(dsn: str, collection: str) -> str:
    with psycopg.connect(dsn) as conn:
        row = conn.execute("SELECT place FROM teola.collections WHERE name = %s", (collection,)).fetchone()
    assert row is not None
    return f"teola.{row[0]}"


def by_hand(dsn: str, *statements: str) -> None:
    """Write to the database as another program does."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        for statement in statements:
            conn.execute(cast(Any, statement))


ROW = "INSERT INTO {t} (id, body, metadata, embedding) VALUES ('{id}', '{id}', 'null', '[1,2]')"
UPSERT = " ON CONFLICT (id) DO UPDATE SET body = 'upserted'"
BY_HAND = {
    "insert": (ROW.format(t="{t}", id="hand"),),
    "update": ("UPDATE {t} SET body = 'other' WHERE id = 'a'",),
    "upsert": (ROW.format(t="{t}", id="a") + " ON CONFLICT (id) DO UPDATE SET body = 'upserted'",),
    "delete": ("DELETE FROM {t} WHERE id = 'a'",),
    "truncate": ("TRUNCATE {t}",),
    "in a block": ("DO $$ BEGIN DELETE FROM {t}; EXCEPTION WHEN division_by_zero THEN NULL; END $$",),
    "as a replica does": ("SET session_replication_role = replica", "UPDATE {t} SET body = 'replicated'"),
    "without its triggers": (
        "ALTER TABLE {t} DISABLE TRIGGER ALL",
        "UPDATE {t} SET body = 'unseen'",
        "ALTER TABLE {t} ENABLE TRIGGER ALL",
        "ALTER TABLE {t} ENABLE ALWAYS TRIGGER teola_changed, ENABLE REPLICA TRIGGER teola_replicated",
    ),
    "its triggers dropped": ("DROP TRIGGER teola_changed ON {t}", "UPDATE {t} SET body = 'unseen'"),
    "the table rewritten": ("ALTER TABLE {t} ALTER COLUMN body TYPE text USING upper(body || 'x')",),
    "the table exchanged": (
        "CREATE TABLE {t}_new (LIKE {t} INCLUDING ALL)",
        ROW.format(t="{t}_new", id="new"),
        "ALTER TABLE {t} RENAME TO {bare}_old",
        "ALTER TABLE {t}_new RENAME TO {bare}",
    ),
    "the table dropped": ("DROP TABLE {t}",),
    "what was counted deleted": (
        "DELETE FROM teola.changes WHERE place = '{t}'::regclass",
        "UPDATE {t} SET body = 'again'",
    ),
}


@pytest.mark.parametrize("how", BY_HAND)
async def test_writes_of_other_programs_change_the_version(how: str, database: str, collection: str) -> None:
    async with started(database) as store:
        await write(store, collection, "a", "b")
        before, hits = await version_of(store, collection), (await searched(store, collection))[1]
        place = position_of(database, collection)
        by_hand(database, *(each.format(t=place, bare=place.split(".")[1]) for each in BY_HAND[how]))
        after = await store.version(collection)
        assert after is not None and after != before
        version, found = await searched(store, collection)
        assert version == after and found != hits
        async with started(database) as other:
            assert await other.version(collection) == after, "another process tells another version"
        await write(store, collection, "a", "c")  # and goes on
        assert {"a", "c"} <= {hit.id for hit in (await searched(store, collection))[1]}
        assert await version_of(store, collection) not in (before, after)


async def test_write_changes_the_version_when_committed(
    store: PgVectorEngine, postgres_dsn: str, collection: str
) -> None:
    await write(store, collection, "a")
    before, place = await version_of(store, collection), position_of(postgres_dsn, collection)
    change = cast(Any, f"UPDATE {place} SET body = 'changed'")
    with psycopg.connect(postgres_dsn) as conn:
        conn.execute(change)
        assert (await version_of(store, collection), (await searched(store, collection))[1][0].text) == (before, "text")
        conn.rollback()
        assert await version_of(store, collection) == before
        conn.execute(change)
        conn.commit()
    assert await version_of(store, collection) != before
    assert (await searched(store, collection))[1][0].text == "changed"


async def test_concurrent_writers_do_not_block_each_other(
    store: PgVectorEngine, postgres_dsn: str, collection: str
) -> None:
    """Other programs' open transactions, at the strictest isolation that took no notice of each other before."""
    await write(store, collection, "a", "b", "c")
    place = position_of(postgres_dsn, collection)
    with psycopg.connect(postgres_dsn) as one, psycopg.connect(postgres_dsn) as two:
        for conn, id in ((one, "a"), (two, "b")):
            conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            conn.execute("SET LOCAL statement_timeout = '20s'")
            conn.execute("SELECT 1 FROM teola.changes")
            conn.execute(cast(Any, f"UPDATE {place} SET body = 'open' WHERE id = '{id}'"))
        before = await version_of(store, collection)
        await asyncio.wait_for(write(store, collection, "c", text="changed beside them"), 20)
        middle = await version_of(store, collection)
        two.commit()
        one.commit()
    after = await version_of(store, collection)
    assert len({before, middle, after}) == 3


async def test_equal_versions_have_equal_rows_during_concurrent_writes(
    store: PgVectorEngine, postgres_dsn: str, collection: str
) -> None:
    """TRUNCATE and rewritten tables are not kept apart by snapshots, as rows are; versions must not be either."""
    await write(store, collection, "a")
    place = position_of(postgres_dsn, collection)
    done = asyncio.Event()

    def change() -> None:
        with psycopg.connect(postgres_dsn) as conn:
            for n in range(60):
                if n % 3 == 0:
                    conn.execute(cast(Any, f"TRUNCATE {place}"))
                elif n % 3 == 1:
                    conn.execute(cast(Any, f"DELETE FROM {place}"))
                row = ROW.format(t=place, id=n)
                conn.execute(cast(Any, row))
                if n % 20 == 19:
                    conn.execute(cast(Any, f"ALTER TABLE {place} ALTER COLUMN body TYPE text USING body || '!'"))
                conn.commit()

    async def look(found: dict[Version | None, Any]) -> None:
        while not done.is_set():
            version, hits = await searched(store, collection)
            assert version is not None
            assert found.setdefault(version, hits) == hits

    seen: dict[Version | None, Any] = {}
    lookers = [asyncio.create_task(look(seen)) for _ in range(3)]
    await asyncio.to_thread(change)
    done.set()
    await asyncio.gather(*lookers)
    assert len(seen) > 2 and all(len(hits) == 1 or hits for hits in seen.values()), "a TRUNCATE was seen half done"


async def test_search_blocked_by_truncate_returns_the_version_after_it(postgres_dsn: str, collection: str) -> None:
    """This also holds if the server's default isolation uses a snapshot older than the locks of a statement."""
    slow = postgres_dsn + r" options='-c default_transaction_isolation=repeatable\\ read' application_name=waiter"
    waits = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = 'waiter'"
    connect = psycopg.AsyncConnection.connect
    async with started(slow, pool_size=1) as store:
        await write(store, collection, "a")
        before = await version_of(store, collection)
        async with await connect(postgres_dsn) as conn, await connect(postgres_dsn, autocommit=True) as watch:
            await conn.execute(cast(Any, f"TRUNCATE {position_of(postgres_dsn, collection)}"))
            work = asyncio.create_task(searched(store, collection))
            while not (await watch.execute(waits)).rowcount:
                await asyncio.sleep(0.01)
            await conn.commit()
            version, hits = await work
        assert hits == () and version == await version_of(store, collection) != before


async def test_empty_and_deleted_collections_have_own_versions(store: PgVectorEngine, collection: str) -> None:
    before = await version_of(store, collection)
    await write(store, collection, "a")
    first = await version_of(store, collection)
    await store.delete_collection(collection)
    gone = await version_of(store, collection)
    await write(store, collection, "a")
    again = await version_of(store, collection)
    assert len({before, first, gone, again}) == 4
    await store.forget(collection)
    await write(store, collection, "a")
    assert await version_of(store, collection) not in (before, first, gone, again)


def changes(conn: psycopg.Connection[Any], oid: int) -> int:
    [rows] = conn.execute("SELECT count(*) FROM teola.changes WHERE place = %s", (oid,)).fetchone() or (0,)
    return int(rows)


async def test_change_counts_are_summed_without_loss(database: str, collection: str) -> None:
    """Engines and searches sum the counts in parallel. None is lost or counted twice."""
    async with started(database) as store:
        await write(store, collection, "a")
        place = position_of(database, collection)
        with psycopg.connect(database) as conn:
            [oid] = conn.execute("SELECT %s::regclass::oid", (place,)).fetchone() or (0,)
        first = await version_of(store, collection)
        by_hand(database, *[f"UPDATE {place} SET body = body"] * 1200)
        before = await version_of(store, collection)
        assert (before.identity, before.counter) == (first.identity, first.counter + 1200)
        await asyncio.gather(*(searched(store, collection) for _ in range(8)))
        assert await version_of(store, collection) == before
        with psycopg.connect(database) as conn:
            assert changes(conn, oid) == 1
        for n in range(70):
            await write(store, collection, "a", text=str(n))
        with psycopg.connect(database) as conn:
            assert changes(conn, oid) < 100
        after = await version_of(store, collection)
        assert after.identity == before.identity and after.counter >= before.counter + 70
        await store.delete_collection(collection)
        with psycopg.connect(database) as conn:
            assert changes(conn, oid) == 0


# ------------------------------------------------------------ what is there already, and what may not be had


def forget_counting(dsn: str) -> None:
    """Bring the database into the state in which an earlier version of this package left it."""
    by_hand(dsn, *(f"DROP FUNCTION teola.{each}" for each in COUNTING), "DROP TABLE teola.changes")


async def test_collections_of_older_releases_get_versions_when_opened(database: str, collection: str) -> None:
    async with started(database) as store:
        await write(store, collection, "a")
    forget_counting(database)
    async with started(database) as store:
        before = await version_of(store, collection)
        by_hand(database, f"DELETE FROM {position_of(database, collection)}")
        assert await version_of(store, collection) != before


async def test_writes_continue_if_the_changes_table_is_dropped(database: str, collection: str) -> None:
    async with started(database) as store:
        await write(store, collection, "a")
        before = await version_of(store, collection)
        by_hand(
            database, "DROP TABLE teola.changes", f"UPDATE {position_of(database, collection)} SET body = 'by hand'"
        )
        await write(store, collection, "b")
        version, hits = await searched(store, collection)
        assert version is None and [hit.text for hit in hits] == ["by hand", "text"]
        assert await store.version(collection) is None
        await store.restart()
        assert await version_of(store, collection) != before


async def test_search_works_without_the_version_functions(database: str, collection: str) -> None:
    async with started(database) as store:
        await write(store, collection, "a")
        version, hits = await searched(store, collection)
        forget_counting(database)
        assert await searched(store, collection) == (None, hits) and version is not None
        assert await store.version(collection) is None
        await write(store, collection + " new", "a")
        assert (await searched(store, collection + " new"))[0] is None


async def test_unprivileged_role_gets_versions_once_owner_installs_them(database: str, collection: str) -> None:
    async with started(database) as owner:
        await write(owner, collection, "a")
        forget_counting(database)
        by_hand(
            database,
            f"CREATE ROLE {(role := f'reader{next(_numbers)}')} LOGIN",
            f"GRANT USAGE ON SCHEMA teola TO {role}",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA teola TO {role}",
        )
        try:
            async with started(database.replace("user=postgres", f"user={role}")) as store:
                version, hits = await searched(store, collection)
                assert version is None and len(hits) == 1 and await store.version(collection) is None
                await write(store, collection, "b")
                await owner.restart()
                before = await version_of(owner, collection)
                await store.restart()
                assert await version_of(store, collection) == before
                await write(store, collection, "c")
                assert await version_of(store, collection) == await version_of(owner, collection) != before
        finally:
            by_hand(database, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


async def test_read_only_server_returns_existing_versions(database: str, collection: str) -> None:
    only_reads = database + " options='-c default_transaction_read_only=on'"
    async with started(database) as writer:
        await write(writer, collection, "a")
        async with started(only_reads) as store:
            assert await version_of(store, collection) == await version_of(writer, collection)
            await write(writer, collection, "b")
            assert await version_of(store, collection) == await version_of(writer, collection)
        forget_counting(database)
        async with started(only_reads) as store:
            version, hits = await searched(store, collection)
            assert version is None and len(hits) == 2 and await store.version(collection) is None


@pytest.mark.parametrize(
    "how",
    (
        "CREATE TABLE {t}_child () INHERITS ({t})",
        "ALTER TABLE {t} SET UNLOGGED",
        "ALTER TABLE {t} RENAME TO below; CREATE VIEW {t} AS SELECT * FROM teola.below",
    ),
)
async def test_collection_with_uncounted_writes_has_no_version(how: str, database: str, collection: str) -> None:
    async with started(database) as store:
        await write(store, collection, "a")
        assert await version_of(store, collection)
        by_hand(database, how.format(t=position_of(database, collection)))
        for _ in range(2):
            version, hits = await searched(store, collection)
            assert version is None and len(hits) == 1 and await store.version(collection) is None


async def test_large_searches_may_run_in_parallel(database: str, collection: str) -> None:
    """The version is read by the leader; the function that reads it must not forbid it to have helpers."""
    async with started(database) as store:
        await write(store, collection, *map(str, range(50)))
        settings = "debug_parallel_query=on", "parallel_setup_cost=0", "parallel_tuple_cost=0"
        options = " ".join(f"-c {each}" for each in (*settings, "min_parallel_table_scan_size=0"))
        async with started(database + f" options='{options}'") as parallel:
            version, hits = await searched(parallel, collection)
            assert (version, hits) == await searched(store, collection) and len(hits) == 50


async def test_versions_change_on_delete_with_an_index(database: str, collection: str) -> None:
    assert MAX_INDEXED > 2
    async with started(database, index="hnsw") as store:
        await write(store, collection, "a", "b")
        before = await version_of(store, collection)
        by_hand(database, f"DELETE FROM {position_of(database, collection)} WHERE id = 'a'")
        assert await version_of(store, collection) != before
        assert [hit.id for hit in (await searched(store, collection))[1]] == ["b"]
