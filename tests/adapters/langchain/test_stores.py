"""Tests of an in-memory store of the user's: queries are embedded early, and searches wait for earlier writes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.output_parsers import CommaSeparatedListOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.binding import workers
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, embed_words
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import EmbedText

Chain = Runnable[Any, Any]
WORDS = ("lambda", "class", "import", "with", "raise")
DOCUMENTS = [Document(f"All of {word}.", id=word) for word in WORDS]
GIVEN = {"question": "what of import?", "documents": DOCUMENTS}


class Embedder(FakeEmbedder):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def _value(self, request: Any) -> tuple[float, ...]:
        payload: EmbedText = request.payload
        self.texts.append(payload.text)
        return super()._value(request)


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    def says(prompt: Any, sampling: Any) -> str:
        return "one, two, three" if "questions" in prompt.flat() else f"so much for {prompt.flat()}"

    with EnginePool.local(engines=[FakeLLM("llm", answer=says), Embedder()]) as made:
        yield made


def app(pool: EnginePool, store: InMemoryVectorStore) -> Chain:
    """Return an app whose documents come with the question. It writes three questions and searches with each."""
    llm = ChatTeola(pool=pool)
    written = ChatPromptTemplate.from_template("Three questions: {question}") | llm | CommaSeparatedListOutputParser()
    search = store.as_retriever(search_kwargs={"k": 2})
    found = written | search.map() | (lambda lists: [one.page_content for found in lists for one in found])
    return (
        RunnablePassthrough.assign(ids=itemgetter("documents") | RunnableLambda(store.add_documents))
        | RunnablePassthrough.assign(found=found)
        | RunnablePassthrough.assign(
            answer=ChatPromptTemplate.from_template("{found} {question}") | llm | StrOutputParser()
        )
    )


class Words(Embeddings):
    """The user's own, which embed as the engine does."""

    def embed_query(self, text: str) -> list[float]:
        return list(embed_words(text))

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [list(embed_words(text, "document")) for text in texts]


def own_store() -> InMemoryVectorStore:
    return InMemoryVectorStore(Words())


def on_engine(pool: EnginePool, store: InMemoryVectorStore) -> Any:
    return accelerate(app(pool, store), pool=pool, bind=[(store.embeddings, "embedder")])


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_searches_wait_for_writes_of_the_same_store(pool: EnginePool, way: str) -> None:
    store = own_store()
    plain = app(pool, store).invoke(GIVEN)
    fast = on_engine(pool, store)
    assert {"prune-dependencies", "decoding-pipelining"} <= set(fast.plan(GIVEN).fired)
    assert "writes memory:" in str(fast.plan(GIVEN).graph)
    for _ in range(3):
        store.store.clear()
        made = asyncio.run(fast.ainvoke(GIVEN)) if way == "ainvoke" else fast.invoke(GIVEN)
        assert made == plain
    trace = fast.last_trace()
    assert trace.wasted() == (0, 0)
    (written,) = (span.done for span in trace.spans if span.primitive == "ids")
    searches = [s for s in trace.spans if s.primitive.endswith("retrieve") and "[" in s.primitive]
    assert len(searches) == 3 and all(s.started >= written for s in searches)


def test_each_search_query_is_embedded_once(pool: EnginePool) -> None:
    store = own_store()
    embedder: Any = pool.engine("embedder")
    on_engine(pool, store).invoke(GIVEN)
    written = [document.page_content for document in DOCUMENTS]
    assert sorted(embedder.texts) == sorted([*written, "one", "three", "two"])


def test_large_store_gives_the_result_of_the_original(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SMALL", 2)
    store = own_store()
    plain = app(pool, store).invoke(GIVEN)
    assert on_engine(pool, store).invoke(GIVEN) == plain


def test_user_retriever_waits_for_a_possible_write(pool: EnginePool) -> None:
    """The retriever uses no engine.

    It is prefetched before steps that it does not need, but not before possible writes.
    """
    store = own_store()
    slow = ChatPromptTemplate.from_template("Slow {question}") | ChatTeola(pool=pool) | StrOutputParser()
    chain = (
        RunnablePassthrough.assign(ids=itemgetter("documents") | RunnableLambda(store.add_documents))
        | RunnablePassthrough.assign(slow=slow)
        | RunnablePassthrough.assign(found=itemgetter("question") | store.as_retriever(search_kwargs={"k": 2}))
    )
    plain = chain.invoke(GIVEN)
    for speculate in ("auto", "all"):
        store.store.clear()
        assert accelerate(chain, pool=pool, speculate=speculate).invoke(GIVEN) == plain
