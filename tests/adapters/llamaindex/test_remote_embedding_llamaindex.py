"""Tests of `OpenAIEmbedding` on an `EmbeddingServer`: the vectors and requests of the object itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms import MockLLM
from llama_index.core.schema import TextNode
from llama_index.embeddings.openai import OpenAIEmbedding
from support.embedding_stub import MODEL, EmbeddingStub, embedding_stub, vector_of

from teola_plugin import accelerate
from teola_plugin.engines import EmbeddingServer
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
TEXTS = [f"text\nnumber {number}" for number in range(7)]


@pytest.fixture
def stub() -> Iterator[EmbeddingStub]:
    with embedding_stub() as server:
        yield server


@pytest.fixture
def pool(stub: EmbeddingStub) -> Iterator[EnginePool]:
    with EnginePool.local([EmbeddingServer(base_url=stub.base_url, model=MODEL)]) as engines:
        yield engines


def embedding(stub: EmbeddingStub, **options: Any) -> OpenAIEmbedding:
    settings = {"model_name": MODEL, "api_key": "mine", "max_retries": 0, "embed_batch_size": 3, **options}
    return OpenAIEmbedding(api_base=stub.base_url, **settings)


async def _on_loop(model: Any) -> Any:
    return [
        await model.aget_text_embedding_batch(TEXTS),
        await model.aget_query_embedding("a\nquestion"),
        await model.aget_text_embedding("a\ntext"),
    ]


WAYS: dict[str, Callable[[Any], Any]] = {
    "sync": lambda model: [
        model.get_text_embedding_batch(TEXTS),
        model.get_query_embedding("a\nquestion"),
        model.get_text_embedding("a\ntext"),
    ],
    "async": lambda model: asyncio.run(_on_loop(model)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dimensions": {"dimensions": 4},
    "new clients": {"reuse_client": False},
    "headers": {"default_headers": {"x-team": "farm"}},
}


def logged(stub: EmbeddingStub) -> list[Any]:
    """Return the requests that the server received, sorted, with the headers that the user's client decides."""
    rows = zip(stub.log, stub.headers, strict=True)
    return sorted([str((path, body, one["authorization"], one.get("x-team"))) for (path, body), one in rows])


def take_log(stub: EmbeddingStub) -> list[Any]:
    rows = logged(stub)
    stub.log.clear()
    stub.headers.clear()
    return rows


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS)
def test_bound_remote_embedding_returns_the_originals_vectors(
    options: str, way: str, stub: EmbeddingStub, pool: EnginePool
) -> None:
    model = embedding(stub, **OPTIONS[options])
    expected = WAYS[way](model)
    original_log = take_log(stub)
    assert WAYS[way](pool.bound(model, "embedder")) == expected
    if way == "sync":
        assert logged(stub) == original_log
    else:  # batches that the framework sends side by side go together
        sent = [text for inputs in stub.inputs for text in inputs]
        assert sorted(sent) == sorted([text.replace("\n", " ") for text in (*TEXTS, "a question", "a text")])


@pytest.mark.parametrize("how", ["bind", "auto"])
def test_engine_with_remote_embedding_returns_the_same_nodes(how: str, stub: EmbeddingStub, pool: EnginePool) -> None:
    model = embedding(stub)
    index = VectorStoreIndex.from_documents([Document(text=text) for text in TEXTS], embed_model=model)
    retriever = index.as_retriever(similarity_top_k=2)
    expected = [(one.text, one.score) for one in retriever.retrieve("text number 3")]
    take_log(stub)
    options: Any = {"pool": pool, "bind": [(model, "embedder")]} if how == "bind" else {"engines": "auto"}
    fast = accelerate(index.as_query_engine(llm=MockLLM(), similarity_top_k=2), **options)
    nodes = fast.query("text number 3").source_nodes
    assert [(one.text, one.score) for one in nodes] == expected
    assert stub.inputs == [["text number 3"]]


