"""Which provider calls of a chain are prefetched: those that the original is sure to make, and that start sooner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.globals import get_debug, get_llm_cache
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import RunnableBinding, RunnableConfig
from langchain_core.runnables.config import merge_configs
from langchain_core.runnables.utils import AddableDict

from teola_plugin.adapters.langchain.call_sites import (
    CodeSites,
    SiteCollector,
    batches_by_calls,
    prefetchable_at,
    sites_of,
    take_as_long,
)
from teola_plugin.adapters.langchain.composites import Node
from teola_plugin.adapters.langchain.prefetch_listener import can_be_silenced
from teola_plugin.adapters.langchain.prefetching import (
    CallSite,
    EntryForm,
    EntryPoint,
    QueryCalls,
    intercept,
)
from teola_plugin.adapters.plan_report import Explanation, OwnCalls, Reason
from teola_plugin.adapters.planned_queries import dropped_waits, sites_that_start_sooner, takes_time
from teola_plugin.adapters.provider_executor import shared_pool
from teola_plugin.adapters.thread_safety import NOBODY, ThreadSafety
from teola_plugin.errors import TeolaError
from teola_plugin.graph import INPUT, Graph, Path, Primitive, PrimitiveKind, Ref, WorkflowTemplate
from teola_plugin.observe.steps import PROVIDER
from teola_plugin.passes import Optimised, Pass
from teola_plugin.passes.decoding_pipelining import leaf_primitives
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.call_limits import ConcurrencyLimit
from teola_plugin.shims import langchain as shims
from teola_plugin.shims.langchain_interceptors import wrap_new_classes
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.langchain.trace import ReadFunction, trace


@dataclass(frozen=True, slots=True)
class Reads:
    """The keys of its input that a chain reads."""

    keys: tuple[Path, ...] = ()
    variables: tuple[Path, ...] = ()
    """Read only of a dictionary."""

    @staticmethod
    def of(traced: TraceResult) -> Reads:
        refs = [ref for component in traced.template.components for _, ref in component.inputs]
        return Reads(_of_input((*refs, *traced.required_keys)), _of_input(traced.required_variables))

    def are_in(self, value: Any) -> bool:
        """Return True if an input has all of it. Runs no user code: what is no dictionary or list has no keys."""
        return all(_leads(value, path) for path in self.keys) and all(
            _leads(value, path) for path in self.variables if _leads(value, path[:-1], dict)
        )


def _of_input(refs: Iterable[Ref]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(ref.path for ref in refs if ref.producer == INPUT and ref.path))


def _leads(value: Any, path: Path, to: type[Any] = object) -> bool:
    """Return True if a path leads to a value of a type."""
    for key in path:
        if type(value) in (dict, AddableDict):  # the latter is made of pieces that were streamed
            has_key = key in value
        else:
            has_key = type(value) in (list, tuple) and type(key) is int and -len(value) <= key < len(value)
        if not has_key:
            return False
        value = value[key]
    return isinstance(value, to)


# ------------------------------------------------------------ what starts sooner

_CALLS = (PrimitiveKind.PREFILLING, PrimitiveKind.SEARCHING)
_WRITING = (PrimitiveKind.DECODING, PrimitiveKind.PARTIAL_DECODING)


def sites_that_gain(optimised: Optimised, take_equal_time: Callable[[str, str], bool]) -> frozenset[str]:
    """Return the sites of wrapped leaves that no longer wait for something they do not need, and that takes time.

    `take_equal_time`: whether the leaves at two sites take as long.
    """
    source, graph = optimised.source, optimised.graph
    if source is None or source is graph:
        return frozenset()
    provided = [p for p in graph if p.engine == PROVIDER and p.kind in _CALLS]
    calls = [p for p in provided if p.id in source and not p.attributes.ends]
    return frozenset(
        _site(p)
        for p in calls
        if any(takes_time(source[name]) for name in dropped_waits(p.id, source, graph))
        and not any(take_equal_time(_site(p), _site(q)) and _lasts_longer(q, p, source, graph) for q in calls)
    )


def mapped_sites_that_gain(optimised: Optimised) -> Iterator[str]:
    """Yield the sites in bodies of `.map()` whose calls start sooner. They no longer wait for steps before the list, or
    until the previous step of the body has ended for all items."""
    source, graph = optimised.source, optimised.graph
    for p in graph if source is not None else ():
        assert source is not None
        body = source[p.id].fragment if p.id in source else None
        if body is None:
            continue
        is_freed = any(takes_time(source[name]) for name in dropped_waits(p.id, source, graph))
        for q in body.graph:
            is_later = any(takes_time(body.graph[name]) for name in body.graph.ancestors[q.id])
            is_call = q.engine == PROVIDER and q.kind in _CALLS
            if is_call and (is_freed or is_later):
                yield _site(q)


def inputs_required_first(optimised: Optimised) -> dict[str, frozenset[str]]:
    """Return, by site, those whose input has to be known first: the site no longer waits for them, and making that
    input, which is possible at once, may fail."""
    source, graph = optimised.source, optimised.graph
    if source is None:
        return {}
    calls = {p.id: _site(p) for p in graph if p.engine == PROVIDER and p.kind in _CALLS and p.id in source}
    at_once = {name for name in calls if not any(takes_time(graph[one]) for one in graph.ancestors[name])}
    return {
        _site(q): frozenset(calls[other] for other in at_once & dropped_waits(p.id, source, graph))
        for p in graph
        if p.id in calls or (p.holds_fragment and p.id in source)
        for q in leaf_primitives(p)
        if _site(q)
    }


def unread_sites(graph: Graph, traced: TraceResult) -> frozenset[str]:
    """Return the sites of wrapped leaves whose results no request, no loop and no function of the user's depends on.

    The time of a function is in the trace under its name if the graph computes it.
    """
    functions = {name for node in traced.report if node.class_name == "RunnableLambda" for name in node.components}
    readers = [p for p in graph if (p.on_engine and not p.decodes) or p.holds_fragment or p.call in functions]
    read = {name for p in readers for name in graph.ancestors[p.id]}
    unread = {_site(p) for p in graph if p.engine == PROVIDER and p.kind in _CALLS and p.id not in read}
    # One site may make several calls, some of which are read.
    read_too = {_site(q) for p in graph for q in leaf_primitives(p) if q is not p or p.id in read}
    return frozenset(unread - read_too)


def predicted_sites(graph: Graph) -> frozenset[str]:
    """Return the sites of wrapped leaves that are called for items of a list that an engine is still writing."""
    writing = [d for d in graph if d.kind in _WRITING and d.engine != PROVIDER]
    grown = {name for d in writing for name in d.attributes.stream_items}
    cut = [p for p in graph if p.speculative and any(d.id in graph.ancestors[p.id] for d in writing)]
    mapped = [q for p in graph if p.id in grown for q in leaf_primitives(p)]
    return frozenset(_site(q) for q in (*cut, *mapped) if q.engine == PROVIDER and q.kind in _CALLS)


def _site(p: Primitive) -> str:
    return p.attributes.wrapped


def _lasts_longer(q: Primitive, p: Primitive, source: Graph, graph: Graph) -> bool:
    """Return True if nobody has `p` sooner for its early start.

    A search that runs beside it in the original still waits for all that `p` waited for, and whoever needs `p` needs
    both."""
    if {p.kind, q.kind} != {PrimitiveKind.SEARCHING} or p is q:
        return False
    are_independent = p.id not in source.ancestors[q.id] and q.id not in source.ancestors[p.id]
    users = [r for r in graph if takes_time(r) and p.id in graph.ancestors[r.id]]
    is_needed_by_all = all(q.id in graph.ancestors[r.id] for r in users)
    return are_independent and is_needed_by_all and dropped_waits(p.id, source, graph) <= graph.ancestors[q.id]


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """A plan of what is prefetched beside an original whose models and retrievers can start sooner."""

    traced: TraceResult
    pool: EnginePool
    sites: Mapping[str, CallSite]
    prefetched_sites: frozenset[str]
    """Sites whose calls are prefetched; the planner waits for the original's calls at the others."""
    batches: bool
    """Whether a batch makes one call an input at every site, as is usual."""
    reads: Reads
    """What the chain reads of its input: without one of them it ends before its end."""
    careful: bool
    """Whether only certain calls are prefetched."""
    required_inputs: Mapping[str, frozenset[str]]
    """Site -> the sites whose input must be known before a call is prefetched there."""
    unread: frozenset[str]
    """Sites whose results no other request depends on."""
    left: Mapping[str, tuple[str, Explanation]]
    """See `CodeSites.left`."""
    max_concurrency: int | None
    """The limit that is bound to the whole chain; that of a call's own config goes before it."""

    @property
    def prefetches_in_maps(self) -> bool:
        """True if calls for each item of a list are prefetched that the structure of the chain shows."""
        return any(self.sites[key].mapped and not self.sites[key].in_code for key in self.prefetched_sites)

    def calls(
        self, input: Any, config: RunnableConfig, limit: ConcurrencyLimit | None, entry: EntryPoint
    ) -> QueryCalls | None:
        """Return where provider calls of a query with this input and config are kept; None if nothing is prefetched."""
        prefetched = frozenset(key for key in self.prefetched_sites if self.sites[key].on_loop in (None, entry.on_loop))
        models = any(isinstance(self.sites[key].target, BaseLanguageModel) for key in prefetched)
        classes = frozenset(type(site.provider) for site in self.sites.values())
        if self.max_concurrency is not None and config.get("max_concurrency") is None:
            config = merge_configs(config, {"max_concurrency": self.max_concurrency})
        prefetch_form = (
            read_prefetch_form(config, entry, models=models, classes=classes) if self.reads.are_in(input) else None
        )
        if prefetch_form is None or not prefetched:
            return None
        form, config_limit = prefetch_form
        limit = limit or config_limit
        return QueryCalls(
            config,
            self.sites,
            prefetched,
            self.required_inputs,
            self.unread,
            limit,
            form,
            on_loop=entry.on_loop,
            learns=self.careful,
        )


