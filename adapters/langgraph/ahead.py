"""What runs ahead of a graph's nodes: the parts of a live query that carry out the nodes' plans."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from teola_plugin.adapters.early_work import log_fallback
from teola_plugin.adapters.langgraph.plans import Plans
from teola_plugin.runtime.context import CallPlace, current_place
from teola_plugin.runtime.query_run import PartRun, QueryRun
from teola_plugin.shims.langgraph import branch_of, sent, state_of
from teola_plugin.tracer.langgraph.lookahead import ARGUMENT, STATE
from teola_plugin.tracer.langgraph.shape import begun_with

DEPTH = 4
"""Primitives that a node stands for, as far as depth goes: a prompt, its prefilling and decoding, a parser."""


class Parts:
    """The parts of one call of a graph. Those of a superstep end when the second superstep after it begins, of which
    those without parts do not count: until then the nodes behind it, which they were begun for, run."""

    def __init__(self, plans: Plans, run: QueryRun) -> None:
        self._plans, self._run = plans, run
        self._live: dict[int, list[PartRun]] = {}
        self._lock = threading.Lock()

    def place(self, name: str, config: Mapping[str, Any]) -> CallPlace:
        """Where the node's code is in the query: so far from its end, and done with the tasks beside it."""
        around = current_place.get()
        depth = around.depth + DEPTH * self._plans.distances.get(name, 0)
        return CallPlace(depth, branch_of(config) or around.gang, around.step)

    def node_began(self, name: str, given: Any, config: Mapping[str, Any], step: int) -> None:
        """What its plan asks for begins, unless there is none. To be called from any thread, in the node's place.
        Raises nothing. `step`: the number of its superstep."""
        try:
            part = self._begun(name, given, config)
            over: list[PartRun] = []
            with self._lock:
                if part is not None:
                    self._live.setdefault(step, []).append(part)
                latest = max((one for one in self._live if one < step), default=step)
                for old in [one for one in self._live if one < latest]:
                    over += self._live.pop(old)
            for one in over:  # behind the new one, which goes on with what they have in common
                one.close()
        except Exception as error:
            log_fallback(error)

    def _begun(self, node: str, given: Any, config: Mapping[str, Any]) -> PartRun | None:
        """The plan of a node joins the live query; None without one."""
        plans, pushed = self._plans, sent(config)
        shape = plans.shape
        if shape is None or not plans.may_have(node, pushed=pushed):
            return None
        state = state_of(config, plans.channels)
        if shape.nodes[node].bound is None:
            state = begun_with(shape, state, given)
        value = {STATE: state, ARGUMENT: given if pushed else None}
        planned = plans.at_hand(node, value, pushed=pushed)
        if planned is None:
            return None
        place = current_place.get()
        return self._run.part(
            plans.graph(planned),
            planned.calls,
            value,
            depth=place.depth - DEPTH * plans.distances.get(node, 0),  # a plan goes on to the graph's end
            members=node if pushed else "",
            lookahead=True,
            step=place.step,
        )

    def close(self) -> None:
        """The call is over."""
        with self._lock:
            parts, self._live = [part for found in self._live.values() for part in found], {}
        for part in parts:
            part.close()
