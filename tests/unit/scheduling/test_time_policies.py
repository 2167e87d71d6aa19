"""Tests of the policies that order queries by remaining time and by due time."""

from __future__ import annotations

import pytest

from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.scheduling import (
    POLICIES,
    BatchPolicy,
    CriticalPath,
    EarliestDeadline,
    EngineScheduler,
    ShortestRemaining,
    TopologyAware,
)
from teola_plugin.scheduling.engine_queue import Enqueue, QueuedRequest, RequestsEnded, RunBatch
from teola_plugin.scheduling.live_query import Objective

ONE = EngineProfile(batching=Batching.CONTINUOUS, max_batch=1, max_requests=1)
Row = tuple[str, int, float, float | None]
"""(query and number, depth, seconds to the end, seconds until it is due)"""


def order(policy: BatchPolicy, *rows: Row, objective: Objective = Objective.LATENCY, at: float = 0.0) -> str:
    """Return the order in which they run on an engine with one slot, which is busy until all have come."""
    scheduler = EngineScheduler(ONE, policy=policy)
    scheduler.handle(Enqueue(at, "Z", "Z0", PrimitiveKind.EMBEDDING, (QueuedRequest("Z0"),)))
    for name, depth, remaining, left in rows:
        request = (QueuedRequest(name),)
        kept = {"objective": objective, "remaining": remaining, "left": left}
        scheduler.handle(Enqueue(at, name[0], name, PrimitiveKind.EMBEDDING, request, depth, **kept))  # type: ignore[arg-type]
    found, running = [], "Z0"
    for _ in rows:
        (batch,) = scheduler.handle(RequestsEnded(at, (running,)))
        assert isinstance(batch, RunBatch)
        (running,) = batch.requests
        found.append(running)
    return " ".join(found)


HOPS = (("A1", 5, 0.4, None), ("A2", 2, 6.0, None), ("B1", 3, 0.5, None), ("B2", 1, 0.2, None))
"""Of A, many short hops and one long one; B is soon done."""


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (TopologyAware(), "A1 A2 B1 B2"),
        (CriticalPath(), "A2 A1 B1 B2"),
        (ShortestRemaining(), "B1 B2 A2 A1"),
        (EarliestDeadline(), "A2 A1 B1 B2"),
    ],
)
def test_policies_order_requests_by_hops_or_seconds(policy: BatchPolicy, wanted: str) -> None:
    assert order(policy, *HOPS) == wanted


@pytest.mark.parametrize("policy", [CriticalPath(), ShortestRemaining(), EarliestDeadline()])
def test_hops_decide_the_order_if_seconds_are_unknown(policy: BatchPolicy) -> None:
    assert order(policy, ("A1", 1, 0.0, None), ("A2", 4, 0.0, None), ("A3", 2, 0.0, None)) == "A2 A3 A1"


def test_bucket_whose_longer_work_runs_yields_its_turn() -> None:
    two = EngineProfile(batching=Batching.CONTINUOUS, max_batch=2, max_requests=2)
    scheduler = EngineScheduler(two, policy=CriticalPath())

    def came(name: str, remaining: float) -> list[tuple[str, ...]]:
        event = Enqueue(0.0, name[0], name, PrimitiveKind.EMBEDDING, (QueuedRequest(name),), 1, remaining=remaining)
        return [batch.requests for batch in scheduler.handle(event) if isinstance(batch, RunBatch)]

    assert came("A1", 5.0) == [("A1",)] and came("Z1", 1.0) == [("Z1",)]
    assert came("A2", 2.0) == came("B1", 1.0) == []
    (batch,) = scheduler.handle(RequestsEnded(0.0, ("Z1",)))
    assert isinstance(batch, RunBatch) and batch.requests == ("B1",)


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ((("A1", 0, 1.0, 9.0), ("B1", 0, 1.0, 3.0), ("C1", 0, 1.0, 5.0)), "B1 C1 A1"),
        ((("A1", 0, 4.0, 3.0), ("B1", 0, 1.0, 9.0)), "B1 A1"),  # A is late in any case
        ((("A1", 0, 1.0, None), ("B1", 0, 1.0, 3.0)), "B1 A1"),  # nobody set a time for A
        ((("A1", 0, 4.0, 3.0), ("B1", 0, 9.0, 1.0), ("C1", 0, 1.0, None)), "C1 A1 B1"),  # late ones by arrival
        ((("A1", 0, 3.0, 3.0), ("B1", 0, 0.0, 4.0)), "A1 B1"),  # just in time
    ],
)
def test_earliest_reachable_deadline_goes_first(rows: tuple[Row, ...], wanted: str) -> None:
    assert order(EarliestDeadline(), *rows) == order(EarliestDeadline(), *rows, at=1000.0) == wanted


def test_warm_ups_run_after_requests_with_a_deadline() -> None:
    scheduler = EngineScheduler(ONE, policy=EarliestDeadline())
    for name, objective, left in (
        ("Z", Objective.LATENCY, None),
        ("A", Objective.BACKGROUND, 1.0),
        ("B", Objective.LATENCY, 5.0),
    ):
        request = (QueuedRequest(name),)
        kind = PrimitiveKind.EMBEDDING
        scheduler.handle(Enqueue(0.0, name, name, kind, request, objective=objective, left=left))
    (batch,) = scheduler.handle(RequestsEnded(0.0, ("Z",)))
    assert isinstance(batch, RunBatch) and batch.requests == ("B",)


@pytest.mark.parametrize("policy", [ShortestRemaining(), EarliestDeadline()])
def test_request_is_overtaken_at_most_twenty_times(policy: BatchPolicy) -> None:
    scheduler = EngineScheduler(ONE, policy=policy)

    def come(name: str, remaining: float) -> None:
        request = (QueuedRequest(name),)
        scheduler.handle(
            Enqueue(0.0, name, name, PrimitiveKind.EMBEDDING, request, remaining=remaining, left=remaining)
        )

    come("running", 1.0)
    come("long", 50.0)
    last, turns = "running", 0
    while last != "long":
        come(f"short{turns}", 1.0)
        (batch,) = scheduler.handle(RequestsEnded(0.0, (last,)))
        assert isinstance(batch, RunBatch)
        last, turns = batch.requests[0], turns + 1
    assert turns == 21


def test_time_policies_are_registered_by_name() -> None:
    assert {"critical-path", "shortest-remaining", "earliest-deadline"} < set(POLICIES)
