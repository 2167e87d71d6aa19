"""Tests of the engine for a store of the user's: shared calls, errors, cancellation, equal searches, bad arguments."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from teola_plugin import shims
from teola_plugin.engines import VectorStoreEngine
from teola_plugin.engines.base import Engine
from teola_plugin.engines.conformance import EngineConformance, collect, ends
from teola_plugin.engines.vector_store import BatchedSearch, SearchOutcome, StoreSearch, run_searches
from teola_plugin.errors import RegistrationError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Done, Request


class ListStore:
    """A store that returns the query, and logs the searches."""

    def __init__(self) -> None:
        self.queries: list[str] = []

    def similarity_search(self, query: str, k: int = 4) -> list[str]:
        self.queries.append(query)
        if query == "broken":
            raise KeyError("out of oats")
        return [query] * k


class TestConformance(EngineConformance):
    async def make(self) -> Engine:
        return VectorStoreEngine("store", ListStore())

    def payloads(self, kind: PrimitiveKind) -> Sequence[Any]:
        store = ListStore()
        return [StoreSearch(store.similarity_search, ("oats",)), StoreSearch(store.similarity_search, ("hay",))]


async def run_all(engine: VectorStoreEngine, *searches: StoreSearch) -> list[SearchOutcome]:
    batch = [Request(f"s{n}", PrimitiveKind.SEARCHING, search) for n, search in enumerate(searches)]
    await engine.start()
    try:
        done = ends(await collect(engine, batch), batch)
    finally:
        await engine.stop()
    return [end.value for end in done.values() if isinstance(end, Done)]


def submitted(engine: VectorStoreEngine, *queries: str) -> list[StoreSearch]:
    """Return the searches that a stand-in for the engine's store submits for these queries."""
    searches: list[StoreSearch] = []
    stand_in = engine.make_stand_in(searches.append)
    for query in queries:
        stand_in.similarity_search(query)
    return searches


async def test_stand_in_has_the_state_and_the_class_of_the_store() -> None:
    store = ListStore()
    engine = VectorStoreEngine("store", store)
    stand_in = engine.make_stand_in(lambda search: search.run().get())
    assert isinstance(stand_in, ListStore)
    assert stand_in.similarity_search("oats", k=2) == ["oats", "oats"]
    assert store.queries == ["oats"]


async def test_error_of_the_store_fails_only_its_search() -> None:
    engine = VectorStoreEngine("store", ListStore())
    broken, whole = await run_all(engine, *submitted(engine, "broken", "oats"))
    with pytest.raises(KeyError, match="out of oats"):
        broken.get()
    assert whole.get() == ["oats"] * 4


async def test_equal_searches_are_shared_only_if_store_is_read_only() -> None:
    writable, fixed = ListStore(), ListStore()
    for store, read_only in ((writable, False), (fixed, True)):
        engine = VectorStoreEngine("store", store, read_only=read_only, max_calls=1)
        outcomes = await run_all(engine, *submitted(engine, "oats", "oats", "hay"))
        assert [one.get() for one in outcomes] == [["oats"] * 4, ["oats"] * 4, ["hay"] * 4]
        assert outcomes[0].value is not outcomes[1].value
    assert sorted(writable.queries) == ["hay", "oats", "oats"]
    assert sorted(fixed.queries) == ["hay", "oats"]


async def test_equal_queries_of_unequal_types_are_not_shared() -> None:
    store = ListStore()
    engine = VectorStoreEngine("store", store, read_only=True, max_calls=1)
    searches: list[StoreSearch] = []
    stand_in = engine.make_stand_in(searches.append)
    stand_in.similarity_search("oats", k=1)
    stand_in.similarity_search("oats", k=True)
    await run_all(engine, *searches)
    assert store.queries == ["oats", "oats"]


async def test_at_most_max_calls_run_at_once() -> None:
    lock, running, most = threading.Lock(), 0, 0

    def search() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.02)
        with lock:
            running -= 1

    await run_all(VectorStoreEngine("store", ListStore(), max_calls=2), *(StoreSearch(search) for _ in range(6)))
    assert most == 2


