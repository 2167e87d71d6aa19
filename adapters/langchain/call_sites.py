"""Call sites: the user's own models and retrievers in chains and functions, and which of them may be prefetched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from langchain_core.embeddings import Embeddings
from langchain_core.language_models import LLM, BaseChatModel, BaseLLM, FakeListLLM
from langchain_core.language_models.fake_chat_models import (
    FakeListChatModel,
    FakeMessagesListChatModel,
    GenericFakeChatModel,
)
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    Runnable,
    RunnableBinding,
    RunnableConfig,
    RunnableLambda,
    RunnableSequence,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableEach
from langchain_core.runnables.config import merge_configs
from langchain_core.runnables.retry import RunnableRetry
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from teola_plugin.adapters.langchain.composites import Node, parts
from teola_plugin.adapters.langchain.prefetching import CallSite
from teola_plugin.adapters.plan_report import Explanation, Reason
from teola_plugin.adapters.provider_executor import ProviderRequest
from teola_plugin.adapters.thread_safety import HTTP_CLIENTS, NOBODY, STORES, ThreadSafety
from teola_plugin.runtime.call_limits import ConcurrencyLimit, limit_of
from teola_plugin.shims.langchain import handlers_in, listens_to_ends, streams
from teola_plugin.tracer.functions import function_reader
from teola_plugin.tracer.functions.frames import to_plain_function
from teola_plugin.tracer.functions.lookup import is_recording
from teola_plugin.tracer.langchain.classes import ProviderMethod, is_pool_backed, is_search, provider_of
from teola_plugin.tracer.langchain.equivalents import retriever_per_query
from teola_plugin.tracer.langchain.trace import ReadFunction
from teola_plugin.tracer.leaf import PERMISSION, WrappedLeaf, search_effect
from teola_plugin.tracer.source import source_of

_STATEFUL = (FakeListChatModel, FakeMessagesListChatModel, GenericFakeChatModel, FakeListLLM)
"""Fakes of the framework that answer by the order of their calls."""


_ASYNC: tuple[tuple[type, str], ...] = (
    (BaseRetriever, "_aget_relevant_documents"),
    (LLM, "_acall"),
    (BaseLLM, "_agenerate"),
    (BaseChatModel, "_agenerate"),
    (Embeddings, "aembed_query"),
    (VectorStore, "asimilarity_search"),
)
"""The method by which a class says that it has async code of its own."""


def sites_of(chain: Node, *, mapped: bool, threads: ThreadSafety = NOBODY) -> dict[str, CallSite]:
    """Return the user's own models and retrievers in a chain, by path.

    `mapped`: also those that are called once for each item of a list. `threads`: what takes several calls at once.
    """
    return dict(SiteCollector(mapped, threads).sites(chain, "chain", {}, {}))


class SiteCollector:
    def __init__(
        self, mapped: bool, threads: ThreadSafety, left: dict[str, tuple[str, Explanation]] | None = None
    ) -> None:
        """`left`: takes the models and retrievers that may not be prefetched, by path, with the reason."""
        self._mapped, self._threads, self._left = mapped, threads, {} if left is None else left

    def sites(
        self, node: Node, path: str, kwargs: Mapping[str, Any], config: RunnableConfig, *, is_mapped: bool = False
    ) -> Iterator[tuple[str, CallSite]]:
        """`is_mapped`: it stands inside of a `.map()`."""
        if isinstance(node, (BaseChatModel, BaseLLM, BaseRetriever, ProviderMethod)):
            yield from self._leaf(node, path, kwargs, config, is_mapped)
        elif isinstance(node, RunnableBinding) or type(node) is RunnableRetry:
            is_late = not all(map(listens_to_ends, node.config_factories))  # what they make is known only in the call
            is_bounded = self._mapped and "max_concurrency" in node.config
            if not (is_late or is_bounded or streams(handlers_in(node.config.get("callbacks")))):
                callbacks_apart: Any = {k: v for k, v in node.config.items() if k != "callbacks"}
                inner = merge_configs(callbacks_apart, config)
                yield from self.sites(
                    node.bound, f"{path}.bound", {**node.kwargs, **kwargs}, inner, is_mapped=is_mapped
                )
        elif type(node) is RunnableWithFallbacks:  # the first is called in any case
            yield from self.sites(node.runnable, f"{path}.runnables[0]", kwargs, config, is_mapped=is_mapped)
        elif isinstance(node, RunnableLambda):
            function, _ = to_plain_function(getattr(node, "func", None) or node.afunc, ())
            if function is not None and source_of(function.__code__) is None:
                self._left[path] = function.__name__, Explanation(Reason.NO_SOURCE, (function.__name__,))
        elif self._mapped or type(node) is not RunnableEach:
            maps = type(node) is RunnableEach
            below: Any = {k: v for k, v in config.items() if k not in ("run_name", "run_id")}
            for i, (where, part) in enumerate(parts(node)):
                first = maps or (isinstance(node, RunnableSequence) and i == 0)
                yield from self.sites(part, path + where, kwargs if first else {}, below, is_mapped=is_mapped or maps)

    def _leaf(
        self, node: Any, path: str, kwargs: Mapping[str, Any], config: RunnableConfig, is_mapped: bool
    ) -> Iterator[tuple[str, CallSite]]:
        """Yield the call site of one model or retriever, unless it is pool-backed.

        If it must not be prefetched, the reason is noted instead. A multi-query retriever may yield one more site: for
        the retriever that it calls for each query.
        """
        explanation, class_name = reason_against(node), type(provider_of(node)).__name__
        if explanation is None and is_mapped and not batches_by_calls(node):
            explanation = Explanation(Reason.OWN_BATCHES, (class_name,))
        parts = (provider_of(node), _embeddings_of(node)) if isinstance(node, ProviderMethod) else (node,)
        is_on_pool = any(map(is_pool_backed, parts))
        if explanation is not None and not is_on_pool:
            self._left[path] = class_name, explanation
        elif not is_on_pool:
            yield path, CallSite(path, node, dict(kwargs), config, self._limit(node), mapped=is_mapped)
        retriever = retriever_per_query(node) if self._mapped and not kwargs else None
        if retriever is not None and eligible(retriever):
            where = f"{path}.retriever"
            yield where, CallSite(where, retriever, {}, config, self._limit(retriever), mapped=True, within=path)

    def _limit(self, node: Node) -> ConcurrencyLimit | None:
        provider: Any = provider_of(node)
        store = provider if isinstance(provider, VectorStore) else getattr(node, "vectorstore", None)
        is_safe = self._threads.allows(provider, HTTP_CLIENTS) or self._threads.is_named(store)
        if (type(node) is VectorStoreRetriever or store is provider) and self._threads.allows(store, STORES):
            calls_users_code = any(map(callable, getattr(node, "search_kwargs", {}).values()))
            is_safe |= self._threads.allows(_embeddings_of(node), HTTP_CLIENTS) and not calls_users_code
        return None if is_safe or concurrent(node) else limit_of(provider)


_FORMS: Mapping[bool | None, Literal["sync", "async", "either"]] = {True: "async", False: "sync", None: "either"}


class CodeSites:
    """The calls of the user's own models and retrievers that functions make, as far as their source shows them."""

    def __init__(self, threads: ThreadSafety = NOBODY) -> None:
        """`threads`: what the user said to take several calls at once."""
        self.sites: dict[str, CallSite] = {}
        """By key. It grows as sources are read, on any thread."""
        self.left: dict[str, tuple[str, Explanation]] = {}
        """Models and retrievers that may not be prefetched, by path: their class, and the reason."""
        self._threads = threads

    @property
    def read_function(self) -> ReadFunction | None:
        """Read functions in chains; None where nobody watches the data that a plan made of their source relies on."""
        return function_reader(self.find_leaves) if is_recording() else None

    def find_leaves(
        self,
        runnable: Runnable[Any, Any],
        location: str,
        kwargs: Mapping[str, Any],
        is_async: bool | None,
        on_loop: bool | None = None,
    ) -> Callable[[Node, Mapping[str, Any], str], WrappedLeaf | None]:
        """Record the call sites in a Runnable that a function calls. See `FindLeaves` and `CallSite.on_loop`."""
        collector = SiteCollector(True, self._threads, self.left)
        sites_by_path: dict[str, CallSite] = {}
        for path, site in collector.sites(runnable, location, kwargs, {}):
            sites_by_path[path] = self._add(replace(site, in_code=_FORMS[is_async], on_loop=on_loop))
        return lambda node, bound, path: prefetchable_at(sites_by_path, node, bound, path, True)

    def _add(self, site: CallSite) -> CallSite:
        """Return the site with a key of its own, or an equal one that was recorded before."""
        key, number = site.key, 1
        while (recorded := self.sites.get(key)) is not None:
            forms = [(one.in_code, one.on_loop, one.kwargs) for one in (recorded, site)]
            if recorded.target is site.target and forms[0] == forms[1]:
                return recorded
            number += 1
            key = f"{site.key}#{number}"
        counts = self.sites.get(site.key, site).counts  # a model that a function makes is a new one each time
        return self.sites.setdefault(key, replace(site, key=key, counts=counts))


