"""Whether places of requests that end are taken by others: steps in, shares out."""

from __future__ import annotations

from itertools import pairwise

import pytest

from teola_plugin.engines.drafts.places import Places


def after(places: Places, *steps: str, each: int = 1, idle: bool = False) -> Places:
    """Steps with requests of one letter each, so many steps apart."""
    for before, names in pairwise(steps):
        places.passed(list(before), list(names), each, idle=idle)
    return places


def test_nothing_is_known_until_a_request_ends() -> None:
    assert after(Places(), "ab", "ab", "abc").taken(3) == 0.0


def test_places_that_others_take_at_once_are_waited_for() -> None:
    places = after(Places(), "abcd", "bcde", "cdef", "defg")
    assert 0.3 < places.taken(4) < 0.4
    for _ in range(30):
        after(places, "defg", "efgh", "defg")
    assert places.taken(4) > 0.99 and places.taken(3) == places.taken(4), "up to a power of two"
    assert places.taken(2) == places.taken(5) == 0.0


def test_a_caller_needs_some_steps_to_ask_again() -> None:
    assert after(Places(), "abcd", "abc", "abc", "abce", each=4).taken(4) == 0.125
    assert after(Places(), "abcd", "abc", "abc", "abce", each=16).taken(4) == 0.0


def test_a_place_is_of_the_rows_that_there_were() -> None:
    places = after(Places(), "abcd", "abce", "abc", "ab")
    assert after(places, "ab", "ab", each=40).taken(4) == pytest.approx(0.125 * (1 - 0.125) ** 2)
    assert after(places, "ab", "a", "ac").taken(2) == 0.125


def test_those_that_come_to_an_idle_engine_did_not_wait() -> None:
    assert after(Places(), "abcd", "efgh", idle=True).taken(4) == 0.0
    assert after(Places(), "abcd", "efgh").taken(4) > 0.4, "all of them ended in the same step"
    later = after(Places(), "abcd", "abc")
    assert after(later, "abc", "efg", idle=True).taken(4) == 0.0, "nor are places taken that were empty before"