def read_prefetch_form(
    config: RunnableConfig, entry: EntryPoint, *, models: bool, classes: Iterable[type] | None = None
) -> tuple[EntryForm, ConcurrencyLimit | None] | None:
    """Return the form of prefetched calls, and the limit that a config sets; None where nothing may be prefetched.

    `classes`: those of the objects that are called, if they are known.
    """
    max_concurrency = config.get("max_concurrency")
    form = form_of_entry(config, entry, models=models)
    if max_concurrency == 1 or form is None or not wrap_new_classes(classes):
        return None
    return form, ConcurrencyLimit(max_concurrency) if max_concurrency else None


def form_of_entry(config: RunnableConfig, entry: EntryPoint, *, models: bool) -> EntryForm | None:
    """Return how models answer that are called with a config; None where nothing may be prefetched.

    A prefetch must not be heard by a listener that cannot be silenced, and a cache may answer the second of two calls.
    """
    kinds = shims.streaming_kinds(config.get("callbacks"))
    if kinds is None or get_debug() or (models and get_llm_cache() is not None) or shims.attached_by_environment():
        return None
    listeners = tuple(dict.fromkeys((*kinds, *entry.listeners)))
    return EntryForm(entry.streams, listeners) if can_be_silenced(listeners) else None


def own_calls(
    sites: Mapping[str, CallSite], prefetched: frozenset[str], left: Mapping[str, tuple[str, Explanation]]
) -> OwnCalls:
    """Return what the report says of the calls at these sites, some of them `prefetched`, and of what is `left`."""
    waits = {key: site.provider for key, site in sites.items() if site.limit is not None and site.limit.limit == 1}
    explanations = {key: Explanation(Reason.NO_USE) for key, site in sites.items() if site.stays_in_place.is_set()}
    if get_debug() or get_llm_cache() is not None:
        explanations = dict.fromkeys(sites, Explanation(Reason.DEBUG if get_debug() else Reason.CACHE_OF_ALL))
    return OwnCalls(prefetched - explanations.keys(), waits, sites, explanations, left)


