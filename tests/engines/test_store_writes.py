"""Tests of writes to both stores: all rows, in the order in which they were given."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teola_plugin.engines import profiles
from teola_plugin.engines.base import Engine
from teola_plugin.engines.conformance import collect, ends
from teola_plugin.engines.fake import FakeStore
from teola_plugin.engines.pgvector import PgVectorEngine
from teola_plugin.errors import EngineError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Chunk, Done, Failed, Hit, IngestRow, OneOf, Request, SearchVector

K = PrimitiveKind
_numbers = itertools.count(1)


@pytest.fixture(params=["fake", pytest.param("postgres", marks=pytest.mark.postgres)])
async def each_store(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """Return a store with latencies, so that larger batches take longer."""
    if request.param == "fake":
        engine: Engine = FakeStore("store", profiles.rtx3090()["store"])
    else:
        engine = PgVectorEngine(dsn=request.getfixturevalue("postgres_dsn"))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def row(collection: str, id: str, text: str = "", vector: Any = (1.0, 2.0), **metadata: Any) -> Request:
    return Request(f"w{next(_numbers)}", K.INGESTION, IngestRow(collection, Chunk(id, text, metadata), vector))


def find(collection: str, vector: Any = (1.0, 2.0), k: int = 100, **wanted: Any) -> Request:
    return Request(f"s{next(_numbers)}", K.SEARCHING, SearchVector(collection, vector, k, tuple(wanted.items())))


async def outcomes(engine: Engine, batch: Sequence[Request]) -> list[Any]:
    """Return the value or the error of each request, in order."""
    found = ends(await collect(engine, batch), batch)
    return [end.value if isinstance(end := found[request.id], Done) else end.error for request in batch]


async def search(engine: Engine, collection: str, **wanted: Any) -> tuple[Hit, ...]:
    [hits] = await outcomes(engine, [find(collection, **wanted)])
    assert isinstance(hits, tuple), hits
    return hits


async def start_task(work: Any) -> asyncio.Task[Any]:
    """Return a task that has had its first turn, so that the engine has taken its batch."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


# ------------------------------------------------------------ order


async def test_later_row_of_concurrent_batches_wins(each_store: Any, collection: str) -> None:
    """A large batch takes longer than the small one behind it, on a connection of its own."""
    for n in range(2):
        name = f"{collection} {n}"
        large = [row(name, "same", "first"), *(row(name, str(i)) for i in range(400))]
        works = [await start_task(outcomes(each_store, each)) for each in (large, [row(name, "same", "last")])]
        await asyncio.gather(*works)
        assert [chunk.text for chunk in await each_store.get(name, ["same"])] == ["last"]


async def test_deletion_runs_after_rows_submitted_before_it(each_store: Any, collection: str) -> None:
    for n in range(2):
        name = f"{collection} {n}"
        ids = [str(i) for i in range(400)]
        work = await start_task(outcomes(each_store, [row(name, id) for id in ids]))
        await (each_store.delete(name, ids) if n % 2 else each_store.delete_collection(name))
        await work
        assert await each_store.count(name) == 0


async def test_rows_submitted_after_a_deletion_are_kept(each_store: Any, collection: str) -> None:
    await outcomes(each_store, [row(collection, str(i), "before") for i in range(300)])
    gone = await start_task(each_store.delete_collection(collection))
    work = await start_task(outcomes(each_store, [row(collection, "7", "after")]))
    await asyncio.gather(gone, work)
    assert [(hit.id, hit.text) for hit in await search(each_store, collection)] == [("7", "after")]


async def test_last_row_of_an_id_in_a_batch_wins(each_store: Any, collection: str) -> None:
    batch = [row(collection, "same", f"text {n}", n=n) for n in range(5)]
    assert await outcomes(each_store, batch) == ["same"] * 5
    assert [(hit.text, hit.metadata) for hit in await search(each_store, collection)] == [("text 4", {"n": 4})]


async def test_cancelled_write_keeps_the_order_of_others(each_store: Any, collection: str) -> None:
    batches = [[row(collection, "same", f"text {n}")] for n in range(4)]
    works = [await start_task(outcomes(each_store, batch)) for batch in batches]
    await each_store.cancel(batches[2][0].id)
    found = [(await work)[0] for work in works]
    assert isinstance(found[2], EngineError) and found[:2] + found[3:] == ["same"] * 3
    assert [hit.text for hit in await search(each_store, collection)] == ["text 3"]


@pytest.mark.postgres
async def test_failed_row_does_not_discard_earlier_row_of_same_id(store: PgVectorEngine, collection: str) -> None:
    """The earlier row was acknowledged, and only the failed one was sent."""
    await outcomes(store, [row(collection, "first")])
    fits, misfit = row(collection, "same", "fits"), row(collection, "same", "misfit", (1.0, 2.0, 3.0))
    done, error = await outcomes(store, [fits, misfit])
    assert done == "same" and isinstance(error, EngineError)
    assert [chunk.text for chunk in await store.get(collection, ["same"])] == ["fits"]


# ------------------------------------------------------------ values that their owners change


