"""How long queries still take, by the profiles of idle engines: for batch policies that look at seconds.

Kept with each planned graph, which serves many queries. What was spliced in since is followed to where it meets the
plan. Of what lies beyond the end of a part only the number of hops is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

from teola_plugin.graph import EngineProfile, Graph, Primitive
from teola_plugin.passes import PassContext
from teola_plugin.passes.estimate import remaining_times, seconds
from teola_plugin.scheduling import LiveQuery
from teola_plugin.scheduling.live_query import LivePrimitive

HOP = 0.1
"""Seconds of a primitive of which nothing but its place is known."""


class Remaining:
    """Of the queries of one runtime. `profiles` are read when a graph is met for the first time."""

    def __init__(self, profiles: Callable[[], Mapping[str, EngineProfile]]) -> None:
        self._profiles = profiles
        self._known: WeakKeyDictionary[Graph, Mapping[str, float]] = WeakKeyDictionary()

    def of(self, query: LiveQuery | None, p: Primitive, depth: int) -> float:
        """Expected seconds from the beginning of `p` to the end of its query."""
        if query is None:
            return 0.0
        planned = self._planned(query.graph).get(p.id)
        if planned is not None:
            return planned
        live = query.get(p.id)
        return depth * HOP if live is None else self._followed(query, live)

    def call(self, query: LiveQuery | None, depth: int) -> float:
        """Of a call of the plain object that no graph knows: nothing of its query is more urgent."""
        if query is None:
            return 0.0
        planned = self._planned(query.graph)
        return max([planned.get(live.id, 0.0) for live in query if not live.status.has_ended], default=depth * HOP)

    def _planned(self, graph: Graph) -> Mapping[str, float]:
        found = self._known.get(graph)
        if found is None:
            found = self._known[graph] = remaining_times(graph, PassContext(self._profiles()))
        return found

    def _followed(self, query: LiveQuery, live: LivePrimitive) -> float:
        """Depth first, on a stack of its own: a chain may be thousands of primitives long."""
        planned, context = self._planned(query.graph), PassContext(self._profiles())
        left: dict[str, float] = {}
        todo = [live]
        while todo:
            one = todo[-1]
            children = query.children(one.id)
            for child in children:
                if child.id in planned:
                    left.setdefault(child.id, planned[child.id])
            open_ = [child for child in children if child.id not in left]
            if open_:
                todo += open_
                continue
            todo.pop()
            beyond = max([left[child.id] for child in children], default=one.base_depth * HOP)
            left[one.id] = seconds(one.primitive, context) + beyond
        return left[live.id]
