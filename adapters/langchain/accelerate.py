"""`accelerate` for LangChain Runnables, and the subplans that are planned when they begin.

A branch, a router, a fallback or a function of the user chooses at run time what runs. So the composite runs as it
always did, in a copy whose parts are accelerated objects of their own: when one is called, its e-graph joins the live
query.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from langchain_core.documents.compressor import BaseDocumentCompressor
from langchain_core.language_models import BaseLanguageModel
from langchain_core.output_parsers.base import BaseLLMOutputParser
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import (
    RouterRunnable,
    Runnable,
    RunnableBranch,
    RunnableGenerator,
    RunnableLambda,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableEach
from langchain_core.runnables.configurable import RunnableConfigurableAlternatives
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.runnables.retry import RunnableRetry
from langchain_core.tools import BaseTool

from teola_plugin.adapters.langchain.accelerated import GeneratorCalls, ModelCalls, accelerated_object, calls_of
from teola_plugin.adapters.langchain.binding.rules import routing_of
from teola_plugin.adapters.langchain.binding.workers import bound_object
from teola_plugin.adapters.langchain.call_sites import sites_of
from teola_plugin.adapters.langchain.composite_calls import CompositeRules, Threads, intercept_composite_methods
from teola_plugin.adapters.langchain.composites import parts as structural_parts
from teola_plugin.adapters.langchain.composites import with_parts as with_structural_parts
from teola_plugin.adapters.langchain.pools import the_pool_of
from teola_plugin.adapters.langchain.prefetch_plan import PrefetchPlan, is_lowered, plan_prefetching
from teola_plugin.adapters.langchain.runnable import AcceleratedRunnable
from teola_plugin.adapters.options import Options
from teola_plugin.adapters.planned_queries import log_fallback
from teola_plugin.adapters.routing import RoutingRules, under_routing
from teola_plugin.adapters.snapshots import FieldSnapshot
from teola_plugin.errors import RegistrationError, TraceError
from teola_plugin.graph import INPUT, Ref, WorkflowTemplate
from teola_plugin.shims.langchain_agents import chain_with_history
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.functions.lookup import DataGuards
from teola_plugin.tracer.langchain.classes import (
    PLANNED_CHAIN,
    WRAPPED_FUNCTION,
    find_override,
    is_pool_backed,
    store_effects,
)
from teola_plugin.tracer.langchain.equivalents import equivalent_chain
from teola_plugin.tracer.langchain.trace import trace
from teola_plugin.tracer.purity.purity import analyze_callable
from teola_plugin.tracer.report import TraceNode, TraceReport

Node = Runnable[Any, Any]


class Accelerate(Protocol):
    """A function that accelerates the parts of a composite."""

    def __call__(self, node: Node, /) -> Node:
        """The same part, accelerated if that is of any use."""
        ...

    def graph(self, node: Node, /) -> Node:
        """A compiled graph, accelerated; the very object for any other."""
        ...

    def maps(self, node: RunnableEach[Any, Any], /) -> bool:
        """Return True if the graph knows all that is done with an item, so that it needs no plan of its own."""
        ...


KEPT = 32
"""Runnables that a function of the user's returned, remembered with what was made of them."""


def with_parts(node: Node, accelerate: Accelerate) -> Node:
    """`node`, or a copy of its composites in which parts that are chosen at run time are accelerated."""
    if is_pool_backed(node):
        return node
    if (graph := accelerate.graph(node)) is not node:
        return graph
    for kind, make in _FRAGMENTS_BY_KIND:
        if type(node) is kind:  # a class of the user's own may do anything with its parts
            return node if find_override(node, kind) else make(node, accelerate)
    before = dict(structural_parts(node))
    accelerated_parts = {where: with_parts(part, accelerate) for where, part in before.items()}
    return (
        node
        if all(accelerated_parts[where] is before[where] for where in accelerated_parts)
        else with_structural_parts(node, accelerated_parts)
    )


