"""Tests of sync composites with pool-backed parts: their calls start together if no plan prefetches them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from differential.recording import observe
from langchain_classic.retrievers import ContextualCompressionRetriever, EnsembleRetriever, MultiQueryRetriever
from langchain_classic.retrievers.document_compressors import LLMChainExtractor
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from support.own_composites import Chain, Lines
from support.own_leaves import Chat, Notes

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.composite_calls import Threads
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.indexing import TeolaIndexer
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.adapters.langchain.web_search import TeolaWebSearch
from teola_plugin.adapters.thread_safety import ThreadSafety
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeStore, FakeWebSearch
from teola_plugin.engines.profiles import rtx3090, scaled, web_search
from teola_plugin.observe.spans import QueryTrace

DOCUMENTS = [Document(f"text {i}", id=str(i)) for i in range(3)]
WAYS: dict[str, Callable[[Chain], Any]] = {
    "invoke": lambda chain: chain.invoke("q"),
    "stream": lambda chain: list(chain.stream("q")),
    "batch": lambda chain: chain.batch(["q"]),
}


class CountedPool:
    """A pool, and how often its LLM was asked for what."""

    def __init__(self) -> None:
        self.prompts: Counter[str] = Counter()
        profiles = scaled(rtx3090(), 0.1)
        engines = [
            FakeLLM("llm", profiles["llm"], self._said),
            FakeEmbedder("embedder", profiles["embedder"]),
            FakeStore("store", profiles["store"]),
            FakeWebSearch("web", web_search(0.06), [one.page_content for one in DOCUMENTS]),
        ]
        self.pool = EnginePool.local(engines).start()
        self.store = TeolaVectorStore(pool=self.pool, embedding=TeolaEmbeddings(pool=self.pool), collection="c")
        self.store.add_documents(DOCUMENTS)

    def _said(self, prompt: Any, sampling: Any) -> str:
        text = prompt.messages[-1].content
        self.prompts[text] += 1
        if "fails" in text:
            raise ValueError("no")
        return "some words that are said, one after the other, for a while"


@pytest.fixture(scope="module")
def counted_pool() -> Iterator[CountedPool]:
    made = CountedPool()
    yield made
    made.pool.close()


def _extracted(model: Any) -> Chain:
    own = InMemoryVectorStore(DeterministicFakeEmbedding(size=4))
    own.add_documents(DOCUMENTS)
    return ContextualCompressionRetriever(
        base_compressor=LLMChainExtractor.from_llm(model), base_retriever=own.as_retriever()
    )


def extractor(counted_pool: CountedPool) -> Chain:
    return _extracted(ChatTeola(pool=counted_pool.pool, max_tokens=20))


def bound_extractor(counted_pool: CountedPool) -> Chain:
    return _extracted(counted_pool.pool.bound(Chat(), "llm"))


def queries(counted_pool: CountedPool) -> Chain:
    return MultiQueryRetriever.from_llm(TeolaWebSearch(pool=counted_pool.pool), Lines())


def queries_of_an_ensemble(counted_pool: CountedPool) -> Chain:
    both = [counted_pool.store.as_retriever(), TeolaWebSearch(pool=counted_pool.pool)]
    return MultiQueryRetriever.from_llm(EnsembleRetriever(retrievers=both, weights=[0.5, 0.5]), Lines())


COMPOSITES = [extractor, bound_extractor, queries, queries_of_an_ensemble]
every = pytest.mark.parametrize("make", COMPOSITES)


def at_once(trace: QueryTrace, engine: str) -> int:
    """Return the largest number of requests of an engine that were under way at the same time."""
    spans = [one for one in trace.spans if one.engine == engine and one.started is not None and one.done is not None]
    return max(sum(one.started <= other.started < one.done for one in spans) for other in spans)


@every
@pytest.mark.parametrize("way", WAYS)
def test_composite_on_a_pool_runs_three_calls_at_once(
    counted_pool: CountedPool, make: Callable[[CountedPool], Chain], way: str
) -> None:
    plain, fast = make(counted_pool), accelerate(make(counted_pool), pool=counted_pool.pool)
    counted_pool.prompts.clear()
    expected, before = WAYS[way](plain), counted_pool.prompts.copy()
    counted_pool.prompts.clear()
    assert WAYS[way](fast) == expected
    assert counted_pool.prompts == before
    assert at_once(fast.last_trace(), "llm" if before else "web") >= 3


@every
def test_composite_on_a_pool_sends_the_events_of_the_original(
    counted_pool: CountedPool, make: Callable[[CountedPool], Chain]
) -> None:
    made = make(counted_pool), accelerate(make(counted_pool), pool=counted_pool.pool)
    seen = [observe(one, "invoke", "q", tags=["mine"], metadata={"n": 1}) for one in made]
    assert seen[0].events == seen[1].events
    assert seen[0].result == seen[1].result


class Order(BaseCallbackHandler):
    """Records starts and ends in order."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_chat_model_start(self, _: Any, messages: Any, **__: Any) -> None:
        self.heard.append(f"model {messages[0][0].content[-60:]}")

    def on_llm_error(self, error: Any, **_: Any) -> None:
        self.heard.append(f"failed {type(error).__name__}")

    def on_retriever_start(self, _: Any, query: str, **__: Any) -> None:
        self.heard.append(f"retriever {query}")

    def on_retriever_end(self, documents: Any, **_: Any) -> None:
        self.heard.append(f"found {documents}")


