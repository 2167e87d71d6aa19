"""Plans of a graph's nodes: for each, what it and the nodes behind it will ask engines for.

They are made when the graph is accelerated: to read the source of its functions takes some milliseconds, which no query
has to wait for. Where conditions on the state are decided by it, there is a plan for each way; one that a state asks
for first is made behind its query, which does with the plan that decides nothing.
"""

from __future__ import annotations

import dis
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

from teola_plugin.adapters.early_work import log_fallback, runs_ahead
from teola_plugin.graph import EngineProfile, Graph
from teola_plugin.passes import Pass
from teola_plugin.pool import EnginePool
from teola_plugin.shims.langgraph import functions_of
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.functions.lookup import DataGuards, FreeNames
from teola_plugin.tracer.functions.pure_expressions import Decide
from teola_plugin.tracer.langgraph.decisions import Decided
from teola_plugin.tracer.langgraph.lookahead import lookahead
from teola_plugin.tracer.langgraph.shape import GraphShape, distances, shape_of

BEHIND = 0.02
"""Seconds after a node has begun at which a plan is made that it lacked: by then its query waits for an engine."""


class Plans:
    """Of one graph. `original`: what was accelerated, copies of which have the same plans."""

    def __init__(
        self, graph: Any, original: Any, pool: EnginePool, passes: tuple[Pass, ...] | None, speculate: str
    ) -> None:
        self.pool, self._passes, self._speculate = pool, passes, speculate
        self._shaping = shaping_of(original)
        self.shape: GraphShape | None = shape_of(graph)
        self.distances: Mapping[str, int] = {} if self.shape is None else distances(self.shape)
        self.channels = () if self.shape is None else tuple(self.shape.updates)
        """Of the state."""
        self._known: dict[tuple[str, bool], Decided[TraceResult | None]] = {}
        self._believed: dict[tuple[str, bool], DataGuards] = {}
        """Data that the plans were made with."""
        self._making: set[tuple[str, bool]] = set()
        self._graphs: dict[int, tuple[tuple[EngineProfile, ...], Graph, TraceResult]] = {}
        """By the identity of the plan, which they keep."""
        if self.shape is not None and _all_there(node.bound for node in self.shape.nodes.values()):
            for name in self.shape.nodes:
                self._of(name, False).before()

    def fit(self, original: Any) -> bool:
        """Return True if they are the plans of this graph, too: of a copy with the same nodes and edges."""
        return is_same_shape(self._shaping, shaping_of(original))

    # ------------------------------------------------------------ one node

    def may_have(self, node: str, *, pushed: bool) -> bool:
        """Whether there is a plan for some state, as far as is known."""
        if self.shape is None or node not in self.shape.nodes:
            return False
        if not self._rest_on(node, pushed).are_unchanged():
            self._known.pop((node, pushed), None)
        return not self._of(node, pushed).empty

    def traced(self, node: str, value: Any, *, pushed: bool) -> TraceResult | None:
        """For a template's input. None where nothing is gained."""
        return self._of(node, pushed).plan(value)

    def at_hand(self, node: str, value: Any, *, pushed: bool) -> TraceResult | None:
        """`traced`, if it was made before; else one that decides nothing. The right one is there some time later."""
        found, another = self._of(node, pushed).made(value)
        if another and (node, pushed) not in self._making:
            self._making.add((node, pushed))
            _behind(partial(self._make, node, value, pushed))
        return found

    def _of(self, node: str, pushed: bool) -> Decided[TraceResult | None]:
        found = self._known.get((node, pushed))
        if found is None:
            found = self._known.setdefault((node, pushed), Decided(partial(self._traced, node, pushed)))
        return found

    def _rest_on(self, node: str, pushed: bool) -> DataGuards:
        return self._believed.setdefault((node, pushed), DataGuards())

    def _make(self, node: str, value: Any, pushed: bool) -> None:
        self.traced(node, value, pushed=pushed)
        self._making.discard((node, pushed))

    def _traced(self, node: str, pushed: bool, decide: Decide | None) -> TraceResult | None:
        if self.shape is None or node not in self.shape.nodes or self._speculate == "off":
            return None
        try:
            with self._rest_on(node, pushed).recording():
                found = lookahead(self.shape, node, pushed=pushed, decide=decide)
            plan = self._plan(found)
        except Exception as error:
            log_fallback(error, None, f"the node {node!r}")
            return None
        return found if plan.source is None or runs_ahead(plan.source, plan.graph) else None

    def graph(self, traced: TraceResult) -> Graph:
        """The e-graph of a plan, for the engines' profiles as they are now."""
        profiles = tuple(self.pool.profiles.values())
        known = self._graphs.get(id(traced))
        if known is None or any(now is not before for now, before in zip(profiles, known[0], strict=True)):
            known = self._graphs[id(traced)] = profiles, self._plan(traced).graph, traced
        return known[1]

    def _plan(self, traced: TraceResult) -> Any:
        return self.pool.plan(traced.template, None, passes=self._passes, speculate=self._speculate)


_SHAPING = ("builder", "interrupt_before_nodes", "interrupt_after_nodes", "cache_policy")
"""Attributes of a graph, besides its nodes, that plans depend on."""


def shaping_of(graph: Any) -> tuple[Any, ...]:
    """Return what of a graph decides how it runs: its nodes, what they call, where it stops."""
    fields = vars(graph)
    stops = (tuple(value) if isinstance(value := fields.get(name), list) else value for name in _SHAPING)
    nodes = fields["nodes"]
    return (*stops, *nodes, *nodes.values(), *(node.bound for node in nodes.values()))


def is_same_shape(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Compare two results of `shaping_of`: texts by their value, nodes and what they call by identity."""
    return len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) in (str, tuple) and type(one) is type(other) and bool(one == other))


def _behind(work: Callable[[], None]) -> None:
    timer = threading.Timer(BEHIND, work)
    timer.daemon = True
    timer.start()


def _all_there(nodes: Any) -> bool:
    """Whether all names are there that the functions of the nodes read: a module may define some of them later."""
    functions = [one for node in nodes for one in functions_of(node) or () if one is not None]
    return all(map(_has_its_names, functions))


def _has_its_names(func: Any) -> bool:
    while type(func) is partial:
        func = func.func
    func = getattr(func, "__func__", func)
    if type(func) is not FunctionType:
        return True
    around, code = FreeNames.of_function(func), func.__code__
    read = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    return around.has(*read, *code.co_freevars)
