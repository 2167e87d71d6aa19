"""Retrievers over stores of the user's own, whose queries an engine embeds. The stores themselves stay as they are.

Embedding and searching come apart only for classes whose search is known to be the one, then the other; each has a
test of equality.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore, VectorStoreRetriever

from teola_plugin.adapters.calls import joined, to_list
from teola_plugin.adapters.langchain.current_query import ConfigScoped, call_context
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.vectorstore import TeolaRetriever, TeolaVectorStore
from teola_plugin.errors import RegistrationError
from teola_plugin.graph import LeftToPlain
from teola_plugin.tracer.langchain.classes import find_override, store_resource
from teola_plugin.tracer.leaf import StoreLeaf

_SEARCHES = {
    "similarity": "similarity_search_by_vector",
    "mmr": "max_marginal_relevance_search_by_vector",
}
"""Search type -> the method to which the store's own search hands the vector of the query."""
SMALL = 500
"""Documents that are searched in a few milliseconds: an early search holds up the loop of the engines."""
_LAZY = (
    ("langchain_community.vectorstores.faiss", "FAISS"),
    ("langchain_chroma.vectorstores", "Chroma"),
    ("langchain_qdrant.qdrant", "QdrantVectorStore"),
)
"""More stores that split: where the class is. Looked up only when somebody has imported them."""


def _splits(store: VectorStore, search_type: str) -> bool:
    lazy = (getattr(sys.modules.get(module), name, None) for module, name in _LAZY)
    splitting_classes = [InMemoryVectorStore, *(cls for cls in lazy if cls is not None)]
    # Of Qdrant only: a search by sparse vectors is another one.
    dense = getattr(getattr(store, "retrieval_mode", None), "value", "dense") == "dense"
    if search_type not in _SEARCHES or not dense:
        return False
    return any(isinstance(store, cls) and not find_override(store, cls) for cls in splitting_classes)


def retriever_on(node: VectorStoreRetriever, embeddings: TeolaEmbeddings) -> VectorStoreRetriever:
    """Return the retriever, with its queries embedded by an engine.

    Raises `RegistrationError` where that may differ.
    """
    store = node.vectorstore
    if isinstance(node, TeolaRetriever) and isinstance(store, TeolaVectorStore):
        return node.model_copy(update={"vectorstore": store_on(store, embeddings)})
    if find_override(node, VectorStoreRetriever):
        raise _cannot_bind(f"a {type(node).__name__}")
    if not _splits(store, node.search_type):
        raise _cannot_bind(f"a search of type {node.search_type!r} in a {type(store).__name__}")
    kind = InMemoryRetriever if type(store) is InMemoryVectorStore else PoolEmbeddedRetriever
    retriever = kind(**{name: getattr(node, name) for name in VectorStoreRetriever.model_fields})
    retriever.name = node.get_name()
    retriever._embeddings = embeddings
    return retriever


def store_on(store: VectorStore, embeddings: TeolaEmbeddings) -> VectorStore:
    """Return a store that others search, its embeddings on an engine. Only ours, which keeps no data in its object."""
    if not isinstance(store, TeolaVectorStore):
        raise _cannot_bind(f"a {type(store).__name__} that is searched by something else than its own retriever")
    copied = copy.copy(store)
    copied.embed_with(embeddings)
    return copied


def _cannot_bind(where: str) -> RegistrationError:
    return RegistrationError(
        f"embeddings cannot be bound inside {where}, which is not known to embed and then search by vector.",
        hint="leave them unbound, or use FAISS, Chroma, Qdrant, InMemoryVectorStore or TeolaVectorStore(pool=pool)",
    )


class PoolEmbeddedRetriever(ConfigScoped, VectorStoreRetriever):
    """A retriever over the user's own store whose queries are embedded by an engine of the pool."""

    __teola_embeds_on_engine__: ClassVar[bool] = True
    _embeddings: Any = None

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        with joined(*call_context(self._embeddings.pool, run_manager)):
            vector = self._embeddings.embed_query(query)
        search = getattr(self.vectorstore, _SEARCHES[self.search_type])
        return search(vector, **(self.search_kwargs | kwargs))  # type: ignore[no-any-return]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        with joined(*call_context(self._embeddings.pool, run_manager)):
            vector = await self._embeddings.aembed_query(query)
        arguments = {**self.search_kwargs, **kwargs}
        if self.search_type == "mmr" and isinstance(self.vectorstore, InMemoryVectorStore):
            return self.vectorstore.max_marginal_relevance_search_by_vector(
                vector, **arguments
            )  # as its own async search
        search = getattr(self.vectorstore, f"a{_SEARCHES[self.search_type]}")
        return await search(vector, **arguments)  # type: ignore[no-any-return]

    def _get_ls_params(self, **kwargs: Any) -> Any:
        """Return the tracing parameters of the retriever that it stands for."""
        return {**super()._get_ls_params(**kwargs), "ls_retriever_name": "vectorstore"}


class InMemoryRetriever(PoolEmbeddedRetriever):
    """The same over an `InMemoryVectorStore`, small enough to be searched twice: ahead, and in its place."""

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> StoreLeaf:
        store, embeddings, arguments = self.vectorstore, self._embeddings, {**self.search_kwargs, **kwargs}
        assert isinstance(store, InMemoryVectorStore)
        search = getattr(store, _SEARCHES[self.search_type])

        def prefetched_search(vector: Any) -> Any:
            if len(store.store) > SMALL:
                raise LeftToPlain("the store is too large to be searched twice; a TeolaVectorStore is searched once")
            return search(to_list(vector), **arguments)

        embedded_text = getattr(embeddings, "sent", str)
        return StoreLeaf(embeddings.engine, embedded_text, prefetched_search, store_resource(store))
