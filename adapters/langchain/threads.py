"""Which parts of a chain may be called on several threads at once: all that they call is known to bear it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import VectorStoreRetriever

from teola_plugin.adapters.langchain import composites
from teola_plugin.adapters.langchain.prefetch_plan import eligible, is_lowered, may_be_prefetched, sites_of
from teola_plugin.adapters.langchain.vectorstore import TeolaRetriever, TeolaVectorStore
from teola_plugin.adapters.thread_safety import HTTP_CLIENTS, STORES, ThreadSafety
from teola_plugin.tracer.langchain.classes import find_override, find_pool_backed, is_pool_backed, leaf_of
from teola_plugin.tracer.leaf import GenerationLeaf, RerankingLeaf, RetrievalLeaf, TextSearchLeaf


@dataclass(frozen=True, slots=True)
class Threads:
    """A rule for parts of chains, by what is known of single objects."""

    safety: ThreadSafety

    def allow(self, part: Any) -> bool:
        """Return True if several threads may call the part at once. Runs no user code.

        Not what has handlers of its own, or prints: who hears of a call must not hear of it early. What asks engines of
        a pool may, unless it writes: the graph makes its requests ahead only where it knows the composite.
        """
        if isinstance(part, BaseRetriever):
            return self._retriever(part)
        if isinstance(part, BaseLanguageModel):
            return self.model(part)
        return isinstance(part, Runnable) and self._chain(part)

    def model(self, node: Any) -> bool:
        if is_pool_backed(node):
            return may_be_prefetched(node) and isinstance(leaf_of(node, {}), GenerationLeaf)
        return eligible(node) and self.safety.allows(node, HTTP_CLIENTS)

    def embeddings(self, node: Any) -> bool:
        return is_pool_backed(node) or self.safety.allows(node, HTTP_CLIENTS)

    def _retriever(self, node: Any) -> bool:
        if not may_be_prefetched(node):
            return False
        if self.safety.told_of(node):
            return True
        if type(node) is VectorStoreRetriever:
            return self._store(node.vectorstore)
        if getattr(type(node), "__teola_embeds_on_engine__", False):  # and searches its store by vector
            return self.safety.told_of(node.vectorstore) or self.safety.allows(node.vectorstore, STORES)
        if is_pool_backed(node):
            return self._searches_engines(node)
        parts = composites.parts_of(node)
        return bool(parts) and all(self._part(one) for one in parts)

    def _searches_engines(self, node: Any) -> bool:
        if isinstance(leaf_of(node, {}), RetrievalLeaf | TextSearchLeaf):
            return True
        store = getattr(node, "vectorstore", None)
        is_plain = isinstance(node, TeolaRetriever) and not find_override(node, TeolaRetriever)
        return is_plain and type(store) is TeolaVectorStore and self.embeddings(store.embeddings)

    def unnamed(self, part: Any) -> tuple[Any, ...]:
        """Return what `concurrent=` would have to name for `allow(part)`; nothing where it holds already, or cannot."""
        blocking = () if self.allow(part) else tuple(self._blocking(part))
        return blocking if blocking and Threads(ThreadSafety((*self.safety.told, *blocking))).allow(part) else ()

    def _blocking(self, part: Any) -> Iterator[Any]:
        if isinstance(part, VectorStoreRetriever) and self.safety.allows(part.vectorstore, STORES):
            yield part.vectorstore.embeddings
        elif isinstance(part, VectorStoreRetriever):
            yield part.vectorstore
        elif below := composites.parts_of(part):
            yield from (one for child in below if not self._part(child) for one in self._blocking(child))
        elif isinstance(part, Runnable) and not isinstance(part, BaseRetriever | BaseLanguageModel):
            leaves = (site.target for site in sites_of(part, mapped=True).values())
            yield from (one for leaf in leaves if not self.allow(leaf) for one in self._blocking(leaf))
        else:
            yield part

    def _store(self, store: Any) -> bool:
        return self.safety.told_of(store) or (
            self.safety.allows(store, STORES) and self.embeddings(getattr(store, "embeddings", None))
        )

    def _part(self, part: Any) -> bool:
        """Return True for a part of a retriever that threads may share: a retriever, a chain, or a compressor."""
        if isinstance(part, Runnable):
            return self.allow(part)
        if isinstance(leaf_of(part, {}), RerankingLeaf):
            return True
        parts = composites.parts_of(part)
        return self.safety.told_of(part) or (bool(parts) and all(self._part(one) for one in parts))

    def _chain(self, node: Any) -> bool:
        """Return True for a chain that is understood as a whole, so that no user code in it might do anything."""
        own_objects = (site.target for site in sites_of(node, mapped=True).values())
        leaves = [*own_objects, *(one for _, one in find_pool_backed(node, ""))]
        if not leaves:
            return False
        return all(self._leaf(leaf) for leaf in leaves) and is_lowered(node, mapped=True)

    def _leaf(self, node: Any) -> bool:
        if isinstance(node, BaseRetriever | BaseLanguageModel):
            return self.allow(node)
        return isinstance(leaf_of(node, {}), RerankingLeaf)
