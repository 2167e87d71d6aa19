"""What runs ahead of a graph's nodes: plans of its nodes, and the parts of a live query that carry them out."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from teola_plugin.adapters.early_work import log_fallback, runs_ahead
from teola_plugin.passes import Pass
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.context import CallPlace, current_place
from teola_plugin.runtime.query_run import PartRun, QueryRun
from teola_plugin.shims.langgraph import branch_of, sent, state_of
from teola_plugin.tracer.draft import Traced
from teola_plugin.tracer.functions.deciding import Decide
from teola_plugin.tracer.langgraph.decisions import Decided
from teola_plugin.tracer.langgraph.lookahead import ARGUMENT, STATE, lookahead
from teola_plugin.tracer.langgraph.shape import GraphShape, begun_with, distances, shape_of

DEPTH = 4
"""Primitives that a node stands for, as far as depth goes: a prompt, its prefilling and decoding, a parser."""


class Plans:
    """Of one graph: for each node, what it and the nodes behind it will ask engines for. Made when first wanted."""

    def __init__(self, graph: Any, pool: EnginePool, passes: tuple[Pass, ...] | None, speculate: str) -> None:
        self._pool, self._passes, self._speculate = pool, passes, speculate
        self.shape: GraphShape | None = shape_of(graph)
        self.distances: Mapping[str, int] = {} if self.shape is None else distances(self.shape)
        self._known: dict[tuple[str, bool], Decided[Traced | None]] = {}

    def traced(self, node: str, value: Any, *, pushed: bool) -> Traced | None:
        """For a template's input. None where nothing is gained."""
        key = node, pushed
        found = self._known.get(key)
        if found is None:
            found = self._known.setdefault(key, Decided(partial(self._traced, node, pushed)))
        return found.plan(value)

    def _traced(self, node: str, pushed: bool, decide: Decide | None) -> Traced | None:
        if self.shape is None or node not in self.shape.nodes or self._speculate == "off":
            return None
        try:
            found = lookahead(self.shape, node, pushed=pushed, decide=decide)
            plan = self._plan(found)
        except Exception as error:
            log_fallback(error)
            return None
        return found if plan.source is None or runs_ahead(plan.source, plan.graph) else None

    def _plan(self, traced: Traced) -> Any:
        return self._pool.plan(traced.template, None, passes=self._passes, speculate=self._speculate)

    def begin(self, run: QueryRun, node: str, given: Any, config: Mapping[str, Any]) -> PartRun | None:
        """The plan of a node whose task begins joins the live query; None without one."""
        pushed = sent(config)
        if self.shape is None or node not in self.shape.nodes:
            return None
        state = state_of(config, tuple(self.shape.updates))
        if self.shape.nodes[node].bound is None:
            state = begun_with(self.shape, state, given)
        value = {STATE: state, ARGUMENT: given if pushed else None}
        traced = self.traced(node, value, pushed=pushed)
        if traced is None:
            return None
        place = current_place.get()
        return run.part(
            self._plan(traced).graph,
            traced.calls,
            value,
            depth=place.depth - DEPTH * self.distances.get(node, 0),  # a plan goes on to the graph's end
            members=node if pushed else "",
            lookahead=True,
            step=place.step,
        )

    def place(self, node: str, config: Mapping[str, Any]) -> CallPlace:
        """Where code of the node is: so far from the end of the query, and done with the tasks beside it."""
        around = current_place.get()
        depth = around.depth + DEPTH * self.distances.get(node, 0)
        return CallPlace(depth, branch_of(config) or around.gang, around.step)


class Parts:
    """The parts of one call of a graph. Those of a superstep end when the second superstep after it begins, of which
    those without parts do not count: until then the nodes behind it, which they were begun for, run."""

    def __init__(self, plans: Plans, run: QueryRun) -> None:
        self._plans, self._run = plans, run
        self._live: dict[int, list[PartRun]] = {}
        self._lock = threading.Lock()

    def place(self, name: str, config: Mapping[str, Any]) -> CallPlace:
        """Where the node's code is, in the query."""
        return self._plans.place(name, config)

    def node_began(self, name: str, given: Any, config: Mapping[str, Any]) -> None:
        """What its plan asks for begins, unless there is none. To be called from any thread. Raises nothing."""
        try:
            step = int((config.get("metadata") or {}).get("langgraph_step", 0))
            for part in self._over(step):
                part.close()
            begun = self._plans.begin(self._run, name, given, config)
            if begun is not None:
                with self._lock:
                    self._live.setdefault(step, []).append(begun)
        except Exception as error:
            log_fallback(error)

    def _over(self, step: int) -> list[PartRun]:
        with self._lock:
            latest = max((one for one in self._live if one < step), default=step)
            old = [one for one in self._live if one < latest]
            return [part for one in old for part in self._live.pop(one)]

    def close(self) -> None:
        """The call is over."""
        with self._lock:
            parts, self._live = [part for found in self._live.values() for part in found], {}
        for part in parts:
            part.close()
