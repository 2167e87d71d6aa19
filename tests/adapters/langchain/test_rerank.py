"""Tests of `TeolaRerank` on a fake reranker: order, ties, copies, as a compressor and as a step of a chain."""

from __future__ import annotations

import copy

import pytest
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda

from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.errors import RegistrationError

TEXTS = ["a boat", "red apples", "green apples", "red apples and green apples", "a kite"]
QUERY = "green apples"


@pytest.fixture
def documents():
    return [Document(id=str(i), page_content=text, metadata={"n": i}) for i, text in enumerate(TEXTS)]


async def test_reranked_documents_are_sorted_stably_by_score(pool, documents):
    rerank = TeolaRerank(pool=pool, top_n=None)
    before = copy.deepcopy(documents)
    found = rerank.compress_documents(documents, QUERY)
    scores = [document.metadata["relevance_score"] for document in found]
    assert scores == sorted(scores, reverse=True) and all(type(score) is float for score in scores)
    assert found[0].page_content == QUERY and found[0].id == "2" and found[0].metadata["n"] == 2
    assert [document.id for document in found[-2:]] == ["0", "4"]  # no word in common: the order of the input
    assert documents == before
    assert await rerank.acompress_documents(documents, QUERY) == found


def test_rerank_returns_at_most_top_n_documents(pool, documents):
    assert len(TeolaRerank(pool=pool).compress_documents(documents, QUERY)) == 3
    assert len(TeolaRerank(pool=pool, top_n=9).compress_documents(documents, QUERY)) == 5
    assert TeolaRerank(pool=pool).compress_documents([], QUERY) == []
    with pytest.raises(ValueError, match="top_n"):
        TeolaRerank(pool=pool, top_n=0)


async def test_rerank_as_runnable_gives_the_documents_of_the_compressor(pool, documents):
    rerank = TeolaRerank(pool=pool, top_n=2)
    given = {"query": QUERY, "documents": documents}
    expected = rerank.compress_documents(documents, QUERY)
    step = rerank.as_runnable()
    chain = RunnableLambda(lambda query: {**given, "query": query}) | step
    assert step.invoke(given) == chain.invoke(QUERY) == expected
    assert await step.ainvoke(given) == await chain.ainvoke(QUERY) == expected
    assert step.batch([given, given]) == [expected, expected]
    assert step.get_name() == "TeolaRerank"


def test_rerank_step_raises_and_describes_wrong_input(pool, documents):
    step = TeolaRerank(pool=pool).as_runnable()
    with pytest.raises(RegistrationError, match=r"keys \['docs', 'query'\].*Next: give it"):
        step.invoke({"query": QUERY, "docs": documents})
    with pytest.raises(RegistrationError, match="the reranker got str"):
        step.invoke("apples")


def test_rerank_works_in_a_compression_retriever(pool, documents):
    class Fixed(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return documents

    rerank = TeolaRerank(pool=pool, top_n=1)
    retriever = ContextualCompressionRetriever(base_compressor=rerank, base_retriever=Fixed())
    assert retriever.invoke(QUERY) == rerank.compress_documents(documents, QUERY)


def test_rerank_leaf_selects_the_documents_of_the_call(pool, documents):
    rerank = TeolaRerank(pool=pool, top_n=2)
    leaf = rerank.as_runnable().__teola_leaf__({})
    assert (leaf.engine, leaf.texts(documents)) == ("reranker", TEXTS)
    scores = [0.0, 0.5, 0.9, 0.9, 0.1]
    assert [document.id for document in leaf.select(documents, scores)] == ["2", "3"]
    assert rerank.__teola_leaf__({"top_n": 1}) is None
    assert copy.deepcopy(rerank).pool is pool
