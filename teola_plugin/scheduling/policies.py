"""Which requests form the next batch. A policy is a pure function of the queue, what runs, and the free slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from teola_plugin.scheduling.engine_events import QueuedRequest
from teola_plugin.scheduling.engine_queue import FreeSlots, QueuedPrimitive, Running, RunningRequest, Slots
from teola_plugin.scheduling.fairness import Turn, in_turn
from teola_plugin.scheduling.objectives import Objective

RIDERS = 16
"""A primitive that takes less than this part of a batch goes along with what its query gives."""
Pick = tuple[QueuedPrimitive, QueuedRequest]
Levels = list[list[QueuedPrimitive]]
_DEPTH = attrgetter("depth")


class BatchPolicy(Protocol):
    """Chooses from `queue` (in order of arrival) what goes next, as far as `slots` takes it; never removes anything.

    Which request goes next is the policy's choice; where it goes, if there are several instances, that of `slots`.
    """

    def pick(self, queue: Sequence[QueuedPrimitive], running: Running, slots: FreeSlots) -> list[Pick]: ...

    def passes(self, coming: RunningRequest, other: RunningRequest) -> bool:
        """Whether a request goes before another that its instance was given earlier and has not begun."""
        ...


def _take(queued: QueuedPrimitive, slots: FreeSlots, picked: list[Pick], already: set[str]) -> None:
    for request in queued.requests:
        if request.id in already:
            continue
        if not slots.left:
            return
        if slots.take(queued, request):
            already.add(request.id)
            picked.append((queued, request))
        elif slots.in_order:
            return


def _take_all(queue: Iterable[QueuedPrimitive], slots: FreeSlots) -> tuple[list[Pick], set[str]]:
    picked: list[Pick] = []
    already: set[str] = set()
    for queued in queue:
        _take(queued, slots, picked, already)
    return picked, already


@dataclass(frozen=True, slots=True)
class TopologyAware:
    """Algorithm 2 of the paper: buckets by earliest arrival, each gives the requests of its deepest level.

    Two things the paper leaves open. The round is repeated while slots remain. And where slots come free one by one
    (continuous batching), a bucket whose deeper primitives are running has had its turn: without this, the literal
    algorithm degenerates to first come, first served among queries, and Figure 7's B would run before H.
    Third, buckets that somebody waits for go before those whose deepest level are members of a gang, and these before
    warm-ups (see `objectives`): a gang is done with its last member, which loses a slot, the other query a whole turn.
    `patience` bounds starvation: a primitive that this many batches have overtaken goes first.
    Fourth, where a batch runs as one (static engines), what is small goes along with the deeper level of its bucket: it
    makes the batch hardly longer, and its query would wait for it for a whole batch more.
    Fifth, once such a batch is half full it takes only what it has room for as a whole: a part would hold up all others
    in it, and its query would wait for the rest all the same.
    When several apps wait, the next bucket is the earliest of the app that had least for its weight.
    """

    patience: int = 20

    def pick(self, queue: Sequence[QueuedPrimitive], running: Running, slots: FreeSlots) -> list[Pick]:
        if len(queue) == 1:
            return _take_all(queue, slots)[0]
        if isinstance(slots, Slots):  # queues are long where little fits: mostly this is all that is looked at
            slots.least = min([queued.least for queued in queue])
            if not slots.left:
                return []
        buckets, starved, alike = self._sorted_out(queue)
        picked, already = _take_all(starved, slots)
        levels = self._ordered(Buckets(buckets, self._levels), running, alike)
        apps = {bucket[0].app for bucket in buckets.values()}
        had = running.served.had(apps) if len(apps) > 1 else None
        first = True
        while slots.left and any(levels[query] for query in levels):
            for query in levels if had is None else in_turn(_Turns(levels), had, _apps(levels)):
                remaining = levels[query]
                if not remaining or (first and self._had_turn(query, remaining[0][0], running)):
                    continue
                for queued in self._next(remaining):
                    if not slots.left:
                        return picked
                    if _fits(queued, slots):
                        _take(queued, slots, picked, already)
                for queued in _riders(remaining, slots):
                    _take(queued, slots, picked, already)
            first = False
        return picked

    def passes(self, coming: RunningRequest, other: RunningRequest) -> bool:
        """What somebody waits for passes members of gangs of younger queries, as it does in the queue. Of older ones
        it does not, or the oldest queries would end last; nor of other apps, which have had their turn."""
        own, others = coming.source, other.source
        return (
            own.objective is Objective.LATENCY
            and others.objective is Objective.THROUGHPUT
            and own.came < others.came
            and own.app == others.app
        )

    # What kindred policies decide otherwise (see `time_policies`).

    def _levels(self, bucket: list[QueuedPrimitive]) -> Levels:
        """A bucket's primitives in the order in which they go, those that go together in one list. Never empty."""
        return _by_depth(bucket)

    def _ordered(self, levels: Mapping[str, Levels], running: Running, alike: bool) -> Mapping[str, Levels]:
        """The buckets in the order of their turns. `alike`: somebody waits for each."""
        if len(levels) < 2 or alike:
            return levels
        return dict(sorted(levels.items(), key=lambda item: urgency(item[1][0])))

    def _had_turn(self, query: str, first: QueuedPrimitive, running: Running) -> bool:
        """Whether something runs that goes before the first that waits."""
        return running.deepest(query) > first.depth

    def _next(self, left: Levels) -> list[QueuedPrimitive]:
        """What a bucket gives in its turn; taken out of what it has left."""
        return left.pop(0)

    def _sorted_out(
        self, queue: Sequence[QueuedPrimitive]
    ) -> tuple[dict[str, list[QueuedPrimitive]], list[QueuedPrimitive], bool]:
        """Buckets by query, the starved, and whether somebody waits for each."""
        buckets: dict[str, list[QueuedPrimitive]] = {}
        starved: list[QueuedPrimitive] = []
        alike = True
        for queued in queue:
            if (bucket := buckets.get(queued.query)) is None:
                buckets[queued.query] = [queued]
            else:
                bucket.append(queued)
            if queued.overtaken >= self.patience:
                starved.append(queued)
            if queued.objective is not Objective.LATENCY:
                alike = False
        return buckets, starved, alike


