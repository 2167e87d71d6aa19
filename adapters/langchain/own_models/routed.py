"""The routed copy of a chain: the user's own leaves, each behind a `ClaimingLeaf`, so that a call made ahead is found.

Only the composites around such leaves are rebuilt, field by field; the user's objects are neither changed nor copied.
A call is made ahead only if the plain object is certain to make it. Two exceptions: when an earlier step fails, an
independent later call may have been made already; and user code that changes its input in place may leave a call that
was made for the input as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.language_models import LLM, BaseChatModel, BaseLLM, FakeListLLM
from langchain_core.language_models.fake_chat_models import (
    FakeListChatModel,
    FakeMessagesListChatModel,
    GenericFakeChatModel,
)
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    Runnable,
    RunnableAssign,
    RunnableBinding,
    RunnableConfig,
    RunnableParallel,
    RunnableSequence,
)
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import merge_configs
from langchain_core.vectorstores import VectorStoreRetriever
from pydantic import PrivateAttr

from teola_plugin.adapters.langchain.active import runs_in
from teola_plugin.adapters.langchain.own_models.gates import Gate, gate_of
from teola_plugin.adapters.langchain.own_models.leaf_calls import Site, same
from teola_plugin.adapters.langchain.own_models.places import AsyncPlace, Place, SyncPlace, open_places
from teola_plugin.adapters.langchain.own_models.replay import may_be_kept_back
from teola_plugin.adapters.langchain.own_models.wrapped import WRAPPED, CallLeaf, gained, shared_pool
from teola_plugin.errors import TeolaError
from teola_plugin.graph import Effect
from teola_plugin.passes import Pass
from teola_plugin.pool import EnginePool
from teola_plugin.tracer.draft import Traced
from teola_plugin.tracer.lcel import trace
from teola_plugin.tracer.lcel_classes import is_pool_backed
from teola_plugin.tracer.leaf import WrappedLeaf

Node = Runnable[Any, Any]
_STATEFUL = (FakeListChatModel, FakeMessagesListChatModel, GenericFakeChatModel, FakeListLLM)
"""Fakes of the framework that answer by the order of their calls."""


_ASYNC: tuple[tuple[type, str], ...] = (
    (BaseRetriever, "_aget_relevant_documents"),
    (LLM, "_acall"),
    (BaseLLM, "_agenerate"),
    (BaseChatModel, "_agenerate"),
)
"""The method by which a class says that it has async code of its own."""


class ClaimingLeaf(RunnableBindingBase[Any, Any]):
    """The user's own leaf (`.bound`); a call that was made ahead of its place is taken instead of made again.

    It has no run of its own, so names, events and configs are the leaf's. Streaming goes to the leaf.
    """

    _site: Site = PrivateAttr()

    def _place(self, config: RunnableConfig | None, kwargs: Mapping[str, Any], kind: type[Place]) -> Any:
        callbacks = None if config is None else config.get("callbacks")
        for run in reversed(runs_in(callbacks)):  # the innermost query that has this leaf
            place = open_places.get(run.id)
            if place is not None and place.sites.get(self._site.key) is self._site:
                return place if isinstance(place, kind) and kwargs == self._site.kwargs else None
        return None

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        place = self._place(config, kwargs, SyncPlace)
        if place is None:
            return self.bound.invoke(input, config, **kwargs)
        return place.invoke(self._site, input, config)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        place = self._place(config, kwargs, AsyncPlace)
        if place is None:
            return await self.bound.ainvoke(input, config, **kwargs)
        return await place.ainvoke(self._site, input, config)

    def batch(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> list[Any]:
        return Runnable.batch(self, inputs, config, **kwargs)

    async def abatch(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> list[Any]:
        return await Runnable.abatch(self, inputs, config, **kwargs)


@dataclass(frozen=True, slots=True)
class Routed:
    """What runs instead of the original where wrapped leaves can start ahead of their place."""

    chain: Node
    traced: Traced
    pool: EnginePool
    sites: Mapping[str, Site]
    early: frozenset[str]
    """Sites whose calls may be made ahead; the others are waited for."""
    batches: bool
    """Whether a batch makes one call an input at every site, as is usual."""

    def place(self, kind: type[Place], config: RunnableConfig, limit: Gate | None) -> Place | None:
        """Where the leaves of a call with this config are called; None where the original has to run."""
        most = config.get("max_concurrency")
        models = any(not isinstance(self.sites[key].leaf, BaseRetriever) for key in self.early)
        if most == 1 or not may_be_kept_back(config, models=models):
            return None
        return kind(config, self.early, self.sites, limit or (Gate(most) if most else None))


def routed(chain: Node, pool: EnginePool | None, *, passes: tuple[Pass, ...] | None, speculate: str) -> Routed | None:
    """The routed copy, or None where nothing would start sooner by it. Runs no user code."""
    found = {} if speculate == "off" else dict(_sites(chain, "chain", {}, {}))
    if not found or (pool is not None and WRAPPED in pool.engine_names):
        return None
    traced = trace(chain, lambda node, kwargs, path: _leaf(found, node, kwargs, path))
    pool = pool or shared_pool()
    try:
        pruning = [p for p in (pool.passes if passes is None else passes) if p.name == "prune-dependencies"]
        planned = pool.plan(traced.template, {}, passes=pruning, speculate=speculate)
        early = gained(planned, lambda one, other: _as_long(found[one].leaf, found[other].leaf))
    except TeolaError:  # what cannot be planned runs as it always did
        return None
    if not early:
        return None
    lowered = {key for c in traced.template.components if (key := dict(c.options).get("wrapped"))}
    sites = {key: found[key] for key in lowered}
    batches = all(type(site.leaf).batch is Runnable.batch for site in sites.values())
    return Routed(_rebuilt(chain, "chain", sites), traced, pool, sites, early, batches)


def _leaf(found: Mapping[str, Site], node: Node, kwargs: Mapping[str, Any], path: str) -> WrappedLeaf | None:
    site = found.get(path)
    if site is None or site.leaf is not node or dict(kwargs) != site.kwargs:
        return None
    if isinstance(node, BaseRetriever):
        effect = Effect(f"store:{id(node)}")
        return WrappedLeaf(path, "retrieval", lambda value: CallLeaf(path, value), (effect,))
    return WrappedLeaf(path, "generation", lambda value: CallLeaf(path, value))


# ------------------------------------------------------------ where the leaves are


def parts(node: Node) -> Iterator[tuple[str, Node]]:
    """The parts of a composite that is looked into, and where they are; as the tracer walks."""
    if isinstance(node, RunnableSequence):
        yield from ((f".steps[{i}]", step) for i, step in enumerate(node.steps))
    elif isinstance(node, RunnableAssign):
        yield ".mapper", node.mapper
    elif isinstance(node, RunnableParallel):
        yield from ((f'.steps__["{key}"]', step) for key, step in node.steps__.items())
    elif isinstance(node, RunnableBinding):
        yield ".bound", node.bound


def _sites(node: Node, path: str, kwargs: Mapping[str, Any], config: RunnableConfig) -> Iterator[tuple[str, Site]]:
    if isinstance(node, (BaseChatModel, BaseLLM, BaseRetriever)):
        if _eligible(node):
            gate = None if _concurrent(node) else gate_of(node)
            yield path, Site(path, node, dict(kwargs), config, gate)
        return
    if isinstance(node, RunnableBinding):
        if not node.config_factories:  # what they make is known only when the plain call is made
            callbacks_apart: Any = {k: v for k, v in node.config.items() if k != "callbacks"}
            inner = merge_configs(callbacks_apart, config)
            yield from _sites(node.bound, f"{path}.bound", {**node.kwargs, **kwargs}, inner)
        return
    below: Any = {k: v for k, v in config.items() if k not in ("run_name", "run_id")}
    for i, (where, part) in enumerate(parts(node)):
        first = isinstance(node, RunnableSequence) and i == 0
        yield from _sites(part, path + where, kwargs if first else {}, below)


def _eligible(node: Any) -> bool:
    """Whether its call is the same call ahead of its place: no handlers, printing or cache of its own."""
    if is_pool_backed(node) or isinstance(node, _STATEFUL) or {"invoke", "ainvoke"} & vars(node).keys():
        return False
    return not (getattr(node, "callbacks", None) or getattr(node, "verbose", False) or getattr(node, "cache", None))


def _concurrent(node: Any) -> bool:
    """Whether it has async code of its own, so that several calls at once are what it was made for."""
    if any(_own(type(node), name) for base, name in _ASYNC if isinstance(node, base)):
        return True
    return isinstance(node, VectorStoreRetriever) and _own(type(node.vectorstore), "asimilarity_search")


def _as_long(one: Any, other: Any) -> bool:
    """Whether calls of the two last as long, side by side, too: equal ones that wait for others to do the work."""
    store = getattr(one, "vectorstore", None)
    waits = _concurrent(one) or _own(type(getattr(store, "embeddings", None)), "aembed_query")
    return waits and same(one, other)


def _own(cls: type[Any], name: str) -> bool:
    """Whether a class has the method from elsewhere than the framework."""
    return not str(getattr(getattr(cls, name, None), "__module__", "langchain_core")).startswith("langchain_core")


# ------------------------------------------------------------ the copy


def _rebuilt(chain: Node, path: str, sites: Mapping[str, Site]) -> Node:
    def claiming(where: str) -> Node:
        made = ClaimingLeaf(bound=sites[where].leaf)
        made._site = sites[where]
        return made

    return rebuilt(chain, path, {where: claiming for where in sites})


def rebuilt(node: Node, path: str, chosen: Mapping[str, Callable[[str], Node]]) -> Node:
    """A copy of the composites above the chosen paths, which are made anew; all else is the very same object."""
    if path in chosen:
        return chosen[path](path)
    inner = {where: rebuilt(part, path + where, chosen) for where, part in parts(node)}
    before = dict(parts(node))
    if all(inner[where] is before[where] for where in inner):
        return node
    return with_parts(node, inner)


def with_parts(node: Node, inner: Mapping[str, Node]) -> Node:
    """A copy of a composite with other `parts`."""
    return node.model_copy(update=_fields(node, inner))  # type: ignore[attr-defined, no-any-return]


def _fields(node: Node, inner: Mapping[str, Node]) -> dict[str, Any]:
    made = list(inner.values())
    if isinstance(node, RunnableSequence):
        return {"first": made[0], "middle": made[1:-1], "last": made[-1]}
    if isinstance(node, RunnableAssign):
        return {"mapper": made[0]}
    if isinstance(node, RunnableParallel):
        return {"steps__": dict(zip(node.steps__, made, strict=True))}
    return {"bound": made[0]}
