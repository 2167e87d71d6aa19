"""Tests of `TeolaIndexer` on fake engines: documents are chunked, embedded, ingested and found."""

from __future__ import annotations

import copy
import itertools

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from langchain_text_splitters import CharacterTextSplitter, RecursiveCharacterTextSplitter

from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.indexing import TeolaIndexer
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.errors import RegistrationError

_names = (f"uploads{i}" for i in itertools.count())
TEXT = " ".join(f"Sentence number {i} speaks of topic {i % 7}." for i in range(60))


@pytest.fixture
def store(pool):
    return TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection=next(_names))


async def test_indexed_documents_are_found_and_reindexing_adds_nothing(store):
    index = TeolaIndexer(store=store)
    assert index.invoke(Document(page_content=TEXT, metadata={"source": "a.txt"})) == store.collection
    expected = RecursiveCharacterTextSplitter(chunk_size=256, chunk_overlap=30).split_text(TEXT)
    found = store.similarity_search("topic", k=100)
    assert {document.page_content for document in found} == set(expected)
    assert all(document.metadata == {"source": "a.txt"} for document in found)
    count = store.count()
    assert await index.ainvoke([Document(page_content=TEXT, metadata={"source": "a.txt"})]) == store.collection
    assert store.count() == count


async def test_indexer_accepts_texts_documents_and_lists(store):
    index = TeolaIndexer(store=store, splitter=CharacterTextSplitter(separator=" ", chunk_size=5, chunk_overlap=0))
    index.invoke("one two")
    await index.ainvoke(["three", Document(page_content="four")])
    index.invoke([])
    index.invoke("")
    (RunnableLambda(lambda text: [text]) | index).invoke("five")
    found = {document.page_content for document in store.similarity_search("x", k=10)}
    assert found == {"one", "two", "three", "four", "five"}
    with pytest.raises(RegistrationError, match="the indexer got dict, not documents"):
        index.invoke({"documents": []})
    with pytest.raises(RegistrationError, match="the indexer got list, not documents"):
        index.invoke([1])


def test_progress_bar_changes_nothing_but_the_terminal(store, capsys):
    splitter = CharacterTextSplitter(separator=" ", chunk_size=5, chunk_overlap=0)
    words = " ".join(f"w{i}" for i in range(100, 200))
    TeolaIndexer(store=store, splitter=splitter, progress=True).invoke(words)
    assert store.count() == 100
    assert f"indexing into {store.collection}" in capsys.readouterr().out


def test_indexer_leaf_returns_the_chunks_of_the_call(store, pool):
    index = TeolaIndexer(store=store)
    leaf = index.__teola_leaf__({})
    assert (leaf.store, leaf.embedder, leaf.collection) == ("store", "embedder", store.collection)
    chunks = leaf.chunk([TEXT, TEXT])
    assert len({chunk.id for chunk in chunks}) == len(chunks) == len(index.chunk(TEXT))
    index.invoke(TEXT)
    assert {document.id for document in store.similarity_search("x", k=100)} == {chunk.id for chunk in chunks}
    assert leaf.result([chunk.id for chunk in chunks]) == store.collection
    assert leaf.effect.writes
    other = TeolaVectorStore(pool=pool, embedding=DeterministicFakeEmbedding(size=8))
    assert TeolaIndexer(store=other).__teola_leaf__({}) is None
    assert index.__teola_leaf__({"x": 1}) is None
    assert copy.deepcopy(index).store.pool is pool


@pytest.mark.parametrize("text", ["", "short", TEXT, TEXT * 20])
def test_indexer_leaf_estimates_chunk_count_within_30_percent(store, text):
    leaf = TeolaIndexer(store=store).__teola_leaf__({})
    real = len(RecursiveCharacterTextSplitter(chunk_size=256, chunk_overlap=30).split_text(text))
    assert real * 0.7 <= leaf.estimate(text) <= max(real, real * 1.3)
