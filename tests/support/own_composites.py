"""LangChain composites that call the user's own models and retrievers one after the other."""

from __future__ import annotations

from typing import Any

from langchain_classic.chains.summarize import load_summarize_chain
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MergerRetriever,
    MultiQueryRetriever,
)
from langchain_classic.retrievers.document_compressors import LLMChainExtractor
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import LLM
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore

from support.own_leaves import Chat, Ledger, Notes, Text

Chain = Runnable[Any, Any]
WRITTEN = "one\ntwo\nthree"


class Lines(LLM):
    """A model that always answers with three lines."""

    @property
    def _llm_type(self) -> str:
        return "lines"

    def _call(self, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        return WRITTEN


class Counted(Chat):
    """A chat model whose tokens the framework can count."""

    def get_token_ids(self, text: str) -> list[int]:
        return list(range(len(text) // 4))


def queries(ledger: Ledger, **more: Any) -> Chain:
    return MultiQueryRetriever.from_llm(Notes(ledger=ledger), Lines(), **more)


def ensemble(ledger: Ledger) -> Chain:
    return EnsembleRetriever(retrievers=[Notes(ledger=ledger, tags=[str(i)]) for i in range(4)], weights=[0.25] * 4)


def merger(ledger: Ledger) -> Chain:
    return MergerRetriever(retrievers=[Notes(ledger=ledger, tags=[str(i)]) for i in range(4)])


def queries_of_ensemble(ledger: Ledger) -> Chain:
    """Return a retriever that asks several queries of another composite."""
    return MultiQueryRetriever.from_llm(ensemble(ledger), Lines())


def extractor(ledger: Ledger) -> Chain:
    shared = InMemoryVectorStore(DeterministicFakeEmbedding(size=4))
    shared.add_documents([Document(f"text {i}", id=str(i)) for i in range(3)])
    compressor = LLMChainExtractor.from_llm(Chat(ledger=ledger))
    return ContextualCompressionRetriever(base_compressor=compressor, base_retriever=shared.as_retriever())


def map_reduce(ledger: Ledger) -> Chain:
    documents = [Document(f"text {i}") for i in range(3)]
    chain = load_summarize_chain(Counted(ledger=ledger), chain_type="map_reduce")
    return RunnableLambda(lambda _: {"input_documents": documents}) | chain


def texts(ledger: Ledger) -> Chain:
    each = PromptTemplate.from_template("Of {x}") | Text(ledger=ledger) | StrOutputParser()
    return RunnableLambda(lambda _: [{"x": 1}, {"x": 2}, {"x": 3}]) | each.map()


COMPOSITES = [queries, ensemble, queries_of_ensemble, merger, extractor, map_reduce, texts]
OWN = (Notes, Chat, Text)
