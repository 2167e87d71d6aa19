"""Policies: which requests form the next batch. A policy is a pure function of the queue, the running requests and the
free slots.

Some order by seconds where Algorithm 2 of the paper counts hops: a hop may be a search of two milliseconds or a
decoding of four seconds, and `remaining`, by the profiles of the engines, tells them apart. Where it is unknown (calls
that no graph has planned), hops decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from teola_plugin.scheduling.engine_queue import (
    FreeSlots,
    QueuedPrimitive,
    QueuedRequest,
    Running,
    RunningRequest,
    Slots,
    Turn,
    serve_in_turn,
)
from teola_plugin.scheduling.live_query import Objective

MAX_RIDER_SHARE = 1 / 16
"""A primitive that takes at most this share of a batch may join deeper primitives of its query."""
Pick = tuple[QueuedPrimitive, QueuedRequest]
Levels = list[list[QueuedPrimitive]]
_DEPTH = attrgetter("depth")


class BatchPolicy(Protocol):
    """Chooses from `queue` (in order of arrival) the requests that go next, as far as `slots` takes them; removes
    nothing.

    If there are several replicas, `slots` chooses the replica of each request.
    """

    def pick(self, queue: Sequence[QueuedPrimitive], running: Running, slots: FreeSlots) -> list[Pick]: ...

    def overtakes(self, request: RunningRequest, other: RunningRequest) -> bool:
        """Return True if a request goes before another that its replica got earlier and has not begun."""
        return False


def _take_requests(queued: QueuedPrimitive, slots: FreeSlots, picked: list[Pick], taken_ids: set[str]) -> None:
    """Add requests of a primitive to `picked` and `taken_ids` for as long as slots take them."""
    for request in queued.requests:
        if request.id in taken_ids:
            continue
        if not slots.left:
            return
        if slots.take(queued, request):
            taken_ids.add(request.id)
            picked.append((queued, request))
        elif slots.in_order:
            return


def _take_in_order(queue: Iterable[QueuedPrimitive], slots: FreeSlots) -> tuple[list[Pick], set[str]]:
    """Return the requests that slots take if primitives are served in this order, and the ids of these requests."""
    picked: list[Pick] = []
    taken_ids: set[str] = set()
    for queued in queue:
        _take_requests(queued, slots, picked, taken_ids)
    return picked, taken_ids


@dataclass(frozen=True, slots=True)
class TopologyAware:
    """Algorithm 2 of the paper: buckets by earliest arrival, each gives the requests of its deepest level.

    The paper leaves five things open. The round is repeated while slots remain. Where slots come free one by one
    (continuous batching), a bucket whose deeper primitives are running has had its turn: otherwise the literal
    algorithm degenerates to first come, first served among queries, and Figure 7's B would run before H. Buckets that
    somebody waits for go before those whose deepest level are members of a gang, and these before warm-ups (see
    `objectives`): a gang is done with its last member, which loses a slot, the other query a whole turn. Where a batch
    runs as a whole (static engines), small primitives join the deeper level of their bucket: they make the batch hardly
    longer, and their query would wait for another whole batch otherwise. Once such a batch is half full it takes only
    primitives that fit as a whole: a part would hold up all others in it, and its query would wait for the rest all the
    same.

    `patience` bounds starvation: a primitive that this many batches have overtaken goes first. When several apps wait,
    the next bucket is the earliest of the app that got least for its weight.
    """

    patience: int = 20

    def pick(self, queue: Sequence[QueuedPrimitive], running: Running, slots: FreeSlots) -> list[Pick]:
        """Return the requests that go next: from each query's bucket in turn its deepest level (see the class)."""
        if len(queue) == 1:
            return _take_in_order(queue, slots)[0]
        if isinstance(slots, Slots):  # a fast path: queues are long where little fits
            slots.smallest_request = min([queued.smallest_request for queued in queue])
            if not slots.left:
                return []
        buckets, starved, all_awaited = self._sort_queue(queue)
        picked, taken_ids = _take_in_order(starved, slots)
        levels = self._order_buckets(LevelsByQuery(buckets, self._levels), running, all_awaited)
        apps = {bucket[0].app for bucket in buckets.values()}
        virtual_times = running.served_units.virtual_times(apps) if len(apps) > 1 else None
        first = True
        while slots.left and any(levels[query] for query in levels):
            for query in (
                levels
                if virtual_times is None
                else serve_in_turn(_TurnsByQuery(levels), virtual_times, _apps_by_query(levels))
            ):
                remaining = levels[query]
                if not remaining or (first and self._had_turn(query, remaining[0][0], running)):
                    continue
                for queued in self._take_next_level(remaining):
                    if not slots.left:
                        return picked
                    if not isinstance(slots, Slots) or not slots.bulk or slots.fits(queued):
                        _take_requests(queued, slots, picked, taken_ids)
                for queued in _small_primitives(remaining, slots):
                    _take_requests(queued, slots, picked, taken_ids)
            first = False
        return picked

    def overtakes(self, request: RunningRequest, other: RunningRequest) -> bool:
        """Return True if somebody waits for the request, and the other one belongs to a gang of a younger query of the
        same app.

        A request does not overtake older queries, or the oldest would end last, nor those of other apps, which have had
        their turn.
        """
        source, other_source = request.source, other.source
        return (
            source.objective is Objective.LATENCY
            and other_source.objective is Objective.THROUGHPUT
            and source.query_number < other_source.query_number
            and source.app == other_source.app
        )

    # Subclasses override the following.

    def _levels(self, bucket: list[QueuedPrimitive]) -> Levels:
        """Return a bucket's primitives in their order, never empty; those that go together are in one list."""
        return _by_depth(bucket)

    def _order_buckets(self, levels: Mapping[str, Levels], running: Running, all_awaited: bool) -> Mapping[str, Levels]:
        """Return the buckets in the order of their turns. `all_awaited`: somebody waits for each primitive."""
        if len(levels) < 2 or all_awaited:
            return levels
        return dict(sorted(levels.items(), key=lambda item: urgency(item[1][0])))

    def _had_turn(self, query: str, first: QueuedPrimitive, running: Running) -> bool:
        """Return True if a running primitive of the query is deeper than its first waiting one.

        Depth is the longest distance to a sink of the graph, so the deepest primitives run first. `pick` skips such a
        query in its first round, since its deepest level already has slots.
        """
        return running.deepest(query) > first.depth

    def _take_next_level(self, left: Levels) -> list[QueuedPrimitive]:
        """Remove from a bucket, and return, what it gives in its turn."""
        return left.pop(0)

    def _sort_queue(
        self, queue: Sequence[QueuedPrimitive]
    ) -> tuple[dict[str, list[QueuedPrimitive]], list[QueuedPrimitive], bool]:
        """Return the buckets by query, the starved primitives, and whether somebody waits for each primitive."""
        buckets: dict[str, list[QueuedPrimitive]] = {}
        starved: list[QueuedPrimitive] = []
        all_awaited = True
        for queued in queue:
            if (bucket := buckets.get(queued.query)) is None:
                buckets[queued.query] = [queued]
            else:
                bucket.append(queued)
            if queued.overtaken >= self.patience:
                starved.append(queued)
            if queued.objective is not Objective.LATENCY:
                all_awaited = False
        return buckets, starved, all_awaited