@pytest.mark.parametrize("way", ["run", "arun"])
def test_ingestion_with_remote_embedding_gives_the_same_vectors(
    way: str, stub: EmbeddingStub, pool: EnginePool
) -> None:
    def vectors(pipeline: Any) -> list[Any]:
        documents = [Document(text=text, id_=text) for text in TEXTS]
        if way == "run":
            return [node.embedding for node in pipeline.run(documents=documents)]
        return [node.embedding for node in asyncio.run(pipeline.arun(documents=documents))]

    model = embedding(stub)
    expected = vectors(IngestionPipeline(transformations=[model]))
    pipeline = IngestionPipeline(transformations=[model], disable_cache=True)
    assert vectors(accelerate(pipeline, pool=pool, bind=[(model, "embedder")])) == expected


def ingested(pipeline: Any) -> list[Any]:
    documents = [Document(text=f"text {number}", id_=str(number)) for number in range(20)]
    return [node.embedding for node in pipeline.run(documents=documents)]


def inserted(index: Any) -> list[Any]:
    nodes = [TextNode(text=f"text {number}", id_=str(number)) for number in range(20)]
    index.insert_nodes(nodes)
    return sorted(index.vector_store.data.embedding_dict.items())


@pytest.mark.parametrize("how", ["own", "bind"])
@pytest.mark.parametrize("work", ["pipeline", "index"])
def test_remote_embedding_batches_of_an_ingestion_overlap(work: str, how: str, stub: EmbeddingStub) -> None:
    stub.delay_s = 0.05
    model = embedding(stub, embed_batch_size=2)
    run = ingested if work == "pipeline" else inserted

    def make() -> Any:
        if work == "pipeline":
            return IngestionPipeline(transformations=[model], disable_cache=True)
        return VectorStoreIndex([], embed_model=model)

    expected = run(make())
    assert stub.most_at_once == 1
    original_log = take_log(stub)
    if how == "own":
        assert run(accelerate(make())) == expected
    else:
        with EnginePool.local([EmbeddingServer(base_url=stub.base_url, model=MODEL, max_inputs=1)]) as pool:
            assert run(accelerate(make(), pool=pool, bind=[(model, "embedder")])) == expected
    assert logged(stub) == original_log
    assert stub.most_at_once > 3


@pytest.mark.parametrize("way", WAYS)
def test_bound_remote_embedding_raises_the_originals_errors(way: str, stub: EmbeddingStub, pool: EnginePool) -> None:
    stub.replace = lambda path, body: (400, {}, {"error": {"message": "it refuses", "code": 400}})
    model = embedding(stub)
    with pytest.raises(openai.BadRequestError) as original:
        WAYS[way](model)
    with pytest.raises(openai.BadRequestError) as carried:
        WAYS[way](pool.bound(model, "embedder"))
    assert carried.value.body == original.value.body


def test_binding_another_embedding_model_raises(stub: EmbeddingStub, pool: EnginePool) -> None:
    with pytest.raises(RegistrationError, match="it asks for 'other'"):
        pool.bound(embedding(stub, model_name="other"), "embedder")


def test_binding_overridden_embedding_class_raises(stub: EmbeddingStub, pool: EnginePool) -> None:
    class Loud(OpenAIEmbedding):
        def _get_query_embedding(self, query: str) -> list[float]:
            return super()._get_query_embedding(query.upper())

    loud = Loud(model_name=MODEL, api_key="mine", api_base=stub.base_url)
    with pytest.raises(RegistrationError, match=r"Loud\._get_query_embedding changes how it asks"):
        pool.bound(loud, "embedder")


def test_fields_set_later_on_bound_embedding_apply_to_calls(stub: EmbeddingStub, pool: EnginePool) -> None:
    bound = pool.bound(embedding(stub), "embedder")
    bound.additional_kwargs = {"dimensions": 4}
    assert bound.get_query_embedding("a") == vector_of("a", 4)
