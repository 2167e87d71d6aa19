"""The routed copy of a chain: the user's own leaves, each behind a `ClaimingLeaf`, so that a call made ahead is found.

Only the composites around such leaves are rebuilt, field by field; the user's objects are neither changed nor copied.
Which calls are made ahead is in `permission`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBindingBase
from pydantic import PrivateAttr

from teola_plugin.adapters.early_words import OwnCalls
from teola_plugin.adapters.langchain.current_query import runs_in
from teola_plugin.adapters.langchain.own_models.call_sites import batches_by_calls, sites_of, take_as_long
from teola_plugin.adapters.langchain.own_models.call_table import (
    AsyncCallTable,
    CallTable,
    Make,
    SyncCallTable,
    open_tables,
)
from teola_plugin.adapters.langchain.own_models.composites import Node, rebuilt
from teola_plugin.adapters.langchain.own_models.concurrency import ConcurrencyLimit
from teola_plugin.adapters.langchain.own_models.leaf_calls import CallSite
from teola_plugin.adapters.langchain.own_models.permission import (
    PERMISSION,
    AlwaysReached,
    Reads,
    asked_before,
    gained,
    predicted,
)
from teola_plugin.adapters.langchain.own_models.replay import may_be_kept_back
from teola_plugin.adapters.langchain.own_models.wrapped import WRAPPED, CallLeaf, shared_pool
from teola_plugin.adapters.thread_safety import NOBODY, ThreadSafety
from teola_plugin.errors import TeolaError
from teola_plugin.graph import Effect, WorkflowTemplate
from teola_plugin.passes import Pass
from teola_plugin.pool import EnginePool
from teola_plugin.shims.stack_levels import hide_from_stack_levels
from teola_plugin.tracer.draft import Traced
from teola_plugin.tracer.langchain.trace import trace
from teola_plugin.tracer.leaf import WrappedLeaf


class ClaimingLeaf(RunnableBindingBase[Any, Any]):
    """The user's own leaf (`.bound`); a call that was made ahead of its table is taken instead of made again.

    It has no run of its own, so names, events and configs are the leaf's. Streaming goes to the leaf.
    """

    _site: CallSite = PrivateAttr()
    _early: bool = PrivateAttr(default=False)

    @property
    def called_early(self) -> bool:
        """Whether the graph may call it ahead of its place."""
        return self._early

    def _table(self, config: RunnableConfig | None, kwargs: Mapping[str, Any], kind: type[CallTable]) -> Any:
        callbacks = None if config is None else config.get("callbacks")
        for run in reversed(runs_in(callbacks)):  # the innermost query that has this leaf
            table = open_tables.get(run.id)
            if table is not None and table.sites.get(self._site.key) is self._site:
                return table if isinstance(table, kind) and kwargs == self._site.kwargs else None
        return None

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        table = self._table(config, kwargs, SyncCallTable)
        if table is None:
            return self.bound.invoke(input, config, **kwargs)
        return table.invoke(self._site, input, config)

    def invoke_by(self, make: Make, input: Any, config: RunnableConfig | None) -> Any:
        """`invoke`, where the plain call is made by `make(input, config)`."""
        table = self._table(config, {}, SyncCallTable)
        return make(input, config) if table is None else table.invoke(self._site, input, config, make)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        table = self._table(config, kwargs, AsyncCallTable)
        if table is None:
            return await self.bound.ainvoke(input, config, **kwargs)
        return await table.ainvoke(self._site, input, config)

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
    sites: Mapping[str, CallSite]
    early: frozenset[str]
    """Sites whose calls may be made ahead; the others are waited for."""
    batches: bool
    """Whether a batch makes one call an input at every site, as is usual."""
    reads: Reads
    """What the chain reads of its input: without one of them it ends before its end."""
    behind: Mapping[str, frozenset[str]]
    """Site -> the sites that must have been asked for before a call is made ahead there."""

    @property
    def own_calls(self) -> OwnCalls:
        """For `explain()`."""
        waits = {key: site.leaf for key, site in self.sites.items() if site.limit is not None and site.limit.limit == 1}
        return OwnCalls(self.early, waits)

    def table(
        self, kind: type[CallTable], input: Any, config: RunnableConfig, limit: ConcurrencyLimit | None
    ) -> CallTable | None:
        """Where the leaves of a call with this input and config are called; None where the original has to run."""
        most = config.get("max_concurrency")
        models = any(not isinstance(self.sites[key].leaf, BaseRetriever) for key in self.early)
        if most == 1 or not may_be_kept_back(config, models=models) or not self.reads.are_in(input):
            return None
        return kind(config, self.early, self.sites, limit or (ConcurrencyLimit(most) if most else None), self.behind)


def routed(
    chain: Node,
    pool: EnginePool | None,
    *,
    passes: tuple[Pass, ...] | None,
    speculate: str,
    mapped: bool = False,
    threads: ThreadSafety = NOBODY,
) -> Routed | None:
    """The routed copy, or None where nothing would start sooner by it. Runs no user code.

    `mapped`: leaves that are called once for each item of a list are among those that it is about. `threads`: what the
    user said to take several calls at once.
    """
    found = {} if speculate == "off" else sites_of(chain, mapped=mapped, threads=threads)
    if not found or (pool is not None and WRAPPED in pool.engine_names):
        return None
    careful = speculate != "all"
    traced = _traced(chain, found, careful=careful)
    pool = pool or shared_pool()
    chosen = pool.passes if passes is None else passes
    try:
        planned = pool.plan(traced.template, {}, passes=chosen, speculate=speculate)
    except TeolaError:  # what cannot be planned runs as it always did
        return None
    early = gained(
        planned,
        lambda one, other: take_as_long(found[one].leaf, found[other].leaf),
        AlwaysReached(planned, traced) if careful else lambda p, passed: True,
    ) | predicted(planned.graph)
    if not early:
        return None
    reads, behind = (Reads.of(traced), asked_before(planned)) if careful else (Reads(), {})
    sites = {key: found[key] for key in _lowered_sites(traced.template)}
    batches = all(batches_by_calls(site.leaf) for site in sites.values())
    return Routed(_rebuilt(chain, sites, early), traced, pool, sites, early, batches, reads, behind)


def maps_own(chain: Node) -> bool:
    """Whether anything of the user's own is called once for each item of a list."""
    return any(site.mapped for site in sites_of(chain, mapped=True).values())


