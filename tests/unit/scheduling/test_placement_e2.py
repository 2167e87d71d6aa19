"""Tests of each rule of E2 with examples worked by hand. Prefilling takes 1 ms a token, and a block has 16 tokens."""

from __future__ import annotations

import pytest
from support.placement import anywhere, ask, but, e2, send

from teola_plugin.scheduling import E2Options
from teola_plugin.scheduling.engine_queue import CacheCleared, CacheRemoved, CacheStored, CacheUse
from teola_plugin.scheduling.placement import PlacementChoice, PlacementRequest, PlacementRule


def test_unknown_prefix_goes_to_the_least_loaded_replica() -> None:
    placement = e2("a", "b")
    assert send(placement, ask("1", ("x", 320))) == PlacementChoice("a", 320, PlacementRule.EXPLORE)
    assert send(placement, ask("2", ("y", 160))) == PlacementChoice("b", 160, PlacementRule.EXPLORE)
    assert send(placement, ask("3", ("z", 160))) == PlacementChoice("b", 160, PlacementRule.EXPLORE)
    assert send(placement, ask("4", ("w", 160))) == PlacementChoice("a", 160, PlacementRule.EXPLORE), (
        "320 against 320: the first"
    )


@pytest.mark.parametrize(
    ("rest", "why", "replica", "units"),
    [
        (144, PlacementRule.EXPLOIT, "a", 144),
        (160, PlacementRule.EXPLORE, "b", 320),
        (320, PlacementRule.EXPLORE, "b", 480),
    ],
)
def test_cached_prefix_is_exploited_only_if_it_outweighs_the_rest(
    rest: int, why: PlacementRule, replica: str, units: int
) -> None:
    placement = e2("a", "b")
    send(placement, ask("1", ("x", 160), ("q", 1600)), "a")
    assert placement.choose_replica(ask("2", ("x", 160), ("r", rest)), anywhere) == PlacementChoice(replica, units, why)


def test_least_loaded_of_the_prefix_holders_is_exploited() -> None:
    placement = e2("a", "b", "c")
    send(placement, ask("1", ("x", 320)), "a")
    send(placement, ask("2", ("x", 320)), "b")
    send(placement, ask("3", ("y", 16)), "b")
    assert placement.choose_replica(ask("4", ("x", 320), ("q", 16)), anywhere) == PlacementChoice(
        "a", 16, PlacementRule.EXPLOIT
    )
    send(placement, ask("5", ("z", 32)), "a")
    assert placement.choose_replica(ask("6", ("x", 320), ("q", 16)), anywhere) == PlacementChoice(
        "b", 16, PlacementRule.EXPLOIT
    )


def test_holder_of_a_slightly_shorter_prefix_counts_as_equal() -> None:
    placement = e2("a", "b")
    send(placement, ask("1", ("x", 320), ("q", 160)), "a")
    send(placement, ask("2", ("x", 320)), "b")
    same = ("x", 320), ("q", 160)
    near = placement.choose_replica(ask("3", *same, ("r", 160)), anywhere)  # a computes 160 tokens, b 320: twice that
    far = placement.choose_replica(ask("4", *same, ("r", 16)), anywhere)  # a computes 16, b 176
    assert near == PlacementChoice("b", 320, PlacementRule.EXPLOIT)
    assert far == PlacementChoice("a", 16, PlacementRule.EXPLOIT)


def test_exploring_subtracts_the_prefix_cached_on_a_replica() -> None:
    placement = e2("a", "b")
    send(placement, ask("1", ("x", 160), ("y", 160)), "a")
    send(placement, ask("2", ("z", 272)), "b")
    # a: load 0.320 + the rest 0.240; b: load 0.272 + all of it 0.400
    assert placement.choose_replica(ask("3", ("x", 160), ("w", 240)), anywhere) == PlacementChoice(
        "a", 240, PlacementRule.EXPLORE
    )


def test_exploring_adds_the_cost_of_evicted_blocks() -> None:
    placement = e2("a", "b", options=E2Options(capacity=20))
    for name in ("1", "2", "3"):
        send(placement, ask(name, ("x", 320)), "a", units=160)
    for name in ("4", "5", "6", "7"):
        send(placement, ask(name, ("y", 160)), "b", units=160)
    # a: 0.480 + 0.160 + what 10 blocks that three requests shared cost again, 0.480; b: 0.640 + 0.160, 10 blocks free
    assert placement.choose_replica(ask("8", ("z", 160)), anywhere) == PlacementChoice("b", 160, PlacementRule.EXPLORE)
    placement.record_cache_event(CacheCleared(0.0, "a"))
    assert placement.choose_replica(ask("9", ("z", 160)), anywhere) == PlacementChoice("a", 160, PlacementRule.EXPLORE)


