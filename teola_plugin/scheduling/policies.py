"""Which requests form the next batch. A policy is a pure function of the queue, what runs, and the free slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from teola_plugin.scheduling.engine_queue import QueuedPrimitive, Room, Running
from teola_plugin.scheduling.events import QueuedRequest
from teola_plugin.scheduling.fairness import Turn, in_turn
from teola_plugin.scheduling.objectives import Objective

Pick = tuple[QueuedPrimitive, QueuedRequest]


class BatchPolicy(Protocol):
    """Chooses from `queue` (in order of arrival) what goes next, as far as `slots` takes it; never removes anything.

    Which request goes next is the policy's choice; where it goes, if there are several instances, that of `slots`.
    """

    def pick(self, queue: Sequence[QueuedPrimitive], running: Running, slots: Room) -> list[Pick]: ...


def _take(queued: QueuedPrimitive, slots: Room, picked: list[Pick], already: set[str]) -> None:
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


def _take_all(queue: Iterable[QueuedPrimitive], slots: Room) -> tuple[list[Pick], set[str]]:
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
    When several apps wait, the next bucket is the earliest of the app that had least for its weight.
    """

    patience: int = 20

    def pick(self, queue: Sequence[QueuedPrimitive], running: Running, slots: Room) -> list[Pick]:
        if len(queue) == 1:
            return _take_all(queue, slots)[0]
        buckets: dict[str, list[QueuedPrimitive]] = {}
        for queued in queue:
            buckets.setdefault(queued.query, []).append(queued)
        had_turn = {query for query, bucket in buckets.items() if running.deepest(query) > _deepest(bucket)}
        starved = [q for q in queue if q.overtaken >= self.patience]
        picked, already = _take_all(starved, slots)
        levels = {query: _levels(bucket) for query, bucket in buckets.items()}
        if len(levels) > 1 and any(q.objective is not Objective.LATENCY for q in queue):
            levels = dict(sorted(levels.items(), key=lambda item: _urgency(item[1][0])))
        apps = {queued.app for queued in queue}
        had = running.served.had(apps) if len(apps) > 1 else None
        first = True
        while slots.left and any(levels.values()):
            for query in levels if had is None else in_turn(_turns(levels), had):
                remaining = levels[query]
                if not remaining or (first and query in had_turn):
                    continue
                for queued in remaining.pop(0):
                    _take(queued, slots, picked, already)
            first = False
        return picked


def _turns(levels: Mapping[str, list[list[QueuedPrimitive]]]) -> dict[str, Turn]:
    """What each bucket's deepest level takes. A bucket is of one query, hence of one app and weight."""
    return {
        query: Turn(left[0][0].app, left[0][0].weight, sum(r.size for q in left[0] for r in q.requests))
        for query, left in levels.items()
        if left
    }


_URGENCY = {Objective.LATENCY: 0, Objective.THROUGHPUT: 1, Objective.SPARE: 2}


def _urgency(level: Sequence[QueuedPrimitive]) -> int:
    return min(_URGENCY[q.objective] for q in level)


def _deepest(bucket: Sequence[QueuedPrimitive]) -> int:
    return max(q.depth for q in bucket)


def _levels(bucket: Sequence[QueuedPrimitive]) -> list[list[QueuedPrimitive]]:
    """The bucket's primitives by depth, deepest level first; within a level by arrival."""
    depths = sorted({q.depth for q in bucket}, reverse=True)
    return [[q for q in bucket if q.depth == depth] for depth in depths]


@dataclass(frozen=True, slots=True)
class PerInvocation:
    """PO: one invocation's requests as a bundle, one bundle at a time, first come, first served."""

    def pick(self, queue: Sequence[QueuedPrimitive], running: Running, slots: Room) -> list[Pick]:
        picked, _ = _take_all(queue[:1], slots)
        return picked


@dataclass(frozen=True, slots=True)
class ThroughputOriented:
    """TO: blind first come, first served; the batch is filled with whatever waits."""

    def pick(self, queue: Sequence[QueuedPrimitive], running: Running, slots: Room) -> list[Pick]:
        picked, _ = _take_all(queue, slots)
        return picked


POLICIES: dict[str, type[TopologyAware] | type[PerInvocation] | type[ThroughputOriented]] = {
    "topology-aware": TopologyAware,
    "per-invocation": PerInvocation,
    "throughput-oriented": ThroughputOriented,
}
