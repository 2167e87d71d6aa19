"""Tests of topology-aware batches from long queues against the simple form of the algorithm."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import pytest

from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.scheduling import EngineScheduler, TopologyAware
from teola_plugin.scheduling.engine_queue import (
    Enqueue,
    FreeSlots,
    PrefillEnded,
    QueuedPrimitive,
    QueuedRequest,
    RequestsEnded,
    RunBatch,
    Running,
    Slots,
    Turn,
    serve_in_turn,
)
from teola_plugin.scheduling.live_query import Objective
from teola_plugin.scheduling.policies import Levels
from tests.support.steps import steps

K = PrimitiveKind
URGENCY = list(Objective)


def by_the_book(queue: Sequence[QueuedPrimitive], running: Running, slots: FreeSlots, patience: int) -> list[str]:
    """Pick requests by the simple algorithm: look at everything, level by level, until nothing more fits."""
    picked: list[str] = []

    def take(queued: QueuedPrimitive) -> None:
        for request in queued.requests:
            if request.id in picked:
                continue
            if not slots.left or not slots.take(queued, request):
                return
            picked.append(request.id)

    if len(queue) == 1:
        take(queue[0])
        return picked
    buckets: dict[str, list[QueuedPrimitive]] = {}
    for queued in queue:
        buckets.setdefault(queued.query, []).append(queued)
    had_turn = {name for name, of in buckets.items() if running.deepest(name) > max(q.depth for q in of)}
    for queued in queue:
        if queued.overtaken >= patience:
            take(queued)
    levels = {name: [[q for q in of if q.depth == depth] for depth in sorted({q.depth for q in of}, reverse=True)]
              for name, of in buckets.items()}  # fmt: skip
    if any(q.objective is not Objective.LATENCY for q in queue):
        levels = dict(sorted(levels.items(), key=lambda item: min(URGENCY.index(q.objective) for q in item[1][0])))
    apps = {queued.app for queued in queue}
    had = running.served_units.virtual_times(apps) if len(apps) > 1 else None
    first = True
    while any(levels.values()):
        turns = {name: Turn(left[0][0].app, left[0][0].weight, sum(r.size for q in left[0] for r in q.requests))
                 for name, left in levels.items() if left}  # fmt: skip
        for name in list(levels) if had is None else list(serve_in_turn(turns, had)):
            if levels[name] and not (first and name in had_turn):
                for queued in levels[name].pop(0):
                    take(queued)
        first = False
    return picked


class Busy(Running):
    """Work of queries that runs, by the depth of its deepest."""

    def __init__(self, depths: dict[str, int]) -> None:
        super().__init__()
        self.depths = depths

    def deepest(self, query: str) -> int:
        return self.depths.get(query, -1)


def random_queue(rng: random.Random) -> tuple[list[QueuedPrimitive], Running]:
    queue = []
    apps = {f"q{i}": rng.choice(["a", "b"]) if rng.random() < 0.5 else "a" for i in range(4)}
    for i in range(rng.randrange(1, 12)):
        query = f"q{rng.randrange(4)}"
        requests = deque(QueuedRequest(f"r{i}.{n}", rng.choice([10, 50, 200, 900])) for n in range(rng.randrange(1, 4)))
        one = QueuedPrimitive(query, f"p{i}", K.PREFILLING, requests, rng.randrange(4), i, apps[query])
        one.overtaken, one.objective = rng.choice([0, 0, 0, 25]), rng.choice(URGENCY)
        if rng.random() < 0.3:
            one.requests.popleft()
        queue += [one] if one.requests else []
    return queue, Busy({f"q{i}": rng.randrange(5) for i in range(rng.randrange(3))})


def test_picked_batch_equals_exhaustive_search() -> None:
    for seed in range(1500):
        rng = random.Random(seed)
        queue, running = random_queue(rng)
        if not queue:
            continue
        size = rng.randrange(6), rng.choice([0, 5, 60, 260, 1000]), rng.random() < 0.3
        found = [request.id for _, request in TopologyAware().pick(queue, running, Slots(*size))]
        assert found == by_the_book(queue, running, Slots(*size), 20), seed


LLM = EngineProfile(batching=Batching.CONTINUOUS, max_batch=4096, max_requests=64)


def driven(count: int) -> EngineScheduler:
    """Run prompts of 200 tokens that all wait at first, and end one by one."""
    scheduler = EngineScheduler(LLM)
    running: deque[str] = deque()

    def record_batches(out: Sequence[object]) -> None:
        for order in out:
            running.extend(order.requests if isinstance(order, RunBatch) else ())

    for i in range(count):
        record_batches(
            scheduler.handle(Enqueue(0.0, f"q{i % 3}", f"p{i}", K.PREFILLING, (QueuedRequest(f"r{i}", 200),), 1))
        )
    while running:
        request = running.popleft()
        record_batches(scheduler.handle(PrefillEnded(0.0, request)))
        record_batches(scheduler.handle(RequestsEnded(0.0, (request,))))
    assert not scheduler.queue
    return scheduler


class Counting(TopologyAware):
    """Counts the buckets that it sorts."""

    sorted: ClassVar[int] = 0

    def _levels(self, bucket: list[QueuedPrimitive]) -> Levels:
        type(self).sorted += 1
        return super()._levels(bucket)


@pytest.mark.parametrize("apps", [1, 2])
def test_only_buckets_that_fill_the_batch_are_sorted(apps: int) -> None:
    request_queues = [deque([QueuedRequest(f"r{i}", 100)]) for i in range(1000)]
    queue = [
        QueuedPrimitive(f"q{i}", "p", K.PREFILLING, one, 1, i, f"app{i % apps}") for i, one in enumerate(request_queues)
    ]
    Counting.sorted = 0
    picked = Counting().pick(queue, Running(), Slots(4, 1000, is_idle=False))
    assert [request.id for _, request in picked] == [f"r{i}" for i in range(4)]
    assert 4 <= Counting.sorted <= 6


def test_waiting_prompt_costs_little_per_scheduling_round() -> None:
    """The cost of a long queue grows with its square, but slowly: instructions for each prompt and each time."""
    extra = steps(lambda: driven(160)) - 2 * steps(lambda: driven(80))
    assert extra / (2 * 80) ** 2 < 90
