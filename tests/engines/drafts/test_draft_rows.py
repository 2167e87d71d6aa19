"""Tests of the drafts for one request, against the text that it writes in the end."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teola_plugin.engines.drafts.accuracy import AppAccuracy
from teola_plugin.engines.drafts.corpus import Corpus
from teola_plugin.engines.drafts.draft_lengths import longest_of_rows, unmeasured_longest_drafts
from teola_plugin.engines.drafts.followed_texts import GAP_TOKEN, FollowedText
from teola_plugin.engines.drafts.request_drafter import RequestDrafter

MOST = 16
ALONE = longest_of_rows(unmeasured_longest_drafts(MOST), 1)
"""For one row on an engine that was not measured."""
TOKENS = st.lists(st.integers(0, 30), max_size=40)
WITH_GAPS = st.lists(st.lists(st.sampled_from([GAP_TOKEN, *range(6)]), max_size=12), max_size=4)


def written(row: RequestDrafter, output: Sequence[int], longest: Sequence[int] = ALONE) -> int:
    """Return the steps that the output takes when a model verifies the drafts."""
    done = steps = 0
    while done < len(output):
        draft = row.draft(MOST, longest)
        assert len(draft) <= MOST
        rest, accepted = output[done : len(output) - 1], 0
        while accepted < min(len(draft), len(rest)) and draft[accepted] == rest[accepted]:
            accepted += 1
        new = output[done : done + accepted + 1]
        row.grow(new)
        done += len(new)
        steps += 1
    return steps


@given(TOKENS, st.lists(TOKENS, max_size=3), TOKENS, TOKENS)
def test_row_output_equals_written_tokens_for_any_drafts(
    prompt: list[int], texts: list[list[int]], recent: list[int], output: list[int]
) -> None:
    row = RequestDrafter(prompt, len(prompt), texts, Corpus(recent), MOST)
    assert written(row, output) <= len(output)
    assert row.output == output and len(row) == len(prompt) + len(output)


def test_correct_text_is_written_in_few_steps() -> None:
    text = list(range(100, 200))
    row = RequestDrafter([1, 2, 3], 3, [text], None, MOST)
    assert written(row, text) == 6
    assert row.accepted >= 93


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(lambda text: [*text[:40], 7, 8, 9, *text[40:]], id="more in between"),
        pytest.param(lambda text: [*text[:40], *text[44:]], id="some left out"),
        pytest.param(lambda text: [*text[:40], 7, 8, *text[42:]], id="other words"),
        pytest.param(lambda text: [5, 6, *text], id="another beginning"),
    ],
)
def test_text_is_followed_again_after_a_difference(changed: object) -> None:
    text = list(range(100, 200))
    output = changed(text)  # type: ignore[operator]
    assert written(RequestDrafter([1, 2, 3], 3, [text], None, MOST), output) <= 16


def test_passage_of_prompt_is_copied_from_it() -> None:
    passage = list(range(100, 160))
    row = RequestDrafter([1, 2, *passage, 3], 63, (), None, MOST)
    assert written(row, passage) <= 9


def test_text_of_request_is_preferred_to_prompt() -> None:
    prompt, text = [1, 2, 3, 4, 5], [1, 2, 9, 9]
    row = RequestDrafter(prompt, 5, [text], None, MOST)
    row.grow([1, 2])
    assert row.draft(MOST, ALONE) == [9, 9]


def test_recent_outputs_are_drafted_if_they_match_longer() -> None:
    row = RequestDrafter([5, 1, 2, 7], 4, (), Corpus([6, 4, 1, 2, 8, 8]), MOST)
    row.grow([4, 1, 2])
    assert row.draft(2, ALONE) == [8, 8]


def misleading(words: int = 25, length: int = 600) -> list[int]:
    """Return tokens in which each pair has occurred before, mostly with another successor."""
    rng = random.Random(1)
    return [rng.randrange(words) for _ in range(length)]


@pytest.mark.parametrize("words", [10, 25, 100])
@pytest.mark.parametrize(("rows", "step"), [(1, 1.0), (16, 1.5)])
def test_misleading_text_costs_at_most_two_percent(rows: int, step: float, words: int) -> None:
    """In steps of a row alone, of which a drafted token takes a twentieth."""
    text = misleading(words, 900)
    row = RequestDrafter(text[:300], 300, (), None, MOST)
    steps = written(row, text[300:], longest_of_rows(unmeasured_longest_drafts(MOST), rows))
    assert steps * step + row.drafted * rows / 20 <= 1.02 * 600 * step


def test_prompt_is_copied_despite_a_misleading_text() -> None:
    passage = list(range(100, 300))
    wrong = [token for i in range(0, 200, 2) for token in (*passage[i : i + 2], 7)]
    row = RequestDrafter([1, *passage, 2], 202, [wrong], None, MOST)
    assert written(row, passage) <= 30
    assert row.drafted - row.accepted < 40


def test_row_drafts_again_once_its_drafts_would_be_accepted() -> None:
    text, passage = misleading(), list(range(100, 160))
    row = RequestDrafter([*passage, *text[:300]], 360, (), None, MOST)
    written(row, text[300:])
    assert written(row, passage) <= 12, "what was not drafted was compared with what came"


def test_draft_grows_while_all_tokens_are_accepted() -> None:
    row = RequestDrafter([1, *range(100, 200), 2], 102, (), None, MOST)
    row.grow([100])
    drafted = []
    for _ in range(5):
        draft = row.draft(MOST, ALONE)
        drafted.append(len(draft))
        row.grow([*draft, draft[-1] + 1])
    assert drafted == sorted(drafted) and drafted[0] <= 4 and drafted[-1] == MOST


def test_text_without_common_tokens_drafts_no_tokens() -> None:
    text = FollowedText([1, 2, 3])
    text.follow([9, 8], 2)
    assert text.next(4) == []
    text.follow([9, 8, 2], 1)
    assert text.next(4) == [3], "a single word that is near counts"


def test_text_is_followed_from_last_tokens_of_a_long_step() -> None:
    """A step is long if the row was not looked at for a while."""
    text = FollowedText(range(100, 200))
    output = [*range(100, 110), *range(900, 960), *range(140, 150)]
    text.follow(output, len(output))
    assert text.next(3) == [150, 151, 152]
    whole = FollowedText(range(100, 200))
    whole.follow(list(range(100, 190)), 90)
    assert whole.next(3) == [190, 191, 192] and whole.agreed == 91, "all are compared while they agree"


def test_row_without_matches_is_searched_less_often_in_large_batch() -> None:
    text = misleading(500, 400)
    searches, looked = dict[int, int](), dict[int, int]()
    for rows in (1, 16):
        row = RequestDrafter(text[:100], 100, (), None, MOST)
        searches[rows] = looked[rows] = 0
        for length in range(101, 401):
            rests = row.rests(text[length - 1 : length])
            if not rests:
                row.grow(text[length - 1 : length])
            assert row.output == text[100:length], "nothing that was written is left out"
            if rests:
                continue
            searches[rows] += 1
            looked[rows] += row.draft(MOST, (0,) * 20, rows) == []
    assert searches[16] < 25 < searches[1] < 60
    assert looked == searches


def test_draft_ends_at_the_last_token_of_a_request() -> None:
    row = RequestDrafter([1, *range(100, 160)], 61, (), None, MOST, max_total=61 + 5)
    row.grow([100, 101])
    assert len(row.draft(MOST)) == 2, "the step writes one more by itself"
    row.grow([102, 103, 104])
    assert row.draft(MOST) == []


def test_single_token_match_is_drafted_only_after_it_proved_right() -> None:
    learned = AppAccuracy()
    row = RequestDrafter([5, 6, 7, 8, 5, 6], 6, (), None, MOST, lookup=True, app_accuracy=learned)
    row.grow([9, 7])
    assert row.draft(MOST, ALONE) == [], "7 was followed by 8, once"
    row.grow([8])
    later = RequestDrafter([5, 6, 7, 8, 5, 6], 6, (), None, MOST, lookup=True, app_accuracy=learned)
    later.grow([9, 7])
    assert later.draft(MOST, ALONE)[:1] == [8], "and so it came"


class Unread(list[list[int]]):
    """Texts that count how often they are read."""

    times = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.times += 1
        return super().__iter__()


def test_texts_are_read_at_first_draft_and_only_once() -> None:
    texts = Unread([[*range(100, 140)], [7, 101, GAP_TOKEN]])
    row = RequestDrafter([1, 2, 3], 3, texts, None, MOST)
    for token in range(100, 110):
        row.grow([token])
    assert (row.has_texts, texts.times) == (True, 0)
    assert row.draft(MOST) == [*range(110, 110 + MOST)]
    row.grow([*range(110, 115)])
    row.draft(MOST)
    assert texts.times == 1


@given(WITH_GAPS, TOKENS, st.integers(0, 40))
def test_text_read_late_is_followed_like_text_read_early(texts: list[list[int]], output: list[int], late: int) -> None:
    early, lazy = (RequestDrafter([50], 1, texts, None, MOST) for _ in range(2))
    early._read_texts()
    for token in output[:late]:
        early.grow([token])
        lazy.grow([token])
    assert lazy.draft(MOST) == early.draft(MOST)
