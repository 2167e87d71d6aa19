"""Retrievers and node postprocessors: their parts, and their code around searches and calls of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.base_selector import BaseSelector
from llama_index.core.indices.list.retrievers import SummaryIndexRetriever
from llama_index.core.indices.query.query_transform.base import BaseQueryTransform
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.retrievers import QueryFusionRetriever, RouterRetriever, TransformRetriever
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle
from llama_index.core.tools.types import ToolMetadata
from llama_index.core.vector_stores.types import (
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)

from teola_plugin.shims.llamaindex.copies import clone, without_spans
from teola_plugin.shims.llamaindex.records import Parts, attribute, is_older_than, methods_since

_NO_VECTOR = (0.0,)
"""A placeholder for an embedding that the code does not read."""


@dataclass(frozen=True, slots=True)
class RetrieverParts(Parts):
    """The parts of every retriever."""

    METHODS: ClassVar[tuple[str, ...]] = ("_retrieve", "_handle_recursive_retrieval")


def deduplicate_nodes(retriever: BaseRetriever, query: str, nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    """Return each node once, as `retrieve` does with the result of `_retrieve`."""
    distinct_nodes: list[NodeWithScore] = clone(retriever)._handle_recursive_retrieval(QueryBundle(query), list(nodes))
    return distinct_nodes


# ------------------------------------------------------------ an index


@dataclass(frozen=True, slots=True)
class VectorIndexRetrieverParts(RetrieverParts):
    OF: ClassVar = (VectorIndexRetriever,)
    METHODS: ClassVar = (
        *RetrieverParts.METHODS,
        "_needs_embedding",
        "_build_vector_store_query",
        "_get_nodes_with_embeddings",
    )

    vector_store: Any = attribute("_vector_store")
    embed_model: Any = attribute("_embed_model")
    docstore: Any = attribute("_docstore")
    similarity_top_k: int = attribute("_similarity_top_k", int)
    vector_store_query_mode: VectorStoreQueryMode = attribute("_vector_store_query_mode", VectorStoreQueryMode)
    filters: MetadataFilters | None = attribute("_filters")
    node_ids: Sequence[str] | None = attribute("_node_ids")
    doc_ids: Sequence[str] | None = attribute("_doc_ids")
    vector_store_kwargs: dict[str, Any] = attribute("_kwargs", dict)


def searches_by_vector(retriever: VectorIndexRetriever) -> bool:
    return retriever._needs_embedding()


def store_query(
    retriever: VectorIndexRetriever, query: str = "", vector: Sequence[float] | None = _NO_VECTOR
) -> VectorStoreQuery:
    """Return the query for the store. By default: for an empty text and a placeholder vector."""
    embedding = None if vector is None else list(vector)
    return retriever._build_vector_store_query(QueryBundle(query, embedding=embedding))


def nodes_of_result(retriever: VectorIndexRetriever, query: str, result: VectorStoreQueryResult) -> list[NodeWithScore]:
    """Return what `_retrieve` returns if its store returns `result`."""
    quiet_retriever = clone(retriever, **VectorIndexRetrieverParts.as_attributes(vector_store=_ResultStore(result)))
    nodes: list[NodeWithScore] = quiet_retriever._get_nodes_with_embeddings(
        QueryBundle(query, embedding=list(_NO_VECTOR))
    )
    return nodes


class _ResultStore:
    """A vector store that returns a known result."""

    def __init__(self, result: VectorStoreQueryResult) -> None:
        self._result = result

    def query(self, *_: Any, **__: Any) -> VectorStoreQueryResult:
        return self._result


@dataclass(frozen=True, slots=True)
class SummaryIndexRetrieverParts(RetrieverParts):
    OF: ClassVar = (SummaryIndexRetriever,)

    index: Any = attribute("_index")


def all_nodes(retriever: SummaryIndexRetriever, query: str) -> list[NodeWithScore]:
    """Return all nodes of the retriever's index, as it is now."""
    nodes: list[NodeWithScore] = without_spans(retriever, "_retrieve")(QueryBundle(query))
    return nodes


# ------------------------------------------------------------ several queries


@dataclass(frozen=True, slots=True)
class QueryFusionRetrieverParts(RetrieverParts):
    OF: ClassVar = (QueryFusionRetriever,)
    METHODS: ClassVar = (*RetrieverParts.METHODS, "_get_queries", "_run_sync_queries")

    retrievers: Sequence[BaseRetriever] = attribute("_retrievers", list, tuple)
    llm: Any = attribute("_llm")
    query_gen_prompt: Any = attribute("query_gen_prompt")
    num_queries: int = attribute("num_queries", int)
    mode: str = attribute("mode", str)
    retriever_weights: Sequence[float] = attribute("_retriever_weights", list, tuple)


