"""Tests of ingestion and indexing: the same rows, ids, nodes, caches and document stores as the original."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from differential.llamaindex.recording import Recorder, recorded
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.callbacks import CallbackManager
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.ingestion import DocstoreStrategy, IngestionCache, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, IndexNode, TextNode, TransformComponent
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore

from teola_plugin import accelerate
from teola_plugin.adapters.llamaindex import TeolaEmbedding, TeolaVectorStore
from teola_plugin.adapters.llamaindex.ingestion import (
    TeolaVectorStoreIndex,
    accelerated_index,
    accelerated_ingestion,
)
from teola_plugin.engines.fake import FakeEmbedder, FakeStore, fake_engines
from teola_plugin.errors import EngineError, RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import IngestRow

_WORDS = ["cat", "dog", "tea", "mat", "sun", "moon", "star", "rain", "snow", "wind"]
_RANDOM = random.Random(0)


def text(words: int) -> str:
    return " ".join(_RANDOM.choices(_WORDS, k=words)) + "."


DOCUMENTS = [Document(id_=f"d{i}", text=" ".join(text(8) for _ in range(12)), metadata={"i": i}) for i in range(16)]


def splitter() -> SentenceSplitter:
    ids: Iterator[int] = itertools.count()
    return SentenceSplitter(
        chunk_size=64, chunk_overlap=0, include_metadata=False, id_func=lambda i, d: f"{d.node_id}-{next(ids)}"
    )


def fresh() -> list[Document]:
    return [document.model_copy(deep=True) for document in DOCUMENTS]


@pytest.fixture
def rows(pool: EnginePool) -> Callable[[str], list[Any]]:
    """Return all rows of a collection with their vectors, in the order of insertion."""
    engine: Any = pool.engine("store")
    return lambda name: list(engine._rows(name).values())


def writes(payloads: Sequence[Any]) -> int:
    return sum(isinstance(payload, IngestRow) for payload in payloads)


def run(pipeline: IngestionPipeline, way: str, **options: Any) -> Sequence[BaseNode]:
    if way == "arun":
        return asyncio.run(pipeline.arun(documents=fresh(), **options))
    return pipeline.run(documents=fresh(), **options)


@pytest.mark.parametrize("way", ["run", "arun"])
def test_accelerated_pipeline_writes_the_originals_rows_and_events(pool, rows, collection, way):
    """Nodes, rows and their order; callbacks, events and spans."""

    def left(make: Callable[[IngestionPipeline], IngestionPipeline], name: str) -> Any:
        recorder = Recorder()
        model = TeolaEmbedding(pool=pool, callback_manager=CallbackManager([recorder]))
        store = TeolaVectorStore(pool=pool, collection=f"{collection}-{name}")
        pipeline = make(IngestionPipeline(transformations=[splitter(), model], vector_store=store))
        with recorded(recorder):
            nodes = run(pipeline, way)
        return nodes, rows(store.collection), recorder.callbacks, recorder.events, recorder.spans

    plain, fast = left(lambda p: p, "plain"), left(accelerated_ingestion, "fast")
    assert fast == plain and len(plain[1]) > 20


def test_pipeline_writes_rows_while_others_are_embedded(pool, collection, payloads, monkeypatch):
    early: list[int] = []
    add = TeolaVectorStore.add
    monkeypatch.setattr(TeolaVectorStore, "add", lambda *a, **k: (early.append(writes(payloads)), add(*a, **k))[1])
    store = TeolaVectorStore(pool=pool, collection=collection)
    pipeline = IngestionPipeline(transformations=[splitter(), TeolaEmbedding(pool=pool)], vector_store=store)
    nodes = accelerated_ingestion(pipeline).run(documents=fresh())
    assert early[0] > 0, "nothing was written before the framework's code added the nodes"
    assert writes(payloads) == len(nodes) == store.count(), "a row was written twice"
    payloads.clear()
    store.clear()
    pipeline.disable_cache = True
    pipeline.run(documents=fresh())
    assert early[1] == 0, "the plain pipeline is changed"


def test_accelerated_pipeline_shares_its_parts_with_the_original(pool, collection):
    store = TeolaVectorStore(pool=pool, collection=collection)
    pipeline = IngestionPipeline(transformations=[splitter(), TeolaEmbedding(pool=pool)], vector_store=store)
    before = dict(vars(pipeline))
    fast = accelerated_ingestion(pipeline)
    assert type(pipeline) is IngestionPipeline and isinstance(fast, IngestionPipeline)
    assert type(fast).__name__ == "IngestionPipeline" and accelerated_ingestion(fast).original is pipeline
    assert vars(fast) is vars(pipeline)
    assert vars(pipeline) == before
    assert fast.cache is pipeline.cache and fast.vector_store is store
    fast.documents = fresh()
    assert pipeline.documents is fast.documents
    assert len(fast.run()) == store.count() > 0


@pytest.mark.parametrize("way", ["run", "arun"])
@pytest.mark.parametrize("strategy", DocstoreStrategy)
def test_pipeline_updates_document_store_and_cache_as_the_original(pool, rows, collection, way, strategy):
    def left(make: Callable[[IngestionPipeline], IngestionPipeline], name: str) -> Any:
        store = TeolaVectorStore(pool=pool, collection=f"{collection}-{name}")
        pipeline = make(
            IngestionPipeline(
                transformations=[splitter(), TeolaEmbedding(pool=pool)],
                vector_store=store,
                docstore=SimpleDocumentStore(),
                docstore_strategy=strategy,
                cache=IngestionCache(),
            )
        )
        seen = []
        for change in (lambda docs: docs, lambda docs: docs, _changed, lambda docs: docs[1:]):
            given = change(fresh())
            made = pipeline.run(documents=given) if way == "run" else asyncio.run(pipeline.arun(documents=given))
            seen.append((list(made), rows(store.collection), pipeline.docstore.to_dict()))
        return seen, sorted(pipeline.cache.cache.get_all(collection=pipeline.cache.collection))

    assert left(accelerated_ingestion, "fast") == left(lambda p: p, "plain")


def _changed(documents: list[Document]) -> list[Document]:
    documents[2].set_content("something else altogether.")
    return documents


class _Drops(TransformComponent):
    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        return [node for node in nodes if "cat" in node.get_content()]


def test_rows_are_not_written_before_a_later_transformation(pool, rows, collection, payloads):
    store = TeolaVectorStore(pool=pool, collection=collection)
    steps = [splitter(), TeolaEmbedding(pool=pool), _Drops()]
    nodes = accelerated_ingestion(IngestionPipeline(transformations=steps, vector_store=store)).run(documents=fresh())
    assert [chunk.id for chunk, _ in rows(collection)] == [node.node_id for node in nodes]
    assert writes(payloads) == len(nodes)


def test_existing_rows_are_replaced_only_at_the_end(pool, collection, payloads, monkeypatch):
    early: list[int] = []
    add = TeolaVectorStore.add
    monkeypatch.setattr(TeolaVectorStore, "add", lambda *a, **k: (early.append(writes(payloads)), add(*a, **k))[1])
    store = TeolaVectorStore(pool=pool, collection=collection)
    model = TeolaEmbedding(pool=pool)
    for _ in range(2):
        steps = [splitter(), model]
        accelerated_ingestion(IngestionPipeline(transformations=steps, vector_store=store)).run(documents=fresh())
        payloads.clear()
    assert early[0] > 0 and early[1] == 0


class _Picky(FakeEmbedder):
    def _value(self, request: Any) -> tuple[float, ...]:
        if "unlucky" in request.payload.text:
            raise ValueError("an unlucky text")
        return super()._value(request)


@pytest.mark.parametrize("way", ["run", "arun"])
def test_failed_pipeline_leaves_no_rows(way):
    store_engine = FakeStore()
    with EnginePool.local([_Picky(), store_engine]) as pool:
        store = TeolaVectorStore(pool=pool, collection="c")
        steps = [splitter(), TeolaEmbedding(pool=pool)]
        pipeline = accelerated_ingestion(IngestionPipeline(transformations=steps, vector_store=store))
        pipeline.documents = [Document(id_="bad", text="an unlucky text.")]
        with pytest.raises(EngineError, match="unlucky"):
            run(pipeline, way)
        assert store.count() == 0
        assert store_engine._collections["c"].version > 0, "no row was written early, so this shows nothing"


def test_unstorable_node_raises_the_originals_error(pool, collection):
    """After all was embedded, with the error and the events of the plain way."""

    def observed(make: Callable[[IngestionPipeline], IngestionPipeline], name: str) -> Any:
        recorder = Recorder()
        model = TeolaEmbedding(pool=pool, callback_manager=CallbackManager([recorder]))
        store = TeolaVectorStore(pool=pool, collection=f"{collection}-{name}")
        pipeline = make(IngestionPipeline(transformations=[model], vector_store=store, disable_cache=True))
        given: list[BaseNode] = [TextNode(id_=f"n{i}", text=f"text {i}") for i in range(30)]
        given[25].metadata["bad"] = object()
        given[25].excluded_embed_metadata_keys = ["bad"]
        with pytest.raises(Exception) as caught:
            pipeline.run(nodes=given)
        return type(caught.value), store.count(), recorder.callbacks

    assert observed(accelerated_ingestion, "fast") == observed(lambda p: p, "plain")


def test_pipeline_without_pool_store_runs_unchanged(pool, payloads):
    own = SimpleVectorStore()
    pipeline = IngestionPipeline(transformations=[splitter(), TeolaEmbedding(pool=pool)], vector_store=own)
    nodes = accelerated_ingestion(pipeline).run(documents=fresh())
    assert list(own.data.embedding_dict) == [node.node_id for node in nodes]
    assert accelerated_ingestion(IngestionPipeline(transformations=[splitter()])).run(documents=fresh())
    assert accelerated_ingestion(IngestionPipeline(transformations=[])).run(documents=fresh()) == fresh()


def test_worker_processes_raise_registration_error(pool, collection):
    store = TeolaVectorStore(pool=pool, collection=collection)
    pipeline = IngestionPipeline(transformations=[TeolaEmbedding(pool=pool)], vector_store=store)
    for one in (pipeline, accelerated_ingestion(pipeline)):
        with pytest.raises(RegistrationError, match="num_workers"):
            one.run(documents=fresh(), num_workers=2)


def test_accelerate_binds_embeddings_of_pipelines_and_indexes(pool, rows, collection):
    """The user's own models in them are bound, and stay unchanged."""
    own = MockEmbedding(embed_dim=3)
    store = TeolaVectorStore(pool=pool, collection=collection)
    pipeline = IngestionPipeline(transformations=[splitter(), own], vector_store=store)
    made = accelerate(pipeline, pool=pool, bind=[(own, "embedder")])
    assert isinstance(made, IngestionPipeline) and pipeline.transformations[1] is own
    assert len(made.run(documents=fresh())) == store.count() > 20
    assert {len(vector) for _, vector in rows(collection)} == {32}, "the engine's vectors"
    index = VectorStoreIndex.from_vector_store(store, embed_model=own)
    fast = accelerate(index, pool=pool, bind=[(own, "embedder")])
    assert isinstance(fast, VectorStoreIndex) and index._embed_model is own
    fast.insert_nodes([TextNode(id_="later", text="a zebra")])
    assert fast.as_retriever(similarity_top_k=1).retrieve("zebra")[0].node_id == "later"


