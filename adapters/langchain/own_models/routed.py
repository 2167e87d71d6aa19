"""Which of the user's own models and retrievers are prefetched beside a chain, and in which form they answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.globals import get_debug, get_llm_cache
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig

from teola_plugin.adapters.early_words import OwnCalls
from teola_plugin.adapters.langchain.own_models.call_sites import batches_by_calls, sites_of, take_as_long
from teola_plugin.adapters.langchain.own_models.composites import Node
from teola_plugin.adapters.langchain.own_models.permission import (
    PERMISSION,
    AlwaysReached,
    Reads,
    asked_before,
    gained,
    predicted,
)
from teola_plugin.adapters.langchain.own_models.wrapped import WRAPPED, CallLeaf, shared_pool
from teola_plugin.adapters.langchain.prefetching import CallSite, EntryForm, EntryPoint, QueryCalls, intercept
from teola_plugin.adapters.thread_safety import NOBODY, ThreadSafety
from teola_plugin.errors import TeolaError
from teola_plugin.graph import Effect, WorkflowTemplate
from teola_plugin.passes import Pass
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.call_limits import ConcurrencyLimit
from teola_plugin.shims import langchain as shims
from teola_plugin.shims.langchain_interceptors import wrap_new_classes
from teola_plugin.tracer.draft import Traced
from teola_plugin.tracer.langchain.trace import trace
from teola_plugin.tracer.leaf import WrappedLeaf


@dataclass(frozen=True, slots=True)
class Routed:
    """What is prefetched beside an original whose models and retrievers can start before their place."""

    traced: Traced
    pool: EnginePool
    sites: Mapping[str, CallSite]
    early: frozenset[str]
    """Sites whose calls may be made ahead; the others are waited for."""
    batches: bool
    """Whether a batch makes one call an input at every site, as is usual."""
    reads: Reads
    """What the chain reads of its input: without one of them it ends before its end."""
    careful: bool
    """Whether only certain calls are prefetched."""
    behind: Mapping[str, frozenset[str]]
    """Site -> the sites that must have been asked for before a call is made ahead there."""

    @property
    def own_calls(self) -> OwnCalls:
        """For `explain()`."""
        waits = {
            key: site.target for key, site in self.sites.items() if site.limit is not None and site.limit.limit == 1
        }
        return OwnCalls(self.early, waits)

    def calls(
        self, input: Any, config: RunnableConfig, limit: ConcurrencyLimit | None, entry: EntryPoint
    ) -> QueryCalls | None:
        """Return where provider calls of a query with this input and config are kept; None if nothing is prefetched."""
        most = config.get("max_concurrency")
        models = any(not isinstance(self.sites[key].target, BaseRetriever) for key in self.early)
        form = form_of_entry(config, entry, models=models)
        if most == 1 or form is None or not self.reads.are_in(input) or not wrap_new_classes():
            return None
        limit = limit or (ConcurrencyLimit(most) if most else None)
        return QueryCalls(
            config, self.sites, self.early, self.behind, limit, form, on_loop=entry.on_loop, learns=self.careful
        )


def form_of_entry(config: RunnableConfig, entry: EntryPoint, *, models: bool) -> EntryForm | None:
    """Return how models answer that are called with a config; None where nothing may be prefetched.

    A prefetch must not be heard by a listener that cannot be silenced, and a cache may answer the second of two calls.
    """
    kinds = shims.streaming_kinds(config.get("callbacks"))
    if kinds is None or get_debug() or (models and get_llm_cache() is not None) or shims.attached_by_environment():
        return None
    return EntryForm(entry.streams, tuple(dict.fromkeys((*kinds, *entry.listeners))))


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
    intercept()
    early = gained(
        planned,
        lambda one, other: take_as_long(found[one].target, found[other].target),
        AlwaysReached(planned, traced) if careful else lambda p, passed: True,
    ) | predicted(planned.graph)
    if not early:
        return None
    reads, behind = (Reads.of(traced), asked_before(planned)) if careful else (Reads(), {})
    sites = {key: found[key] for key in _lowered_sites(traced.template)}
    batches = all(batches_by_calls(site.target) for site in sites.values())
    return Routed(traced, pool, sites, early, batches, reads, careful, behind)


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
        hidden = (s for s in found.values() if s.within and path.startswith(f"{s.within}.") and s.target is node)
        site = next(hidden, None)
    if site is None or site.target is not node or dict(kwargs) != site.kwargs:
        return None
    key = site.key
    if isinstance(node, BaseRetriever):
        effect = Effect(f"store:{id(node)}")
        return WrappedLeaf(key, "retrieval", lambda value: CallLeaf(key, value), (effect,))
    effects = (PERMISSION,) if careful else ()
    return WrappedLeaf(key, "generation", lambda value: CallLeaf(key, value), effects)