def generate_queries(retriever: QueryFusionRetriever, llm: Any, query: str) -> list[str]:
    """Return the queries that the LLM writes for a query, by the retriever's own parsing."""
    quiet_retriever = clone(retriever, **QueryFusionRetrieverParts.as_attributes(llm=llm))
    return [bundle.query_str for bundle in quiet_retriever._get_queries(query)]


def fuse_results(
    retriever: QueryFusionRetriever, query: str, lists: Mapping[tuple[str, int], Sequence[NodeWithScore]]
) -> list[NodeWithScore]:
    """Fuse what the retrievers returned, by the fusion's mode.

    `lists` has the nodes of each pair of a query and a retriever's index.

    Writes scores into the nodes.
    """
    results = {key: list(nodes) for key, nodes in lists.items()}
    replaced_methods = {"_get_queries": lambda _: [], "_run_sync_queries": lambda _: results}
    fused_nodes: list[NodeWithScore] = without_spans(
        clone(retriever, use_async=False, **replaced_methods), "_retrieve"
    )(QueryBundle(query))
    return fused_nodes


@dataclass(frozen=True, slots=True)
class TransformRetrieverParts(RetrieverParts):
    OF: ClassVar = (TransformRetriever,)

    retriever: BaseRetriever = attribute("_retriever", BaseRetriever)
    query_transform: BaseQueryTransform = attribute("_query_transform", BaseQueryTransform)
    transform_metadata: dict[str, Any] | None = attribute("_transform_metadata", dict, NoneType)


@dataclass(frozen=True, slots=True)
class RouterRetrieverParts(RetrieverParts):
    OF: ClassVar = (RouterRetriever,)

    selector: BaseSelector = attribute("_selector", BaseSelector)
    retrievers: Sequence[BaseRetriever] = attribute("_retrievers", list, tuple)
    metadatas: Sequence[ToolMetadata] = attribute("_metadatas", list, tuple)


# ------------------------------------------------------------ node postprocessors


@dataclass(frozen=True, slots=True)
class PostprocessorParts(Parts):
    """The parts of every postprocessor."""

    METHODS: ClassVar[tuple[str, ...]] = ("_postprocess_nodes",)


def postprocess(step: BaseNodePostprocessor, nodes: Sequence[NodeWithScore], query: str) -> list[NodeWithScore]:
    """Run a postprocessor without events. It may write into the nodes.

    Whoever needs the nodes unchanged passes copies. The list itself is copied here. Raises what the postprocessor
    raises.
    """
    processed: list[NodeWithScore] = without_spans(step, "_postprocess_nodes")(list(nodes), QueryBundle(query))
    return processed


@dataclass(frozen=True, slots=True)
class LLMRerankParts(PostprocessorParts):
    OF: ClassVar = (LLMRerank,)
    METHODS: ClassVar = (
        *PostprocessorParts.METHODS,
        *methods_since("0.14.24", "_get_node_batches", "_get_predict_kwargs"),
    )

    llm: Any = attribute("llm")
    choice_select_prompt: BasePromptTemplate = attribute("choice_select_prompt", BasePromptTemplate)
    format_node_batch_fn: Callable[..., Any] = attribute("_format_node_batch_fn")
    parse_choice_select_answer_fn: Callable[..., Any] = attribute("_parse_choice_select_answer_fn")


def batches(step: LLMRerank, nodes: Sequence[NodeWithScore]) -> list[list[BaseNode]]:
    """Return the nodes in groups, from each of which the LLM chooses with one call.

    llama-index-core has a method for this since 0.14.24; for older ones, groups of `choice_batch_size` are cut here.
    """
    if is_older_than("0.14.24"):
        inner, size = [node.node for node in nodes], step.choice_batch_size
        return [inner[start : start + size] for start in range(0, len(inner), size)]
    return step._get_node_batches(list(nodes))


def batch_arguments(step: LLMRerank, batch: Sequence[BaseNode], query: str) -> dict[str, Any]:
    """Return the variables of the prompt for one group of nodes.

    llama-index-core has a method for this since 0.14.24.
    """
    if is_older_than("0.14.24"):
        return {"context_str": step._format_node_batch_fn(list(batch)), "query_str": query}
    return step._get_predict_kwargs(list(batch), query)