# ------------------------------------------------------------ indexes


def nodes() -> list[BaseNode]:
    return splitter().get_nodes_from_documents(fresh())


@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("batch", [2048, 16])
def test_pool_index_writes_the_originals_rows_and_events(pool, rows, collection, use_async, batch):
    def left(cls: type[VectorStoreIndex], name: str) -> Any:
        recorder = Recorder()
        model = TeolaEmbedding(pool=pool, callback_manager=CallbackManager([recorder]))
        store = TeolaVectorStore(pool=pool, collection=f"{collection}-{name}")
        storage = StorageContext.from_defaults(vector_store=store)
        given = [*nodes(), IndexNode(id_="pointer", text="see there", index_id="x"), TextNode(id_="empty", text="")]
        options = {"embed_model": model, "storage_context": storage, "use_async": use_async}
        with recorded(recorder):
            index = cls(given, insert_batch_size=batch, **options)
        index.insert_nodes([TextNode(id_="later", text="the later cat")])
        asyncio.run(index.ainsert_nodes([TextNode(id_="last", text="the last cat")]))
        kept = index.index_struct.nodes_dict, sorted(index.docstore.docs)
        assert all(node.embedding is None for node in given)
        return rows(store.collection), kept, recorder.callbacks, recorder.events, recorder.spans

    plain, fast = left(VectorStoreIndex, "plain"), left(TeolaVectorStoreIndex, "fast")
    assert fast == plain and len(plain[0]) > 20


