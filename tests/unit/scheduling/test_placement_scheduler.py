"""Tests of the engine scheduler with replicas that cache prefixes: the policy picks requests, E2 picks replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.placement import PROFILE, prompt

from teola_plugin.errors import ConfigError
from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.scheduling import (
    E2,
    EngineScheduler,
    PerInvocation,
    ThroughputOriented,
    TopologyAware,
    block_hashes,
)
from teola_plugin.scheduling.engine_queue import (
    CacheStored,
    Enqueue,
    PrefillEnded,
    QueuedRequest,
    ReplicaDown,
    ReplicaDrained,
    ReplicaUp,
    RequestsEnded,
    RunBatch,
)
from teola_plugin.scheduling.events import Instruction, Tick

K = PrimitiveKind
LLM = EngineProfile(
    PROFILE.curves, Batching.CONTINUOUS, max_batch=512, max_requests=3, max_request_size=2048, prefix_caching=True
)


def enqueue(
    name: str, *parts: tuple[str, int], query: str = "", depth: int = 0, session: str = "", at: float = 0.0
) -> Enqueue:
    tokens = prompt(*parts)
    request = QueuedRequest(name, len(tokens), block_hashes(tokens))
    return Enqueue(at, query or name, name, K.PREFILLING, (request,), depth, session=session)


def placed(instructions: list[Instruction]) -> dict[str, str]:
    """Return the replica of each request."""
    return {r: i.replica for i in instructions if isinstance(i, RunBatch) for r in i.requests}


@pytest.mark.parametrize(
    ("profile", "replicas", "expected"),
    [
        (LLM, ("0", "1"), True),
        (LLM, ("0",), False),
        (EngineProfile(batching=Batching.CONTINUOUS), ("0", "1"), False),
        (EngineProfile(prefix_caching=True), ("0", "1"), False),
    ],
)
def test_scheduler_wants_blocks_only_for_several_caching_replicas(
    profile: EngineProfile, replicas: tuple[str, ...], expected: bool
) -> None:
    assert EngineScheduler(profile, replicas).wants_blocks is expected


def test_second_replica_makes_the_scheduler_want_blocks() -> None:
    scheduler = EngineScheduler(LLM)
    assert not scheduler.wants_blocks
    scheduler.handle(ReplicaUp(0.0, "1"))
    assert scheduler.wants_blocks


def test_static_engine_with_e2_placement_raises_config_error() -> None:
    static = EngineProfile(prefix_caching=True)
    with pytest.raises(ConfigError, match="E2 places request by request"):
        EngineScheduler(static, ("0", "1"), placement=E2(static))


def test_equal_prefixes_share_a_replica_and_others_do_not() -> None:
    scheduler = EngineScheduler(LLM, ("0", "1"))
    first = placed(scheduler.handle(enqueue("x1", ("x", 320))))
    other = placed(scheduler.handle(enqueue("y1", ("y", 320))))
    same = placed(scheduler.handle(enqueue("x2", ("x", 320), ("q", 32))))
    assert (first["x1"], other["y1"], same["x2"]) == ("0", "1", "0")


def test_only_uncached_tokens_fill_the_tick() -> None:
    scheduler = EngineScheduler(LLM, ("0", "1"))
    scheduler.handle(enqueue("x1", ("x", 480)))
    assert placed(scheduler.handle(enqueue("x2", ("x", 480), ("q", 16)))) == {"x2": "0"}
    assert sum(r.size for r in scheduler.running.at("0").requests.values()) == 496


def test_policy_picks_requests_and_placement_picks_replicas() -> None:
    scheduler = EngineScheduler(LLM, ())
    for name, query, depth, prefix in [("A", "1", 3, "x"), ("B", "1", 1, "y"), ("G", "2", 1, "x"), ("H", "2", 3, "y")]:
        scheduler.handle(enqueue(name, (prefix, 480), (name, 16), query=query, depth=depth))
    scheduler.replicas += ["0", "1"]
    scheduler._route_if_several()
    out = scheduler.handle(Tick(0.0))
    assert placed(out) == {"A": "0", "H": "1", "B": "1", "G": "0"}
    numbers = {r: n for i in out if isinstance(i, RunBatch) for r, n in zip(i.requests, i.priorities, strict=True)}
    assert max(numbers["A"], numbers["H"]) < max(numbers["B"], numbers["G"])
    assert numbers["A"] < numbers["G"]
    assert numbers["H"] < numbers["B"]


def test_a_session_follows_its_warm_up() -> None:
    scheduler = EngineScheduler(LLM, ("0", "1"))
    scheduler.handle(enqueue("x1", ("x", 160), ("y", 160)))
    assert placed(scheduler.handle(enqueue("warm", ("z", 160), session="s"))) == {"warm": "1"}
    assert placed(scheduler.handle(enqueue("full", ("x", 160), ("y", 160), session="s"))) == {"full": "1"}


def test_request_waiting_for_its_prefix_yields_then_goes_next() -> None:
    scheduler = EngineScheduler(LLM, ("0", "1"))
    for name in ("x1", "x2", "x3"):
        scheduler.handle(enqueue(name, ("x", 480)))
        scheduler.handle(PrefillEnded(0.0, name))
    assert placed(scheduler.handle(enqueue("x4", ("x", 480)))) == {}, "three requests run at 0"
    assert placed(scheduler.handle(enqueue("y1", ("y", 64)))) == {"y1": "1"}
    assert placed(scheduler.handle(RequestsEnded(1.0, ("x2",)))) == {"x4": "0"}


def test_a_dead_replicas_prefixes_are_computed_elsewhere() -> None:
    scheduler = EngineScheduler(LLM, ("0", "1"))
    scheduler.handle(enqueue("x1", ("x", 320)))
    scheduler.handle(ReplicaDown(1.0, "0"))
    assert placed(scheduler.handle(enqueue("x2", ("x", 320)))) == {"x2": "1"}
    scheduler.handle(ReplicaUp(2.0, "0"))
    assert placed(scheduler.handle(enqueue("y1", ("y", 320)))) == {"y1": "0"}


def test_a_drained_replica_gets_nothing_and_ends_what_it_has() -> None:
    scheduler = EngineScheduler(LLM, ("0", "1"))
    scheduler.handle(enqueue("x1", ("x", 320)))
    scheduler.handle(ReplicaDrained(1.0, "0"))
    assert placed(scheduler.handle(enqueue("x2", ("x", 320)))) == {"x2": "1"}
    scheduler.handle(PrefillEnded(1.0, "x1"))
    scheduler.handle(RequestsEnded(2.0, ("x1",)))
    assert list(scheduler.running.by_id) == ["x2"]


def test_warm_up_delays_no_deeper_request_on_any_replica() -> None:
    scheduler = EngineScheduler(replace(LLM, interference=1.0), ("0", "1"))
    scheduler.handle(enqueue("deep0", ("x", 64), depth=5))
    scheduler.handle(enqueue("deep1", ("y", 64), depth=5))
    warm = replace(enqueue("warm", ("z", 64), depth=1), kind=K.PARTIAL_PREFILLING)
    assert placed(scheduler.handle(warm)) == {}
    assert placed(scheduler.handle(enqueue("other", ("w", 64)))) == {"other": "0"}, "others are not held up by it"
    assert placed(scheduler.handle(RequestsEnded(1.0, ("deep1",)))) == {"warm": "1"}


def test_apps_share_all_replicas_by_weight() -> None:
    one_each = replace(LLM, max_requests=1)
    scheduler = EngineScheduler(one_each, ("0", "1"))
    for app, weight in (("heavy", 3.0), ("light", 1.0)):
        for number in range(12):
            scheduler.handle(replace(enqueue(f"{app}{number}", (f"{number}"[-1], 64)), app=app, weight=weight))
    order = list(scheduler.running.by_id)
    while scheduler.running.by_id and len(order) < 14:
        order += placed(scheduler.handle(RequestsEnded(1.0, (next(iter(scheduler.running.by_id)),))))
    assert sum(name.startswith("heavy") for name in order[2:14]) in (8, 9, 10)


def test_cache_events_reach_the_placement() -> None:
    scheduler = EngineScheduler(LLM, ("0", "1"))
    event = enqueue("x1", ("x", 320))
    scheduler.handle(CacheStored(0.0, "1", event.requests[0].blocks))
    scheduler.handle(CacheStored(0.0, "unknown", event.requests[0].blocks))
    assert placed(scheduler.handle(event)) == {"x1": "1"}


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    scheduler = EngineScheduler(LLM, ("0", "1"))
    for name in ("s0", "s1"):
        scheduler.handle(enqueue(name, (name[1], 64)))
    scheduler.handle(enqueue("large", ("L", 2000)))
    for number in range(2, 400):
        ran = list(scheduler.running.by_id)
        out = scheduler.handle(enqueue(f"s{number}", (chr(1000 + number), 64)))
        out += scheduler.handle(RequestsEnded(1.0, (ran[0],)))
        if "large" in placed(out):
            break
    assert 20 < number < 100


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["q1", "q2", "q3"]),
            st.integers(0, 4),
            st.sampled_from("xyz"),
            st.integers(0, 20),
            st.integers(1, 700),
            st.sampled_from(["", "s", "t"]),
            st.sampled_from(["down", "up", "end", "prefilled", ""]),
        ),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from([TopologyAware(), PerInvocation(), ThroughputOriented()]),
    st.integers(2, 4),
)
def test_requests_run_once_on_live_replicas_within_slot_limits(
    steps: list[tuple[str, int, str, int, int, str, str]], policy: object, replicas: int
) -> None:
    scheduler = EngineScheduler(LLM, tuple(map(str, range(replicas))), policy)  # type: ignore[arg-type]
    ran: dict[str, str] = {}

    def check(out: list[Instruction]) -> None:
        for name, replica in placed(out).items():
            assert name not in ran
            assert replica in scheduler.replicas
            ran[name] = replica
        for replica in scheduler.replicas:
            here = scheduler.running.at(replica).requests.values()
            prefilling = [r.size for r in here if r.prefilling]
            assert len(here) <= LLM.max_requests
            assert len(prefilling) <= 1 or sum(prefilling) <= LLM.max_batch
            at = scheduler.running.at(replica)
            assert (at.prefilling, at.units) == (len(prefilling), sum(prefilling))

    for number, (query, depth, letter, shared, rest, session, then) in enumerate(steps):
        event = enqueue(
            f"r{number}", (letter, 16 * shared), (chr(500 + number), rest), query=query, depth=depth, session=session
        )
        check(scheduler.handle(event))
        running = next(iter(scheduler.running.by_id), "")
        if then == "end" and running:
            check(scheduler.handle(RequestsEnded(1.0 * number, (running,))))
        elif then == "prefilled" and running:
            check(scheduler.handle(PrefillEnded(1.0 * number, running)))
        elif then == "down" and len(scheduler.replicas) > 1:
            check(scheduler.handle(ReplicaDown(1.0 * number, scheduler.replicas[-1])))
        elif then == "up":
            check(scheduler.handle(ReplicaUp(1.0 * number, str(len(scheduler.replicas)))))
    while scheduler.running.by_id:
        check(scheduler.handle(RequestsEnded(100.0, (next(iter(scheduler.running.by_id)),))))
    assert not scheduler.queue
    assert len(ran) == len(steps)
