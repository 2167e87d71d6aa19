"""Tests of the lookup of what followed a text, against a search through all positions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from teola_plugin.engines.drafts.corpus import LONGEST, Corpus

TOKENS = st.lists(st.integers(0, 4), max_size=60)


def agreed(tokens: list[int], last: list[int], place: int) -> int:
    found = 0
    while found < min(LONGEST, len(last), place) and tokens[place - 1 - found] == last[-1 - found]:
        found += 1
    return found


@given(TOKENS, TOKENS, st.sampled_from([1, 2]))
def test_best_match_is_longest_among_all_positions(tokens: list[int], last: list[int], least: int) -> None:
    """Among the latest dozen of places; a short text has no more than that of most pairs."""
    place, found = Corpus(tokens).best(last, min_match=least)
    every = [agreed(tokens, last, at) for at in range(len(tokens))]
    if found:
        assert found == agreed(tokens, last, place) >= least and place < len(tokens)
    fitting = [n for n in every if n >= least]
    if len(fitting) <= 12:
        assert found == max(fitting, default=0)


@given(TOKENS, st.lists(TOKENS, max_size=5))
def test_grown_corpus_equals_corpus_built_at_once(first: list[int], more: list[list[int]]) -> None:
    grown, whole = Corpus(first), [*first, *(token for one in more for token in one)]
    for one in more:
        grown.add(one)
    last = whole[-6:]
    assert grown.tokens == whole
    assert grown.best(last) == Corpus(whole).best(last)


@given(TOKENS, TOKENS, st.sampled_from([1, 2]), st.integers(0, 20))
def test_index_finds_the_same_matches_as_a_scan(tokens: list[int], last: list[int], least: int, after: int) -> None:
    corpus = Corpus(tokens)
    looks = [corpus.best(last, min_match=least, after=after) for _ in range(12)]
    assert looks == [looks[0]] * 12
    corpus, token = Corpus(tokens), (last or [0])[-1]
    assert {corpus.latest(token) for _ in range(12)} == {Corpus(tokens).latest(token)}


def test_latest_match_wins_unless_after_is_given() -> None:
    corpus = Corpus([1, 2, 7, 1, 2, 8, 1, 2, 9])
    assert corpus.continuation(corpus.best([1, 2])[0], 1) == [9]
    assert corpus.continuation(corpus.best([1, 2], after=3)[0], 1) == [8]
    assert corpus.best([2, 1]) == (-1, 0)


def test_longer_match_wins_over_later_match() -> None:
    corpus = Corpus([5, 1, 2, 7, 6, 1, 2, 8])
    assert corpus.continuation(corpus.best([5, 1, 2])[0], 1) == [7]
    assert corpus.best([5, 1, 2])[1] == 3


def test_continuation_stops_at_end_of_text() -> None:
    corpus = Corpus([1, 2, 3, -1, -2, 4, 5])
    assert corpus.continuation(corpus.best([1, 2])[0], 9) == [3]
    assert corpus.continuation(0, 9) == [1, 2, 3]
