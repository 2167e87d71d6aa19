"""Tests of the engine scheduler by tables of events and instructions, without a clock or an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.scheduling import EngineScheduler, PerInvocation, ThroughputOriented, TopologyAware
from teola_plugin.scheduling.engine_queue import (
    CancelRequests,
    CancelRunning,
    DepthChanged,
    Dropped,
    Enqueue,
    PrefillEnded,
    QueuedRequest,
    Reject,
    ReplicaDown,
    ReplicaUp,
    RequestsEnded,
    RunBatch,
)

K = PrimitiveKind
LLM = EngineProfile(batching=Batching.CONTINUOUS, max_batch=1024, max_requests=8, max_request_size=2048)
EMBEDDER = EngineProfile(batching=Batching.STATIC, max_efficient_batch=4)


def enqueue(query: str, name: str, depth: int = 0, requests: int = 1, size: int = 1, session: str = "") -> Enqueue:
    made = tuple(QueuedRequest(name if requests == 1 else f"{name}{i}", size) for i in range(requests))
    return Enqueue(0.0, query, name, K.EMBEDDING, made, depth, session=session)


def batches(instructions: list[object]) -> list[tuple[str, ...]]:
    return [i.requests for i in instructions if isinstance(i, RunBatch)]


def figure_7(policy: object) -> Iterator[tuple[str, ...]]:
    """Yield batches for A (depth 3) and B (1) of query 1, G (1) and H (3) of query 2.

    Two prefillings fit into a tick.
    """
    scheduler = EngineScheduler(LLM, (), policy)  # type: ignore[arg-type]
    for query, name, depth in [("q1", "A", 3), ("q1", "B", 1), ("q2", "G", 1), ("q2", "H", 3)]:
        scheduler.handle(enqueue(query, name, depth, size=512))
    yield from batches(scheduler.handle(ReplicaUp(0.0, "0")))
    running = list(scheduler.running.by_id)
    while running:
        yield from batches(scheduler.handle(RequestsEnded(1.0, (running[0],))))
        running = list(scheduler.running.by_id)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (TopologyAware(), [("A", "H"), ("B",), ("G",)]),
        (ThroughputOriented(), [("A", "B"), ("G",), ("H",)]),
        (PerInvocation(), [("A",), ("B",), ("G",), ("H",)]),
    ],
)
def test_each_policy_serves_figure_7_in_its_order(policy: object, order: list[tuple[str, ...]]) -> None:
    assert list(figure_7(policy)) == order


def test_slots_freed_one_by_one_still_serve_h_before_b() -> None:
    scheduler = EngineScheduler(EngineProfile(batching=Batching.CONTINUOUS, max_batch=1, max_requests=1), ())
    for query, name, depth in [("q1", "A", 3), ("q1", "B", 1), ("q2", "G", 1), ("q2", "H", 3)]:
        scheduler.handle(enqueue(query, name, depth))
    assert batches(scheduler.handle(ReplicaUp(0.0, "0"))) == [("A",)]
    two = EngineScheduler(EngineProfile(batching=Batching.CONTINUOUS, max_batch=9, max_requests=2), ())
    two.handle(enqueue("q1", "A", 3))
    two.handle(enqueue("q0", "Z", 9))
    two.handle(ReplicaUp(0.0, "0"))
    for query, name, depth in [("q1", "B", 1), ("q2", "G", 1), ("q2", "H", 3)]:
        two.handle(enqueue(query, name, depth))
    assert batches(two.handle(RequestsEnded(1.0, ("Z",)))) == [("H",)]  # A is running: query 1 has had its turn


def test_requests_of_different_queries_are_fused() -> None:
    scheduler = EngineScheduler(EMBEDDER, ())
    scheduler.handle(enqueue("q1", "a", requests=2))
    scheduler.handle(enqueue("q2", "b", requests=2))
    assert batches(scheduler.handle(ReplicaUp(0.0, "0"))) == [("a0", "a1", "b0", "b1")]


def test_a_static_engine_runs_one_batch_at_a_time() -> None:
    scheduler = EngineScheduler(EMBEDDER)
    assert batches(scheduler.handle(enqueue("q1", "a", requests=6))) == [("a0", "a1", "a2", "a3")]
    for request in ("a0", "a1", "a2"):
        assert batches(scheduler.handle(RequestsEnded(1.0, (request,)))) == []
    assert batches(scheduler.handle(RequestsEnded(1.0, ("a3",)))) == [("a4", "a5")]


def test_a_continuous_engine_frees_token_slots_when_prefilling_ends() -> None:
    scheduler = EngineScheduler(LLM)
    assert batches(scheduler.handle(enqueue("q1", "a", size=700))) == [("a",)]
    assert batches(scheduler.handle(enqueue("q1", "b", size=700))) == []
    assert batches(scheduler.handle(PrefillEnded(1.0, "a"))) == [("b",)]


def test_request_beyond_tick_runs_alone_and_beyond_engine_is_rejected() -> None:
    scheduler = EngineScheduler(LLM)
    assert batches(scheduler.handle(enqueue("q1", "long", size=1500))) == [("long",)]
    out = scheduler.handle(enqueue("q1", "too long", size=3000))
    assert out == [Reject("too long", 3000, 2048)]
    assert not scheduler.queue


def test_cancel_drops_queued_requests_and_stops_running_ones() -> None:
    scheduler = EngineScheduler(EMBEDDER)
    scheduler.handle(enqueue("q1", "a", requests=6))
    out = scheduler.handle(CancelRequests(1.0, ("a0", "a5", "unknown")))
    assert out == [Dropped(("a5",)), CancelRunning("0", ("a0",))]


def test_announced_depths_reorder_the_queue() -> None:
    scheduler = EngineScheduler(EngineProfile(batching=Batching.STATIC, max_efficient_batch=1), ())
    scheduler.handle(enqueue("q1", "a", 1))
    scheduler.handle(enqueue("q1", "b", 2))
    scheduler.handle(DepthChanged(0.0, "q1", {"a": 5}))
    assert batches(scheduler.handle(ReplicaUp(0.0, "0"))) == [("a",)]


def test_primitive_is_overtaken_by_at_most_twenty_batches() -> None:
    scheduler = EngineScheduler(EngineProfile(batching=Batching.STATIC, max_efficient_batch=1), ())
    scheduler.handle(enqueue("q1", "shallow", 0))
    for i in range(60):
        scheduler.handle(enqueue("q1", f"deep{i}", 5))
    order = list(batches(scheduler.handle(ReplicaUp(0.0, "0"))))
    while scheduler.running.by_id:
        order += batches(scheduler.handle(RequestsEnded(0.0, (next(iter(scheduler.running.by_id)),))))
    assert order.index(("shallow",)) == 20
    assert len(order) == 61


def test_sessions_go_to_the_replica_that_has_their_prefix() -> None:
    scheduler = EngineScheduler(LLM, ("0", "1"))
    assert scheduler.handle(enqueue("q1", "warm", session="s"))[0].replica == "0"  # type: ignore[attr-defined]
    assert scheduler.handle(enqueue("q2", "other"))[0].replica == "1"  # type: ignore[attr-defined]
    assert scheduler.handle(enqueue("q3", "another"))[0].replica == "0"  # type: ignore[attr-defined]
    scheduler.handle(RequestsEnded(0.0, ("other",)))
    assert scheduler.handle(enqueue("q1", "full", session="s"))[0].replica == "0"  # type: ignore[attr-defined]


def test_a_dead_replica_gets_nothing_until_it_is_up_again() -> None:
    scheduler = EngineScheduler(EMBEDDER)
    scheduler.handle(enqueue("q1", "a"))
    scheduler.handle(ReplicaDown(0.0, "0"))
    assert not scheduler.running.by_id
    assert scheduler.handle(enqueue("q1", "b")) == []
    assert batches(scheduler.handle(ReplicaUp(1.0, "0"))) == [("b",)]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["q1", "q2", "q3"]), st.integers(0, 4), st.integers(1, 5), st.integers(1, 600)),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from([LLM, EMBEDDER]),
    st.sampled_from([TopologyAware(), PerInvocation(), ThroughputOriented()]),
    st.integers(1, 3),
)
def test_every_request_runs_once_and_slots_are_never_overrun(
    queue: list[tuple[str, int, int, int]], profile: EngineProfile, policy: object, replicas: int
) -> None:
    scheduler = EngineScheduler(profile, tuple(map(str, range(replicas))), policy)  # type: ignore[arg-type]
    ran: list[str] = []
    expected = 0

    def check(out: list[object]) -> None:
        for batch in (i for i in out if isinstance(i, RunBatch)):
            ran.extend(batch.requests)
        for replica in scheduler.replicas:
            here = scheduler.running.at(replica).requests.values()
            if profile.batching is Batching.STATIC:
                assert len(here) <= profile.max_efficient_batch
            else:
                assert len(here) <= profile.max_requests
                prefilling = [r.size for r in here if r.prefilling]
                assert len(prefilling) <= 1 or sum(prefilling) <= profile.max_batch

    for number, (query, depth, requests, size) in enumerate(queue):
        expected += requests
        size = size if profile is LLM else 1
        check(scheduler.handle(enqueue(query, f"p{number}_", depth, requests, size)))  # type: ignore[arg-type]
    while scheduler.running.by_id:
        check(scheduler.handle(RequestsEnded(1.0, (next(iter(scheduler.running.by_id)),))))  # type: ignore[arg-type]
    assert len(ran) == len(set(ran)) == expected
    assert not scheduler.queue


def warm_up(depth: int = 1, *, when_idle: bool = False) -> Enqueue:
    return Enqueue(0.0, "q1", "warm", K.PARTIAL_PREFILLING, (QueuedRequest("warm", 100),), depth, when_idle=when_idle)


@pytest.mark.parametrize(
    ("interference", "when_idle", "beside_prefilling", "beside_decoding"),
    [(0.3, False, False, True), (0.3, True, False, False), (1.0, False, False, False)],
)
def test_warm_ups_do_not_delay_deeper_requests(
    interference: float, when_idle: bool, beside_prefilling: bool, beside_decoding: bool
) -> None:
    scheduler = EngineScheduler(replace(LLM, interference=interference))
    scheduler.handle(enqueue("q1", "deep", 5, size=200))
    assert bool(batches(scheduler.handle(warm_up(when_idle=when_idle)))) is beside_prefilling
    assert bool(batches(scheduler.handle(PrefillEnded(1.0, "deep")))) is beside_decoding
    assert bool(batches(scheduler.handle(RequestsEnded(2.0, ("deep",))))) is not beside_decoding
    assert "warm" in scheduler.running.by_id


@pytest.mark.parametrize(("others", "begins"), [(0, True), (1, True), (2, False)])
def test_warm_up_waits_if_its_slowdown_exceeds_its_gain(others: int, begins: bool) -> None:
    scheduler = EngineScheduler(replace(LLM, interference=0.5))
    for number in range(others):
        scheduler.handle(enqueue(f"other{number}", f"answer{number}", size=100))
        scheduler.handle(PrefillEnded(0.0, f"answer{number}"))
    assert bool(batches(scheduler.handle(warm_up()))) is begins
    if not begins:
        assert batches(scheduler.handle(RequestsEnded(1.0, ("answer0",)))) == [("warm",)]


@pytest.mark.parametrize(("rider", "size"), [(2, 32), (3, 30)])
def test_small_requests_ride_along_in_a_static_batch(rider: int, size: int) -> None:
    """Two queries embed a document and a question each; the questions are nearer to the output."""
    scheduler = EngineScheduler(EngineProfile(batching=Batching.STATIC, max_batch=32, max_efficient_batch=32))
    scheduler.handle(enqueue("busy", "busy", requests=32))
    for query in ("q1", "q2"):
        scheduler.handle(enqueue(query, f"{query}.question", depth=1, requests=rider))
        scheduler.handle(enqueue(query, f"{query}.document", depth=2, requests=15))
    [batch] = batches(scheduler.handle(RequestsEnded(1.0, tuple(f"busy{i}" for i in range(32)))))
    mine = [name for name in batch if name.startswith("q1")]
    assert any("question" in name for name in mine) is (rider == 2)
    assert len(batch) == size


@pytest.mark.parametrize(
    ("documents", "taken"),
    [
        ((20, 20), [20, 0]),
        ((20, 12), [20, 12]),
        ((20, 20, 10), [20, 0, 10]),
        ((15, 20), [15, 17]),  # less than half full: rather a part than so small a batch
        ((40, 20), [32, 0]),
    ],
)
def test_static_batch_prefers_primitives_that_fit_whole(documents: tuple[int, ...], taken: list[int]) -> None:
    scheduler = EngineScheduler(EngineProfile(batching=Batching.STATIC, max_batch=32, max_efficient_batch=32))
    scheduler.handle(enqueue("busy", "busy", requests=32))
    for number, size in enumerate(documents):
        scheduler.handle(enqueue(f"q{number}", f"q{number}.document", requests=size))
    [batch] = batches(scheduler.handle(RequestsEnded(1.0, tuple(f"busy{i}" for i in range(32)))))
    assert [sum(name.startswith(f"q{n}.") for name in batch) for n in range(len(documents))] == taken


def test_large_primitive_that_never_fits_still_gets_its_turn() -> None:
    scheduler = EngineScheduler(EngineProfile(batching=Batching.STATIC, max_batch=32, max_efficient_batch=32))
    scheduler.handle(enqueue("first", "first", requests=20))
    scheduler.handle(enqueue("small0", "small0", requests=20))
    scheduler.handle(enqueue("large", "large", requests=30))
    running = [f"first{i}" for i in range(20)]
    for number in range(1, 40):
        scheduler.handle(enqueue(f"small{number}", f"small{number}", requests=20))
        [batch] = batches(scheduler.handle(RequestsEnded(float(number), tuple(running))))
        running = list(batch)
        if any(name.startswith("large") for name in running):
            break
    assert number <= 3, "it is the next in turn"
