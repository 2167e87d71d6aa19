"""How deep each primitive of a live query is, as fragments are spliced in."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from teola_plugin.graph import Graph
from teola_plugin.scheduling.live_primitive import LivePrimitive


class Depths:
    """Longest ways to a sink and beyond, kept right as a query grows. They never become shorter: edges only come."""

    def __init__(self, live: dict[str, LivePrimitive], children: dict[str, list[str]]) -> None:
        self._live, self._children = live, children
        self._raised: dict[str, int] = {}
        """Depths that are greater than those known, by primitive, and not seen to yet."""
        self._todo: list[tuple[int, str]] = []
        """Those primitives, by the depth that is known: what leads to another is deeper than that other."""
        self._order: list[tuple[int, str]] | None = None
        """What has not ended, deepest first; kept once somebody asks."""

    def leads(self, name: str, to: str) -> None:
        """There is a way from one to the other now."""
        self._offer(name, self._live[to].depth + 1)

    def grown(self, made: Sequence[LivePrimitive]) -> dict[str, int]:
        """`made` is new, in an order in which nothing leads to an earlier one. Returns what changed at engines."""
        for live in reversed(made):
            known = [child.depth for name in self._children.get(live.id, ()) if (child := self._live.get(name))]
            live.depth = max(live.least, 1 + max(known, default=-1))
        for live in made:
            self._spread(live)
        changed: dict[str, int] = {}
        while self._todo:
            _, name = heappop(self._todo)
            depth, found = self._raised.pop(name, 0), self._live.get(name)
            if found is None or depth <= found.depth:
                continue
            found.depth = depth
            self._spread(found)
            if found.status.active and found.primitive.on_engine:
                changed[name] = depth
        return changed

    def _spread(self, live: LivePrimitive) -> None:
        """Its depth is known: what leads to it is deeper."""
        if self._order is not None:
            heappush(self._order, (-live.depth, live.id))
        for parent in Graph.edges_into(live.primitive):
            self._offer(parent, live.depth + 1)
        for ref in live.outputs:
            self._offer(ref.producer, live.depth + 1)
        for ref in live.early:
            self._offer(ref.producer, live.depth + 1)

    def _offer(self, name: str, depth: int) -> None:
        live = self._live.get(name)
        if live is None or depth <= live.depth:
            return
        if name not in self._raised:
            heappush(self._todo, (live.depth, name))
        self._raised[name] = max(depth, self._raised.get(name, 0))

    def deepest(self) -> int:
        if self._order is None:
            self._order = [(-live.depth, live.id) for live in self._live.values()]
            heapify(self._order)
        while self._order:
            depth, name = self._order[0]
            live = self._live.get(name)
            if live is not None and not live.status.ended and live.depth == -depth:
                return -depth
            heappop(self._order)
        return 0