@dataclass(frozen=True, slots=True)
class ReadChain:
    """The calls of a chain, as far as its structure and the source of its functions show them."""

    traced: TraceResult
    sites: Mapping[str, CallSite]
    code_sites: CodeSites
    """Those of the sites that are in functions."""


def read_chain(chain: Node, *, speculate: str, mapped: bool = False, threads: ThreadSafety = NOBODY) -> ReadChain:
    """Read the calls of a chain. Runs no user code. See `plan_prefetching`."""
    code = CodeSites(threads)
    sites_by_path = dict(SiteCollector(mapped, threads, code.left).sites(chain, "chain", {}, {}))
    traced = _traced(chain, sites_by_path, careful=speculate != "all", read_function=code.read_function)
    return ReadChain(traced, sites_by_path | code.sites, code)


def plan_prefetching(
    chain: Node,
    pool: EnginePool | None,
    *,
    passes: tuple[Pass, ...] | None,
    speculate: str,
    mapped: bool = False,
    threads: ThreadSafety = NOBODY,
) -> PrefetchPlan | None:
    """Return what is prefetched beside a chain; None if nothing of it would start sooner. Runs no user code.

    `mapped`: leaves that are called once for each item of a list are among those that it is about. `threads`: what the
    user said to take several calls at once.
    """
    if speculate == "off" or (pool is not None and PROVIDER in pool.engine_names):
        return None
    careful = speculate != "all"
    read = read_chain(chain, speculate=speculate, mapped=mapped, threads=threads)
    traced, sites_by_path, code = read.traced, read.sites, read.code_sites
    if not sites_by_path:
        return None
    pool = pool or shared_pool()
    chosen_passes = pool.passes if passes is None else passes
    try:
        planned = pool.plan(traced.template, {}, passes=chosen_passes, speculate=speculate)
    except TeolaError:  # what cannot be planned runs as it always did
        return None
    intercept()
    predicted = predicted_sites(planned.graph)
    mapped_sites = frozenset(mapped_sites_that_gain(planned))
    if careful:
        mapped_sites, predicted = (
            mapped_sites - predicted,
            predicted - {k for k, one in sites_by_path.items() if one.mapped},
        )
    prefetched_in_chain = (
        mapped_sites
        | predicted
        | sites_that_gain(
            planned,
            lambda one, other: take_as_long(sites_by_path[one].target, sites_by_path[other].target),
        )
    )
    sooner = () if planned.source is None else sites_that_start_sooner(planned.source, planned.graph)
    prefetched_sites = (prefetched_in_chain - code.sites.keys()) | code.sites.keys() & sooner
    if not prefetched_sites:
        return None
    reads, required_inputs = (Reads.of(traced), inputs_required_first(planned)) if careful else (Reads(), {})
    sites = {key: sites_by_path[key] for key in _lowered_sites(traced.template)}
    batches = all(batches_by_calls(site.target) for site in sites.values())
    return PrefetchPlan(
        traced,
        pool,
        sites,
        prefetched_sites,
        batches,
        reads,
        careful,
        required_inputs,
        unread_sites(planned.graph, traced),
        code.left,
        bound_max_concurrency(chain),
    )