def _fits(queued: QueuedPrimitive, slots: FreeSlots) -> bool:
    return not isinstance(slots, Slots) or not slots.bulk or slots.fits(queued)


def _riders(left: Levels, slots: FreeSlots) -> list[QueuedPrimitive]:
    """Of a bucket's further levels, what is small beside a batch that runs as one."""
    most = slots.bulk / RIDERS if isinstance(slots, Slots) else 0.0
    return [queued for level in left for queued in level if queued.least <= most and len(queued.requests) <= most]


class Buckets(Mapping[str, Levels]):
    """Levels by query, in the order of the buckets; made when they are looked at: a few buckets fill a batch."""

    def __init__(self, buckets: Mapping[str, list[QueuedPrimitive]], sort: Callable[[list[QueuedPrimitive]], Levels]):
        self._buckets, self._sort = buckets, sort
        self._sorted: dict[str, Levels] = {}

    def __getitem__(self, query: str) -> Levels:
        found = self._sorted.get(query)
        if found is None:
            found = self._sorted[query] = self._sort(self._buckets[query])
        return found

    def __iter__(self) -> Iterator[str]:
        """Those that have something left."""
        return (query for query in self._buckets if self._sorted.get(query, True))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def apps(self) -> dict[str, str]:
        return {query: self._buckets[query][0].app for query in self}


def _apps(levels: Mapping[str, Levels]) -> dict[str, str]:
    """Whose bucket each is that has something left."""
    if isinstance(levels, Buckets):
        return levels.apps()
    return {query: left[0][0].app for query, left in levels.items() if left}


class _Turns(Mapping[str, Turn]):
    """What each bucket's deepest level takes, by query, of those that have something left. A bucket is of one query,
    hence of one app and weight."""

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
    """0 if somebody waits for any of it, 1 if it is members of gangs, 2 if it is warm-ups."""
    return min(_URGENCY[q.objective] for q in level)


def _by_depth(bucket: list[QueuedPrimitive]) -> Levels:
    """The bucket's primitives by depth, deepest level first; within a level by arrival."""
    levels: Levels = []
    for queued in sorted(bucket, key=_DEPTH, reverse=True):  # stable, reversed or not
        if not levels or levels[-1][0].depth != queued.depth:
            levels.append([])
        levels[-1].append(queued)
    return levels


@dataclass(frozen=True, slots=True)
class PerInvocation:
    """PO: one invocation's requests as a bundle, one bundle at a time, first come, first served."""

    def pick(self, queue: Sequence[QueuedPrimitive], running: Running, slots: FreeSlots) -> list[Pick]:
        picked, _ = _take_all(queue[:1], slots)
        return picked

    def passes(self, coming: RunningRequest, other: RunningRequest) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class ThroughputOriented:
    """TO: blind first come, first served; the batch is filled with whatever waits."""

    def pick(self, queue: Sequence[QueuedPrimitive], running: Running, slots: FreeSlots) -> list[Pick]:
        picked, _ = _take_all(queue, slots)
        return picked

    def passes(self, coming: RunningRequest, other: RunningRequest) -> bool:
        return False
