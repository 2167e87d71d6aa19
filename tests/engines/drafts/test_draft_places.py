"""Tests of the estimate whether other requests take the slots of requests that end."""

from __future__ import annotations

from itertools import pairwise

import pytest

from teola_plugin.engines.drafts.draft_budget import SlotReuseEstimator


def after(slots: SlotReuseEstimator, *steps: str, each: int = 1, idle: bool = False) -> SlotReuseEstimator:
    """Record steps of requests, each named by a letter, with `each` steps between them."""
    for before, names in pairwise(steps):
        slots.record_steps(list(before), list(names), each, idle=idle)
    return slots


def test_slot_reuse_is_zero_until_a_request_ends() -> None:
    assert after(SlotReuseEstimator(), "ab", "ab", "abc").reuse(3) == 0.0


def test_slot_reuse_rises_when_freed_slots_are_refilled() -> None:
    slots = after(SlotReuseEstimator(), "abcd", "bcde", "cdef", "defg")
    assert 0.3 < slots.reuse(4) < 0.4
    for _ in range(30):
        after(slots, "defg", "efgh", "defg")
    assert slots.reuse(4) > 0.99 and slots.reuse(3) == slots.reuse(4), "up to a power of two"
    assert slots.reuse(2) == slots.reuse(5) == 0.0


def test_slot_refilled_within_few_steps_counts_as_reused() -> None:
    assert after(SlotReuseEstimator(), "abcd", "abc", "abc", "abce", each=4).reuse(4) == 0.125
    assert after(SlotReuseEstimator(), "abcd", "abc", "abc", "abce", each=16).reuse(4) == 0.0


def test_slot_reuse_is_kept_per_row_count() -> None:
    slots = after(SlotReuseEstimator(), "abcd", "abce", "abc", "ab")
    assert after(slots, "ab", "ab", each=40).reuse(4) == pytest.approx(0.125 * (1 - 0.125) ** 2)
    assert after(slots, "ab", "a", "ac").reuse(2) == 0.125


def test_requests_to_idle_engine_do_not_count_as_reuse() -> None:
    assert after(SlotReuseEstimator(), "abcd", "efgh", idle=True).reuse(4) == 0.0
    assert after(SlotReuseEstimator(), "abcd", "efgh").reuse(4) > 0.4, "all of them ended in the same step"
    later = after(SlotReuseEstimator(), "abcd", "abc")
    assert after(later, "abc", "efg", idle=True).reuse(4) == 0.0, "nor are places taken that were empty before"
