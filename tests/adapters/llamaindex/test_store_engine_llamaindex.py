"""Tests of retrievers over a bound store: the original's nodes, errors and events, in fewer calls of the client."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from differential.llamaindex.recording import Recorder, recorded
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.callbacks import CallbackManager
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import QueryFusionRetriever, VectorIndexRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from support.store_clients import (
    IDS,
    METADATA,
    QUERIES,
    TEXTS,
    ClientLog,
    Score,
    closed_pools,
    run_together,
    serve_store,
    vector_of,
)

import teola_plugin
from teola_plugin import EnginePool, accelerate
from teola_plugin.engines import VectorStoreEngine
from teola_plugin.errors import RegistrationError


class Words(BaseEmbedding):
    def _get_query_embedding(self, query: str) -> list[float]:
        return vector_of(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return vector_of(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return vector_of(text)


def chroma() -> Any:
    chromadb = pytest.importorskip("chromadb")
    stores = pytest.importorskip("llama_index.vector_stores.chroma")
    collection = chromadb.EphemeralClient().create_collection(f"store-{uuid.uuid4()}")
    return stores.ChromaVectorStore(chroma_collection=collection)


def qdrant(**options: Any) -> Any:
    client = pytest.importorskip("qdrant_client").QdrantClient(":memory:")
    stores = pytest.importorskip("llama_index.vector_stores.qdrant")
    return stores.QdrantVectorStore("farm", client=client, index_doc_id=False, **options)


class PlainStore(SimpleVectorStore):
    """A store of a class that the engine does not know, with sync code alone."""

    def query(self, query: Any, **kwargs: Any) -> Any:
        return SimpleVectorStore.query(self, query, **kwargs)


def node(text: str, metadata: dict[str, Any], id: str) -> TextNode:
    return TextNode(id_=id, text=text, metadata=metadata)


def index_over(store: BasePydanticVectorStore) -> VectorStoreIndex:
    storage = StorageContext.from_defaults(vector_store=store)
    nodes = [node(*one) for one in zip(TEXTS, METADATA, IDS, strict=True)]
    return VectorStoreIndex(nodes, storage_context=storage, embed_model=Words())


def client_log(store: Any) -> ClientLog:
    return ClientLog(store.client)


@pytest.fixture
def pools() -> Iterator[list[EnginePool]]:
    with closed_pools() as pools:
        yield pools


def described(nodes: list[NodeWithScore]) -> list[tuple[Any, ...]]:
    return [(one.node.node_id, one.node.get_content(), one.node.metadata, Score(one.score or 0.0)) for one in nodes]


STORES: list[Callable[[], Any]] = [chroma, qdrant, PlainStore]
embedded_clients = pytest.mark.parametrize("make", [chroma, qdrant])
all_stores = pytest.mark.parametrize("make", STORES, ids=lambda make: make.__name__)
FILTERS = MetadataFilters(filters=[MetadataFilter(key="word", value="class")])


@all_stores
@pytest.mark.parametrize("options", [{}, {"similarity_top_k": 5}, {"filters": FILTERS}], ids=["plain", "5", "filters"])
def test_store_engine_returns_the_nodes_of_the_original(
    make: Callable[[], Any], options: dict[str, Any], pools: list[EnginePool]
) -> None:
    store = make()
    retriever = index_over(store).as_retriever(**options)
    expected = [described(retriever.retrieve(query)) for query in QUERIES]
    fast = serve_store(store, retriever, pools)
    assert [described(fast.retrieve(query)) for query in QUERIES] == expected
    assert all(nodes for nodes in expected)


@all_stores
def test_searches_go_through_the_engine(make: Callable[[], Any], pools: list[EnginePool]) -> None:
    store = make()
    fast = serve_store(store, index_over(store).as_retriever(), pools)
    fast.retrieve(QUERIES[0])
    assert [span.engine for span in fast.last_trace().spans] == ["store"]


@embedded_clients
def test_waiting_searches_share_a_call_of_the_store(make: Callable[[], Any], pools: list[EnginePool]) -> None:
    store = make()
    retriever = index_over(store).as_retriever(similarity_top_k=3)
    log = client_log(store)
    expected = [described(nodes) for nodes in run_together(retriever.retrieve, log, QUERIES)]
    assert log.calls == [1] * len(QUERIES)
    log.calls.clear()
    fast = serve_store(store, retriever, pools, max_calls=1)
    assert [described(nodes) for nodes in run_together(fast.retrieve, log, QUERIES)] == expected
    assert sum(log.calls) == len(QUERIES)
    assert len(log.calls) < len(QUERIES) / 2


@embedded_clients
def test_shared_call_gives_each_query_its_own_objects(make: Callable[[], Any], pools: list[EnginePool]) -> None:
    store = make()
    retriever = index_over(store).as_retriever()
    log = client_log(store)
    fast = serve_store(store, retriever, pools, max_calls=1)
    results = run_together(fast.retrieve, log, ["what of lambda?"] * 4)
    assert len(log.calls) < 4
    assert sum(log.calls) == 4
    results[0][0].node.metadata["changed"] = True
    assert all("changed" not in one[0].node.metadata for one in results[1:])


def test_equal_searches_of_a_read_only_store_are_made_once(pools: list[EnginePool]) -> None:
    store = chroma()
    retriever = index_over(store).as_retriever()
    log = client_log(store)
    expected = described(retriever.retrieve("what of lambda?"))
    log.calls.clear()
    fast = serve_store(store, retriever, pools, max_calls=1, read_only=True)
    results = run_together(fast.retrieve, log, ["what of lambda?"] * 4)
    assert [described(nodes) for nodes in results] == [expected] * 4
    assert sum(log.calls) < 4


def test_searches_with_other_filters_are_not_merged(pools: list[EnginePool]) -> None:
    store = chroma()
    index = index_over(store)
    all_nodes, filtered = index.as_retriever(), index.as_retriever(filters=FILTERS)
    log = client_log(store)

    class Flow(Workflow):
        @step
        async def search(self, ev: StartEvent) -> StopEvent:
            nodes = (filtered if ev.filters else all_nodes).retrieve("what of lambda?")
            return StopEvent(result=described(nodes))

    async def run(app: Any, filters: bool) -> Any:
        return await app.run(filters=filters)

    expected = [asyncio.run(run(Flow(), filters)) for filters in (True, False)]
    log.calls.clear()
    fast = serve_store(store, Flow(), pools, max_calls=1)
    outcomes = run_together(lambda filters: asyncio.run(run(fast, filters)), log, [True, False] * 3)
    assert outcomes == expected * 3
    assert sum(log.calls) == 6
    assert max(log.calls) <= 3


@all_stores
@pytest.mark.parametrize("read_only", [False, True])
def test_async_queries_give_the_nodes_of_the_original(
    make: Callable[[], Any], read_only: bool, pools: list[EnginePool]
) -> None:
    store = make()
    retriever = index_over(store).as_retriever()

    async def outcomes(app: Any) -> list[Any]:
        results = await asyncio.gather(*(app.aretrieve(query) for query in QUERIES), return_exceptions=True)
        return [str(one) if isinstance(one, BaseException) else described(one) for one in results]

    expected = asyncio.run(outcomes(retriever))
    assert asyncio.run(outcomes(serve_store(store, retriever, pools, read_only=read_only))) == expected


def test_async_client_of_qdrant_is_called_on_the_callers_loop(pools: list[EnginePool]) -> None:
    client = pytest.importorskip("qdrant_client").AsyncQdrantClient(":memory:")
    stores = pytest.importorskip("llama_index.vector_stores.qdrant")
    store = stores.QdrantVectorStore("farm", aclient=client, index_doc_id=False)
    index = VectorStoreIndex.from_vector_store(store, embed_model=Words(), use_async=True)

    async def outcomes(app: Any) -> list[Any]:
        results = await asyncio.gather(*(app.aretrieve(query) for query in QUERIES))
        return [described(nodes) for nodes in results]

    async def compare() -> None:
        await index.ainsert_nodes([node(*one) for one in zip(TEXTS, METADATA, IDS, strict=True)])
        expected = await outcomes(index.as_retriever())
        fast = serve_store(store, index.as_retriever(), pools)
        assert await outcomes(fast) == expected

    asyncio.run(compare())


@pytest.mark.parametrize("read_only", [False, True])
def test_sync_store_leaves_the_loop_only_if_read_only(read_only: bool, pools: list[EnginePool]) -> None:
    store = chroma()
    retriever = index_over(store).as_retriever(similarity_top_k=1)
    fast = serve_store(store, retriever, pools, read_only=read_only, max_calls=1)
    log = client_log(store)

    async def count_calls() -> list[int]:
        log.calls.clear()
        await asyncio.gather(*(fast.aretrieve(query) for query in QUERIES[:4]))
        return log.calls

    calls = asyncio.run(count_calls())
    assert sum(calls) == 4
    assert (max(calls) > 1) is read_only


@all_stores
def test_async_search_keeps_its_order_with_writes_of_other_tasks(
    make: Callable[[], Any], pools: list[EnginePool]
) -> None:
    store = make()
    if make is qdrant:
        pytest.skip("it has async code, and no async client here")
    index = index_over(store)
    retriever = index.as_retriever(similarity_top_k=1)
    fast = serve_store(store, retriever, pools)

    async def search_and_write(app: Any, number: int) -> list[Any]:
        query = f"zebra{number} zebra{number}"
        found, _ = await asyncio.gather(app.aretrieve(query), write(query))
        return [one.node.get_content() for one in found]

    async def write(query: str) -> None:
        index.insert_nodes([TextNode(text=query)])

    original = asyncio.run(search_and_write(retriever, 1))
    assert original != ["zebra1 zebra1"]
    assert asyncio.run(search_and_write(fast, 2)) != ["zebra2 zebra2"]


@all_stores
@pytest.mark.parametrize("read_only", [False, True])
def test_search_after_a_write_finds_the_new_text(
    make: Callable[[], Any], read_only: bool, pools: list[EnginePool]
) -> None:
    store = make()
    index = index_over(store)
    log = None if make is PlainStore else client_log(store)

    class Flow(Workflow):
        @step
        async def write(self, ev: StartEvent) -> StopEvent:
            retriever = index.as_retriever(similarity_top_k=1)
            before = retriever.retrieve(ev.text)
            index.insert_nodes([TextNode(text=ev.text)])
            after = (
                retriever.retrieve(ev.text)
                if make is not PlainStore
                else index.as_retriever(similarity_top_k=1).retrieve(ev.text)
            )
            return StopEvent(result=[one.node.get_content() for one in (*before, *after)])

    async def run(app: Any, text: str) -> Any:
        return await app.run(text=text)

    fast = serve_store(store, Flow(), pools, read_only=read_only)
    for number in range(3):
        text = f"zebra{number} zebra{number}"
        before, after = asyncio.run(run(fast, text))
        assert before != text
        assert after == text
    assert log is None or log.calls == [1] * 6


@all_stores
def test_store_engine_raises_the_errors_of_the_store(make: Callable[[], Any], pools: list[EnginePool]) -> None:
    store = make()
    retriever = index_over(store).as_retriever(similarity_top_k="many")
    with pytest.raises(Exception) as original:
        retriever.retrieve(QUERIES[0])
    fast = serve_store(store, retriever, pools)
    with pytest.raises(type(original.value)) as error:
        fast.retrieve(QUERIES[0])
    assert str(error.value) == str(original.value)


@all_stores
@pytest.mark.parametrize("top_k", [2, "many"])
def test_store_engine_sends_the_events_of_the_original(
    make: Callable[[], Any], top_k: Any, pools: list[EnginePool]
) -> None:
    store = make()
    index = index_over(store)

    def engine(recorder: Recorder) -> Any:
        manager = CallbackManager([recorder])
        retriever = VectorIndexRetriever(index, similarity_top_k=top_k, callback_manager=manager)
        return RetrieverQueryEngine.from_args(retriever, llm=MockLLM(), callback_manager=manager)

    def hear(app: Any, recorder: Recorder) -> tuple[Any, ...]:
        with recorded(recorder):
            try:
                outcome = str(app.query(QUERIES[0]))
            except Exception as error:
                outcome = repr(error)
        return outcome, recorder.callbacks, recorder.events, recorder.spans

    first, second = Recorder(), Recorder()
    expected = hear(engine(first), first)
    assert hear(serve_store(store, engine(second), pools), second) == expected
    assert expected[1]
    assert expected[3]


@embedded_clients
def test_each_query_of_a_fusion_is_made_once(make: Callable[[], Any], pools: list[EnginePool]) -> None:
    store = make()
    index = index_over(store)
    retrievers = [index.as_retriever(similarity_top_k=k) for k in (1, 2, 3)]
    fusion = QueryFusionRetriever(retrievers, llm=MockLLM(), num_queries=1, similarity_top_k=4, use_async=False)
    log = client_log(store)
    expected = described(fusion.retrieve(QUERIES[0]))
    assert log.calls == [1, 1, 1]
    log.calls.clear()
    fast = serve_store(store, fusion, pools)
    assert described(fast.retrieve(QUERIES[0])) == expected
    assert sum(log.calls) == 3


def test_hybrid_searches_return_the_nodes_of_the_store(pools: list[EnginePool]) -> None:
    def encode(texts: list[str]) -> tuple[list[list[int]], list[list[float]]]:
        return [[len(text) % 7, 9] for text in texts], [[1.0, 0.5] for _ in texts]

    store = qdrant(enable_hybrid=True, sparse_doc_fn=encode, sparse_query_fn=encode)
    index = index_over(store)
    for options in ({"vector_store_query_mode": "hybrid", "sparse_top_k": 3}, {"vector_store_query_mode": "default"}):
        retriever = index.as_retriever(similarity_top_k=2, **options)
        expected = [described(retriever.retrieve(query)) for query in QUERIES]
        fast = serve_store(store, retriever, pools)
        assert [described(fast.retrieve(query)) for query in QUERIES] == expected


def test_failing_search_does_not_fail_searches_of_the_same_call(pools: list[EnginePool]) -> None:
    store = qdrant()
    index = index_over(store)
    good, bad = index.as_retriever(), index.as_retriever(vector_store_kwargs={"qdrant_filters": "no filter"})
    log = client_log(store)
    expected = [described(good.retrieve(query)) for query in QUERIES[1:]]
    pools.append(EnginePool.local(store=VectorStoreEngine("store", store, max_calls=1)).start())
    fast_good, fast_bad = (accelerate(one, pool=pools[-1], bind=[(store, "store")]) for one in (good, bad))
    outcomes = run_together(
        lambda query: (fast_bad if query == QUERIES[0] else fast_good).retrieve(query), log, QUERIES
    )
    assert isinstance(outcomes[0], Exception)
    assert [described(nodes) for nodes in outcomes[1:]] == expected


def test_client_whose_search_was_replaced_is_called_by_its_store(pools: list[EnginePool]) -> None:
    store = qdrant()
    retriever = index_over(store).as_retriever()
    queries: list[Any] = []
    search = store.client.query_points

    def replaced(**kwargs: Any) -> Any:
        queries.append(kwargs["query"])
        return search(**kwargs)

    store.client.query_points = replaced
    fast = serve_store(store, retriever, pools, max_calls=1)
    for query in QUERIES:
        fast.retrieve(query)
    assert len(queries) == len(QUERIES)


def test_store_that_searches_itself_does_not_deadlock(pools: list[EnginePool]) -> None:
    class NestedStore(PlainStore):
        def query(self, query: Any, *, is_nested: bool = False, **kwargs: Any) -> Any:
            return PlainStore.query(self, query, **kwargs) if is_nested else self.query(query, is_nested=True)

    store = NestedStore()
    retriever = index_over(store).as_retriever()
    expected = described(retriever.retrieve(QUERIES[0]))
    assert described(serve_store(store, retriever, pools, max_calls=1).retrieve(QUERIES[0])) == expected


def test_store_searches_itself_with_pool_on_the_callers_loop() -> None:
    store = PlainStore()
    retriever = index_over(store).as_retriever()
    expected = described(retriever.retrieve(QUERIES[0]))

    async def search() -> Any:
        async with EnginePool.on_this_loop({"store": VectorStoreEngine("store", store)}) as pool:
            fast = accelerate(retriever, pool=pool, bind=[(store, "store")])
            return described(await fast.aretrieve(QUERIES[0]))

    assert asyncio.run(search()) == expected


def test_search_after_pool_closes_is_made_by_the_store(pools: list[EnginePool]) -> None:
    store = PlainStore()
    retriever = index_over(store).as_retriever()
    expected = described(retriever.retrieve(QUERIES[0]))

    class Flow(Workflow):
        @step
        async def search(self, ev: StartEvent) -> StopEvent:
            pools[-1].close()
            return StopEvent(result=described(retriever.retrieve(QUERIES[0])))

    async def run(app: Any) -> Any:
        return await app.run()

    assert asyncio.run(run(serve_store(store, Flow(), pools))) == expected


def test_uninstalled_store_searches_by_itself(pools: list[EnginePool]) -> None:
    store = PlainStore()
    threads: list[str] = []

    class NotingStore(PlainStore):
        def query(self, query: Any, **kwargs: Any) -> Any:
            threads.append(threading.current_thread().name)
            return PlainStore.query(self, query, **kwargs)

    store = NotingStore()
    retriever = index_over(store).as_retriever()
    fast = serve_store(store, retriever, pools)
    fast.retrieve(QUERIES[0])
    retriever.retrieve(QUERIES[0])
    teola_plugin.uninstall()
    fast.retrieve(QUERIES[0])
    assert threads[0].startswith("teola-store")
    assert threads[1:] == [threading.current_thread().name] * 2


def test_engine_of_another_store_is_refused(pools: list[EnginePool]) -> None:
    one, other = PlainStore(), PlainStore()
    pools.append(EnginePool.local(store=VectorStoreEngine("store", one)).start())
    with pytest.raises(RegistrationError, match="does not serve this PlainStore"):
        accelerate(index_over(other).as_retriever(), pool=pools[-1], bind=[(other, "store")])
    with pytest.raises(RegistrationError, match="outside of accelerated apps"):
        pools[-1].bound(one, "store")