def _updated(node: Any, **fields: Any) -> Node:
    """A copy with other values for some fields; the very same object when they are what they were."""
    same = all(_same(getattr(node, name), value) for name, value in fields.items())
    updated: Node = node if same else node.model_copy(update=fields)
    return updated


def _same(old: Any, new: Any) -> bool:
    """Return True if new fields hold the very objects of the old ones, item by item in mappings and lists."""
    if isinstance(new, Mapping):
        return all(old[key] is value for key, value in new.items())
    if isinstance(new, (list, tuple)):
        return all(_same(a, b) for a, b in zip(old, new, strict=True))
    return old is new


def _accelerate_branch(node: RunnableBranch[Any, Any], accelerate: Accelerate) -> Node:
    arms = [(condition, accelerate(arm)) for condition, arm in node.branches]
    return _updated(node, branches=arms, default=accelerate(node.default))


def _accelerate_fallbacks(node: RunnableWithFallbacks[Any, Any], accelerate: Accelerate) -> Node:
    fallbacks = [accelerate(one) for one in node.fallbacks]
    return _updated(node, runnable=accelerate(node.runnable), fallbacks=fallbacks)


def _accelerate_alternatives(node: RunnableConfigurableAlternatives[Any, Any], accelerate: Accelerate) -> Node:
    """Return configurable alternatives with each accelerated on its own: the config chooses at run time."""
    alternatives = {
        key: accelerate(one) if isinstance(one, Runnable) else one for key, one in node.alternatives.items()
    }
    return _updated(node, default=accelerate(node.default), alternatives=alternatives)


def _lambda(node: RunnableLambda[Any, Any], accelerate: Accelerate) -> Node:
    """The user's function runs as it always did; a Runnable that it returns is accelerated.

    The chain inside a `RunnableWithMessageHistory` is planned at once.
    """
    func, afunc = vars(node).get("func"), vars(node).get("afunc")
    if equivalent_chain(node) is not None or store_effects(func):
        return node  # the framework's own
    wrapped: dict[str, Callable[..., Any]] = {}
    for name, one in (("func", func), ("afunc", afunc)):
        remembered = _Remembered(accelerate)
        wrapper = None if one is None or analyze_callable(one) is not None else _returning(one, remembered)
        if wrapper is not None:
            wrapped[name] = wrapper
            if (chain := chain_with_history(one)) is not None:  # known before it is returned
                setattr(wrapper, PLANNED_CHAIN, remembered(chain))
    if not wrapped:
        return node
    copied = copy.copy(node)
    vars(copied).update(wrapped)
    return copied


class _Remembered:
    """`accelerate`, once for each of the Runnables that keep coming back."""

    def __init__(self, accelerate: Accelerate) -> None:
        self._accelerate = accelerate
        self._pairs: list[tuple[Node, Node]] = []

    def __call__(self, value: Any) -> Any:
        """Return the accelerated form of what a user's function returned; values that are no Runnables pass through.

        The last few Runnables are remembered by identity, so that a router does not plan the same chain at every call.
        """
        if not isinstance(value, Runnable):
            return value
        for original, accelerated in list(self._pairs):
            if original is value:
                return accelerated
        accelerated = self._accelerate(value)
        self._pairs = [*self._pairs[1 - KEPT :], (value, accelerated)]
        return accelerated


def _returning(func: Callable[..., Any], accelerated: _Remembered) -> Callable[..., Any] | None:
    """`func`, with what it returns accelerated; None for a function that yields."""
    if not inspect.isroutine(func) or inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        return None
    if inspect.iscoroutinefunction(func):

        @functools.wraps(func)
        async def acall(*args: Any, **kwargs: Any) -> Any:
            return accelerated(await func(*args, **kwargs))

        setattr(acall, WRAPPED_FUNCTION, func)
        return acall

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        return accelerated(func(*args, **kwargs))

    setattr(call, WRAPPED_FUNCTION, func)
    return call


