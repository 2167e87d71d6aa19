"""Tests that apps share an engine by weight, and that one app alone is not affected."""

from __future__ import annotations

from collections import Counter

import pytest

from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.scheduling import EngineScheduler
from teola_plugin.scheduling.engine_queue import (
    Enqueue,
    QueuedRequest,
    ReplicaUp,
    RequestsEnded,
    RunBatch,
    ServedUnits,
    Turn,
    serve_in_turn,
)

ONE_BY_ONE = EngineProfile(batching=Batching.STATIC, max_efficient_batch=1)


def enqueue(app: str, number: int, *, weight: float = 1.0, size: int = 1, depth: int = 0) -> Enqueue:
    name = f"{app}{number}"
    return Enqueue(
        0.0, name, name, PrimitiveKind.EMBEDDING, (QueuedRequest(name, size),), depth, app=app, weight=weight
    )


def run_order(scheduler: EngineScheduler) -> list[str]:
    """Return the requests in the order in which they run."""
    order: list[str] = []
    out = scheduler.handle(ReplicaUp(0.0, "0"))
    while out:
        ran = [request for i in out if isinstance(i, RunBatch) for request in i.requests]
        order += ran
        out = scheduler.handle(RequestsEnded(0.0, tuple(ran)))
    return order


def test_one_app_is_served_in_order_of_arrival() -> None:
    scheduler = EngineScheduler(ONE_BY_ONE, ())
    for number in range(5):
        scheduler.handle(enqueue("a", number, weight=5.0 - number))
    assert run_order(scheduler) == ["a0", "a1", "a2", "a3", "a4"]


def test_two_apps_take_turns_regardless_of_arrival() -> None:
    scheduler = EngineScheduler(ONE_BY_ONE, ())
    for app in "ab":
        for number in range(3):
            scheduler.handle(enqueue(app, number))
    assert run_order(scheduler) == ["a0", "b0", "a1", "b1", "a2", "b2"]


@pytest.mark.parametrize(("weight", "expected"), [(1.0, 5), (3.0, 7), (0.25, 2)])
def test_apps_are_served_in_proportion_to_weights(weight: float, expected: int) -> None:
    scheduler = EngineScheduler(ONE_BY_ONE, ())
    for number in range(15):  # few enough that nothing waits for more than 20 batches
        scheduler.handle(enqueue("a", number))
    for number in range(15):
        scheduler.handle(enqueue("b", number, weight=weight))
    assert abs(Counter(name[0] for name in run_order(scheduler)[:10])["b"] - expected) <= 1


def test_fair_shares_count_units_not_requests() -> None:
    profile = EngineProfile(batching=Batching.CONTINUOUS, max_batch=100, max_requests=1)
    scheduler = EngineScheduler(profile, ())
    for number in range(9):
        scheduler.handle(enqueue("long", number, size=90))
        scheduler.handle(enqueue("short", number, size=10))
    assert run_order(scheduler)[:6] == ["long0", *(f"short{i}" for i in range(5))]


def test_idle_app_accumulates_no_credit() -> None:
    scheduler = EngineScheduler(ONE_BY_ONE, ())
    for number in range(10):
        scheduler.handle(enqueue("a", number))
    run_order(scheduler)
    scheduler = _without_replica(scheduler)
    for app in "ba":
        for number in range(20, 24):
            scheduler.handle(enqueue(app, number))
    assert Counter(name[0] for name in run_order(scheduler)[:4])["b"] <= 3


def _without_replica(scheduler: EngineScheduler) -> EngineScheduler:
    """Return the same scheduler without its replica, so that a queue can build up."""
    scheduler.replicas.clear()
    return scheduler


def test_starved_primitive_of_light_app_runs_after_twenty_batches() -> None:
    scheduler = EngineScheduler(ONE_BY_ONE, ())
    scheduler.handle(enqueue("light", 0, weight=0.001))
    scheduler.handle(enqueue("light", 1, weight=0.001))
    for number in range(60):
        scheduler.handle(enqueue("heavy", number, weight=1000.0))
    order = run_order(scheduler)
    assert len(order) == 62
    assert order.index("light1") <= 21


def test_number_of_remembered_apps_is_bounded() -> None:
    seen = ServedUnits()
    for number in range(5000):
        seen.arrive(f"app{number}", waiting=False)
        seen.add(f"app{number}", 1.0, 1)
    assert len(seen._virtual_times) <= 1001


def test_buckets_are_served_by_usage_and_weight_of_apps() -> None:
    turns = {
        "q1": Turn("a", 1.0, 10),
        "q2": Turn("a", 1.0, 10),
        "q3": Turn("b", 2.0, 10),
        "q4": Turn("b", 2.0, 10),
        "q5": Turn("b", 2.0, 10),
    }
    had = {"a": 0.0, "b": 1.0}
    assert list(serve_in_turn(turns, had)) == ["q1", "q3", "q4", "q2", "q5"]
    assert had == {"a": 20.0, "b": 16.0}