def test_new_prefix_goes_to_the_replica_that_mostly_decodes() -> None:
    placement = e2("a", "b")
    send(placement, ask("1", ("x", 1600)), "a")
    for number in range(4):
        send(placement, ask(f"hit{number}", ("x", 1600)))
    send(placement, ask("2", ("y", 160)), "b")
    assert placement.loads["a"].hit_ratio > 0.7
    assert placement.loads.load("a") > placement.loads.load("b")
    assert placement.choose_replica(ask("3", ("z", 160)), anywhere) == PlacementChoice("a", 160, PlacementRule.BALANCE)
    assert placement.choose_replica(ask("4", ("z", 160)), but("a")) == PlacementChoice("b", 160, PlacementRule.EXPLORE)
    placement.begin_round(31.0)
    assert placement.choose_replica(ask("5", ("z", 160)), anywhere) == PlacementChoice(
        "b", 160, PlacementRule.EXPLORE
    ), "half a minute later"


def test_no_replica_is_preferred_if_all_decode() -> None:
    placement = e2("a", "b")
    for name in ("a", "b"):
        send(placement, ask(f"first {name}", (name, 1600)), name)
        for number in range(4 if name == "a" else 9):
            send(placement, ask(f"{name}{number}", (name, 1600)))
    assert min(load.hit_ratio for _, load in placement.loads) > 0.7
    placed = placement.choose_replica(ask("new", ("z", 160)), anywhere)
    assert placed is not None and placed.rule is PlacementRule.EXPLORE


def test_session_stays_on_its_replica_despite_a_better_match() -> None:
    placement = e2("a", "b")
    send(placement, ask("warm-up", ("x", 160), session="s"), "a")
    send(placement, ask("1", ("x", 160), ("y", 160)), "b")
    full = ask("full", ("x", 160), ("y", 160), session="s")
    assert placement.choose_replica(full, anywhere) == PlacementChoice("a", 160, PlacementRule.SESSION)
    placement.forget_replica("a")
    assert placement.choose_replica(full, anywhere) == PlacementChoice("b", 1, PlacementRule.EXPLOIT)


@pytest.mark.parametrize(
    ("rest", "replica", "why"), [(160, "b", PlacementRule.EXPLORE), (144, "a", PlacementRule.SESSION)]
)
def test_session_leaves_a_crowded_replica_with_little_cached(rest: int, replica: str, why: PlacementRule) -> None:
    placement = e2("a", "b")
    send(placement, ask("warm-up", ("x", 160), session="s"), "a")
    placement.record_ended(0.0, ["warm-up"])
    full = ask("full", ("x", 160), ("y", rest), session="s")
    assert placement.choose_replica(full, anywhere) == PlacementChoice("a", rest, PlacementRule.SESSION)
    send(placement, ask("other", ("z", 640)), "a")
    placed = placement.choose_replica(full, anywhere)
    assert placed is not None
    assert (placed.replica, placed.rule) == (replica, why)


def test_session_with_unknown_prompt_waits_for_its_replica() -> None:
    placement = e2("a", "b")
    send(placement, PlacementRequest("warm-up", 100, session="s"), "a")
    assert placement.choose_replica(PlacementRequest("full", 200, session="s"), but("a")) is None
    assert placement.choose_replica(PlacementRequest("full", 200, session="s"), anywhere) == PlacementChoice(
        "a", 200, PlacementRule.SESSION
    )


def test_number_of_remembered_waiting_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teola_plugin.scheduling.placement.e2.MAX_PREFERENCES", 5)
    placement = e2("a", "b")
    send(placement, ask("1", ("x", 320)), "a")
    placement.record_prefilled(0.0, "1")
    for number in range(40):
        placement.begin_round(0.1 * number)
        assert placement.choose_replica(ask(f"r{number}", ("x", 320)), but("a")) is None
        assert len(placement._preferences) <= 5


def test_cache_event_of_an_unknown_replica_is_ignored() -> None:
    placement = e2("a")
    known = ask("1", ("x", 320))
    placement.record_cache_event(CacheStored(0.0, "gone", known.blocks))
    assert placement.choose_replica(known, anywhere) == PlacementChoice("a", 320, PlacementRule.EXPLORE)


def test_request_waits_for_its_prefix_while_that_is_cheaper() -> None:
    placement = e2("a", "b")
    send(placement, ask("1", ("x", 320)), "a", prefilling=True)  # for 0.320 s
    one, two, three = (ask(name, ("x", 320), ("q", 96)) for name in ("2", "3", "4"))
    # in front of it 0.320, its rest 0.096: as much as all of it, 0.416, elsewhere
    assert placement.choose_replica(one, but("a")) == PlacementChoice("b", 416, PlacementRule.SPILL)
    placement.record_prefilled(0.1, "1")
    assert placement.choose_replica(one, but("a")) is None, "nothing in front of it"
    assert placement.choose_replica(two, but("a")) is None, "one in front of it"
    assert placement.choose_replica(three, but("a")) is None
    for name in ("5", "6"):
        last = placement.choose_replica(ask(name, ("x", 320), ("q", 96)), but("a"))
    assert last == PlacementChoice("b", 416, PlacementRule.SPILL), "the line has become too long"
    placement.begin_round(0.2)
    assert placement.choose_replica(one, but("a")) is None, "each round has a line of its own"