def bound_max_concurrency(chain: Node) -> int | None:
    """Return the `max_concurrency` that `with_config` has bound to a whole chain; None without one."""
    limit = None
    while limit is None and isinstance(chain, RunnableBinding):
        limit, chain = chain.config.get("max_concurrency"), chain.bound
    return limit


def is_lowered(node: Node, *, mapped: bool) -> bool:
    """Return True if all of a chain is lowered; with `mapped`, the user's own leaves too."""
    sites_by_path = sites_of(node, mapped=True) if mapped else {}
    return all(row.level == "lowered" for row in _traced(node, sites_by_path).report)


def _traced(
    chain: Node,
    sites_by_path: Mapping[str, CallSite],
    *,
    careful: bool = True,
    read_function: ReadFunction | None = None,
) -> TraceResult:
    """Trace a chain in which the models and retrievers at these call sites become requests that can be prefetched.

    `careful` keeps a model's call behind user code that might raise before it. `read_function` reads the source of
    functions.
    """
    return trace(
        chain,
        (lambda node, kwargs, path: prefetchable_at(sites_by_path, node, kwargs, path, careful))
        if sites_by_path
        else None,
        read_function,
    )


def _lowered_sites(template: WorkflowTemplate) -> Iterator[str]:
    """Keys of the sites that the template knows of, also inside of what it holds."""
    for component in template.components:
        if component.attributes.wrapped:
            yield component.attributes.wrapped
        for inner in (component.body, component.otherwise):
            if inner is not None:
                yield from _lowered_sites(inner)