def test_index_writes_rows_while_others_are_embedded(pool, collection, payloads, monkeypatch):
    early: list[int] = []
    add = TeolaVectorStore.add
    monkeypatch.setattr(TeolaVectorStore, "add", lambda *a, **k: (early.append(writes(payloads)), add(*a, **k))[1])
    store = TeolaVectorStore(pool=pool, collection=collection)
    storage = StorageContext.from_defaults(vector_store=store)
    TeolaVectorStoreIndex(nodes(), embed_model=TeolaEmbedding(pool=pool), storage_context=storage)
    assert early[0] > 0 and writes(payloads) == store.count()


def test_existing_index_can_be_accelerated(pool, collection):
    store = TeolaVectorStore(pool=pool, collection=collection)
    index = VectorStoreIndex.from_vector_store(store, embed_model=TeolaEmbedding(pool=pool))
    fast = accelerated_index(index)
    assert type(index) is VectorStoreIndex and type(fast).__name__ == "VectorStoreIndex"
    assert accelerated_index(fast).original is index
    fast.insert_nodes(nodes())
    assert index.as_retriever().retrieve("cat") == fast.as_retriever().retrieve("cat")


def test_index_shows_a_progress_bar(pool, collection, capsys):
    store = TeolaVectorStore(pool=pool, collection=collection)
    storage = StorageContext.from_defaults(vector_store=store)
    TeolaVectorStoreIndex(nodes(), embed_model=TeolaEmbedding(pool=pool), storage_context=storage, show_progress=True)
    assert "Generating embeddings: 100%" in capsys.readouterr().err


def test_pool_index_works_without_pool_store():
    with EnginePool.local(fake_engines()) as pool:
        index = TeolaVectorStoreIndex(nodes(), embed_model=TeolaEmbedding(pool=pool))
        assert index.as_retriever().retrieve("cat")