def test_busy_replica_costs_more_to_spill_to() -> None:
    placement = e2("a", "b", "c")
    send(placement, ask("1", ("x", 320)), "a", prefilling=True)  # to wait takes 0.416: as much as to go, at first
    send(placement, ask("2", ("y", 160)), "b")
    send(placement, ask("3", ("z", 160)), "c")  # both were busy for 0.160 of the first second
    assert placement.choose_replica(ask("4", ("x", 320), ("q", 96)), but("a")) is None
    assert placement.choose_replica(ask("5", ("x", 320), ("r", 96)), but("a")) == PlacementChoice(
        "b", 416, PlacementRule.SPILL
    ), "0.512 by now"


def test_request_spills_from_a_long_queue_to_an_idle_replica() -> None:
    placement = e2("a", "b")
    same = ("x", 320), ("q", 96)
    send(placement, ask("1", ("x", 320)), "a")
    send(placement, ask("2", ("y", 700)), "a", prefilling=True)
    assert placement.choose_replica(ask("3", *same), anywhere) == PlacementChoice("a", 96, PlacementRule.EXPLOIT), (
        "0.796 here, 0.416 there"
    )
    send(placement, ask("4", ("z", 100)), "a", prefilling=True)
    assert placement.choose_replica(ask("5", *same), anywhere) == PlacementChoice("b", 416, PlacementRule.SPILL), (
        "0.896: more than twice as long"
    )
    send(placement, ask("6", ("w", 16)), "b", prefilling=True)
    assert placement.choose_replica(ask("7", *same), anywhere) == PlacementChoice("a", 96, PlacementRule.EXPLOIT), (
        "b is not idle any more"
    )


def test_urgent_request_does_not_wait_for_its_prefix() -> None:
    placement = e2("a", "b")
    send(placement, ask("1", ("x", 320)), "a")
    placement.record_prefilled(0.1, "1")
    assert placement.choose_replica(ask("2", ("x", 320)), but("a")) is None
    placed = placement.choose_replica(ask("2", ("x", 320), urgent=True), but("a"))
    assert placed is not None and placed.replica == "b"
    assert placement.choose_replica(ask("3", ("x", 320), urgent=True), but("a", "b")) is None


def test_gang_stays_together_only_if_it_shares_a_prefix() -> None:
    placement = e2("a", "b", "c")
    send(placement, ask("busy", ("z", 800)), "b")
    send(placement, ask("busier", ("w", 1600)), "c")
    together = [send(placement, ask(f"t{i}", ("x", 160), (str(i), 16), gang="t")).replica for i in range(3)]
    apart = [send(placement, ask(f"a{i}", (str(i), 160), gang="a")).replica for i in range(4)]
    alone = [send(placement, ask(f"n{i}", (chr(ord("A") + i), 16))).replica for i in range(3)]
    assert together == ["a", "a", "a"]
    assert apart[:3] == ["a", "b", "c"]
    assert apart[3] == "a"
    assert alone == ["a", "a", "a"], "without a gang the least loaded gets them all"


def test_a_dead_replica_is_never_chosen() -> None:
    placement = e2("a", "b")
    send(placement, ask("1", ("x", 320), session="s"), "a")
    placement.forget_replica("a")
    for request in (ask("2", ("x", 320)), ask("3", ("x", 320), session="s"), ask("4", ("y", 16))):
        placed = placement.choose_replica(request, anywhere)
        assert placed is not None and placed.replica == "b"
    placement.forget_replica("b")
    assert placement.choose_replica(ask("5", ("x", 320)), anywhere) is None


def test_placement_follows_the_cache_events_of_engines() -> None:
    placement = e2("a", "b")
    known = ask("1", ("x", 320))
    placement.record_cache_event(CacheStored(0.0, "b", known.blocks))
    assert placement.choose_replica(known, anywhere) == PlacementChoice("b", 1, PlacementRule.EXPLOIT)
    placement.record_cache_event(CacheRemoved(0.0, "b", known.blocks, keeps=15))
    assert placement.choose_replica(known, anywhere) == PlacementChoice("b", 80, PlacementRule.EXPLOIT)
    placement.record_cache_event(CacheRemoved(0.0, "b", known.blocks, keeps=10))
    assert placement.choose_replica(known, anywhere) == PlacementChoice("b", 160, PlacementRule.EXPLORE), (
        "half is not more than half"
    )
    placement.record_cache_event(CacheCleared(0.0, "b"))
    placement.record_cache_event(CacheUse(0.0, "b", 1.0))
    assert placement.choose_replica(known, anywhere) == PlacementChoice("a", 320, PlacementRule.EXPLORE)


def test_requests_without_blocks_are_spread_by_load() -> None:
    placement = e2("a", "b")
    assert [send(placement, PlacementRequest(str(i), 100)).replica for i in range(4)] == ["a", "b", "a", "b"]


def test_number_of_remembered_gangs_is_bounded() -> None:
    placement = e2("a", "b", options=E2Options(gangs=3))
    for number in range(9):
        send(placement, ask(f"r{number}", ("x", 16), gang=f"g{number}", session=f"s{number}"))
    assert list(placement._gangs) == ["g6", "g7", "g8"]