def _small_primitives(left: Levels, slots: FreeSlots) -> list[QueuedPrimitive]:
    """Return primitives of a bucket's further levels that are small compared to a batch that runs as a whole."""
    max_size = slots.bulk * MAX_RIDER_SHARE if isinstance(slots, Slots) else 0.0
    return [
        queued
        for level in left
        for queued in level
        if queued.smallest_request <= max_size and len(queued.requests) <= max_size
    ]


class LevelsByQuery(Mapping[str, Levels]):
    """Levels by query, in the order of the buckets. They are sorted on access, because a few buckets fill a batch."""

    def __init__(self, buckets: Mapping[str, list[QueuedPrimitive]], sort: Callable[[list[QueuedPrimitive]], Levels]):
        self._buckets, self._sort = buckets, sort
        self._sorted: dict[str, Levels] = {}

    def __getitem__(self, query: str) -> Levels:
        """Return the levels of a query's bucket, sorted when they are first read. Callers may take from them.

        What a caller takes is gone for later readers of the same object, which lives for one scheduling decision.
        """
        levels = self._sorted.get(query)
        if levels is None:
            levels = self._sorted[query] = self._sort(self._buckets[query])
        return levels

    def __iter__(self) -> Iterator[str]:
        """Iterate over the queries that have primitives left."""
        return (query for query in self._buckets if self._sorted.get(query, True))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def apps(self) -> dict[str, str]:
        return {query: self._buckets[query][0].app for query in self}


def _apps_by_query(levels: Mapping[str, Levels]) -> dict[str, str]:
    """Return the app of each bucket that has primitives left."""
    if isinstance(levels, LevelsByQuery):
        return levels.apps()
    return {query: left[0][0].app for query, left in levels.items() if left}


class _TurnsByQuery(Mapping[str, Turn]):
    """The turn of each bucket that has primitives left, by query: what its deepest level takes. A bucket has one app
    and weight."""

    def __init__(self, levels: Mapping[str, Levels]) -> None:
        self._levels = levels

    def __getitem__(self, query: str) -> Turn:
        level = self._levels[query][0]
        return Turn(level[0].app, level[0].weight, sum(r.size for q in level for r in q.requests))

    def __iter__(self) -> Iterator[str]:
        return (query for query in self._levels if self._levels[query])

    def __len__(self) -> int:
        return sum(1 for _ in self)


_URGENCY = {Objective.LATENCY: 0, Objective.THROUGHPUT: 1, Objective.BACKGROUND: 2}


def urgency(level: Sequence[QueuedPrimitive]) -> int:
    """Return 0 if somebody waits for any of the level, 1 if it is members of gangs, 2 if it is warm-ups."""
    return min(_URGENCY[q.objective] for q in level)