async def test_row_is_written_as_it_was_at_submission(each_store: Any, collection: str) -> None:
    metadata: dict[str, Any] = {"tags": ["given"], "deep": {"n": 1}}
    vector = np.array([1.0, 2.0], dtype=np.float32)
    request = Request("changed later", K.INGESTION, IngestRow(collection, Chunk("a", "text", metadata), vector))
    work = await start_task(outcomes(each_store, [request]))
    metadata["tags"].append("too late")
    metadata["deep"]["n"] = metadata["new"] = 2
    vector[:] = (2.0, -1.0)
    assert await work == ["a"]
    [hit] = await search(each_store, collection)
    assert hit.metadata == {"tags": ["given"], "deep": {"n": 1}} and hit.score == pytest.approx(1.0)


async def test_hits_share_no_objects_with_store_or_other_hits(each_store: Any, collection: str) -> None:
    shared: dict[str, Any] = {"tags": ["given"], "deep": {"n": 1}}
    await outcomes(each_store, [row(collection, id, **shared) for id in "ab"])
    batch = [find(collection), find(collection)]
    found = await outcomes(each_store, batch)
    hits = [*found[0], *found[1], *await search(each_store, collection)]
    chunks = await each_store.get(collection, ["a", "b"]) + await each_store.find(collection, [])
    for each in [*hits, *chunks]:
        assert each.metadata == {"tags": ["given"], "deep": {"n": 1}}
        each.metadata["tags"].append("changed by a reader")
        each.metadata["deep"]["n"] = 2
    assert shared == {"tags": ["given"], "deep": {"n": 1}}
    again = [*await search(each_store, collection), *await each_store.get(collection, ["a"])]
    assert all(each.metadata == shared for each in again)


async def test_metadata_of_equal_value_but_other_type_is_rewritten(each_store: Any, collection: str) -> None:
    for value in (1, True, 1.0, "1", [1], [True]):
        await outcomes(each_store, [row(collection, "a", v=value)])
        [hit] = await search(each_store, collection)
        assert repr(hit.metadata) == repr({"v": value})


# ------------------------------------------------------------ filters

VALUES: tuple[Any, ...] = (
    *(1, 1.0, True, "1", 0, 0.0, -0.0, False, "", None, "None", "true", 10**30, 1e30, 0.1, 2**53 + 1, float(2**53)),
    *([1], (1.0,), [True], ["1"], [], {}, {"a": 1}, {"a": True}, {"a": 1.0, "b": None}, {"b": None, "a": 1}, {"1": 0}),
)


@pytest.mark.postgres
async def test_filters_match_alike_in_fake_and_real_store(store: PgVectorEngine, collection: str) -> None:
    fake = FakeStore()
    rows = [(str(n), {"v": value}) for n, value in enumerate(VALUES)] + [("without", {"other": 1})]
    for engine in (store, fake):
        found = await outcomes(engine, [row(collection, id, **metadata) for id, metadata in rows])
        assert found == [id for id, _ in rows]
    for value in (*VALUES, {1: 0}):
        [real, faked] = [{hit.id for hit in await search(each, collection, v=value)} for each in (store, fake)]
        assert real == faked and real, value
        listed = [{chunk.id for chunk in await each.find(collection, [("v", value)])} for each in (store, fake)]
        assert listed == [real, real]


@pytest.mark.parametrize(
    ("value", "same"), [(True, [True]), (1, [1, 1.0]), (1.0, [1, 1.0]), ("1", ["1"]), ([1], [[1], (1.0,)])]
)
async def test_true_and_one_are_different_filter_values(each_store: Any, value: Any, same: list[Any]) -> None:
    name = f"filters {value!r}"
    kinds: list[Any] = [True, 1, 1.0, "1", [1], (1.0,), [True]]
    await outcomes(each_store, [row(name, repr(kind), v=kind) for kind in kinds])
    assert {hit.id for hit in await search(each_store, name, v=value)} == {repr(each) for each in same}
    await each_store.delete_collection(name)


@pytest.mark.parametrize(
    ("condition", "matches"),
    [
        (OneOf((1, "a")), {"one", "float", "text"}),
        (OneOf((True,)), {"true"}),
        (OneOf((1, True)), {"one", "float", "true"}),
        (OneOf(([1], {"b": None})), {"list", "object"}),
        (OneOf((None,)), {"null", "missing"}),
        (OneOf(()), set()),
        (OneOf((1, "a"), negated=True), {"true", "digit", "list", "object", "null", "missing"}),
        (OneOf((None,), negated=True), {"one", "float", "text", "true", "digit", "list", "object"}),
        (OneOf((), negated=True), {"one", "float", "text", "true", "digit", "list", "object", "null", "missing"}),
    ],
)
async def test_one_of_condition_matches_by_json_types(
    each_store: Any, collection: str, condition: OneOf, matches: set[str]
) -> None:
    values = {"one": 1, "float": 1.0, "true": True, "text": "a", "digit": "1", "list": [1], "object": {"b": None}}
    rows = [row(collection, name, v=value) for name, value in {**values, "null": None}.items()]
    await outcomes(each_store, [*rows, row(collection, "missing")])

    hits = await search(each_store, collection, v=condition)
    chunks = await each_store.find(collection, [("v", condition)])

    assert {hit.id for hit in hits} == matches
    assert {chunk.id for chunk in chunks} == matches


