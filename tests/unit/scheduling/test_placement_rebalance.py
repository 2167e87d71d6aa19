"""Tests of moving and copying prefixes, with examples worked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.placement import anywhere, ask, e2, send

from teola_plugin.scheduling import E2Options
from teola_plugin.scheduling.placement import Move, PlacementRule, Portion, rebalance

NEVER, ALWAYS = (lambda name: False), (lambda name: True)


def portions(*costs: float, requests: int = 2) -> list[Portion]:
    return [Portion(key, requests, cost) for key, cost in enumerate(costs, 1)]


@pytest.mark.parametrize(
    ("loads", "costs", "expected"),
    [
        ({"a": 14.0, "b": 10.0}, (1.0, 2.0), []),  # not 1.5 times
        ({"a": 15.0, "b": 10.0}, (1.0, 2.0), [Move(1, "a", "b")]),  # 14 : 11; two more would be 12 : 13
        ({"a": 20.0, "b": 10.0}, (3.0, 1.0, 2.0), [Move(2, "a", "b"), Move(3, "a", "b")]),  # the cheapest first
        ({"a": 20.0, "b": 10.0}, (6.0, 7.0), []),  # either would change places: 14 : 16
        ({"a": 9.0, "b": 0.0}, (4.0, 5.0), [Move(1, "a", "b")]),
        ({"a": 0.0, "b": 0.0}, (), []),
        ({"a": 5.0}, (1.0, 2.0), []),
    ],
)
def test_the_cheapest_shared_prefixes_move(
    loads: dict[str, float], costs: tuple[float, ...], expected: list[Move]
) -> None:
    assert rebalance(list(loads.items()), lambda name: portions(*costs), ALWAYS) == expected


def test_unshared_prefixes_are_not_moved() -> None:
    found = rebalance([("a", 20.0), ("b", 1.0)], lambda name: portions(1.0, 2.0, requests=1), ALWAYS)
    assert found == []


def test_only_shared_prefix_is_copied_when_first_tokens_slow() -> None:
    hot = [("a", 20.0), ("b", 1.0)]
    assert rebalance(hot, lambda name: portions(19.0), NEVER) == []
    assert rebalance(hot, lambda name: portions(19.0), ALWAYS) == [Move(1, "a", "b", copy=True)]


def test_hottest_and_coldest_are_paired_then_the_next() -> None:
    loads = [("a", 1.0), ("b", 2.0), ("c", 9.0), ("d", 9.5), ("e", 3.0)]
    found = rebalance(loads, lambda name: portions(1.0, 9.0), ALWAYS)
    assert found == [Move(1, "d", "a"), Move(1, "c", "b")]


@given(
    st.lists(st.floats(0, 100), max_size=12),
    st.lists(st.tuples(st.integers(1, 3), st.floats(0, 60)), max_size=12),
    st.integers(0, 5),
)
def test_moves_never_invert_the_load_order_of_a_pair(
    levels: list[float], shares: list[tuple[int, float]], most: int
) -> None:
    loads = {f"i{number}": level for number, level in enumerate(levels)}
    known = [Portion(key, requests, cost) for key, (requests, cost) in enumerate(shares, 1)]
    moves = rebalance(list(loads.items()), lambda name: known, NEVER, max_moves=most)
    assert len(moves) <= most
    after = dict(loads)
    for move in moves:
        cost = next(p.cost for p in known if p.key == move.key)
        after[move.source] -= cost
        after[move.target] += cost
        assert after[move.source] >= after[move.target]


def test_moved_prefix_is_served_by_its_target_until_expiry() -> None:
    placement = e2("a", "b", options=E2Options(least_requests=2))
    for number in range(4):
        for name in "xyz":
            send(placement, ask(f"{name}{number}", (name, 320), (str(number), 32)), "a", units=100)
    moves = placement.balancer.check(10.0)
    assert [(move.source, move.target, move.copy) for move in moves] == [("a", "b", False)]  # 1.2 : 0 -> 0.8 : 0.4
    placement.begin_round(11.0)
    replicas = {name: placement.choose_replica(ask(f"{name}9", (name, 320), ("9", 32)), anywhere) for name in "xyz"}
    moved = [name for name, placed in replicas.items() if placed is not None and placed.replica == "b"]
    assert len(moved) == 1
    assert replicas[moved[0]].rule is PlacementRule.MOVED  # type: ignore[union-attr]
    send(placement, ask("again", (moved[0], 320), ("8", 32)))
    assert placement.balancer.check(12.0) == [], "only every ten seconds"
    placement.begin_round(10.0 + 181.0)
    back = placement.choose_replica(ask("later", (moved[0], 320), ("7", 32)), anywhere)
    assert back is not None and back.rule is PlacementRule.EXPLOIT, "the move has run out; b has the prefix by now"


@pytest.mark.parametrize(
    ("prompt", "moved"),
    [
        ((("s", 16), ("x", 320), ("9", 32)), True),
        ((("s", 16), ("z", 320), ("8", 32)), False),  # begins alike, as all do
        ((("s", 16), ("x", 304), ("7", 32)), False),  # has the prefix in part
        ((("s", 16), ("7", 8)), False),  # has the beginning, and little else
    ],
)
def test_move_applies_only_to_prompts_it_was_counted_for(prompt: tuple[tuple[str, int], ...], moved: bool) -> None:
    """Text with which all prompts begin is unknown before the second prompt, so it is part of the first prefix."""
    placement = e2("a", "b", options=E2Options(least_requests=2))
    for name, units in (("x", 100), ("y", 200)):
        for number in range(4):
            send(placement, ask(f"{name}{number}", ("s", 16), (name, 320), (str(number), 32)), "a", units=units)
    assert len(placement.balancer.check(10.0)) == 1
    placement.begin_round(11.0)
    send(placement, ask("new", ("s", 16), ("z", 320)), "a")
    placed = placement.choose_replica(ask("one", *prompt), anywhere)
    assert placed is not None
    assert (placed.rule is PlacementRule.MOVED) == moved


def test_a_copied_prefix_is_served_by_both() -> None:
    placement = e2("a", "b", options=E2Options(least_requests=2))
    for number in range(65):
        at = 2.0 * number
        placement.begin_round(at)
        request = ask(f"r{number}", ("x", 320), (str(number % 10), 32))
        send(placement, request, "a", units=32, prefilling=True)
        placement.record_prefilled(at + (1.0 if at < 90.0 else 3.0), request.id)
        placement.record_ended(at + 3.0, [])
    assert [redirect.copy for redirect in placement.balancer.redirects.values()] == [True]
    placement.begin_round(132.0)
    served = [send(placement, ask(f"s{number}", ("x", 320), (chr(999 + number), 32))).replica for number in range(80)]
    assert set(served) == {"a", "b"}


def test_few_requests_are_not_balanced() -> None:
    placement = e2("a", "b", options=E2Options(least_requests=50))
    for number in range(99):
        send(placement, ask(f"r{number}", (str(number % 3), 320)), "a")
    assert placement.balancer.check(10.0) == []


def test_dead_target_replica_gets_no_moved_requests() -> None:
    placement = e2("a", "b", options=E2Options(least_requests=2))
    for number in range(4):
        for name in "xyz":
            send(placement, ask(f"{name}{number}", (name, 320)), "a", units=100)
    assert placement.balancer.check(10.0)
    placement.forget_replica("b")
    placement.begin_round(11.0)
    for name in "xyz":
        placed = placement.choose_replica(ask("new", (name, 320)), anywhere)
        assert placed is not None and placed.replica == "a"
