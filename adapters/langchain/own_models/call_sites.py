"""Where the user's own models and retrievers stand in a chain, and which of them may be called ahead of their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from langchain_core.language_models import LLM, BaseChatModel, BaseLLM, FakeListLLM
from langchain_core.language_models.fake_chat_models import (
    FakeListChatModel,
    FakeMessagesListChatModel,
    GenericFakeChatModel,
)
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableBinding, RunnableConfig, RunnableSequence
from langchain_core.runnables.base import RunnableEach
from langchain_core.runnables.config import merge_configs
from langchain_core.vectorstores import VectorStoreRetriever

from teola_plugin.adapters.langchain.own_models.composites import Node, parts
from teola_plugin.adapters.langchain.prefetching import CallSite
from teola_plugin.adapters.thread_safety import NOBODY, ThreadSafety
from teola_plugin.runtime.call_limits import ConcurrencyLimit, limit_of
from teola_plugin.shims.langchain import handlers_in, streams
from teola_plugin.tracer.langchain.classes import is_pool_backed
from teola_plugin.tracer.langchain.equivalents import asked_per_query

_STATEFUL = (FakeListChatModel, FakeMessagesListChatModel, GenericFakeChatModel, FakeListLLM)
"""Fakes of the framework that answer by the order of their calls."""


_ASYNC: tuple[tuple[type, str], ...] = (
    (BaseRetriever, "_aget_relevant_documents"),
    (LLM, "_acall"),
    (BaseLLM, "_agenerate"),
    (BaseChatModel, "_agenerate"),
)
"""The method by which a class says that it has async code of its own."""


def sites_of(chain: Node, *, mapped: bool, threads: ThreadSafety = NOBODY) -> dict[str, CallSite]:
    """The user's own leaves, by path. `mapped`: those, too, that are called once for each item of a list.

    `threads`: what the user said to take several calls at once.
    """
    return dict(_Walk(mapped, threads).sites(chain, "chain", {}, {}))


class _Walk:
    def __init__(self, mapped: bool, threads: ThreadSafety) -> None:
        self._mapped, self._threads = mapped, threads

    def sites(
        self, node: Node, path: str, kwargs: Mapping[str, Any], config: RunnableConfig, *, each: bool = False
    ) -> Iterator[tuple[str, CallSite]]:
        """`each`: it stands inside of a `.map()`."""
        if isinstance(node, (BaseChatModel, BaseLLM, BaseRetriever)):
            yield from self._leaf(node, path, kwargs, config, each)
        elif isinstance(node, RunnableBinding):
            is_late = bool(node.config_factories)  # what they make is known only when the plain call is made
            if not (is_late or streams(handlers_in(node.config.get("callbacks")))):
                callbacks_apart: Any = {k: v for k, v in node.config.items() if k != "callbacks"}
                inner = merge_configs(callbacks_apart, config)
                yield from self.sites(node.bound, f"{path}.bound", {**node.kwargs, **kwargs}, inner, each=each)
        elif self._mapped or type(node) is not RunnableEach:
            maps = type(node) is RunnableEach
            below: Any = {k: v for k, v in config.items() if k not in ("run_name", "run_id")}
            for i, (where, part) in enumerate(parts(node)):
                first = maps or (isinstance(node, RunnableSequence) and i == 0)
                yield from self.sites(part, path + where, kwargs if first else {}, below, each=each or maps)

    def _leaf(
        self, node: Any, path: str, kwargs: Mapping[str, Any], config: RunnableConfig, each: bool
    ) -> Iterator[tuple[str, CallSite]]:
        if eligible(node) and not (each and not batches_by_calls(node)):
            yield path, CallSite(path, node, dict(kwargs), config, self._limit(node), mapped=each)
        asked = asked_per_query(node) if self._mapped and not kwargs else None
        if asked is not None and eligible(asked):
            where = f"{path}.retriever"
            yield where, CallSite(where, asked, {}, config, self._limit(asked), mapped=True, within=path)

    def _limit(self, node: Node) -> ConcurrencyLimit | None:
        said = self._threads.told_of(node) or self._threads.told_of(getattr(node, "vectorstore", None))
        return None if said or concurrent(node) else limit_of(node)


def eligible(node: Any) -> bool:
    """Return True if a model or retriever of the user's own may be prefetched.

    What stands above the provider methods is the framework's code, and no rate limiter, which would count a call twice.
    """
    if is_pool_backed(node) or getattr(node, "rate_limiter", None) is not None:
        return False
    cls: Any = type(node)
    return may_be_early(node) and is_the_frameworks_above(cls)


def may_be_early(node: Any) -> bool:
    """Return True for an object without handlers, printing or a cache of its own, whose calls depend on no order."""
    if isinstance(node, _STATEFUL) or _ABOVE_SEAM & vars(node).keys():
        return False
    return not any(getattr(node, name, None) for name in ("callbacks", "verbose", "cache"))


_ABOVE_SEAM = frozenset(("invoke", "ainvoke", "stream", "astream", "generate", "agenerate", "generate_prompt"))


@lru_cache(maxsize=512)
def is_the_frameworks_above(cls: type) -> bool:
    """Return True unless code of the user's own runs above the provider methods: a prefetch would run it once more."""
    methods = (getattr(cls, name, None) for name in _ABOVE_SEAM)
    return all(str(getattr(one, "__module__", "langchain")).startswith("langchain") for one in methods)


def batches_by_calls(node: Node) -> bool:
    """Whether a batch makes one call an input, as is usual."""
    return type(node).batch is Runnable.batch and type(node).abatch is Runnable.abatch


def concurrent(node: Any) -> bool:
    """Whether it has async code of its own, so that several calls at once are what it was made for."""
    if any(_own(type(node), name) for base, name in _ASYNC if isinstance(node, base)):
        return True
    return isinstance(node, VectorStoreRetriever) and _own(type(node.vectorstore), "asimilarity_search")


def take_as_long(one: Any, other: Any) -> bool:
    """Whether calls of the two last as long, side by side, too: equal ones that wait for others to do the work."""
    store = getattr(one, "vectorstore", None)
    waits = concurrent(one) or _own(type(getattr(store, "embeddings", None)), "aembed_query")
    return waits and _equal(one, other)


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except Exception:  # objects that cannot be compared are not known to be the same
        return False


def _own(cls: type[Any], name: str) -> bool:
    """Whether a class has the method from elsewhere than the framework."""
    return not str(getattr(getattr(cls, name, None), "__module__", "langchain_core")).startswith("langchain_core")