def lowered(node: Node, *, mapped: bool) -> bool:
    """Whether all of it is lowered; with `mapped`, the user's own leaves too."""
    found = sites_of(node, mapped=True) if mapped else {}
    return all(row.level == "lowered" for row in _traced(node, found).report)


def _traced(chain: Node, found: Mapping[str, CallSite], *, careful: bool = True) -> Traced:
    return trace(chain, (lambda node, kwargs, path: _leaf(found, node, kwargs, path, careful)) if found else None)


def _lowered_sites(template: WorkflowTemplate) -> Iterator[str]:
    """Keys of the sites that the template knows of, also inside of what it holds."""
    for component in template.components:
        if component.attributes.wrapped:
            yield component.attributes.wrapped
        for inner in (component.body, component.otherwise):
            if inner is not None:
                yield from _lowered_sites(inner)


def _leaf(
    found: Mapping[str, CallSite], node: Node, kwargs: Mapping[str, Any], path: str, careful: bool
) -> WrappedLeaf | None:
    site = found.get(path)
    if site is None:  # of an object that is planned with an equivalent chain, which has paths of its own
        hidden = (s for s in found.values() if s.within and path.startswith(f"{s.within}.") and s.leaf is node)
        site = next(hidden, None)
    if site is None or site.leaf is not node or dict(kwargs) != site.kwargs:
        return None
    key = site.key
    if isinstance(node, BaseRetriever):
        effect = Effect(f"store:{id(node)}")
        return WrappedLeaf(key, "retrieval", lambda value: CallLeaf(key, value), (effect,))
    effects = (PERMISSION,) if careful else ()
    return WrappedLeaf(key, "generation", lambda value: CallLeaf(key, value), effects)


def _rebuilt(chain: Node, sites: Mapping[str, CallSite], early: frozenset[str]) -> Node:
    def claiming(where: str) -> Node:
        made = ClaimingLeaf(bound=sites[where].leaf)
        made._site, made._early = sites[where], where in early
        return made

    return rebuilt(chain, "chain", {where: claiming for where in sites})


hide_from_stack_levels(globals())
