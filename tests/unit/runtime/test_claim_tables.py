"""Tests of claim tables: who gets an entry, who may not, and which entries are forgotten."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from teola_plugin.runtime.claims import Caller, ClaimRule, Claims, ClaimTable, PlannerGraph

ORIGINAL, PLANNER = Caller.ORIGINAL, Caller.PLANNER


@dataclass(eq=False)
class Result:
    """An entry whose state the tests set."""

    claims: Claims = field(default_factory=Claims)
    is_claimable: bool = True
    is_expected: bool = False
    is_forgotten: bool = False

    def forget(self) -> None:
        self.is_forgotten = True


def result(rule: ClaimRule = ClaimRule.ONCE_PER_CALLER, made_by: Caller = PLANNER) -> Result:
    """Return an entry that nobody has claimed yet."""
    return Result(Claims(rule, made_by))


def prefetched(table: ClaimTable[Result], rule: ClaimRule, key: str = "key") -> Result:
    """Return an entry that the planner has made."""
    return table.claim_or_add(key, PLANNER, lambda: result(rule))


@pytest.mark.parametrize(
    ("rule", "claims_of_original", "claims_of_planner"),
    [
        (ClaimRule.PURE, 3, 3),
        (ClaimRule.PURE_FOR_PLANNER, 1, 3),
        (ClaimRule.ONCE_PER_CALLER, 1, 0),
        (ClaimRule.WRITE, 0, 0),
        (ClaimRule.WARM_UP, 0, 3),
        (ClaimRule.ALONE, 0, 0),
    ],
)
def test_claim_rule_limits_the_claims_of_each_caller(
    rule: ClaimRule, claims_of_original: int, claims_of_planner: int
) -> None:
    table = ClaimTable[Result]()
    prefetched(table, rule)
    for caller, expected in ((ORIGINAL, claims_of_original), (PLANNER, claims_of_planner)):
        claimed = [table.claim("key", caller) for _ in range(3)]
        assert sum(entry is not None for entry in claimed) == expected


def test_expected_write_is_claimed_by_the_original() -> None:
    table = ClaimTable[Result]()
    write = prefetched(table, ClaimRule.WRITE)
    write.is_expected = True
    assert table.claim("key", ORIGINAL) is write


def test_equal_entries_are_claimed_in_the_order_added() -> None:
    table = ClaimTable[Result]()
    first, second = result(), result()
    table.add("key", first, PLANNER)
    table.add("key", second, PLANNER)
    assert [table.claim("key", ORIGINAL) for _ in range(3)] == [first, second, None]


def test_unclaimable_entry_is_replaced_by_a_new_one() -> None:
    table = ClaimTable[Result]()
    prefetched(table, ClaimRule.PURE).is_claimable = False
    other = result(ClaimRule.PURE)
    assert not table.has("key")
    assert table.claim_or_add("key", ORIGINAL, lambda: other) is other


def test_an_entry_without_a_key_serves_one_claim() -> None:
    table = ClaimTable[Result]()
    alone = result(ClaimRule.PURE)
    assert table.claim_or_add(None, ORIGINAL, lambda: alone) is alone
    assert list(table) == []
    assert alone.claims.is_wanted


@pytest.mark.parametrize("first", [ORIGINAL, PLANNER])
def test_offer_is_claimed_once_by_each_caller(first: Caller) -> None:
    table = ClaimTable[Result]()
    offered = result()
    assert table.offer("key", offered)
    assert not offered.claims.is_wanted
    assert table.claim("key", first) is offered
    assert table.claim("key", first) is None
    assert table.claim("key", PLANNER if first is ORIGINAL else ORIGINAL) is offered


def test_offer_is_refused_if_an_existing_entry_forbids_it() -> None:
    table = ClaimTable[Result]()
    known = prefetched(table, ClaimRule.PURE)
    assert not table.offer("key", result(), unless=lambda entry: entry is known)
    assert list(table) == [known]


def test_entry_claimed_by_both_callers_is_forgotten_at_its_end() -> None:
    table = ClaimTable[Result]()
    entry = prefetched(table, ClaimRule.ONCE_PER_CALLER)
    table.claim("key", ORIGINAL)
    table.end(entry)
    assert entry.is_forgotten
    assert list(table) == []


def test_prefetched_entry_stays_until_its_graphs_end() -> None:
    table = ClaimTable[Result]()
    entry = prefetched(table, ClaimRule.ONCE_PER_CALLER)
    table.end(entry)
    assert not entry.is_forgotten
    table.release(entry)
    assert entry.is_forgotten


def test_later_graph_claims_an_entry_left_by_a_lookahead_graph() -> None:
    table = ClaimTable[Result]()
    early, late = PlannerGraph("part1", "part1", lookahead=True), PlannerGraph("part2", "part2", lookahead=True)
    entry = table.claim_or_add("key", PLANNER, result, early)
    entry.claims.add_graph(early, lookahead=True, is_new=True)
    table.end(entry)
    table.release(entry)
    assert table.claim("key", PLANNER, early) is None
    assert table.claim("key", PLANNER, late) is entry


def test_table_remembers_the_newest_entries_of_the_original() -> None:
    table = ClaimTable[Result](max_remembered=2)
    entries = [table.claim_or_add(str(number), ORIGINAL, lambda: result(made_by=ORIGINAL)) for number in range(4)]
    for entry in entries:
        table.end(entry)
    assert [entry.is_forgotten for entry in entries] == [True, True, False, False]
    assert list(table) == entries[2:]


def test_dropped_write_is_forgotten_and_not_claimed() -> None:
    table = ClaimTable[Result]()
    entry = table.claim_or_add("key", ORIGINAL, lambda: result(ClaimRule.WRITE, ORIGINAL))
    table.end(entry)
    assert table.has("key")
    table.drop_writes(lambda write: write is entry)
    assert entry.is_forgotten
    assert table.claim("key", PLANNER) is None


def test_released_claim_leaves_the_entry_unwanted() -> None:
    table = ClaimTable[Result]()
    entry = prefetched(table, ClaimRule.PURE)
    table.claim("key", ORIGINAL)
    assert not entry.claims.give_up(PLANNER)
    assert entry.claims.give_up(ORIGINAL)


def test_concurrent_threads_claim_different_entries() -> None:
    table = ClaimTable[Result]()
    for _ in range(400):
        table.add("key", result(), PLANNER)
    claimed: list[Result | None] = []

    def claim() -> None:
        claimed.extend(table.claim("key", ORIGINAL) for _ in range(100))

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, claimed))) == 400
    assert table.claim("key", ORIGINAL) is None
