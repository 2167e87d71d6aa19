"""Policies that look at seconds where Algorithm 2 counts hops: how long a query still takes, and when it is due.

The paper leaves both open. A hop may be a search of two milliseconds or a decoding of four seconds; `remaining`, by the
profiles of the engines, tells them apart. Where nobody knows it (calls that no graph has planned), hops decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from teola_plugin.scheduling.engine_queue import QueuedPrimitive, Running, RunningRequest
from teola_plugin.scheduling.objectives import Objective
from teola_plugin.scheduling.policies import Levels, PerInvocation, ThroughputOriented, TopologyAware, urgency


@dataclass(frozen=True, slots=True)
class CriticalPath(TopologyAware):
    """Buckets by earliest arrival, as `TopologyAware`; each gives what is on its longest path, in seconds."""

    def _levels(self, bucket: list[QueuedPrimitive]) -> Levels:
        """Those of one level have the same way to go, as requests of a MAP's instances do."""
        levels: Levels = []
        for queued in sorted(bucket, key=_way, reverse=True):
            if not levels or _way(levels[-1][0]) != _way(queued):
                levels.append([])
            levels[-1].append(queued)
        return levels

    def _had_turn(self, query: str, first: QueuedPrimitive, running: Running) -> bool:
        if not first.remaining:
            return running.deepest(query) > first.depth
        return running.longest(query) > first.remaining


@dataclass(frozen=True, slots=True)
class ShortestRemaining(CriticalPath):
    """The query that is done soonest goes first, with all it has: least mean latency, at the cost of long queries,
    which `patience` bounds. Queries of which nobody knows how long they take go by arrival, after those."""

    def _ordered(self, levels: Mapping[str, Levels], running: Running, alike: bool) -> Mapping[str, Levels]:
        def key(item: tuple[str, Levels]) -> tuple[int, float]:
            query, found = item
            way = max(found[0][0].remaining, running.longest(query))
            return urgency(found[0]), way or math.inf

        return levels if len(levels) < 2 else dict(sorted(levels.items(), key=key))

    def _had_turn(self, query: str, first: QueuedPrimitive, running: Running) -> bool:
        return False

    def _next(self, left: Levels) -> list[QueuedPrimitive]:
        found = [queued for level in left for queued in level]
        left.clear()
        return found

    def passes(self, coming: RunningRequest, other: RunningRequest) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class EarliestDeadline(ShortestRemaining):
    """The query that is due first goes first, with all it has, of those that can still be in time: what is left on its
    longest path fits before it is due. Then those that nobody set a time for, then those that are late in any case;
    both by arrival. Warm-ups go last."""

    def _ordered(self, levels: Mapping[str, Levels], running: Running, alike: bool) -> Mapping[str, Levels]:
        def key(item: tuple[str, Levels]) -> tuple[bool, int, float]:
            level = item[1][0]
            first = level[0]
            background = all(queued.objective is Objective.BACKGROUND for queued in level)
            if first.due is None:
                return background, _NEVER, 0.0
            in_time = running.now + first.remaining <= first.due
            return background, _SOON if in_time else _LATE, first.due if in_time else 0.0

        return levels if len(levels) < 2 else dict(sorted(levels.items(), key=key))


_SOON, _NEVER, _LATE = 0, 1, 2


def _way(queued: QueuedPrimitive) -> tuple[float, int]:
    """Seconds to the end of the query, then hops."""
    return queued.remaining, queued.depth


POLICIES: dict[str, type[TopologyAware] | type[PerInvocation] | type[ThroughputOriented]] = {
    "topology-aware": TopologyAware,
    "critical-path": CriticalPath,
    "shortest-remaining": ShortestRemaining,
    "earliest-deadline": EarliestDeadline,
    "per-invocation": PerInvocation,
    "throughput-oriented": ThroughputOriented,
}
"""By the name that pools take."""
