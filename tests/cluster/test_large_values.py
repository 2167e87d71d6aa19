"""Tests of large values: they go from replica to replica and not through clients, they are freed, and can get lost."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.indexing import TeolaIndexer
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.cluster.connection import actor
from teola_plugin.cluster.names import actor_name
from teola_plugin.graph import Attributes, Graph, Primitive, PrimitiveKind, Query, Ref, named
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Chunk, EmbedText, IngestRow
from teola_plugin.runtime.claims import RemoteValue

K = PrimitiveKind
TEXTS = [f"text {i} of {i % 7} and {i % 11}" for i in range(384)]
CHUNKS = [Chunk(f"c{i}", text) for i, text in enumerate(TEXTS)]
INPUTS = {"texts": TEXTS, "chunks": CHUNKS}


def index(collection: str) -> Graph:
    """Return a graph that embeds and then stores. Only the store reads the vectors."""
    embed = Primitive("embed", K.EMBEDDING, "wide", named(texts=Ref("$input", ("texts",))), batchable=True).with_(
        attributes=Attributes(role="document")
    )
    read = named(chunks=Ref("$input", ("chunks",)), vectors=Ref("embed"))
    attributes = Attributes(collection=collection)
    store = Primitive("store", K.INGESTION, "store", read, batchable=True, attributes=attributes)
    return Graph([embed, store], Ref("store"))


def chain_after(collection: str) -> Graph:
    """Return a graph that stores and then embeds. The embedding is sent along with the storing."""
    read = named(chunks=Ref("$input", ("chunks",)), vectors=Ref("$input", ("vectors",)))
    store = Primitive("store", K.INGESTION, "store", read, batchable=True, attributes=Attributes(collection=collection))
    after = Primitive("after", K.EMBEDDING, "embedder", named(texts=Ref("$input", ("text",))), after=("store",))
    return Graph([store, after], Ref("after"))


def in_store() -> int:
    """Return the bytes in Ray's shared memory."""
    name = "object_store_memory"
    return int(ray.cluster_resources()[name] - ray.available_resources().get(name, 0))


def until(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.05)
    return condition()


def settled(condition: Callable[[], bool]) -> bool:
    """Wait until the condition is true of a node's report, which is up to half a second old."""
    time.sleep(0.5)
    return until(condition)


@contextmanager
def freed() -> Iterator[None]:
    """Check that what the body puts into shared memory is freed after it, without Python's collector."""
    assert settled(lambda: in_store() < 1000)
    gc.disable()
    try:
        yield
        assert settled(lambda: in_store() < 1000), f"{in_store()} bytes are left"
    finally:
        gc.enable()


@pytest.fixture
def collection(shared: EnginePool) -> Iterator[str]:
    yield "kept"
    shared.admin("store", "delete_collection", "kept").result(30)


@pytest.fixture(scope="module")
def vectors(fakes_address: str) -> list[Any]:
    with EnginePool.connect(fakes_address, pool="fakes") as pool:
        return pool.call(K.EMBEDDING, "wide", [EmbedText(text, "document") for text in TEXTS]).result(30)


def are_unreadable(kept: list[Any]) -> bool:
    """Return True if none of the objects can be read. Ray allows it for a moment after it counts them as freed."""
    for ref in {one.batch.ref for one in kept}:
        try:
            ray.get(ref, timeout=5)
        except ray.exceptions.RayError:
            continue
        return False
    return True


def received(pool: EnginePool) -> int:
    port: Any = pool.runtime.port("wide")
    return int(port.traffic[1])


def search_results(pool: EnginePool, collection: str) -> list[str]:
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool, engine="wide"), collection=collection)
    assert store.count() == len(TEXTS)
    return [document.page_content for document in store.similarity_search(TEXTS[5], 1)]


def test_vectors_of_a_graph_reach_the_store_without_the_client(
    shared: EnginePool, collection: str, vectors: list[Any]
) -> None:
    with freed():
        before = received(shared)
        run = shared.runtime.submit(Query({"input": INPUTS}), index(collection), {})
        assert run.output.result(30) == [chunk.id for chunk in CHUNKS]
        assert run.trace.result(30)
        assert received(shared) - before < len(pickle.dumps(vectors)) / 5
        del run
    assert search_results(shared, collection) == [TEXTS[5]]