def eligible(node: Any) -> bool:
    """Return True if a model or retriever of the user's own may be prefetched."""
    return not is_pool_backed(node) and reason_against(node) is None


def reason_against(node: Any) -> Explanation | None:
    """Return why calls of a model or retriever may not be prefetched; None if they may.

    What stands above the provider methods is the framework's code, and no rate limiter, which would count a call twice.
    """
    cache = "document_embedding_store" if getattr(node, "method", "") == "embed_documents" else "query_embedding_store"
    embeddings, node = _embeddings_of(node), provider_of(node)
    names = (type(node).__name__,)
    if getattr(node, "rate_limiter", None) is not None:
        return Explanation(Reason.RATE_LIMITER, names)
    if getattr(embeddings, cache, None) is not None:  # of `CacheBackedEmbeddings`: it may answer an equal call
        return Explanation(Reason.CACHE, names)
    if not may_be_prefetched(node):
        is_ordered = isinstance(node, _STATEFUL)
        reason = Reason.ORDER if is_ordered else Reason.CACHE if getattr(node, "cache", None) else Reason.HANDLERS
        return Explanation(Reason.OWN_METHODS if _ABOVE_SEAM & vars(node).keys() else reason, names)
    cls: Any = type(node)
    return None if is_the_frameworks_above(cls) else Explanation(Reason.OWN_METHODS, names)


