"""Tests of `embed_documents` with several requests in parallel: the same requests, vectors, order and errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings
from langgraph.graph import END, START, StateGraph
from support.embedding_stub import MODEL, EmbeddingStub, embedding_stub, vector_of

from benchmarks.public_apps.server import RateLimit
from teola_plugin import accelerate, uninstall
from teola_plugin.engines import EmbeddingServer
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.provider_limits import provider_limit

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
TEXTS = [f"text number {number}" for number in range(20)]


@pytest.fixture
def stub() -> Iterator[EmbeddingStub]:
    with embedding_stub(delay_s=0.05) as server:
        yield server


class Characters:
    """A tokenizer with a token for each character, which counts the texts that it splits."""

    texts = 0

    def encode_ordinary(self, text: str) -> list[int]:
        type(self).texts += 1
        return [ord(character) for character in text]


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Characters, "texts", 0)
    monkeypatch.setattr("tiktoken.encoding_for_model", lambda name: Characters())


def embeddings(stub: EmbeddingStub, **options: Any) -> OpenAIEmbeddings:
    settings = {"max_retries": 0, "check_embedding_ctx_length": False, "chunk_size": 2, "dimensions": 4, **options}
    return OpenAIEmbeddings(base_url=stub.base_url, api_key="mine", model=MODEL, **settings)  # type: ignore[arg-type]


def ingest(model: Any, texts: list[str]) -> list[Any]:
    """Return the vectors that a store got from `add_documents`."""
    store = InMemoryVectorStore(model)
    store.add_documents([Document(text, id=str(number)) for number, text in enumerate(texts)])
    return [store.store[str(number)]["vector"] for number in range(len(texts))]


async def aingest(model: Any, texts: list[str]) -> list[Any]:
    store = InMemoryVectorStore(model)
    await store.aadd_documents([Document(text, id=str(number)) for number, text in enumerate(texts)])
    return [store.store[str(number)]["vector"] for number in range(len(texts))]


def from_documents(model: Any, texts: list[str]) -> list[Any]:
    store = InMemoryVectorStore.from_documents([Document(text) for text in texts], model)
    return [row["vector"] for row in store.store.values()]


def index_all(model: Any, texts: list[str]) -> list[Any]:
    store, records = InMemoryVectorStore(model), InMemoryRecordManager("records")
    records.create_schema()
    documents = [Document(text, metadata={"source": "files"}) for text in texts]
    index(documents, records, store, cleanup="full", source_id_key="source", key_encoder="sha256")
    return [row["vector"] for row in store.store.values()]


async def aindex_all(model: Any, texts: list[str]) -> list[Any]:
    store, records = InMemoryVectorStore(model), InMemoryRecordManager("records")
    await records.acreate_schema()
    documents = [Document(text, metadata={"source": "files"}) for text in texts]
    await aindex(documents, records, store, cleanup="full", source_id_key="source", key_encoder="sha256")
    return [row["vector"] for row in store.store.values()]


def run_original(way: str, model: Any, texts: list[str]) -> Any:
    if way in ASYNC:
        return asyncio.run(ASYNC[way](model, texts))
    return SYNC[way](model, texts)


def run_fast(way: str, model: Any, texts: list[str], **options: Any) -> Any:
    """Return the result of the same work in an accelerated app."""
    if way in ASYNC:

        async def arun(inputs: Any) -> Any:
            return await ASYNC[way](model, inputs)

        return asyncio.run(accelerate(RunnableLambda(arun), **options).ainvoke(texts))
    return accelerate(RunnableLambda(lambda inputs: SYNC[way](model, inputs)), **options).invoke(texts)


SYNC: dict[str, Callable[[Any, list[str]], Any]] = {
    "embed_documents": lambda model, texts: model.embed_documents(texts),
    "add_documents": ingest,
    "from_documents": from_documents,
    "index": index_all,
}
ASYNC: dict[str, Callable[[Any, list[str]], Any]] = {
    "aembed_documents": lambda model, texts: model.aembed_documents(texts),
    "aadd_documents": aingest,
    "aindex": aindex_all,
}
WAYS = (*SYNC, *ASYNC)


def take_log(stub: EmbeddingStub) -> list[str]:
    """Return the requests since the last time, sorted."""
    with stub.lock:
        rows, stub.log, stub.most_at_once = sorted(map(str, stub.log)), [], 0
    return rows


@pytest.mark.parametrize("way", WAYS)
def test_concurrent_embedding_batches_send_the_requests_of_the_original(way: str, stub: EmbeddingStub) -> None:
    model = embeddings(stub)
    expected = run_original(way, model, TEXTS)
    original_log = take_log(stub)
    assert run_fast(way, model, TEXTS) == expected
    assert stub.most_at_once > 4
    assert take_log(stub) == original_log


@pytest.mark.parametrize("way", ["embed_documents", "aembed_documents"])
@pytest.mark.parametrize(
    "options", [{}, {"embedding_ctx_length": 8}, {"embedding_ctx_length": 8, "chunk_size": 3}], ids=str
)
def test_texts_are_tokenized_once_for_concurrent_batches(
    way: str, options: dict[str, Any], stub: EmbeddingStub
) -> None:
    model = embeddings(stub, check_embedding_ctx_length=True, **options)
    texts = [*TEXTS[:7], "", *TEXTS[7:9]]
    expected = run_original(way, model, texts)
    original_log, split_texts = take_log(stub), Characters.texts
    assert run_fast(way, model, texts) == expected
    assert stub.most_at_once > 2
    assert take_log(stub) == original_log
    assert Characters.texts == 2 * split_texts


def test_forty_embedding_batches_run_at_least_six_at_once(stub: EmbeddingStub) -> None:
    stub.delay_s = 0.2
    model = embeddings(stub, chunk_size=50, dimensions=8)
    texts = [f"text {number}" for number in range(2000)]
    assert run_fast("add_documents", model, texts) == [vector_of(text) for text in texts]
    assert len(stub.log) == 40
    assert stub.most_at_once >= 6


@pytest.mark.parametrize("way", ["embed_documents", "aembed_documents"])
def test_embedding_batches_respect_rate_limit_of_the_server(way: str, stub: EmbeddingStub) -> None:
    stub.delay_s = 0.01
    limit = RateLimit(requests=10, tokens=1e9, period_s=0.5)
    lock = threading.Lock()

    def within_the_limit(path: str, body: dict[str, Any]) -> Any:
        with lock:
            wait_s = limit.take(1)
            headers = limit.headers()
        refusal = {**headers, "retry-after-ms": str(int(1000 * wait_s) + 1)}
        return (429, refusal, {"error": {"message": "slow down"}}) if wait_s > 0 else None

    stub.replace = within_the_limit
    texts = [f"text {number}" for number in range(60)]
    assert run_fast(way, embeddings(stub, max_retries=2), texts) == [vector_of(text, 4) for text in texts]


@pytest.mark.parametrize("way", ["embed_documents", "aembed_documents"])
@pytest.mark.parametrize("place", [0, 9, 19])
def test_failed_embedding_batch_raises_the_error_of_the_original(way: str, place: int, stub: EmbeddingStub) -> None:
    model = embeddings(stub)
    texts = [*TEXTS[:place], "refuse", *TEXTS[place + 1 :]]
    with pytest.raises(openai.BadRequestError) as original:
        run_original(way, model, texts)
    with pytest.raises(openai.BadRequestError) as fast:
        run_fast(way, model, texts)
    assert fast.value.body == original.value.body


@pytest.mark.parametrize("way", ["embed_documents", "aembed_documents"])
def test_failed_embedding_batch_stops_further_requests(way: str, stub: EmbeddingStub) -> None:
    texts = ["refuse", *(f"text {number}" for number in range(199))]
    with pytest.raises(openai.BadRequestError):
        run_fast(way, embeddings(stub), texts)
    assert len(stub.log) <= 16


@pytest.mark.parametrize("way", ["embed_documents", "aembed_documents"])
def test_rate_limited_embedding_batch_is_retried_with_lower_concurrency(way: str, stub: EmbeddingStub) -> None:
    lock, refusals = threading.Lock(), iter([(429, {"retry-after-ms": "5"}, {"error": {"message": "slow down"}})])

    def refuse_one_prefetch(path: str, body: dict[str, Any]) -> Any:
        with lock:
            return None if body["input"][0] == TEXTS[0] else next(refusals, None)

    stub.replace = refuse_one_prefetch
    model = embeddings(stub)
    assert run_fast(way, model, TEXTS) == [vector_of(text, 4) for text in TEXTS]
    assert len(stub.log) == 11
    assert provider_limit(model).limit < 16


@pytest.mark.parametrize("way", ["embed_documents", "aembed_documents"])
@pytest.mark.parametrize(
    "case",
    ["one batch", "max_concurrency", "switched off", "no app", "uninstalled", "a class of one's own", "progress bar"],
)
def test_embedding_batches_stay_sequential_in_excluded_cases(case: str, way: str, stub: EmbeddingStub) -> None:
    stub.delay_s = 0.01

    class Own(OpenAIEmbeddings):
        pass

    model: Any = embeddings(stub)
    texts, config, options = TEXTS, RunnableConfig(), dict[str, Any]()
    if case == "one batch":
        texts = TEXTS[:2]
    elif case == "max_concurrency":
        config = RunnableConfig(max_concurrency=1)
    elif case == "switched off":
        options = {"speculate": "off"}
    elif case == "a class of one's own":
        model = Own(base_url=stub.base_url, api_key="k", model=MODEL, chunk_size=2, dimensions=4)
        model.check_embedding_ctx_length = False
    elif case == "progress bar":
        model.show_progress_bar = True

    async def arun(inputs: Any) -> Any:
        return await model.aembed_documents(inputs)

    chain = RunnableLambda(lambda inputs: model.embed_documents(inputs), afunc=arun)
    app: Any = chain if case == "no app" else accelerate(chain, **options)
    if case == "uninstalled":
        uninstall()
    vectors = app.invoke(texts, config) if way == "embed_documents" else asyncio.run(app.ainvoke(texts, config))
    assert vectors == [vector_of(text, 4) for text in texts]
    assert stub.most_at_once == 1


def test_embedding_batches_of_a_graph_node_run_concurrently(stub: EmbeddingStub) -> None:
    model = embeddings(stub)

    def add(state: dict[str, Any]) -> dict[str, Any]:
        return {"vectors": ingest(model, state["texts"])}

    builder = StateGraph(dict)
    builder.add_node("add", add)
    builder.add_edge(START, "add")
    builder.add_edge("add", END)
    graph = builder.compile()
    expected = graph.invoke({"texts": TEXTS})
    original_log = take_log(stub)
    assert accelerate(graph).invoke({"texts": TEXTS}) == expected
    assert stub.most_at_once > 4
    assert take_log(stub) == original_log


@pytest.mark.parametrize("way", ["add_documents", "aadd_documents"])
def test_embedding_batches_run_concurrently_on_an_engine(way: str, stub: EmbeddingStub) -> None:
    model = embeddings(stub)
    engine = EmbeddingServer(base_url=stub.base_url, model=MODEL, max_inputs=1)
    with EnginePool.local([engine]) as pool:
        vectors = run_fast(way, model, TEXTS, pool=pool, bind={type(model): "embedder"})
    assert vectors == [vector_of(text, 4) for text in TEXTS]
    assert stub.most_at_once > 4
    assert sorted(stub.inputs) == sorted([TEXTS[start : start + 2] for start in range(0, 20, 2)])


def test_cancelled_embedding_call_sends_no_more_requests(stub: EmbeddingStub) -> None:
    stub.delay_s = 0.1
    model = embeddings(stub)

    async def arun(inputs: Any) -> Any:
        return await model.aembed_documents(inputs)

    async def cancel_early() -> None:
        task = asyncio.create_task(accelerate(RunnableLambda(arun)).ainvoke([str(one) for one in range(200)]))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.2)

    asyncio.run(cancel_early())
    assert len(stub.log) <= 16
