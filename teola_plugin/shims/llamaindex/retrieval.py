"""Retrievers: what they are made of, and their own code before and after a search."""

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

from teola_plugin.shims.llamaindex.copies import clone, unspanned
from teola_plugin.shims.llamaindex.records import Parts, attribute, is_older_than, since

_NO_VECTOR = (0.0,)
"""In place of an embedding where the code that runs does not look at it."""


@dataclass(frozen=True, slots=True)
class RetrieverParts(Parts):
    """Of every retriever."""

    METHODS: ClassVar[tuple[str, ...]] = ("_retrieve", "_handle_recursive_retrieval")


def distinct(retriever: BaseRetriever, query: str, nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    """What the public `retrieve` makes of what `_retrieve` gave: every node once."""
    made: list[NodeWithScore] = clone(retriever)._handle_recursive_retrieval(QueryBundle(query), list(nodes))
    return made


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
    """What it asks its store for; where nothing is said, for any query."""
    embedding = None if vector is None else list(vector)
    return retriever._build_vector_store_query(QueryBundle(query, embedding=embedding))


def nodes_of_result(retriever: VectorIndexRetriever, query: str, result: VectorStoreQueryResult) -> list[NodeWithScore]:
    """What `_retrieve` gives when its store finds this."""
    own = clone(retriever, **VectorIndexRetrieverParts.named(vector_store=_ResultStore(result)))
    made: list[NodeWithScore] = own._get_nodes_with_embeddings(QueryBundle(query, embedding=list(_NO_VECTOR)))
    return made


class _ResultStore:
    """Stands for the vector store of a copy: a search has been made."""

    def __init__(self, result: VectorStoreQueryResult) -> None:
        self._result = result

    def query(self, *_: Any, **__: Any) -> VectorStoreQueryResult:
        return self._result


@dataclass(frozen=True, slots=True)
class SummaryIndexRetrieverParts(RetrieverParts):
    OF: ClassVar = (SummaryIndexRetriever,)

    index: Any = attribute("_index")


def all_nodes(retriever: SummaryIndexRetriever, query: str) -> list[NodeWithScore]:
    """What it retrieves: all that its index has, as it is now."""
    made: list[NodeWithScore] = unspanned(retriever, "_retrieve")(QueryBundle(query))
    return made


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


def written_queries(retriever: QueryFusionRetriever, llm: Any, query: str) -> list[str]:
    """The queries that the LLM writes for one, by its own parsing."""
    own = clone(retriever, **QueryFusionRetrieverParts.named(llm=llm))
    return [one.query_str for one in own._get_queries(query)]


def fused(
    retriever: QueryFusionRetriever, query: str, lists: Mapping[tuple[str, int], Sequence[NodeWithScore]]
) -> list[NodeWithScore]:
    """What it makes of what its retrievers (by number) found for each query, by the mode that it is in.

    Writes scores into the nodes.
    """
    found = {key: list(nodes) for key, nodes in lists.items()}
    known = {"_get_queries": lambda _: [], "_run_sync_queries": lambda _: found}
    made: list[NodeWithScore] = unspanned(clone(retriever, use_async=False, **known), "_retrieve")(QueryBundle(query))
    return made


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
    """Of every postprocessor."""

    METHODS: ClassVar[tuple[str, ...]] = ("_postprocess_nodes",)


def postprocessed(step: BaseNodePostprocessor, nodes: Sequence[NodeWithScore], query: str) -> list[NodeWithScore]:
    """What a step makes of nodes, without events. It may write into them."""
    made: list[NodeWithScore] = unspanned(step, "_postprocess_nodes")(list(nodes), QueryBundle(query))
    return made


@dataclass(frozen=True, slots=True)
class LLMRerankParts(PostprocessorParts):
    OF: ClassVar = (LLMRerank,)
    METHODS: ClassVar = (
        *PostprocessorParts.METHODS,
        *since("0.14.24", "_get_node_batches", "_get_predict_kwargs"),
    )

    llm: Any = attribute("llm")
    choice_select_prompt: BasePromptTemplate = attribute("choice_select_prompt", BasePromptTemplate)
    format_node_batch_fn: Callable[..., Any] = attribute("_format_node_batch_fn")
    parse_choice_select_answer_fn: Callable[..., Any] = attribute("_parse_choice_select_answer_fn")


def batches(step: LLMRerank, nodes: Sequence[NodeWithScore]) -> list[list[BaseNode]]:
    """Return the nodes in groups, from each of which the LLM chooses with one call."""
    if is_older_than("0.14.24"):
        inner, size = [node.node for node in nodes], step.choice_batch_size
        return [inner[start : start + size] for start in range(0, len(inner), size)]
    return step._get_node_batches(list(nodes))


def batch_arguments(step: LLMRerank, batch: Sequence[BaseNode], query: str) -> dict[str, Any]:
    """Return the variables of the prompt for one group of nodes."""
    if is_older_than("0.14.24"):
        return {"context_str": step._format_node_batch_fn(list(batch)), "query_str": query}
    return step._get_predict_kwargs(list(batch), query)