async def test_cancelled_waiting_search_is_not_executed() -> None:
    calls: list[str] = []
    release = threading.Event()
    engine = VectorStoreEngine("store", ListStore(), max_calls=1)
    searches = [StoreSearch(lambda: release.wait(10)), StoreSearch(lambda: calls.append("late"))]
    batch = [Request(f"c{n}", PrimitiveKind.SEARCHING, search) for n, search in enumerate(searches)]
    await engine.start()
    try:
        reading = asyncio.ensure_future(collect(engine, batch))
        await asyncio.sleep(0.05)
        await engine.cancel("c1")
        release.set()
        await reading
    finally:
        await engine.stop()
    assert calls == []


def test_searches_run_one_by_one_if_the_shared_call_fails() -> None:
    def fail(client: Any, searches: Sequence[Any]) -> list[Any]:
        raise OSError("refused")

    batched = BatchedSearch("search", lambda arguments: (), fail)
    searches = [StoreSearch(str, (n,), group=1, batched=batched) for n in range(3)]
    assert [one.get() for one in run_searches(searches, False)] == ["0", "1", "2"]


def test_client_of_a_store_is_found_and_replaced_in_a_copy() -> None:
    chroma, qdrant = pytest.importorskip("langchain_chroma").Chroma, pytest.importorskip("langchain_qdrant")
    for cls in (chroma, qdrant.QdrantVectorStore):
        store = object.__new__(cls)
        assert shims.store_client(store) is None
        vars(store)[shims._CLIENT_ATTRIBUTES[f"{cls.__module__}.{cls.__qualname__}"]] = "client"
        assert shims.store_client(store) == "client"
        assert shims.store_client(shims.with_store_client(store, "other")) == "other"
        assert shims.store_client(store) == "client"
    assert shims.store_client(object.__new__(type("OwnChroma", (chroma,), {}))) is None
    assert shims.store_client(ListStore()) is None


def test_async_client_of_a_store_is_found_and_replaced_in_a_copy() -> None:
    clients = pytest.importorskip("qdrant_client")
    stores = pytest.importorskip("llama_index.vector_stores.qdrant")
    client = clients.AsyncQdrantClient(":memory:")
    store = stores.QdrantVectorStore("farm", aclient=client)

    with shims.async_store_client_replaced(store, "other") as copied:
        found = shims.async_store_client(copied), shims.async_store_client(store)
        copied._legacy_vector_format = False
        copied.dense_vector_name = "unnamed"

    assert found == ("other", client)
    assert shims.async_store_client(store) is client
    assert (store._legacy_vector_format, store.dense_vector_name) == (False, "unnamed")
    assert shims.async_store_client(ListStore()) is None


def test_embedded_client_is_told_from_one_of_a_server() -> None:
    clients = pytest.importorskip("qdrant_client")

    assert shims.is_embedded_client(clients.AsyncQdrantClient(":memory:"))
    assert shims.is_embedded_client(object())
    assert not shims.is_embedded_client(clients.AsyncQdrantClient(url="http://127.0.0.1:9", check_compatibility=False))


def test_store_whose_attributes_cannot_be_shared_has_no_stand_in() -> None:
    class Slotted:
        __slots__ = ()

        def similarity_search(self, query: str) -> list[str]:
            return [query]

    assert VectorStoreEngine("store", Slotted()).make_stand_in(lambda search: None) is None


@pytest.mark.parametrize("max_calls", [0, -1, True, 2.0, "2"])
def test_number_of_calls_must_be_positive(max_calls: Any) -> None:
    with pytest.raises(RegistrationError, match="max_calls"):
        VectorStoreEngine("store", ListStore(), max_calls=max_calls)


@pytest.mark.parametrize("store", [None, object(), "store"])
def test_object_without_searches_is_refused(store: Any) -> None:
    with pytest.raises(RegistrationError, match="no vector store of LangChain or LlamaIndex"):
        VectorStoreEngine("store", store)
