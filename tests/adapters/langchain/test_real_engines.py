"""Tests of pool-backed objects on real engines: MiniLM by sentence-transformers, and PostgreSQL with pgvector."""

from __future__ import annotations

import itertools

import pytest
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import EmbeddingsIntegrationTests, VectorStoreIntegrationTests

from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.indexing import TeolaIndexer
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.pool import EnginePool

pytestmark = [pytest.mark.postgres, pytest.mark.models]

_names = (f"real{i}" for i in itertools.count())
DOCUMENTS = [
    Document(id="1", page_content="The cat sleeps on the mat.", metadata={"kind": "animal", "deep": {"a": [1, None]}}),
    Document(id="2", page_content="Dogs bark at postmen.", metadata={"kind": "animal", "legs": 4, "share": 0.5}),
    Document(id="3", page_content="Green tea is brewed at low heat.", metadata={"kind": "drink", "hot": True}),
    Document(id="4", page_content="Ünïcode, 'quotes' and \\ slashes; 中文。", metadata={"kind": "ünï", "n": 10**12}),
]
QUERIES = ["a sleeping pet", "what to drink", "non-English text", "the mail arrives"]


@pytest.fixture(scope="module")
def pool():
    from teola_plugin.engines.pgvector import PgVectorEngine
    from teola_plugin.engines.sentence_transformers import EmbeddingEngine

    with EnginePool.local(embedder=EmbeddingEngine("embedder"), store=PgVectorEngine("store")) as pool:
        yield pool


@pytest.fixture
def store(pool):
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection=next(_names))
    yield store
    store.delete()


async def test_real_store_finds_the_documents_of_the_exact_store(store):
    store.add_documents(DOCUMENTS)
    exact = InMemoryVectorStore(store.embeddings)
    exact.add_documents(DOCUMENTS)
    for query in QUERIES:
        found, expected = store.similarity_search_with_score(query), exact.similarity_search_with_score(query)
        assert [document for document, _ in found] == [document for document, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-5)
        assert await store.asimilarity_search_with_score(query) == found
    assert [d.id for d in store.similarity_search("pets", filter={"kind": "animal", "legs": 4})] == ["2"]
    assert [d.id for d in store.similarity_search("pets", filter={"hot": True})] == ["3"]


async def test_reindexing_on_real_engines_adds_no_rows(store):
    index = TeolaIndexer(store=store)
    text = " ".join(f"Sentence number {i} speaks of topic {i % 7}." for i in range(60))
    assert index.invoke(text) == store.collection
    count = store.count()
    assert count == len(index.chunk(text)) > 3
    assert await index.ainvoke([text]) == store.collection and store.count() == count


class TestEmbeddings(EmbeddingsIntegrationTests):
    @pytest.fixture(autouse=True)
    def _use(self, pool):
        type(self).pool = pool

    @property
    def embeddings_class(self):
        return TeolaEmbeddings

    @property
    def embedding_model_params(self):
        return {"pool": self.pool}


class TestVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, pool):
        store = TeolaVectorStore(pool=pool, embedding=self.get_embeddings(), collection=next(_names))
        yield store
        store.delete()
