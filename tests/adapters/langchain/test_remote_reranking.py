"""Tests of `CohereRerank` on a `RerankingServer`: the documents, scores and order of the object itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from support.embedding_stub import EmbeddingStub, embedding_stub, reranking_pool, score_of

from teola_plugin import accelerate
from teola_plugin.errors import EngineError, RegistrationError
from teola_plugin.pool import EnginePool

cohere = pytest.importorskip("langchain_cohere", reason="needs langchain-cohere")
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
DOCUMENTS = [Document(f"document {number}", metadata={"n": number}) for number in range(8)]
QUERY = "what sleeps?"


@pytest.fixture
def stub() -> Iterator[EmbeddingStub]:
    with embedding_stub("cohere") as server:
        yield server


@pytest.fixture
def pool(stub: EmbeddingStub) -> Iterator[EnginePool]:
    with reranking_pool(stub) as pool:
        yield pool


def reranker(stub: EmbeddingStub, **options: Any) -> Any:
    return cohere.CohereRerank(**{"base_url": stub.url, "cohere_api_key": "mine", "model": "m", "top_n": 3, **options})


WAYS: dict[str, Callable[[Any], Any]] = {
    "sync": lambda one: one.compress_documents(DOCUMENTS, QUERY),
    "async": lambda one: asyncio.run(one.acompress_documents(DOCUMENTS, QUERY)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("top_n", [3, None])
def test_bound_remote_reranker_returns_the_documents_of_the_original(
    top_n: int | None, way: str, stub: EmbeddingStub, pool: EnginePool
) -> None:
    own = reranker(stub, top_n=top_n)
    expected = WAYS[way](own)
    original_path = stub.log[0][0]
    assert WAYS[way](pool.bound(own, "reranker")) == expected
    path, body = stub.log[1]
    assert path == original_path == "/v2/rerank"
    assert body == {"model": "m", "query": QUERY, "documents": [one.page_content for one in DOCUMENTS]}
    assert stub.headers[1]["authorization"] == stub.headers[0]["authorization"]


@pytest.mark.parametrize("how", ["bind", "auto"])
def test_app_with_remote_rerank_engine_gives_the_same_result(how: str, stub: EmbeddingStub, pool: EnginePool) -> None:
    own = reranker(stub)
    app = RunnableLambda(lambda query: own.compress_documents(DOCUMENTS, query))
    expected = app.invoke(QUERY)
    options: Any = {"pool": pool, "bind": [(own, "reranker")]} if how == "bind" else {"engines": "auto"}
    fast = accelerate(app, **options)
    assert fast.invoke(QUERY) == expected
    assert "top_n" not in stub.log[-1][1], "the engine asked"


def test_rerank_call_with_extra_options_is_sent_by_the_client(stub: EmbeddingStub, pool: EnginePool) -> None:
    own = reranker(stub)
    bound = pool.bound(own, "reranker")
    fast = accelerate(RunnableLambda(lambda query: bound.rerank(DOCUMENTS, query, max_tokens_per_doc=7)), pool=pool)
    results = fast.invoke(QUERY)
    assert stub.log[-1][1]["max_tokens_per_doc"] == 7
    assert results[0]["relevance_score"] == max(score_of(QUERY, one.page_content) for one in DOCUMENTS)


def test_refused_rerank_request_raises_engine_error(stub: EmbeddingStub, pool: EnginePool) -> None:
    stub.replace = lambda path, body: (400, {}, {"message": "too many documents"})
    with pytest.raises(EngineError, match="too many documents"):
        pool.bound(reranker(stub), "reranker").compress_documents(DOCUMENTS, QUERY)


def test_binding_a_reranker_of_another_server_raises(stub: EmbeddingStub, pool: EnginePool) -> None:
    with pytest.raises(RegistrationError, match=r"it talks to http://localhost:1/v2"):
        pool.bound(reranker(stub, base_url="http://localhost:1"), "reranker")


def test_reranker_of_a_public_address_is_not_served() -> None:
    own = cohere.CohereRerank(cohere_api_key="mine", model="m")
    fast = accelerate(RunnableLambda(lambda query: own.compress_documents(DOCUMENTS, query)), engines="auto")
    assert "api.cohere.com/v2 is not known to be of this machine or a private network" in fast.explain(details=True)


def test_compression_retriever_reranks_on_the_engine(stub: EmbeddingStub, pool: EnginePool) -> None:
    classic = pytest.importorskip("langchain_classic.retrievers")

    class Fixed(BaseRetriever):
        def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
            return DOCUMENTS

    own = reranker(stub)
    retriever = classic.ContextualCompressionRetriever(base_compressor=own, base_retriever=Fixed())
    expected = retriever.invoke(QUERY)
    fast = accelerate(retriever, pool=pool, bind=[(own, "reranker")])
    assert fast.invoke(QUERY) == expected
    assert "top_n" not in stub.log[-1][1]