def _embeddings_of(node: Any) -> Any:
    """Return the embeddings that a search embeds its query with, or that are called themselves; None for models."""
    provider = provider_of(node)
    store = provider if isinstance(provider, VectorStore) else getattr(provider, "vectorstore", None)
    return provider if isinstance(provider, Embeddings) else getattr(store, "embeddings", None)


def may_be_prefetched(node: Any) -> bool:
    """Return True for an object without handlers, printing or a cache of its own, whose calls depend on no order."""
    if isinstance(node, _STATEFUL) or _ABOVE_SEAM & vars(node).keys():
        return False
    return not any(getattr(node, name, None) for name in ("callbacks", "verbose", "cache"))


_ABOVE_SEAM = frozenset(("invoke", "ainvoke", "stream", "astream", "generate", "agenerate", "generate_prompt"))


@lru_cache(maxsize=512)
def is_the_frameworks_above(cls: type) -> bool:
    """Return True unless code of the user's own runs above the provider methods: a prefetch would run it once more."""
    methods = (getattr(cls, name, None) for name in _ABOVE_SEAM)
    frameworks = ("langchain", "teola_plugin.")
    return all(str(getattr(one, "__module__", "langchain")).startswith(frameworks) for one in methods)


def batches_by_calls(node: Node) -> bool:
    """Return True if a batch makes one call for each input, as is usual."""
    return type(node).batch is Runnable.batch and type(node).abatch is Runnable.abatch


def concurrent(node: Any) -> bool:
    """Return True for an object with async code of its own, which is made for several calls at once."""
    provider = provider_of(node)
    if any(_is_overridden(type(provider), name) for base, name in _ASYNC if isinstance(provider, base)):
        return True
    return isinstance(node, VectorStoreRetriever) and concurrent(node.vectorstore)


def take_as_long(one: Any, other: Any) -> bool:
    """Return True for two equal objects that wait for others to do the work: their calls last as long, side by side."""
    store = getattr(one, "vectorstore", None)
    waits = concurrent(one) or _is_overridden(type(getattr(store, "embeddings", None)), "aembed_query")
    return waits and _equal(one, other)


def _equal(one: Any, other: Any) -> bool:
    """Return True if two objects are equal and of one class; False if they cannot be compared."""
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except Exception:  # objects that cannot be compared are not known to be the same
        return False


def _is_overridden(cls: type[Any], name: str) -> bool:
    """Return True if a class has a method from elsewhere than the framework."""
    return not str(getattr(getattr(cls, name, None), "__module__", "langchain_core")).startswith("langchain_core")


def prefetchable_at(
    sites_by_path: Mapping[str, CallSite], node: Node, kwargs: Mapping[str, Any], path: str, careful: bool
) -> WrappedLeaf | None:
    """Return the request by which the graph prefetches a model or retriever at its place in a chain.

    None if no call site is known there, or the call has other arguments than the site. With `careful`, a model's call
    has the effect `PERMISSION`, by which order edges may keep it in its place.
    """
    site = sites_by_path.get(path)
    if site is None:  # of an object that is planned with an equivalent chain, which has paths of its own
        hidden = (
            s for s in sites_by_path.values() if s.within and path.startswith(f"{s.within}.") and s.target is node
        )
        site = next(hidden, None)
    if site is None or site.target is not node or dict(kwargs) != site.kwargs:
        return None
    key = site.key
    if is_search(node):
        effect = search_effect(provider_of(node))
        return WrappedLeaf(key, "retrieval", lambda value: ProviderRequest(key, value), (effect,))
    effects = (PERMISSION,) if careful else ()
    kind: Any = "embedding" if isinstance(node, ProviderMethod) else "generation"
    return WrappedLeaf(key, kind, lambda value: ProviderRequest(key, value), effects)
