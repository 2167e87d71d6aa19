"""`OpenAIEmbeddings` on an `EmbeddingServer`, by `bind=` and `engines="auto"`: the vectors of the object itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings
from support.embedding_stub import MODEL, EmbeddingStub, embedding_stub, vector_of

from teola_plugin import accelerate
from teola_plugin.adapters.automatic_engines import PROCESS
from teola_plugin.engines import EmbeddingServer
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
TEXTS = ["lambs eat oats", "walls need lime\nand sand", "moss grows in the shade", "", "a primitive is a step"]


@pytest.fixture
def stub() -> Iterator[EmbeddingStub]:
    with embedding_stub() as server:
        yield server


@pytest.fixture
def pool(stub: EmbeddingStub) -> Iterator[EnginePool]:
    with EnginePool.local([EmbeddingServer(base_url=stub.base_url, model=MODEL)]) as engines:
        yield engines


class Characters:
    """A tokenizer with a token for each character."""

    def encode_ordinary(self, text: str) -> list[int]:
        return [ord(character) for character in text]


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiktoken.encoding_for_model", lambda name: Characters())


def embeddings(stub: EmbeddingStub, **options: Any) -> OpenAIEmbeddings:
    settings = {"model": MODEL, "max_retries": 0, "check_embedding_ctx_length": False, **options}
    return OpenAIEmbeddings(base_url=stub.base_url, api_key="mine", **settings)  # type: ignore[arg-type]


async def _on_loop(model: Any, texts: list[str]) -> Any:
    return await model.aembed_documents(texts), [await model.aembed_query(text) for text in texts]


def _in_thread(model: Any, texts: list[str]) -> Any:
    return model.embed_documents(texts), [model.embed_query(text) for text in texts]


WAYS: dict[str, Callable[[Any, list[str]], Any]] = {
    "sync": _in_thread,
    "async": lambda model, texts: asyncio.run(_on_loop(model, texts)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dimensions": {"dimensions": 4},
    "batches": {"chunk_size": 2},
    "floats": {"model_kwargs": {"encoding_format": "float"}},
    "tokens": {"check_embedding_ctx_length": True},
    "long texts": {"check_embedding_ctx_length": True, "embedding_ctx_length": 8, "chunk_size": 3},
    "headers and query": {"default_headers": {"x-team": "farm"}, "default_query": {"version": "2"}},
}


def logged(stub: EmbeddingStub) -> list[Any]:
    """Return the requests that the server received, with the headers that the user's client decides."""
    rows = zip(stub.log, stub.headers, strict=True)
    return [(path, body, headers["authorization"], headers.get("x-team")) for (path, body), headers in rows]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS)
def test_bound_remote_embeddings_send_the_requests_of_the_original(
    options: str, way: str, stub: EmbeddingStub, pool: EnginePool
) -> None:
    model = embeddings(stub, **OPTIONS[options])
    expected = WAYS[way](model, TEXTS)
    original_log = logged(stub)
    stub.log.clear()
    stub.headers.clear()
    bound = pool.bound(model, "embedder")
    assert WAYS[way](bound, TEXTS) == expected
    assert logged(stub) == original_log


def index_and_search(store: InMemoryVectorStore) -> Any:
    def run(question: str) -> list[str]:
        store.add_documents([Document(text) for text in TEXTS])
        return [one.page_content for one in store.similarity_search(question, k=2)]

    return RunnableLambda(run)


@pytest.mark.parametrize("how", ["bind", "auto"])
def test_app_with_remote_embedding_engine_sends_the_same_requests(
    how: str, stub: EmbeddingStub, pool: EnginePool
) -> None:
    model = embeddings(stub)
    expected = index_and_search(InMemoryVectorStore(model)).invoke("lambs eat oats")
    original_log = logged(stub)
    stub.log.clear()
    stub.headers.clear()
    app = index_and_search(InMemoryVectorStore(model))
    options: Any = {"pool": pool, "bind": [(model, "embedder")]} if how == "bind" else {"engines": "auto"}
    fast = accelerate(app, **options)
    assert fast.invoke("lambs eat oats") == expected
    assert logged(stub) == original_log
    assert logged(stub)[0][2] == "Bearer mine"


