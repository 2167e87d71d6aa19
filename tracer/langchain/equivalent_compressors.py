"""Compressors of langchain_classic as steps from `{"query", "documents"}` to documents.

What is computed on engines stands in the open; what is chosen by it is chosen by the compressor's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any

from langchain_core.documents import Document
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from teola_plugin.tracer.langchain.classes import changed, is_pool_backed, leaf_of
from teola_plugin.tracer.langchain.equivalent_parts import Computed, LeafStep, SequentialEach, is_from
from teola_plugin.tracer.leaf import EmbeddingLeaf, RerankingLeaf

Node = Runnable[Any, Any]
_HOME = "langchain_classic.retrievers.document_compressors"


def step_of(compressor: Any) -> Node | None:
    """The step; None for a compressor that is not known, was changed, or holds something that is not of a pool."""
    kind = type(compressor)
    if is_pool_backed(compressor):
        return compressor.as_runnable() if hasattr(compressor, "as_runnable") else None
    make = _KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")
    return None if make is None or changed(compressor, kind) else make(compressor)


def _cross_encoder(node: Any) -> Node | None:
    leaf = leaf_of(node.model, {})
    if not isinstance(leaf, RerankingLeaf):
        return None

    def select(documents: Any, scores: Any) -> list[Document]:
        scored = node.model_copy(update={"model": _Known(leaf.select(documents, scores))})
        return list(scored.compress_documents(documents, ""))

    return LeafStep(replace(leaf, select=select))


class _Known:
    """A cross encoder, or embeddings, that have done their work."""

    def __init__(self, values: Any, query: Any = None) -> None:
        self._values, self._query = values, query

    def score(self, pairs: Any) -> Any:
        return self._values

    def embed_documents(self, texts: Any) -> Any:
        return self._values

    def embed_query(self, text: str) -> Any:
        return self._query


def _embeddings_filter(node: Any) -> Node | None:
    """Documents and question are embedded at once. The question most likely was, for the search."""
    embeddings = node.embeddings
    leaf = leaf_of(embeddings, {})
    if not isinstance(leaf, EmbeddingLeaf):
        return None
    if not is_from(node.similarity_fn, "langchain_community.utils.math", "cosine_similarity"):
        return None
    one, sent = leaf.result, getattr(embeddings, "sent", str)
    of_documents = replace(leaf, role="document", batchable=True, result=lambda vectors: [one(v) for v in vectors])
    texts = Computed(lambda documents: [sent(document.page_content) for document in documents])
    question = Computed(lambda text: sent(text))

    def select(given: Any) -> list[Document]:
        known = node.model_copy(update={"embeddings": _Known(given["vectors"], given["vector"])})
        found = known.compress_documents(given["documents"], given["query"]) if given["documents"] else []
        return [Document(one.page_content, id=one.id, metadata=one.metadata) for one in found]

    return RunnablePassthrough.assign(
        vectors=RunnableLambda(itemgetter("documents")) | texts | LeafStep(of_documents),
        vector=RunnableLambda(itemgetter("query")) | question | LeafStep(leaf),
    ) | Computed(select)


def _extractor(node: Any) -> Node | None:
    """Each document is cut down by a model."""

    def select(given: Any) -> list[Document]:
        pairs = zip(given["documents"], given["said"], strict=True)
        return [Document(page_content=said, metadata=document.metadata) for document, said in pairs if said]

    return _asked_of_each(node, f"{_HOME}.chain_extract", select)


def _filter(node: Any) -> Node | None:
    """A model says of each document whether it is relevant."""

    def select(given: Any) -> list[Document]:
        return [d for d, said in zip(given["documents"], given["said"], strict=True) if said is True]

    return _asked_of_each(node, f"{_HOME}.chain_filter", select)


def _asked_of_each(node: Any, module: str, select: Callable[[Any], list[Document]]) -> Node | None:
    if not is_from(node.get_input, module, "default_get_input") or type(node.llm_chain).__name__ == "LLMChain":
        return None
    inputs = Computed(lambda given: [node.get_input(given["query"], document) for document in given["documents"]])
    return RunnablePassthrough.assign(said=inputs | SequentialEach(bound=node.llm_chain)) | Computed(select)


def _pipeline(node: Any) -> Node | None:
    """One compressor after the other."""
    steps = [step_of(one) for one in node.transformers]
    if not steps or None in steps:
        return None
    whole: Node = RunnablePassthrough()
    for step in steps[:-1]:
        assert step is not None
        whole = whole | RunnablePassthrough.assign(documents=step)
    return whole | steps[-1]  # type: ignore[operator]


_KNOWN: dict[str, Callable[[Any], Node | None]] = {
    f"{_HOME}.cross_encoder_rerank.CrossEncoderReranker": _cross_encoder,
    f"{_HOME}.embeddings_filter.EmbeddingsFilter": _embeddings_filter,
    f"{_HOME}.chain_extract.LLMChainExtractor": _extractor,
    f"{_HOME}.chain_filter.LLMChainFilter": _filter,
    f"{_HOME}.base.DocumentCompressorPipeline": _pipeline,
}