@every
def test_composite_on_a_pool_sends_events_in_the_originals_order(
    counted_pool: CountedPool, make: Callable[[CountedPool], Chain]
) -> None:
    events = []
    for chain in (make(counted_pool), accelerate(make(counted_pool), pool=counted_pool.pool)):
        order = Order()
        chain.invoke("q", {"callbacks": [order]})
        events.append(order.heard)
    assert events[0] == events[1]


@every
def test_speculate_off_and_max_concurrency_keep_calls_sequential(
    counted_pool: CountedPool, make: Callable[[CountedPool], Chain]
) -> None:
    off, bounded = (
        accelerate(make(counted_pool), pool=counted_pool.pool, speculate="off"),
        accelerate(make(counted_pool), pool=counted_pool.pool),
    )
    off.invoke("q")
    bounded.invoke("q", {"max_concurrency": 1})
    for fast in (off, bounded):
        engine = "llm" if any(span.engine == "llm" for span in fast.last_trace().spans) else "web"
        assert at_once(fast.last_trace(), engine) <= (2 if make is queries_of_an_ensemble else 1)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_failing_composite_on_a_pool_sends_the_originals_events(counted_pool: CountedPool, at: int) -> None:
    own = InMemoryVectorStore(DeterministicFakeEmbedding(size=4))
    own.add_documents([Document(f"text {i}{' fails' * (i == at)}", id=str(i)) for i in range(3)])
    chain = ContextualCompressionRetriever(
        base_compressor=LLMChainExtractor.from_llm(ChatTeola(pool=counted_pool.pool, max_tokens=20)),
        base_retriever=own.as_retriever(),
    )
    seen = []
    for one in (chain, accelerate(chain, pool=counted_pool.pool)):
        order = Order()
        with suppress(Exception):
            one.invoke("q", {"callbacks": [order]})
            raise AssertionError("it has to fail")
        seen.append(order.heard)
    assert seen[0] == seen[1]
    assert seen[0][-1].startswith("failed")


def test_each_batch_input_is_a_separate_query(counted_pool: CountedPool) -> None:
    fast, inputs = accelerate(extractor(counted_pool), pool=counted_pool.pool, app="batch"), ["a", "b", "c", "d"]
    assert fast.batch(inputs) == extractor(counted_pool).batch(inputs)
    deadline = time.monotonic() + 5
    while (
        len(made := [one for one in counted_pool.pool.traces if one.app == "batch"]) < 4 and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    assert [sum(span.engine == "llm" for span in trace.spans) for trace in made] == [3, 3, 3, 3]


def test_threads_allow_pool_objects_without_user_code(counted_pool: CountedPool) -> None:
    threads, pool = Threads(ThreadSafety()), counted_pool.pool
    model = ChatTeola(pool=pool)
    own = TeolaVectorStore(pool=pool, embedding=DeterministicFakeEmbedding(size=4), collection="c")
    model_with_callbacks = ChatTeola(pool=pool, callbacks=[Order()])

    class Changed(ChatTeola):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            return super()._generate(*args, **kwargs)

    store = counted_pool.store
    assert all(map(threads.allow, (model, store.as_retriever(), store.as_retriever(search_type="mmr"))))
    refused = (model_with_callbacks, Changed(pool=pool), own.as_retriever(), TeolaIndexer(store=store), Notes())
    assert not any(map(threads.allow, refused))
    assert Threads(ThreadSafety((DeterministicFakeEmbedding,))).allow(own.as_retriever())
