"""What runs ahead of a graph's nodes: the parts of a live query that carry out the nodes' plans."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from teola_plugin.adapters.early_work import log_fallback
from teola_plugin.adapters.langgraph.coverage import covers, only_warms_up
from teola_plugin.adapters.langgraph.plans import Plans
from teola_plugin.graph import Graph
from teola_plugin.runtime.context import CallPlace, current_place
from teola_plugin.runtime.part import HeldPart
from teola_plugin.runtime.query_run import PartRun, QueryRun
from teola_plugin.shims.langgraph import branch_of, sent, state_of
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.langgraph.lookahead import ARGUMENT, STATE
from teola_plugin.tracer.langgraph.shape import begun_with

DEPTH = 4
"""Primitives that a node stands for, as far as depth goes: a prompt, its prefilling and decoding, a parser."""


@dataclass(slots=True, eq=False)
class _Live:
    """A part that has not ended, with its plan; and the last superstep of which it is known to ask for something."""

    part: PartRun
    graph: Graph
    step: int


class Parts:
    """The parts of one call of a graph. Those of a superstep end when the second superstep after it begins, of which
    those without parts do not count: until then the nodes behind it, which they were begun for, run. What a part has
    asked for already is not asked for by the parts of these nodes once more: they are held until something comes that
    it has not foreseen."""

    def __init__(self, plans: Plans, run: QueryRun) -> None:
        self._plans, self._run = plans, run
        self._live: list[_Live] = []
        self._lock = threading.Lock()

    def place(self, name: str, config: Mapping[str, Any]) -> CallPlace:
        """Where the node's code is in the query: so far from its end, and done with the tasks beside it."""
        around = current_place.get()
        depth = around.depth + DEPTH * self._plans.distances.get(name, 0)
        return CallPlace(depth, branch_of(config) or around.gang, around.step, around.held)

    def node_began(
        self, name: str, given: Any, config: Mapping[str, Any], place: CallPlace, step: int
    ) -> HeldPart | None:
        """What its plan asks for begins, unless there is none, or unless it is held. To be called from any thread.
        Raises nothing. `step`: the number of its superstep."""
        part = None
        try:
            found, over = self._planned(name, given, config), self._over(step)
            if found is None:
                self._run.turn(over=over)
            else:
                part = self._part(name, *found, place, step, over, pushed=sent(config))
        except Exception as error:
            log_fallback(error, None, f"the node {name!r}")
        return None if part is None else part.held

    def _planned(self, node: str, given: Any, config: Mapping[str, Any]) -> tuple[TraceResult, dict[str, Any]] | None:
        """The plan of a node, and the value that it begins with; None without one."""
        plans, shape, pushed = self._plans, self._plans.shape, sent(config)
        if shape is None or not plans.may_have(node, pushed=pushed):
            return None
        state = state_of(config, plans.channels)
        if shape.nodes[node].bound is None:
            state = begun_with(shape, state, given)
        value = {STATE: state, ARGUMENT: given if pushed else None}
        planned = plans.at_hand(node, value, pushed=pushed)
        return None if planned is None else (planned, value)

    def _part(
        self,
        node: str,
        planned: TraceResult,
        value: dict[str, Any],
        place: CallPlace,
        step: int,
        over: list[PartRun],
        *,
        pushed: bool,
    ) -> PartRun:
        """The part of a node: it has begun, or is held. Those that are `over` end behind it, which goes on with what
        they have in common."""
        graph = self._plans.graph(planned)
        with self._lock:
            covered = not pushed and self._covered(graph, step)
        held = covered or only_warms_up(graph)
        if not held:
            self._run.turn(over=over, soon=False)
        part = self._run.part(
            graph,
            planned.calls,
            value,
            depth=place.depth - DEPTH * self._plans.distances.get(node, 0),  # a plan goes on to the graph's end
            gang=place.gang,
            members=node if pushed else "",
            lookahead=True,
            step=place.step,
            held=held,
            covered=covered,
            form=place.form,
        )
        if held:
            self._run.turn(part.held, over)
        with self._lock:
            self._live.append(_Live(part, graph, step))
        return part

    def _covered(self, graph: Graph, step: int) -> bool:
        """Whether a part of an earlier superstep has asked for all of it; that one goes on, then."""
        for one in self._live:
            if one.step < step and one.part.begun and covers(one.graph, graph):
                one.step = step
                return True
        return False

    def _over(self, step: int) -> list[PartRun]:
        with self._lock:
            latest = max((one.step for one in self._live if one.step < step), default=step)
            over = [one.part for one in self._live if one.step < latest]
            self._live = [one for one in self._live if one.step >= latest]
            return over

    def close(self) -> None:
        """The call is over."""
        with self._lock:
            live, self._live = self._live, []
        for one in live:
            one.part.close()
