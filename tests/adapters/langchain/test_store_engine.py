"""Tests of retrievers over a bound store: the original's documents, errors and events, in fewer calls of the client."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore, VectorStoreRetriever
from support.store_clients import (
    IDS,
    METADATA,
    QUERIES,
    TEXTS,
    ClientLog,
    closed_pools,
    run_together,
    serve_store,
    vector_of,
)

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines import VectorStoreEngine
from teola_plugin.errors import RegistrationError


class Words(Embeddings):
    def embed_query(self, text: str) -> list[float]:
        return vector_of(text)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [vector_of(text) for text in texts]


def chroma(name: str = "") -> VectorStore:
    langchain_chroma = pytest.importorskip("langchain_chroma")
    store: VectorStore = langchain_chroma.Chroma(name or f"store-{uuid.uuid4()}", Words())
    store.add_texts(TEXTS, METADATA, ids=IDS)
    return store


def qdrant() -> VectorStore:
    langchain_qdrant = pytest.importorskip("langchain_qdrant")
    store: VectorStore = langchain_qdrant.QdrantVectorStore.from_texts(
        TEXTS, Words(), METADATA, ids=IDS, location=":memory:"
    )
    return store


class PlainStore(InMemoryVectorStore):
    """A store of a class that the engine does not know, with relevance scores, and without async searches."""

    asimilarity_search = VectorStore.asimilarity_search
    asimilarity_search_with_score = VectorStore.asimilarity_search_with_score
    amax_marginal_relevance_search = VectorStore.amax_marginal_relevance_search

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda score: max(0.0, min(1.0, score))


def plain() -> VectorStore:
    store = PlainStore(Words())
    store.add_texts(TEXTS, METADATA, ids=IDS)
    return store


def client_log(store: Any) -> ClientLog:
    return ClientLog(store._chroma_collection if hasattr(store, "_chroma_collection") else store._client)


@pytest.fixture
def pools() -> Iterator[list[EnginePool]]:
    with closed_pools() as pools:
        yield pools


def described(documents: list[Document]) -> list[tuple[Any, ...]]:
    return [(one.id, one.page_content, one.metadata) for one in documents]


SEARCHES: dict[str, dict[str, Any]] = {
    "similarity": {"search_kwargs": {"k": 3}},
    "default": {},
    "threshold": {"search_type": "similarity_score_threshold", "search_kwargs": {"k": 5, "score_threshold": 0.3}},
    "mmr": {"search_type": "mmr", "search_kwargs": {"k": 3, "fetch_k": 9}},
}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("make", [chroma, qdrant, plain])
def test_store_engine_returns_the_documents_of_the_original(
    make: Callable[[], VectorStore], search: str, pools: list[EnginePool]
) -> None:
    store = make()
    app = store.as_retriever(**SEARCHES[search]) | RunnableLambda(described)
    expected = [app.invoke(query) for query in QUERIES]
    fast = serve_store(store, app, pools)

    async def run_together() -> list[Any]:
        return await asyncio.gather(*(fast.ainvoke(query) for query in QUERIES))

    assert [fast.invoke(query) for query in QUERIES] == expected
    assert fast.batch(QUERIES) == expected
    assert asyncio.run(run_together()) == expected


def test_store_engine_applies_native_filters_of_the_store(pools: list[EnginePool]) -> None:
    store = chroma()
    retriever = store.as_retriever(search_kwargs={"k": 3, "filter": {"number": {"$gt": 40}}})
    expected = retriever.batch(QUERIES)
    assert serve_store(store, retriever, pools).batch(QUERIES) == expected
    assert all(document.metadata["number"] > 40 for documents in expected for document in documents)


@pytest.mark.parametrize("make", [chroma, qdrant])
def test_waiting_searches_share_a_call_of_the_store(make: Callable[[], VectorStore], pools: list[EnginePool]) -> None:
    store = make()
    log, app = client_log(store), store.as_retriever() | RunnableLambda(described)
    expected = run_together(app.invoke, log, QUERIES)
    assert log.calls == [1] * len(QUERIES)
    log.calls.clear()
    fast = serve_store(store, app, pools, max_calls=1)
    assert run_together(fast.invoke, log, QUERIES) == expected
    assert sum(log.calls) == len(QUERIES)
    assert len(log.calls) < len(QUERIES) / 2


@pytest.mark.parametrize("make", [chroma, qdrant])
def test_shared_call_gives_each_query_its_own_objects(make: Callable[[], VectorStore], pools: list[EnginePool]) -> None:
    store = make()
    log, fast = client_log(store), serve_store(store, store.as_retriever(), pools, max_calls=1)
    results = run_together(fast.invoke, log, ["what of lambda?"] * 4)
    assert len(log.calls) < 4
    assert sum(log.calls) == 4
    results[0][0].metadata["changed"] = True
    assert all("changed" not in one[0].metadata for one in results[1:])


def test_equal_searches_of_a_read_only_store_are_made_once(pools: list[EnginePool]) -> None:
    store = chroma()
    log, retriever = client_log(store), store.as_retriever()
    expected = retriever.invoke("what of lambda?")
    log.calls.clear()
    fast = serve_store(store, retriever, pools, max_calls=1, read_only=True)
    results = run_together(fast.invoke, log, ["what of lambda?"] * 4)
    assert results == [expected] * 4
    assert sum(log.calls) < 4
    results[0][0].metadata["changed"] = True
    assert all("changed" not in one[0].metadata for one in results[1:])


def test_searches_with_other_arguments_are_not_merged(pools: list[EnginePool]) -> None:
    store = chroma()
    log = client_log(store)
    one, other = store.as_retriever(search_kwargs={"k": 1}), store.as_retriever(search_kwargs={"k": True})
    app = RunnableLambda(lambda query: described((one if query[0] else other).invoke(query[1])))
    queries = [(number % 2, "what of lambda?") for number in range(4)]
    expected = [app.invoke(query) for query in queries[:1]]
    log.calls.clear()
    fast = serve_store(store, app, pools, max_calls=1)
    outcomes = run_together(fast.invoke, log, queries)
    assert outcomes[1] == expected[0]
    assert max(log.calls) <= 2


@pytest.mark.parametrize("make", [chroma, qdrant, plain])
@pytest.mark.parametrize("read_only", [False, True])
def test_search_after_a_write_finds_the_new_text(
    make: Callable[[], VectorStore], read_only: bool, pools: list[EnginePool]
) -> None:
    store = make()
    retriever = store.as_retriever(search_kwargs={"k": 1})

    def write(query: str) -> str:
        store.add_texts([f"New: {query}"], [{"word": "new", "number": -1}])
        return query

    app = RunnableLambda(write) | retriever | RunnableLambda(lambda documents: documents[0].page_content)
    fast = serve_store(store, app, pools, read_only=read_only)
    for number in range(3):
        query = f"zebra{number} zebra{number}"
        assert fast.invoke(query) == f"New: {query}"


@pytest.mark.parametrize("make", [chroma, qdrant])
def test_equal_searches_around_a_write_are_both_made(make: Callable[[], VectorStore], pools: list[EnginePool]) -> None:
    store = make()
    log, retriever = client_log(store), store.as_retriever(search_kwargs={"k": 1})

    def answer(query: str) -> list[str]:
        before = retriever.invoke(query)
        store.add_texts([f"Copy of {query}"], [{"word": "new", "number": -1}])
        after = retriever.invoke(query)
        return [one.page_content for one in (*before, *after)]

    fast = serve_store(store, RunnableLambda(answer), pools)
    before, after = fast.invoke("zebra stripes")
    assert before != after
    assert after == "Copy of zebra stripes"
    assert log.calls == [1, 1]


@pytest.mark.parametrize("make", [chroma, qdrant, plain])
def test_store_engine_raises_the_errors_of_the_store(make: Callable[[], VectorStore], pools: list[EnginePool]) -> None:
    store = make()
    retriever = store.as_retriever(search_kwargs={"k": "many"})
    with pytest.raises(Exception) as original:
        retriever.invoke("what of lambda?")
    fast = serve_store(store, retriever, pools)
    with pytest.raises(type(original.value)) as error:
        fast.invoke("what of lambda?")
    assert str(error.value) == str(original.value)
    with pytest.raises(type(original.value)):
        asyncio.run(fast.ainvoke("what of lambda?"))


def test_failing_search_does_not_fail_searches_of_the_same_call(pools: list[EnginePool]) -> None:
    store = qdrant()
    log = client_log(store)
    good, bad = store.as_retriever(), store.as_retriever(search_kwargs={"filter": "no filter"})
    app = RunnableLambda(lambda query: described((bad if query == QUERIES[0] else good).invoke(query)))
    expected = [described(good.invoke(query)) for query in QUERIES[1:]]
    fast = serve_store(store, app, pools, max_calls=1)
    outcomes = run_together(fast.invoke, log, QUERIES)
    assert isinstance(outcomes[0], Exception)
    assert outcomes[1:] == expected


class Shouting(VectorStoreRetriever):
    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:  # type: ignore[override]
        return super()._get_relevant_documents(query.upper(), run_manager=run_manager)


def test_retriever_with_overridden_search_returns_the_same_documents(pools: list[EnginePool]) -> None:
    store = plain()
    retriever = Shouting(vectorstore=store)
    expected = retriever.invoke(QUERIES[0])
    assert serve_store(store, retriever, pools).invoke(QUERIES[0]) == expected


def test_store_with_async_searches_is_searched_on_the_callers_loop(pools: list[EnginePool]) -> None:
    threads: list[str] = []

    class AsyncStore(PlainStore):
        async def asimilarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
            threads.append(threading.current_thread().name)
            return self.similarity_search(query, k, **kwargs)

    store = AsyncStore(Words())
    store.add_texts(TEXTS)
    expected = store.as_retriever().invoke(QUERIES[0])
    fast = serve_store(store, store.as_retriever(), pools)
    assert asyncio.run(fast.ainvoke(QUERIES[0])) == expected
    assert threads == [threading.current_thread().name]


def test_client_whose_search_was_replaced_is_called_by_its_store(pools: list[EnginePool]) -> None:
    store: Any = qdrant()
    queries: list[Any] = []
    search = store._client.query_points

    def replaced(**kwargs: Any) -> Any:
        queries.append(kwargs["query"])
        return search(**kwargs)

    store._client.query_points = replaced
    fast = serve_store(store, store.as_retriever(), pools, max_calls=1)
    fast.batch(QUERIES)
    assert len(queries) == len(QUERIES)


def test_search_after_pool_closes_is_made_by_the_store(pools: list[EnginePool]) -> None:
    store = chroma()
    retriever = store.as_retriever()
    expected = retriever.invoke(QUERIES[0])

    def answer(query: str) -> list[Document]:
        pools[-1].close()
        return retriever.invoke(query)

    assert serve_store(store, RunnableLambda(answer), pools).invoke(QUERIES[0]) == expected


def test_prefetched_searches_are_made_once(pools: list[EnginePool]) -> None:
    store = chroma()
    log = client_log(store)
    one, other = store.as_retriever(search_kwargs={"k": 1}), store.as_retriever(search_kwargs={"k": 2})

    def answer(query: str) -> list[tuple[Any, ...]]:
        first = one.invoke(query)
        return described([*first, *other.invoke(query)])

    expected = answer(QUERIES[0])
    log.calls.clear()
    assert serve_store(store, RunnableLambda(answer), pools).invoke(QUERIES[0]) == expected
    assert log.calls == [1, 1]


def test_engine_of_another_store_is_refused(pools: list[EnginePool]) -> None:
    one, other = plain(), plain()
    pools.append(EnginePool.local(store=VectorStoreEngine("store", one)).start())
    with pytest.raises(RegistrationError, match="does not serve this PlainStore"):
        accelerate(other.as_retriever(), pool=pools[-1], bind=[(other, "store")])
    with pytest.raises(RegistrationError, match="outside of accelerated apps"):
        pools[-1].bound(one, "store")


@pytest.mark.parametrize("make", [chroma, qdrant])
def test_search_whose_query_is_ready_does_not_overtake_a_write(
    make: Callable[[], VectorStore], pools: list[EnginePool]
) -> None:
    store = make()
    log, retriever = client_log(store), store.as_retriever(search_kwargs={"k": 1})

    def write(values: dict[str, str]) -> list[str]:
        threading.Event().wait(0.05)
        return store.add_texts([values["text"]], [{"word": "new", "number": -1}])

    search = itemgetter("question") | retriever | RunnableLambda(lambda documents: documents[0].page_content)
    app = RunnablePassthrough.assign(ids=RunnableLambda(write)) | RunnablePassthrough.assign(text=search)
    fast = serve_store(store, app, pools)
    for number in range(3):
        question = f"zebra{number} zebra{number}"
        assert fast.invoke({"question": question, "text": f"New: {question}"})["text"] == f"New: {question}"
        question += " again"
        answered = asyncio.run(fast.ainvoke({"question": question, "text": f"New: {question}"}))
        assert answered["text"] == f"New: {question}"
    assert log.calls == [1] * 6


class Listener(BaseCallbackHandler):
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_retriever_start(self, serialized: Any, query: str, **kwargs: Any) -> None:
        self.events.append(("start", kwargs["name"], query, kwargs["metadata"], kwargs["tags"]))

    def on_retriever_end(self, documents: Any, **kwargs: Any) -> None:
        self.events.append(("end", described(documents)))

    def on_retriever_error(self, error: BaseException, **kwargs: Any) -> None:
        self.events.append(("error", repr(error)))


@pytest.mark.parametrize("make", [chroma, qdrant, plain])
@pytest.mark.parametrize("k", [2, "many"])
def test_store_engine_sends_the_events_of_the_original(
    make: Callable[[], VectorStore], k: Any, pools: list[EnginePool]
) -> None:
    store = make()
    app = store.as_retriever(search_kwargs={"k": k}) | RunnableLambda(described)
    fast = serve_store(store, app, pools)
    events: list[list[Any]] = []
    for runnable in (app, fast):
        listener = Listener()
        with contextlib.suppress(Exception):
            runnable.invoke(QUERIES[0], {"callbacks": [listener]})
        events.append(listener.events)
    assert events[0] == events[1]
    assert len(events[0]) == 2