_FRAGMENTS_BY_KIND: tuple[tuple[type, Callable[[Any, Accelerate], Node]], ...] = (
    (RunnableBranch, _accelerate_branch),
    (
        RouterRunnable,
        lambda node, accelerate: _updated(
            node, runnables={key: accelerate(one) for key, one in node.runnables.items()}
        ),
    ),
    (RunnableWithFallbacks, _accelerate_fallbacks),
    (RunnableRetry, lambda node, accelerate: _updated(node, bound=accelerate(node.bound))),
    (
        RunnableEach,
        lambda node, accelerate: node if accelerate.maps(node) else _updated(node, bound=accelerate(node.bound)),
    ),
    (RunnableConfigurableAlternatives, _accelerate_alternatives),
    (RunnableWithMessageHistory, lambda node, accelerate: _updated(node, bound=with_parts(node.bound, accelerate))),
    (RunnableLambda, _lambda),
)


Graphs = Callable[[Any, Options], Any]
"""The graph, accelerated; the very object for what is no graph."""
_KINDS: tuple[tuple[type, type[AcceleratedRunnable]], ...] = (
    (RunnableGenerator, GeneratorCalls),
    (BaseLanguageModel, ModelCalls),
)


def accelerate_runnable(runnable: Any, options: Options, graphs: Graphs | None = None) -> Any:
    """See `teola_plugin.accelerate`. Returns an instance of a subclass of the original's class.

    An accelerated object is accelerated anew, with these options. `graphs` accelerates compiled graphs in
    the chain; without it they are left alone.
    """
    if not isinstance(runnable, Runnable):
        raise TraceError(
            f"a {type(runnable).__qualname__} is a LangChain object but no Runnable.",
            hint="pass the chain or retriever that uses it",
        )
    calls = calls_of(runnable)
    if calls is not None:
        runnable = calls.chain if isinstance(runnable, BaseLanguageModel) else calls.bound
    return accelerated_object(_calls(runnable, options, graphs))


def _calls(
    runnable: Node, options: Options, graphs: Graphs | None, guards: DataGuards | None = None
) -> AcceleratedRunnable:
    """Plan a Runnable. Raises `RegistrationError` and `TraceError` for what the user has to know.

    `guards`: those of the plan before. They record the data that the plan relies on.
    """
    guards = guards or DataGuards()
    accelerate_copy = partial(accelerate_runnable, options=options, graphs=graphs)
    renew = partial(_renewed, options=replace(options, strict=False), graphs=graphs)
    options = replace(options, pool=options.pool or the_pool_of(runnable))
    options, rules, serving = routing_of(runnable, options)
    with under_routing(rules), guards.recording():
        fast = ChainPlanner(options.inside(), graphs).planned(runnable, _on_engine(runnable, rules))
    fast.routes_by(rules)
    fast.copied_by(accelerate_copy)
    fast.tells_of(serving)
    if fast.chain is not runnable or fast.has_prefetch_plan or rules is not None:
        parts = [*_composites(runnable), *(obj for obj, _ in options.bind)]
        fast.renewed_by(renew, FieldSnapshot({id(part): part for part in parts}.values()), guards)
    if options.shadow:
        fast.shadowed(options.shadow)
    return fast


def _renewed(calls: AcceleratedRunnable, options: Options, graphs: Graphs | None) -> AcceleratedRunnable:
    """Plan an object again whose fields, or data that its functions read, were set since.

    What cannot be planned any more just runs.
    """
    try:
        renewed = _calls(calls.bound, options, graphs, calls.guards)
    except Exception as error:
        log_fallback(error, calls.bound, "fields that were set")
        renewed = calls.model_copy()
        renewed.runs_original(untraced(calls.bound, f"teola-plugin failed: {error!r}"))
    renewed.continues(calls)
    return renewed


_UNCOPIED = (BaseLanguageModel, BasePromptTemplate, BaseLLMOutputParser, BaseTool)
"""Classes whose objects are called as they are, whatever is around them."""


