"""Tests of `TeolaEmbeddings` on a fake embedder, with LangChain's own test suites."""

from __future__ import annotations

import copy

import pytest
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests

from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.engines.fake import embed_words
from teola_plugin.errors import RegistrationError


async def test_query_and_document_vectors_differ_and_are_lists(pool):
    embeddings = TeolaEmbeddings(pool=pool)
    query, documents = embeddings.embed_query("a cat"), embeddings.embed_documents(["a cat", "a dog"])
    assert query == list(embed_words("a cat", "query"))
    assert documents == [list(embed_words(text, "document")) for text in ("a cat", "a dog")]
    assert query != documents[0]
    assert (await embeddings.aembed_query("a cat"), await embeddings.aembed_documents(["a cat", "a dog"])) == (
        query,
        documents,
    )
    assert embeddings.embed_documents([]) == []


def test_embeddings_check_engine_and_copies_share_pool(pool):
    with pytest.raises(RegistrationError, match="unknown engine 'embeder'"):
        TeolaEmbeddings(pool=pool, engine="embeder")
    embeddings = TeolaEmbeddings(pool=pool)
    assert copy.deepcopy(embeddings).pool is pool
    assert embeddings.model_dump() == {"engine": "embedder"}


def test_embeddings_leaf_describes_the_query_request(pool):
    leaf = TeolaEmbeddings(pool=pool).__teola_leaf__({})
    assert (leaf.engine, leaf.role, leaf.batchable) == ("embedder", "query", False)
    assert leaf.result((1, 2.0)) == [1.0, 2.0]
    assert TeolaEmbeddings(pool=pool).__teola_leaf__({"x": 1}) is None


class _Suite:
    @pytest.fixture(autouse=True)
    def _use(self, pool):
        type(self).pool = pool

    @property
    def embeddings_class(self):
        return TeolaEmbeddings

    @property
    def embedding_model_params(self):
        return {"pool": self.pool}


class TestUnit(_Suite, EmbeddingsUnitTests): ...


class TestIntegration(_Suite, EmbeddingsIntegrationTests): ...
