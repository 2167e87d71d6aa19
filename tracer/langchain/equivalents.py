"""Chains that compute what some retrievers and older chains compute. They are planned with, and never run.

The object itself runs, unchanged, and finds its work done. So an equivalent need not have its events or its place in
them, only its requests. Classes go by name: langchain_classic need not be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from langchain_core.documents import Document
from langchain_core.runnables import Runnable, RunnableParallel, RunnablePassthrough
from langchain_core.stores import InMemoryByteStore, InMemoryStore

from teola_plugin.shims.langchain import keeps_documents_as_bytes
from teola_plugin.tracer.langchain import equivalent_chains as chains
from teola_plugin.tracer.langchain.classes import changed, is_accelerated, is_pool_backed
from teola_plugin.tracer.langchain.equivalent_compressors import step_of
from teola_plugin.tracer.langchain.equivalent_parts import AsDict, Computed, SequentialEach
from teola_plugin.tracer.symbols import NotUnderstood

__all__ = ["AsDict", "Computed", "SequentialEach", "beginning", "equivalent"]

Node = Runnable[Any, Any]
Make = Callable[[Any], Node | None]


def equivalent(node: object) -> Node | None:
    """A chain with the requests and the value of `node`; None for a class that is not known, or was changed."""
    return _made(node, _WHOLE)


def beginning(node: object) -> Node | None:
    """A chain with the requests that `node` makes first, whatever it does then; None as for `equivalent`."""
    return _made(node, _FIRST)


def asked_per_query(node: Any) -> Node | None:
    """The retriever that a known object asks for each of the queries it writes; None for any other object."""
    return node.retriever if _make(node, _WHOLE) is _multi_query and not _is_llm_chain(node.llm_chain) else None


def _made(node: object, known: Mapping[str, Make]) -> Node | None:
    make = _make(node, known)
    try:
        return None if make is None else make(node)
    except NotUnderstood:
        return None


def _make(node: object, known: Mapping[str, Make]) -> Make | None:
    kind = type(node)
    make = known.get(_full_name(kind))  # type: ignore[arg-type]
    return None if make is None or is_accelerated(node) or changed(node, kind) else make


@lru_cache(maxsize=1024)
def _full_name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_llm_chain(node: object) -> bool:
    """An object of its own kind, with memory and callbacks."""
    return type(node).__name__ == "LLMChain"


def _multi_query(node: Any) -> Node | None:
    """Queries are written, each is searched, the union is returned."""
    if _is_llm_chain(node.llm_chain):
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
    """A retriever, and what is done with its documents."""
    compressed = step_of(node.base_compressor)
    if compressed is None:
        return None
    found: Node = RunnableParallel(documents=node.base_retriever, query=RunnablePassthrough())
    return found | compressed


def _parents(node: Any) -> Node | None:
    """Small pieces are searched; the documents that they are of are looked up where that asks nobody else."""
    found = _children(node)
    return found | Computed(lambda pieces: _looked_up(node, pieces)) if found and _in_memory(node.docstore) else None


def _children(node: Any) -> Node | None:
    if node.search_type.value != "similarity" or not hasattr(node.vectorstore, "as_retriever"):
        return None
    retriever: Node = node.vectorstore.as_retriever(search_kwargs=node.search_kwargs)
    return retriever if is_pool_backed(retriever) else None


def _in_memory(store: Any) -> bool:
    """Also below the encoder that `byte_store=` puts before it."""
    kind = type(store)
    if f"{kind.__module__}.{kind.__qualname__}" == f"{_STORAGE}.encoder_backed.EncoderBackedStore":
        return type(store.store) is InMemoryByteStore and keeps_documents_as_bytes(store)
    return type(store) is InMemoryStore


def _looked_up(node: Any, pieces: list[Document]) -> list[Document]:
    ids = [piece.metadata[node.id_key] for piece in pieces if node.id_key in piece.metadata]
    return [one for one in node.docstore.mget(list(dict.fromkeys(ids))) if one is not None]


_RETRIEVERS = "langchain_classic.retrievers"
_CHAINS = "langchain_classic.chains"
_STORAGE = "langchain_classic.storage"
_PARENTS = (
    f"{_RETRIEVERS}.multi_vector.MultiVectorRetriever",
    f"{_RETRIEVERS}.parent_document_retriever.ParentDocumentRetriever",
)
_WHOLE: dict[str, Make] = {
    f"{_RETRIEVERS}.multi_query.MultiQueryRetriever": _multi_query,
    f"{_RETRIEVERS}.ensemble.EnsembleRetriever": _ensemble,
    f"{_RETRIEVERS}.contextual_compression.ContextualCompressionRetriever": _compression,
    **dict.fromkeys(_PARENTS, _parents),
    f"{_CHAINS}.llm.LLMChain": chains.llm_chain,
    f"{_CHAINS}.combine_documents.stuff.StuffDocumentsChain": chains.stuff,
    f"{_CHAINS}.retrieval_qa.base.RetrievalQA": chains.retrieval_qa,
    "langchain_core.runnables.base.RunnableLambda": chains.stuffing_function,
}
_FIRST: dict[str, Make] = {
    **dict.fromkeys(_PARENTS, _children),
    f"{_CHAINS}.combine_documents.map_reduce.MapReduceDocumentsChain": chains.mapped,
}
