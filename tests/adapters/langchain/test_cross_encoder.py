"""Tests of `TeolaCrossEncoder` in the places where LangChain takes a cross encoder."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_classic.retrievers.document_compressors import CrossEncoderReranker
from langchain_core.cross_encoders import BaseCrossEncoder
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

from teola_plugin import accelerate
from teola_plugin.errors import RegistrationError
from teola_plugin.langchain import TeolaCrossEncoder, TeolaRerank
from teola_plugin.pool import EnginePool

DOCUMENTS = [Document(text) for text in ("walls need lime", "lambs eat grass", "what do lambs eat, and why?")]


class FixedRetriever(BaseRetriever):
    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return DOCUMENTS


def test_cross_encoder_returns_float_array_of_scores(fakes: EnginePool) -> None:
    encoder = TeolaCrossEncoder(pool=fakes)
    assert isinstance(encoder, BaseCrossEncoder)
    scores = encoder.score([("what do lambs eat?", one.page_content) for one in DOCUMENTS])
    assert scores.dtype == np.float32 and scores.shape == (3,)
    best = TeolaRerank(pool=fakes, top_n=1).compress_documents(DOCUMENTS, "what do lambs eat?")
    assert best[0].page_content == DOCUMENTS[int(scores.argmax())].page_content


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_cross_encoder_reranker_runs_on_the_engine(fakes: EnginePool, way: str) -> None:
    reranker = CrossEncoderReranker(model=TeolaCrossEncoder(pool=fakes), top_n=2)
    chain = ContextualCompressionRetriever(base_compressor=reranker, base_retriever=FixedRetriever())
    fast = accelerate(chain)
    given = "what do lambs eat?"
    found = fast.invoke(given) if way == "invoke" else asyncio.run(fast.ainvoke(given))
    assert found == chain.invoke(given)
    trace = fast.last_trace()
    assert trace is not None and {span.engine for span in trace.spans if span.engine} == {"reranker"}


def test_cross_encoder_raises_for_unknown_engine(fakes: EnginePool) -> None:
    with pytest.raises(RegistrationError, match="nobody"):
        TeolaCrossEncoder(pool=fakes, engine="nobody")
