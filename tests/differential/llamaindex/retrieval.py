"""Retrievers, and query engines with different retrievers and postprocessors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llama_index.core import QueryBundle, StorageContext, SummaryIndex, VectorStoreIndex
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.indices.query.query_transform import HyDEQueryTransform
from llama_index.core.postprocessor import (
    LLMRerank,
    LongContextReorder,
    MetadataReplacementPostProcessor,
    SimilarityPostprocessor,
)
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import (
    QueryFusionRetriever,
    RecursiveRetriever,
    RouterRetriever,
    TransformRetriever,
)
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import IndexNode, NodeWithScore
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.tools import RetrieverTool
from llama_index.core.vector_stores import SimpleVectorStore, VectorStoreQueryResult
from llama_index.core.vector_stores.types import VectorStoreQueryMode
from pydantic import PrivateAttr

from benchmarks.llamaindex.engines import advanced_rag, indexes
from benchmarks.llamaindex.kits import Kit, Sizes, corpus

Make = Any


def vector(kit: Kit) -> BaseRetriever:
    return kit.reports.as_retriever(similarity_top_k=4)


def fused(mode: str, queries: int, **options: Any) -> Make:
    """Return a fusion of two collections with this number of queries."""

    def make(kit: Kit) -> BaseRetriever:
        return QueryFusionRetriever(
            [index.as_retriever(similarity_top_k=4) for index in indexes(kit)],
            llm=kit.llm,
            num_queries=queries,
            mode=mode,  # type: ignore[arg-type]
            similarity_top_k=5,
            callback_manager=kit.manager,
            **options,
        )

    return make


def over(make: Make, **options: Any) -> Make:
    """Return an engine over a retriever."""
    return lambda kit: RetrieverQueryEngine.from_args(make(kit), llm=kit.llm, callback_manager=kit.manager, **options)


def after(*makers: Make) -> Make:
    """Return an engine with these postprocessors."""
    return lambda kit: kit.reports.as_query_engine(similarity_top_k=6, node_postprocessors=[one(kit) for one in makers])


def replaced(kit: Kit) -> BaseQueryEngine:
    """Return an engine that replaces the text of found nodes, as sentence windows do."""
    return kit.reports.as_query_engine(node_postprocessors=[MetadataReplacementPostProcessor("source")])


def routed(kit: Kit) -> BaseRetriever:
    described = zip(indexes(kit), ("The reports.", "The notes."), strict=True)
    tools = [RetrieverTool.from_defaults(index.as_retriever(), description=text) for index, text in described]
    return RouterRetriever(LLMSingleSelector.from_defaults(llm=kit.llm), tools, llm=kit.llm)


def transformed(kit: Kit) -> BaseRetriever:
    return TransformRetriever(vector(kit), HyDEQueryTransform(llm=kit.llm))


def recursive(kit: Kit) -> BaseRetriever:
    """Return a recursive retriever whose nodes lead to another engine."""
    links = [IndexNode(id_="link", text="Everything about terms and reasons", index_id="notes")]
    top = VectorStoreIndex(links, embed_model=kit.embedding, callback_manager=kit.manager)
    return RecursiveRetriever(
        "top",
        retriever_dict={"top": top.as_retriever(similarity_top_k=1)},
        query_engine_dict={"notes": kit.notes.as_query_engine(similarity_top_k=2)},
        callback_manager=kit.manager,
    )


class Worded(SimpleVectorStore):
    """A store of the user's own that knows of words, too: the modes `default`, `mmr` and `hybrid`."""

    _texts: dict[str, set[str]] = PrivateAttr(default_factory=dict)

    def add(self, nodes: Any, **kwargs: Any) -> list[str]:
        self._texts.update({node.node_id: set(node.get_content().split()) for node in nodes})
        return super().add(nodes, **kwargs)

    def query(self, query: Any, **kwargs: Any) -> VectorStoreQueryResult:
        if query.mode != VectorStoreQueryMode.HYBRID:
            return super().query(query, **kwargs)
        near = super().query(replace(query, mode=VectorStoreQueryMode.DEFAULT, similarity_top_k=100), **kwargs)
        query_words, alpha = set(query.query_str.split()), query.alpha or 0.5
        scores = {
            name: alpha * score + (1 - alpha) * len(query_words & self._texts[name]) / len(query_words)
            for name, score in zip(near.ids or [], near.similarities or [], strict=True)
        }
        best = sorted(scores, key=lambda name: (-scores[name], name))[: query.similarity_top_k]
        return VectorStoreQueryResult(ids=best, similarities=[scores[name] for name in best])


