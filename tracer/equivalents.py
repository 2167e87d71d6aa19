"""Chains that compute what some retrievers compute. They are planned with, and never run.

The retriever itself runs, unchanged, and finds its work done. So an equivalent need not have its events or its place in
them, only its requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough

from teola_plugin.tracer.lcel_classes import changed, is_pool_backed

Node = Runnable[Any, Any]


class Computed(RunnableLambda[Any, Any]):
    """The framework's own pure code for a step."""


def equivalent(node: object) -> Node | None:
    """A chain with the requests and the value of `node`; None for a class that is not known, or was changed."""
    kind = type(node)
    make = _KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")
    return None if make is None or changed(node, kind) else make(node)


def _multi_query(node: Any) -> Node | None:
    """Queries are written, each is searched, the union is returned."""
    if type(node.llm_chain).__name__ == "LLMChain":  # an object of its own kind, with memory and callbacks
        return None
    found: Node = RunnableParallel(question=RunnablePassthrough()) | node.llm_chain | node.retriever.map()
    if node.include_original:
        both = RunnableParallel(written=found, own=node.retriever)
        found = both | Computed(lambda lists: [*lists["written"], lists["own"]])
    return found | Computed(lambda lists: node.unique_union([document for found in lists for document in found]))


def _ensemble(node: Any) -> Node:
    """All retrievers with the same query; their ranks are fused."""
    found: Node = RunnableParallel({f"ranked{i}": one for i, one in enumerate(node.retrievers)})
    return found | Computed(lambda lists: node.weighted_reciprocal_rank([list(one) for one in lists.values()]))


def _compression(node: Any) -> Node | None:
    """A retriever and a reranker."""
    if not is_pool_backed(node.base_compressor) or not hasattr(node.base_compressor, "as_runnable"):
        return None
    reranker: Node = node.base_compressor.as_runnable()
    found: Node = RunnableParallel(documents=node.base_retriever, query=RunnablePassthrough())
    return found | reranker


_RETRIEVERS = "langchain_classic.retrievers"
_KNOWN: dict[str, Callable[[Any], Node | None]] = {
    f"{_RETRIEVERS}.multi_query.MultiQueryRetriever": _multi_query,
    f"{_RETRIEVERS}.ensemble.EnsembleRetriever": _ensemble,
    f"{_RETRIEVERS}.contextual_compression.ContextualCompressionRetriever": _compression,
}
"""By name: langchain_classic need not be there."""
