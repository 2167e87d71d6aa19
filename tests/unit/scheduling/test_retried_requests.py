"""Tests of requests that run again: they keep their place in the queue and all that is known of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from teola_plugin.errors import TeolaError
from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.scheduling import EngineScheduler
from teola_plugin.scheduling.engine_queue import (
    CancelRequests,
    CancelRunning,
    DepthChanged,
    Dropped,
    Enqueue,
    QueuedRequest,
    ReplicaDrained,
    ReplicaUp,
    RequestsEnded,
    Retried,
    RunBatch,
    RunningRequest,
)
from teola_plugin.scheduling.live_query import Objective
from teola_plugin.scheduling.validate import VIOLATIONS, validate_engine_scheduler

K = PrimitiveKind
ONE = EngineProfile(batching=Batching.CONTINUOUS, max_batch=1, max_requests=1)


def enqueue(name: str, requests: int = 1, **more: object) -> Enqueue:
    made = tuple(QueuedRequest(f"{name}{i}" if requests > 1 else name) for i in range(requests))
    return replace(Enqueue(0.0, name, name, K.PREFILLING, made), **more)  # type: ignore[arg-type]


def ran(instructions: list[object]) -> list[str]:
    return [r for i in instructions if isinstance(i, RunBatch) for r in i.requests]


FIELDS: list[dict[str, object]] = [
    {"depth": 7},
    {"app": "shop"},
    {"weight": 3.0},
    {"session": "s"},
    {"gang": "g"},
    {"objective": Objective.THROUGHPUT},
    {"when_idle": True},
]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: next(iter(fields)))
def test_retry_keeps_the_fields_of_its_request(fields: dict[str, object]) -> None:
    scheduler = EngineScheduler(ONE)
    assert ran(scheduler.handle(enqueue("a", **fields))) == ["a"]
    scheduler.handle(ReplicaDrained(0.5, "0"))
    assert not ran(scheduler.handle(Retried(1.0, "a")))
    [queued] = scheduler.queue
    assert {name: getattr(queued, name) for name in fields} == fields
    assert ran(scheduler.handle(ReplicaUp(2.0, "0"))) == ["a"]


def test_retry_keeps_depth_and_objective_changed_while_running() -> None:
    scheduler = EngineScheduler(ONE)
    scheduler.handle(enqueue("a", depth=1))
    scheduler.handle(DepthChanged(0.5, "a", {"a": 9}, {"a": (Objective.THROUGHPUT, "gang")}))
    scheduler.handle(ReplicaDrained(0.5, "0"))
    scheduler.handle(Retried(1.0, "a"))
    [queued] = scheduler.queue
    assert (queued.depth, queued.objective, queued.gang) == (9, Objective.THROUGHPUT, "gang")
    [batch] = scheduler.handle(ReplicaUp(2.0, "0"))
    assert isinstance(batch, RunBatch) and batch.urgencies == ((9, Objective.THROUGHPUT),)


def test_retry_keeps_its_old_turn_in_the_queue() -> None:
    scheduler = EngineScheduler(ONE)
    assert ran(scheduler.handle(enqueue("first"))) == ["first"]
    for later in ("second", "third"):
        assert not ran(scheduler.handle(enqueue(later)))
    assert ran(scheduler.handle(Retried(1.0, "first"))) == ["first"]
    assert ran(scheduler.handle(RequestsEnded(2.0, ("first",)))) == ["second"]


def test_retried_requests_of_a_primitive_keep_their_order() -> None:
    profile = EngineProfile(batching=Batching.STATIC, max_batch=4, max_efficient_batch=4)
    scheduler = EngineScheduler(profile)
    assert ran(scheduler.handle(enqueue("a", 6))) == ["a0", "a1", "a2", "a3"]
    scheduler.handle(ReplicaDrained(0.5, "0"))
    for failed in ("a2", "a0", "a3", "a1"):
        scheduler.handle(Retried(1.0, failed))
    assert ran(scheduler.handle(ReplicaUp(2.0, "0"))) == ["a0", "a1", "a2", "a3"]


def test_request_on_a_drained_replica_can_be_cancelled() -> None:
    scheduler = EngineScheduler(ONE)
    scheduler.handle(enqueue("a"))
    scheduler.handle(ReplicaDrained(0.5, "0"))
    assert scheduler.handle(CancelRequests(1.0, ("a",))) == [CancelRunning("0", ("a",))]


def test_retry_of_an_unknown_request_is_dropped() -> None:
    assert EngineScheduler(ONE).handle(Retried(0.0, "unknown")) == [Dropped(("unknown",))]


def test_invariant_violation_of_a_scheduler_raises() -> None:
    """The check that runs in every test after every event."""
    scheduler = EngineScheduler(ONE)
    scheduler.handle(enqueue("a"))
    source = next(iter(scheduler.running.by_id.values())).source
    scheduler.running.add(RunningRequest.of(source, "b", 1, "0"))
    with pytest.raises(TeolaError, match="runs 2 requests of 1"):
        validate_engine_scheduler(scheduler)
    scheduler.running.remove("b")
    scheduler.queue.append(source)
    with pytest.raises(TeolaError, match="without requests"):
        scheduler.handle(enqueue("c"))
    assert VIOLATIONS
    VIOLATIONS.clear()