def _composites(root: Any) -> Iterator[Any]:
    """The Runnables and compressors of the framework's own classes that `root` is made of, itself included."""
    todo, seen = [root], set[int]()
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if type(node) in (list, tuple):
            todo += node
        elif type(node) is dict:
            todo += node.values()
        elif _is_composite(node):
            yield node
            todo += vars(node).values()
        elif (chain := chain_with_history(node)) is not None:
            todo.append(chain)


def _is_composite(node: Any) -> bool:
    is_runnable = isinstance(node, (Runnable, BaseDocumentCompressor)) and not isinstance(node, _UNCOPIED)
    return is_runnable and type(node).__module__.startswith("langchain")


def _on_engine(runnable: Node, rules: RoutingRules | None) -> Any:
    """Return the Runnable; for a model that is routed itself, an object of a subclass that carries the route."""
    route = None if rules is None or not isinstance(runnable, BaseLanguageModel) else rules.route(runnable)
    return runnable if route is None else bound_object(runnable, route.engine, route.pool)


@dataclass(frozen=True, slots=True)
class ChainPlanner:
    """Accelerates an object, and the parts of it that are planned when they begin."""

    options: Options
    graphs: Graphs | None = None
    own_maps: bool = False
    """Whether the calls of own models and retrievers in `.map()` are part of the plan."""

    def planned(self, runnable: Node, routed: Node) -> AcceleratedRunnable:
        """Plan a Runnable. `routed`: the same; for a model that is routed itself, the object that carries its route."""
        options = self.options
        pool = options.pool
        try:
            chain, traced, sooner = self._plans(routed)
        except (RegistrationError, TraceError):  # the user's to know
            raise
        except Exception as error:
            log_fallback(error, runnable, "the whole")
            chain, traced, sooner, pool = (
                routed,
                untraced(routed, f"teola-plugin failed: {error!r}"),
                None,
                None,
            )
        calls_class = next(
            (calls_class for framework_class, calls_class in _KINDS if isinstance(runnable, framework_class)),
            AcceleratedRunnable,
        )
        call_options: Any = {"passes": options.passes, "speculate": options.speculate, "app": options.app}
        fast = calls_class.of(runnable, traced, pool, chain=chain, prefetch_plan=sooner, **call_options)
        if options.speculate != "off":
            intercept_composite_methods()
            fast.prefetches_of_composites(CompositeRules([routed], Threads(options.threads)))
        return fast

    def _plans(self, routed: Node) -> tuple[Node, TraceResult, PrefetchPlan | None]:
        """Return what runs in place of the original, its trace, and its plan; None for a plan that gains nothing.

        Calls of own models in `.map()` are tried as part of the plan first. If none of them gains anything, the plan is
        made without them, and the chain in the map gets a plan of its own.
        """
        options = self.options
        if not self.own_maps and any(site.mapped for site in sites_of(routed, mapped=True).values()):
            plans_with_maps = replace(self, own_maps=True)._plans(routed)
            plan = plans_with_maps[2]
            if plan is not None and (options.speculate == "all" or plan.prefetches_in_maps):
                return plans_with_maps
        chain = with_parts(routed, self)
        limits: Any = {"passes": options.passes, "speculate": options.speculate, "threads": options.threads}
        sooner = plan_prefetching(chain, options.pool, mapped=self.own_maps, **limits)
        return chain, trace(chain), sooner

    def __call__(self, node: Node, /) -> Node:
        fast = replace(self, own_maps=False).planned(node, node)
        return fast if fast.gains else fast.chain

    def graph(self, node: Node, /) -> Node:
        return node if self.graphs is None else self.graphs(node, self.options)

    def maps(self, node: RunnableEach[Any, Any], /) -> bool:
        return is_lowered(node, mapped=self.own_maps)


def untraced(runnable: Runnable[Any, Any], reason: str) -> TraceResult:
    """Return the trace of an object that could not be traced: it runs as it always did."""
    report = TraceReport((TraceNode("chain", type(runnable).__name__, "original", (), reason),))
    return TraceResult(WorkflowTemplate((), Ref(INPUT)), {}, lambda _: {}, {}, report)
