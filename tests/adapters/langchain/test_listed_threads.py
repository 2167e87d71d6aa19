"""Tests of the classes that are listed as thread-safe: equal answers from eight threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from support.openai_stub import MODEL, OpenAIStub, openai_stub
from support.provider_server import ProviderServer

from teola_plugin import accelerate
from teola_plugin.adapters.thread_safety import LISTED, ThreadSafety
from teola_plugin.engines.fake import embed_words

WORDS = ("lambda", "class", "import", "with", "raise", "yield", "while", "return")
TEXTS = [f"All of {one} and of {other}." for one in WORDS for other in WORDS]
ASKED = [f"what of {word}, {i}?" for word in WORDS for i in range(20)]


class Words(Embeddings):
    def embed_query(self, text: str) -> list[float]:
        return list(embed_words(text))

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [list(embed_words(text, "document")) for text in texts]


def in_memory() -> VectorStore:
    store = InMemoryVectorStore(Words())
    store.add_texts(TEXTS)
    return store


def chroma() -> VectorStore:
    langchain_chroma = pytest.importorskip("langchain_chroma")
    store: VectorStore = langchain_chroma.Chroma("threads", Words())
    store.add_texts(TEXTS)
    return store


def faiss() -> VectorStore:
    pytest.importorskip("faiss")
    from langchain_community.vectorstores import FAISS

    return FAISS.from_texts(TEXTS, Words())


def qdrant() -> VectorStore:
    langchain_qdrant = pytest.importorskip("langchain_qdrant")
    made: VectorStore = langchain_qdrant.QdrantVectorStore.from_texts(TEXTS, Words(), location=":memory:")
    return made


def contents(found: list[Document]) -> list[str]:
    return [one.page_content for one in found]


@pytest.mark.parametrize("make", [in_memory, chroma, faiss, qdrant])
def test_listed_store_allows_searches_from_eight_threads(make: Any) -> None:
    store = make()
    assert ThreadSafety().allows(store)
    retriever = store.as_retriever(search_kwargs={"k": 3})
    expected = [contents(retriever.invoke(one)) for one in ASKED]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(3):
            assert [contents(found) for found in threads.map(retriever.invoke, ASKED)] == expected


@pytest.fixture(scope="module")
def stub() -> Iterator[OpenAIStub]:
    pytest.importorskip("langchain_openai")
    with openai_stub() as made:
        yield made


def test_listed_clients_allow_calls_from_eight_threads(stub: OpenAIStub) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    given: dict[str, Any] = {"base_url": stub.base_url, "model": MODEL, "api_key": "none"}
    for model in (ChatOpenAI(**given), OpenAI(**given)):
        assert ThreadSafety().allows(model)
        expected = [model.invoke(one) for one in ASKED[:40]]
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(model.invoke, ASKED[:40]))
        assert [getattr(one, "content", one) for one in found] == [getattr(one, "content", one) for one in expected]


def test_map_reduce_of_listed_client_overlaps_without_concurrent_option(stub: OpenAIStub) -> None:
    """The bare line: requests are under way together, and there are as many."""
    from langchain_classic.chains.summarize import load_summarize_chain
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        base_url=stub.base_url, model=MODEL, api_key="none", custom_get_token_ids=lambda text: list(range(len(text)))
    )
    chain = load_summarize_chain(model, chain_type="map_reduce", token_max=9000)
    documents = {"input_documents": [Document(f"slowly {i}") for i in range(4)]}
    stub.requests.clear()
    stub.go.set()
    expected = chain.invoke(documents)
    plain = sorted(str(body) for _, body in stub.requests)
    stub.requests.clear()
    stub.go.clear()
    with ThreadPoolExecutor(1) as caller:
        found = caller.submit(accelerate(chain).invoke, documents)
        together = _have_arrived(stub, 4)
        stub.go.set()
        assert found.result() == expected
    assert together
    assert sorted(str(body) for _, body in stub.requests) == plain


def _have_arrived(stub: OpenAIStub, requests: int) -> bool:
    """Return True if this many requests arrive before any is answered."""
    for _ in range(300):
        if len(stub.requests) >= requests:
            return True
        time.sleep(0.01)
    return False


def test_map_reduce_of_anthropic_client_overlaps_without_concurrent_option() -> None:
    from langchain_classic.chains.summarize import load_summarize_chain

    server = ProviderServer()
    model = server.chat_anthropic(custom_get_token_ids=lambda text: list(range(len(text))))
    chain = load_summarize_chain(model, chain_type="map_reduce", token_max=9000)
    documents = {"input_documents": [Document(f"slowly {i}") for i in range(4)]}
    try:
        expected = chain.invoke(documents)["output_text"]
        plain = sorted(map(str, server.received()))
        server.awaited_requests = 4
        assert accelerate(chain).invoke(documents)["output_text"] == expected
        assert sorted(map(str, server.received())) == plain
    finally:
        server.close()


def test_listed_thread_safe_classes_exist_if_installed() -> None:
    """The names in the list are spelled right."""
    import importlib

    for name in LISTED:
        module, _, kind = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), kind)
        except ModuleNotFoundError as error:
            assert error.name == module.partition(".")[0], f"{name} is not where the list says"
        else:
            assert f"{found.__module__}.{found.__qualname__}" == name