def searched(mode: str, **options: Any) -> Make:
    """Return an engine with a mode that only a store of the user's has. The embedding model is the kit's."""

    def make(kit: Kit) -> BaseRetriever:
        context = StorageContext.from_defaults(vector_store=Worded())
        made = VectorStoreIndex(
            corpus(Sizes(10, 30)), storage_context=context, embed_model=kit.embedding, callback_manager=kit.manager
        )
        return made.as_retriever(similarity_top_k=3, vector_store_query_mode=mode, **options)

    return make


class Keywords(BaseRetriever):
    """Somebody's own: by words that question and passage share."""

    def __init__(self, kit: Kit) -> None:
        self._other = kit.notes.as_retriever(similarity_top_k=6)
        super().__init__(callback_manager=kit.manager)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        query_words = set(query_bundle.query_str.split())
        found = self._other.retrieve(query_bundle.query_str)
        return sorted(found, key=lambda node: (-len(query_words & set(node.node.get_content().split())), node.node_id))[
            :3
        ]


def listed(kit: Kit) -> BaseQueryEngine:
    """Return an engine over a summary index, which returns all of its nodes."""
    return SummaryIndex(corpus(Sizes(3, 30))).as_query_engine(
        llm=kit.llm, response_mode="tree_summarize", use_async=True
    )


MODES = ("simple", "reciprocal_rerank", "relative_score", "dist_based_score")
RETRIEVERS: dict[str, Make] = {
    "vector": vector,
    **{f"fusion_{mode}_{n}": fused(mode, n) for mode, n in zip(MODES, (1, 3, 4, 3), strict=True)},
    "transformed": transformed,
    "mmr": searched("mmr", vector_store_kwargs={"mmr_threshold": 0.3}),
    "hybrid": searched("hybrid", alpha=0.3),
}
ENGINES: dict[str, Make] = {
    **{f"over_fusion_{mode}_{n}": over(fused(mode, n)) for mode in MODES for n in (3, 4)},
    "fusion_sync": over(fused("reciprocal_rerank", 3, use_async=False)),
    "fusion_weighted": over(fused("relative_score", 3, retriever_weights=[0.7, 0.3]), response_mode="refine"),
    "fusion_of_fusion": over(
        lambda kit: QueryFusionRetriever(
            [fused("simple", 3)(kit)],
            llm=kit.llm,
            num_queries=2,
            mode="reciprocal_rerank",
            callback_manager=kit.manager,
        )
    ),
    "advanced": advanced_rag,
    "reranked": after(lambda kit: kit.reranker(2)),
    "llm_reranked": after(lambda kit: LLMRerank(llm=kit.llm, choice_batch_size=3, top_n=3)),
    "cut_off": after(lambda kit: SimilarityPostprocessor(similarity_cutoff=0.1)),
    "many_postprocessors": after(
        lambda kit: SimilarityPostprocessor(similarity_cutoff=-1.0),
        lambda kit: LongContextReorder(),
        lambda kit: kit.reranker(4),
    ),
    "replaced": replaced,
    "routed_retriever": over(routed),
    "over_transformed": over(transformed),
    "recursive": over(recursive),
    "own_retriever": over(Keywords),
    "own_retriever_fused": over(
        lambda kit: QueryFusionRetriever(
            [vector(kit), Keywords(kit)], llm=kit.llm, num_queries=3, callback_manager=kit.manager
        )
    ),
    "over_mmr": over(searched("mmr")),
    "over_hybrid": over(searched("hybrid")),
    "fused_modes": over(
        lambda kit: QueryFusionRetriever(
            [searched(mode)(kit) for mode in ("default", "mmr", "hybrid")],
            llm=kit.llm,
            num_queries=3,
            mode=FUSION_MODES.RECIPROCAL_RANK,
            callback_manager=kit.manager,
        )
    ),
    "listed": listed,
}