def test_explain_names_the_remote_embedding_engine(stub: EmbeddingStub) -> None:
    model = embeddings(stub)
    fast = accelerate(index_and_search(InMemoryVectorStore(model)), engines="auto")
    assert f"engine 'embedder', {stub.base_url}" in fast.explain() or stub.base_url in fast.explain()
    assert "EmbeddingServer(base_url=" in fast.explain(details=True)
    assert PROCESS.pool is not None


def test_embeddings_of_a_public_address_are_not_served() -> None:
    model = OpenAIEmbeddings(api_key="mine", model=MODEL)  # type: ignore[arg-type]
    fast = accelerate(index_and_search(InMemoryVectorStore(model)), engines="auto")
    assert "api.openai.com/v1 is not known to be of this machine or a private network" in fast.explain(details=True)


def test_concurrent_queries_share_an_embedding_request(stub: EmbeddingStub) -> None:
    stub.delay_s = 0.1
    engine = EmbeddingServer(base_url=stub.base_url, model=MODEL, max_connections=1)
    with EnginePool.local([engine]) as pool:
        bound = pool.bound(embeddings(stub), "embedder")
        vectors: dict[str, Any] = {}

        def call(text: str) -> None:
            vectors[text] = bound.embed_query(text)

        threads = [threading.Thread(target=call, args=(f"text {number}",)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert vectors == {f"text {number}": vector_of(f"text {number}") for number in range(6)}
    assert len(stub.log) <= 3


@pytest.mark.parametrize("way", WAYS)
def test_bound_remote_embeddings_raise_the_errors_of_the_original(
    way: str, stub: EmbeddingStub, pool: EnginePool
) -> None:
    model = embeddings(stub)
    bound = pool.bound(model, "embedder")
    with pytest.raises(openai.BadRequestError) as original:
        WAYS[way](model, ["refuse"])
    with pytest.raises(openai.BadRequestError) as carried:
        WAYS[way](bound, ["refuse"])
    assert carried.value.message == original.value.message
    assert carried.value.body == original.value.body


@pytest.mark.parametrize("way", WAYS)
def test_rate_limited_embedding_request_is_retried(way: str, stub: EmbeddingStub, pool: EnginePool) -> None:
    refusals = iter([(429, {"retry-after-ms": "5"}, {"error": {"message": "slow down"}})])
    stub.replace = lambda path, body: next(refusals, None)
    bound = pool.bound(embeddings(stub, max_retries=2), "embedder")
    assert WAYS[way](bound, ["a"]) == ([vector_of("a")], [vector_of("a")])
    assert len(stub.log) == 3


def test_binding_embeddings_of_another_server_or_model_raises(stub: EmbeddingStub, pool: EnginePool) -> None:
    elsewhere = OpenAIEmbeddings(base_url="http://localhost:1/v1", api_key="mine", model=MODEL)  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match=r"it talks to http://localhost:1/v1"):
        pool.bound(elsewhere, "embedder")
    with pytest.raises(RegistrationError, match=r"it asks for 'other'") as error:
        pool.bound(embeddings(stub, model="other"), "embedder")
    assert "EmbeddingServer(model='other'" in str(error.value)


def test_binding_local_embeddings_to_a_server_raises(pool: EnginePool) -> None:
    huggingface = pytest.importorskip("langchain_huggingface")
    from teola_plugin.engines.sentence_transformers.embedding import packaged_minilm

    local = huggingface.HuggingFaceEmbeddings(model_name=packaged_minilm())
    with pytest.raises(RegistrationError, match="computes in this process"):
        pool.bound(local, "embedder")


def test_fields_set_later_on_bound_embeddings_apply_to_calls(stub: EmbeddingStub, pool: EnginePool) -> None:
    model = embeddings(stub)
    fast = accelerate(RunnableLambda(lambda text: model.embed_query(text)), pool=pool, bind=[(model, "embedder")])
    assert fast.invoke("a") == vector_of("a")
    model.dimensions = 4
    assert fast.invoke("a") == vector_of("a", 4)
