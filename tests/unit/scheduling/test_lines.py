"""Tests of the order of requests that wait at a replica."""

from __future__ import annotations

from dataclasses import replace

import pytest

from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.scheduling import POLICIES, EngineScheduler
from teola_plugin.scheduling.engine_queue import (
    MAX_NUMBERED_QUERIES,
    Enqueue,
    PrefillEnded,
    QueryNumbers,
    QueuedRequest,
    RunBatch,
)
from teola_plugin.scheduling.live_query import Objective

LLM = EngineProfile(batching=Batching.CONTINUOUS, max_batch=1000, max_requests=64)
CALL, MEMBER, WARM_UP = Objective.LATENCY, Objective.THROUGHPUT, Objective.BACKGROUND


def scheduler(policy: str = "topology-aware", profile: EngineProfile = LLM) -> EngineScheduler:
    return EngineScheduler(profile, policy=POLICIES[policy]())


def enqueue(query: str, name: str, objective: Objective, app: str = "app") -> Enqueue:
    kind = PrimitiveKind.PARTIAL_PREFILLING if objective is WARM_UP else PrimitiveKind.PREFILLING
    requests = (QueuedRequest(f"{query}{name}"),)
    gang = f"{query}.gang" if objective is MEMBER else ""
    return Enqueue(0.0, query, f"{query}{name}", kind, requests, app=app, objective=objective, gang=gang)


def line(scheduler: EngineScheduler, *comings: Enqueue) -> list[str]:
    """Return the names in the order in which a replica starts them, if it gets all before it starts any."""
    numbers: dict[str, int] = {}
    for coming in comings:
        for batch in scheduler.handle(coming):
            assert isinstance(batch, RunBatch)
            numbers.update(zip(batch.requests, batch.priorities, strict=True))
    return sorted(numbers, key=numbers.__getitem__)  # stable: of equal numbers, who came first


OLD, YOUNG = enqueue("1", "map", MEMBER), [enqueue("2", f"map{n}", MEMBER) for n in (0, 1)]
REDUCE = enqueue("1", "reduce", CALL)


@pytest.mark.parametrize(
    ("comings", "expected"),
    [
        ([OLD, *YOUNG, REDUCE], "1map 1reduce 2map0 2map1"),
        ([*YOUNG, enqueue("3", "call", CALL)], "2map0 2map1 3call"),
        ([OLD, YOUNG[0], enqueue("2", "call", CALL), YOUNG[1], REDUCE], "1map 2map0 2call 1reduce 2map1"),
        ([OLD, enqueue("2", "call", CALL), REDUCE], "1map 2call 1reduce"),
        ([OLD, YOUNG[0], enqueue("1", "map2", MEMBER)], "1map 2map0 1map2"),
        ([OLD, enqueue("2", "map", MEMBER, "other"), YOUNG[1], REDUCE], "1map 2map 1reduce 2map1"),
        (
            [OLD, enqueue("2", "a", CALL), *YOUNG, REDUCE, enqueue("1", "b", CALL), enqueue("2", "c", CALL)],
            "1map 2a 1reduce 1b 2map0 2map1 2c",
        ),
    ],
    ids=["younger", "older", "behind a call", "no call", "no member", "no other app", "twice"],
)
def test_call_overtakes_gang_members_of_younger_queries(comings: list[Enqueue], expected: str) -> None:
    assert line(scheduler(), *comings) == expected.split()


def test_call_overtakes_a_younger_gang_despite_warm_ups() -> None:
    """Warm-ups come after all other requests in any case."""
    busy, warm_up = enqueue("1", "map", MEMBER), enqueue("2", "warm-up", WARM_UP)
    found = line(scheduler(), busy, enqueue("2", "map", MEMBER), warm_up, REDUCE)
    assert found.index("1reduce") < found.index("2map")


def test_prefilled_requests_do_not_change_the_priority_of_a_call() -> None:
    one = scheduler()
    line(one, OLD, *YOUNG)
    for name in ("1map", "2map0", "2map1"):
        one.handle(PrefillEnded(1.0, name))
    assert [batch.priorities for batch in one.handle(REDUCE) if isinstance(batch, RunBatch)] == [(3,)]


@pytest.mark.parametrize("policy", ["per-invocation", "throughput-oriented", "shortest-remaining", "earliest-deadline"])
def test_other_policies_keep_the_order_of_admission(policy: str) -> None:
    assert line(scheduler(policy), OLD, *YOUNG, REDUCE) == ["1map", "2map0", "2map1", "1reduce"]


def test_gang_member_is_not_overtaken_by_younger_queries() -> None:
    """Queries that come later are younger, and do not overtake it, however many they are."""
    one = scheduler()
    comings = [enqueue(f"{n}", name, kind) for n in range(20) for name, kind in (("map", MEMBER), ("call", CALL))]
    assert line(one, *comings)[:2] == ["0map", "0call"]


def test_queries_are_numbered_in_order_and_the_oldest_forgotten() -> None:
    order = QueryNumbers()
    assert [order.number(name) for name in ("a", "b", "a")] == [0, 1, 0]
    for other in range(MAX_NUMBERED_QUERIES):
        order.number(f"q{other}")
    assert order.number("a") == MAX_NUMBERED_QUERIES + 2


@pytest.mark.parametrize("policy", POLICIES)
def test_waiting_warm_up_does_not_block_other_requests(policy: str) -> None:
    """This holds even for the policy that serves one invocation after the other."""
    profile = replace(LLM, interference=0.5, prefix_caching=True)
    one = EngineScheduler(profile, ("0", "1"), POLICIES[policy]())
    for number in range(8):
        one.handle(enqueue(f"other{number}", "call", CALL))
        one.handle(PrefillEnded(0.0, f"other{number}call"))
    assert not one.handle(enqueue("1", "warm-up", WARM_UP))
    assert line(one, enqueue("2", "call", CALL)) == ["2call"]
