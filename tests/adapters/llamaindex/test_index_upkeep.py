"""Indices and ingestion pipelines on a `TeolaVectorStore` hold the same nodes as on LlamaIndex's own store."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, SimpleVectorStore, VectorStoreQuery

from teola_plugin.adapters.llamaindex import TeolaEmbedding, TeolaVectorStore
from teola_plugin.engines.fake import embed_words

_names = (f"upkeep {n}" for n in itertools.count())


def documents(edition: int, count: int = 4) -> list[Document]:
    """Return documents, of which those with odd numbers change with the edition."""
    return [
        Document(
            text=f"book {n} of edition {edition if n % 2 else 0}", id_=f"d{n}", metadata={"n": n, "odd": n % 2 == 1}
        )
        for n in range(count)
    ]


HISTORY = [documents(0), documents(0), documents(1), documents(1, 2), documents(2, 5) + documents(2, 1)]


@pytest.fixture
def embedding(pool):
    return TeolaEmbedding(pool=pool)


@pytest.fixture
def stores(pool):
    return TeolaVectorStore(pool=pool, collection=next(_names)), SimpleVectorStore()


def query(**options: Any) -> VectorStoreQuery:
    return VectorStoreQuery(query_embedding=list(embed_words("book", "query")), **{"similarity_top_k": 50, **options})


def splitter() -> SentenceSplitter:
    """Return a splitter whose ids follow from the document, so that two indices have equal nodes."""
    return SentenceSplitter(id_func=lambda n, document: f"{document.id_}/{document.hash[:8]}/{n}")


def node_id(number: int) -> str:
    """Return the id of the node of a document of the first edition."""
    document = documents(0)[number]
    return f"{document.id_}/{document.hash[:8]}/0"


# ------------------------------------------------------------ pipelines


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("strategy", DocstoreStrategy)
def test_pipelines_upsert_and_delete_as_with_the_simple_store(
    stores: Any, embedding: Any, strategy: Any, is_async: bool
) -> None:
    def history(store: Any) -> list[Any]:
        pipeline = IngestionPipeline(
            transformations=[splitter(), embedding],
            docstore=SimpleDocumentStore(),
            vector_store=store,
            docstore_strategy=strategy,
        )
        results: list[Any] = []
        for batch in HISTORY:
            nodes = asyncio.run(pipeline.arun(documents=batch)) if is_async else pipeline.run(documents=batch)
            results.append((sorted(node.node_id for node in nodes), sorted(store.query(query()).ids)))
        return results

    own, plain = (history(store) for store in stores)

    assert own == plain


# ------------------------------------------------------------ indices


def index_on(store: Any, embedding: Any) -> VectorStoreIndex:
    return VectorStoreIndex.from_documents(
        documents(0),
        embed_model=embedding,
        transformations=[splitter()],
        storage_context=StorageContext.from_defaults(vector_store=store),
    )


def texts(index: VectorStoreIndex) -> Counter[str]:
    return Counter(one.node.get_content() for one in index.as_retriever(similarity_top_k=50).retrieve("book"))


STEPS: dict[str, Any] = {
    "refresh_ref_docs": lambda index: index.refresh_ref_docs(documents(1, 6)),
    "arefresh_ref_docs": lambda index: index.arefresh_ref_docs(documents(1, 6)),
    "update_ref_doc": lambda index: index.update_ref_doc(documents(3)[1]),
    "aupdate_ref_doc": lambda index: index.aupdate_ref_doc(documents(3)[1]),
    "update_ref_doc with arguments": lambda index: index.update_ref_doc(
        documents(3)[1], insert_kwargs={"batch_size": 2}
    ),
    "delete_ref_doc": lambda index: index.delete_ref_doc("d0", delete_from_docstore=True),
    "adelete_ref_doc": lambda index: index.adelete_ref_doc("d0", delete_from_docstore=True),
    "delete_ref_doc of none": lambda index: index.delete_ref_doc("nobody"),
    "insert": lambda index: index.insert(Document(text="more", id_="more")),
    "ainsert": lambda index: index.ainsert(Document(text="more", id_="more")),
    "insert with arguments": lambda index: index.insert(Document(text="more", id_="more"), batch_size=2),
    "insert_nodes": lambda index: index.insert_nodes([TextNode(text="more", id_="more")], batch_size=2),
    "ainsert_nodes": lambda index: index.ainsert_nodes([TextNode(text="more", id_="more")]),
    "delete_nodes": lambda index: index.delete_nodes([node_id(0)], delete_from_docstore=True),
    "adelete_nodes": lambda index: index.adelete_nodes([node_id(1), node_id(2)]),
    "delete_nodes by filters": lambda index: index.delete_nodes(
        None, filters=MetadataFilters(filters=[MetadataFilter(key="odd", value=1)])
    ),
}


@pytest.mark.parametrize("step", STEPS)
def test_index_updates_have_the_effect_of_the_simple_store(stores: Any, embedding: Any, step: str) -> None:
    results = []
    for store in stores:
        index = index_on(store, embedding)
        outcome = STEPS[step](index)
        outcome = asyncio.run(outcome) if asyncio.iscoroutine(outcome) else outcome
        results.append((outcome, texts(index)))

    assert results[0] == results[1]


# ------------------------------------------------------------ arguments

FIELDS: list[dict[str, Any]] = [
    *(
        {"query_str": "book"},
        {"output_fields": ["n"]},
        {"embedding_field": "e"},
        {"alpha": 0.3},
        {"mmr_threshold": 0.2},
    ),
    *({"sparse_top_k": 1}, {"hybrid_top_k": 1}, {"node_ids": None}, {"doc_ids": []}, {"filters": None}),
    *({"similarity_top_k": 2}, {"filters": MetadataFilters(filters=[])}),
]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "".join(fields))
def test_store_accepts_query_fields_that_the_simple_store_accepts(stores: Any, embedding: Any, fields: Any) -> None:
    for store in stores:
        index_on(store, embedding)
    store, plain = stores

    result = store.query(query(**fields), unknown=1)

    assert len(result.ids) == len(plain.query(query(**fields), unknown=1).ids)
    assert asyncio.run(store.aquery(query(**fields), unknown=1)) == result


def test_store_ignores_arguments_that_the_simple_store_ignores(stores: Any) -> None:
    node = TextNode(id_="a", text="a", embedding=list(embed_words("a", "document")))
    for store in stores:
        assert store.add([node], batch_size=1) == ["a"]
        assert asyncio.run(store.async_add([node], batch_size=1)) == ["a"]
        store.delete("nobody", unknown=1)
        asyncio.run(store.adelete("nobody", unknown=1))
        store.delete_nodes(["nobody"], None, unknown=1)
        asyncio.run(store.adelete_nodes(["nobody"], filters=None, unknown=1))
        assert store.query(query()).ids == ["a"]