def _by_depth(bucket: list[QueuedPrimitive]) -> Levels:
    """Return the bucket's primitives by depth, deepest level first; within a level by arrival."""
    levels: Levels = []
    for queued in sorted(bucket, key=_DEPTH, reverse=True):  # stable, reversed or not
        if not levels or levels[-1][0].depth != queued.depth:
            levels.append([])
        levels[-1].append(queued)
    return levels


@dataclass(frozen=True, slots=True)
class PerInvocation(BatchPolicy):
    """PO: one invocation's requests as a bundle, one bundle at a time, first come, first served."""

    def pick(self, queue: Sequence[QueuedPrimitive], running: Running, slots: FreeSlots) -> list[Pick]:
        picked, _ = _take_in_order(queue[:1], slots)
        return picked


@dataclass(frozen=True, slots=True)
class ThroughputOriented(BatchPolicy):
    """TO: blind first come, first served; the batch is filled with whatever waits."""

    def pick(self, queue: Sequence[QueuedPrimitive], running: Running, slots: FreeSlots) -> list[Pick]:
        picked, _ = _take_in_order(queue, slots)
        return picked


@dataclass(frozen=True, slots=True)
class CriticalPath(TopologyAware):
    """Buckets by earliest arrival, as `TopologyAware`; each gives what is on its longest path, in seconds."""

    def _levels(self, bucket: list[QueuedPrimitive]) -> Levels:
        """Group primitives with the same path left, as requests of a MAP's instances have."""
        levels: Levels = []
        for queued in sorted(bucket, key=_remaining_path, reverse=True):
            if not levels or _remaining_path(levels[-1][0]) != _remaining_path(queued):
                levels.append([])
            levels[-1].append(queued)
        return levels

    def _had_turn(self, query: str, first: QueuedPrimitive, running: Running) -> bool:
        """Return True if a running primitive of the query has a longer way to the end than its first waiting one.

        Without estimates of the remaining time, depth decides.
        """
        if not first.remaining:
            return running.deepest(query) > first.depth
        return running.longest(query) > first.remaining


@dataclass(frozen=True, slots=True)
class ShortestRemaining(CriticalPath):
    """The query that ends soonest goes first, with all its primitives: least mean latency, at the cost of long queries,
    which `patience` bounds. Queries of unknown duration go after those, by arrival."""

    def _order_buckets(self, levels: Mapping[str, Levels], running: Running, all_awaited: bool) -> Mapping[str, Levels]:
        """Order the queries by urgency, then by the seconds that they still take; unknown durations last."""

        def key(item: tuple[str, Levels]) -> tuple[int, float]:
            query, query_levels = item
            remaining_s = max(query_levels[0][0].remaining, running.longest(query))
            return urgency(query_levels[0]), remaining_s or math.inf

        return levels if len(levels) < 2 else dict(sorted(levels.items(), key=key))

    def _had_turn(self, query: str, first: QueuedPrimitive, running: Running) -> bool:
        return False

    def _take_next_level(self, left: Levels) -> list[QueuedPrimitive]:
        """Take all primitives of a bucket at once: by this policy, a query is not served level by level."""
        primitives = [queued for level in left for queued in level]
        left.clear()
        return primitives

    def overtakes(self, request: RunningRequest, other: RunningRequest) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class EarliestDeadline(ShortestRemaining):
    """The query that is due first goes first, with all its primitives, among those that can still be in time: what is
    left on the longest path fits before it is due. Queries without a deadline follow, then those that are late in any
    case; both by arrival. Warm-ups go last."""

    def _order_buckets(self, levels: Mapping[str, Levels], running: Running, all_awaited: bool) -> Mapping[str, Levels]:
        """Order the queries by when they are due; those without a deadline, and late ones, come after these."""

        def key(item: tuple[str, Levels]) -> tuple[bool, int, float]:
            """Return the place of a bucket: warm-ups last, then by class (in time, no deadline, late), then by
            deadline."""
            level = item[1][0]
            first = level[0]
            background = all(queued.objective is Objective.BACKGROUND for queued in level)
            if first.due is None:
                return background, _NEVER, 0.0
            in_time = running.now + first.remaining <= first.due
            return background, _SOON if in_time else _LATE, first.due if in_time else 0.0

        return levels if len(levels) < 2 else dict(sorted(levels.items(), key=key))


_SOON, _NEVER, _LATE = 0, 1, 2


def _remaining_path(queued: QueuedPrimitive) -> tuple[float, int]:
    """Return the seconds, then the hops, to the end of the query."""
    return queued.remaining, queued.depth


POLICIES: dict[str, type[TopologyAware] | type[PerInvocation] | type[ThroughputOriented]] = {
    "topology-aware": TopologyAware,
    "critical-path": CriticalPath,
    "shortest-remaining": ShortestRemaining,
    "earliest-deadline": EarliestDeadline,
    "per-invocation": PerInvocation,
    "throughput-oriented": ThroughputOriented,
}
"""Policies by the names that pools accept."""