def test_rows_are_written_when_the_original_sends_them(shared: EnginePool, collection: str, vectors: list[Any]) -> None:
    """Their vectors are made early and stay where they are made; the rows are sent when the plain object sends them."""
    run = shared.runtime.submit(Query({"input": INPUTS}), index(collection), {}, has_original=True)
    payloads = [EmbedText(text, "document") for text in TEXTS]
    made = shared.call(K.EMBEDDING, "wide", payloads, keep_remote=True, run=run).result(60)
    assert all(isinstance(vector, RemoteValue) for vector in made)
    time.sleep(0.3)
    assert shared.admin("store", "count", collection).result(10) == 0
    rows = [IngestRow(collection, chunk, vector) for chunk, vector in zip(CHUNKS, made, strict=True)]
    run.call(K.INGESTION, "store", rows).result(60)
    assert shared.admin("store", "count", collection).result(10) == len(CHUNKS)
    run.close()
    trace = run.trace.result(10)
    assert trace is not None and [span.outcome for span in trace.spans if span.primitive == "store"] == ["done"]


def test_documents_added_to_a_store_bypass_the_client(shared: EnginePool, collection: str, vectors: list[Any]) -> None:
    store = TeolaVectorStore(pool=shared, embedding=TeolaEmbeddings(pool=shared, engine="wide"), collection=collection)
    with freed():
        before = received(shared)
        store.add_texts(TEXTS)
        assert received(shared) - before < len(pickle.dumps(vectors)) / 5
    assert search_results(shared, collection) == [TEXTS[5]]


def test_accelerated_indexer_keeps_vectors_off_the_client(
    shared: EnginePool, collection: str, vectors: list[Any]
) -> None:
    store = TeolaVectorStore(pool=shared, embedding=TeolaEmbeddings(pool=shared, engine="wide"), collection=collection)
    fast = accelerate(TeolaIndexer(store=store), pool=shared)
    with freed():
        before = received(shared)
        assert fast.invoke(TEXTS) == collection
        assert received(shared) - before < len(pickle.dumps(vectors)) / 5
    assert search_results(shared, collection) == [TEXTS[5]]


def test_claimed_remote_vectors_are_fetched(shared: EnginePool, collection: str, vectors: list[Any]) -> None:
    with freed():
        run = shared.runtime.submit(Query({"input": INPUTS}), index(collection), {}, has_original=True)
        assert until(lambda: in_store() > 100_000)  # they are made, ahead of their being asked for
        claimed = run.call(K.EMBEDDING, "wide", [EmbedText(text, "document") for text in TEXTS]).result(30)
        run.close()
        trace = run.trace.result(30)
        assert claimed == vectors
        assert trace is not None and sum(span.kind == "EMBEDDING" for span in trace.spans) == 1  # they were claimed
        del run, claimed


def test_lost_remote_values_are_computed_again(shared: EnginePool, collection: str, vectors: list[Any]) -> None:
    assert settled(lambda: in_store() < 1000)
    ask = [EmbedText(text, "document") for text in TEXTS]
    kept = shared.call(K.EMBEDDING, "wide", ask, keep_remote=True).result(30)
    assert all(isinstance(value, RemoteValue) for value in kept)
    assert settled(lambda: in_store() > 100_000)
    host = actor(actor_name("fakes", "wide"))
    before = len(ray.get(host.recent_batches.remote()))
    os.kill(ray.get(host.status.remote())["replicas"][0]["pid"], signal.SIGKILL)
    assert until(lambda: are_unreadable(kept))
    again = chain_after(collection)
    inputs = {"chunks": CHUNKS, "vectors": kept, "text": TEXTS[0]}
    ended = shared.runtime.submit(Query({"input": inputs}), again, {}).output.result(60)
    assert len(ray.get(host.recent_batches.remote())) > before  # they were
    assert ended == shared.call(K.EMBEDDING, "embedder", [EmbedText(TEXTS[0])]).result(30)[0]
    rows = [IngestRow(collection, chunk, value) for chunk, value in zip(CHUNKS, kept, strict=True)]
    assert shared.call(K.INGESTION, "store", rows).result(60) == [chunk.id for chunk in CHUNKS]
    assert search_results(shared, collection) == [TEXTS[5]]