async def test_conditions_of_different_types_on_one_key_match_no_row(each_store: Any, collection: str) -> None:
    await outcomes(each_store, [row(collection, "a", v=1), row(collection, "b", v="1")])

    chunks = await each_store.find(collection, [("v", 1), ("v", "1")])

    assert chunks == []


_WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4)
_NUMBERS = (
    st.integers(-2, 2)
    | st.integers(-(10**30), 10**30)
    | st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e30, 0.1, 2.0**53])
    | st.floats(allow_nan=False, allow_infinity=False)
)
_SCALARS = st.none() | st.booleans() | _NUMBERS | st.sampled_from(["", "1", "1.0", "true", "null", "a"]) | _WORDS
_JSON = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3), max_leaves=6
)
_KEYS = st.sampled_from(["a", "b", "ü"])
_METADATA = st.lists(st.dictionaries(_KEYS, _JSON, max_size=3), min_size=1, max_size=6)


@st.composite
def _metadata_and_filter(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[tuple[str, Any]]]:
    """Draw metadata of rows, and a filter whose values are often among theirs."""
    metadata = draw(_METADATA)
    present = [value for each in metadata for value in each.values()]
    values = st.sampled_from(present) | _JSON if present else _JSON
    one_of = st.builds(OneOf, st.lists(values, max_size=3).map(tuple), st.booleans())
    return metadata, draw(st.lists(st.tuples(_KEYS, values | one_of), min_size=1, max_size=2))


@pytest.mark.postgres
def test_filters_of_the_fake_store_match_as_the_json_of_postgresql(postgres_dsn: str) -> None:
    names = (f"random filters {n}" for n in itertools.count())
    stores: list[Any] = [FakeStore(), PgVectorEngine(dsn=postgres_dsn, pool_size=1)]

    async def matching_ids(store: Any, collection: str, metadata: Any, conditions: Any) -> list[str]:
        rows = [IngestRow(collection, Chunk(str(n), "", each), (1.0, 2.0)) for n, each in enumerate(metadata)]
        await outcomes(store, [Request(f"random {n}", K.INGESTION, one) for n, one in enumerate(rows)])
        chunks = await store.find(collection, conditions)
        await store.delete_collection(collection)
        return sorted(chunk.id for chunk in chunks)

    with asyncio.Runner() as runner:

        @settings(max_examples=100, deadline=None)
        @given(_metadata_and_filter())
        def check(drawn: Any) -> None:
            collection = next(names)
            fake, real = (runner.run(matching_ids(store, collection, *drawn)) for store in stores)
            assert fake == real

        try:
            for store in stores:
                runner.run(store.start())
            check()
        finally:
            for store in stores:
                runner.run(store.stop())


# ------------------------------------------------------------ what no database can hold


@pytest.mark.postgres
async def test_invalid_text_fails_alone_and_is_named(store: PgVectorEngine, collection: str) -> None:
    for bad, words in (("a\0b", "NUL"), ("a\ud800b", "lone surrogates")):
        batch = {
            "the chunk's id": row(collection, bad),
            "the collection's name": row(bad, "x"),
            "the text": row(collection, "x", bad),
            "metadata": row(collection, "x", deep=[{"n": bad}]),
            "metadata ": row(collection, "x", **{bad: 1}),
            "filter": find(collection, v=bad),
            "a filter's key": find(collection, **{bad: 1}),
            "the collection's name ": find(bad),
        }
        good = [row(collection, f"good {n}") for n in range(3)]
        found = await outcomes(store, [good[0], *batch.values(), *good[1:]])
        assert [found[0], *found[-2:]] == ["good 0", "good 1", "good 2"]
        for what, error in zip(batch, found[1:-2], strict=True):
            assert isinstance(error, EngineError) and not error.retryable
            assert what.strip() in str(error) and words in str(error), error
        with pytest.raises(EngineError):
            await store.get(collection, [bad])
        assert await store.count(collection) == 3 and store.load().requests == 0


class Hostile:
    """A vector that answers with an error of its own."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise LookupError("no array here")

    def __iter__(self) -> Any:
        raise LookupError("no numbers here")


@pytest.mark.parametrize("vector", [Hostile(), (10**400, 1.0), None, ("a", "b"), 3.0])
async def test_wrong_vector_fails_alone(each_store: Any, collection: str, vector: Any) -> None:
    batch = [row(collection, "good"), row(collection, "bad", "", vector), row(collection, "fine")]
    found = ends(await collect(each_store, batch), batch)
    assert [type(found[request.id]) for request in batch] == [Done, Failed, Done]
    assert await each_store.count(collection) == 2
    needles = [find(collection, vector), find(collection)]
    found = ends(await collect(each_store, needles), needles)
    assert [type(found[request.id]) for request in needles] == [Failed, Done]
