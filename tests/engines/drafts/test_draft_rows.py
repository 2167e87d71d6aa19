"""What is drafted for one request, against what it writes in the end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teola_plugin.engines.drafts.adaptive import DraftLength
from teola_plugin.engines.drafts.corpus import Corpus
from teola_plugin.engines.drafts.followed import FollowedText
from teola_plugin.engines.drafts.row import Row

MOST = 16
TOKENS = st.lists(st.integers(0, 30), max_size=40)


def written(row: Row, output: Sequence[int]) -> int:
    """The steps that it takes to write the output, as a model verifies drafts."""
    done = steps = 0
    while done < len(output):
        draft = row.draft(MOST)
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
def test_whatever_is_drafted_the_row_holds_what_was_written(
    prompt: list[int], texts: list[list[int]], recent: list[int], output: list[int]
) -> None:
    row = Row(prompt, len(prompt), texts, Corpus(recent), MOST)
    assert written(row, output) <= len(output)
    assert row.output == output and len(row) == len(prompt) + len(output)


def test_a_text_that_is_right_is_written_in_a_few_steps() -> None:
    text = list(range(100, 200))
    row = Row([1, 2, 3], 3, [text], None, MOST)
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
def test_a_text_is_picked_up_again_behind_a_difference(changed: object) -> None:
    text = list(range(100, 200))
    output = changed(text)  # type: ignore[operator]
    assert written(Row([1, 2, 3], 3, [text], None, MOST), output) <= 16


def test_what_the_prompt_holds_is_copied_from_it() -> None:
    passage = list(range(100, 160))
    row = Row([1, 2, *passage, 3], 63, (), None, MOST)
    assert written(row, passage) <= 9


def test_a_text_that_came_with_the_request_goes_before_the_prompt() -> None:
    prompt, text = [1, 2, 3, 4, 5], [1, 2, 9, 9]
    row = Row(prompt, 5, [text], None, MOST)
    row.grow([1, 2])
    assert row.draft(MOST) == [9, 9]


def test_recent_outputs_serve_where_they_agree_with_more() -> None:
    row = Row([5, 1, 2, 7], 4, (), Corpus([6, 4, 1, 2, 8, 8]), MOST)
    row.grow([4, 1, 2])
    assert row.draft(2) == [8, 8]


def test_misses_end_the_drafting_for_a_while() -> None:
    length = DraftLength(MOST)
    drafted = []
    for _ in range(40):
        most = length.now()
        drafted.append(most)
        length.verified(most, 0)
    assert 0 < sum(map(bool, drafted)) <= 8


def test_a_draft_grows_while_all_of_it_is_right() -> None:
    length, drafted = DraftLength(MOST), []
    for _ in range(4):
        drafted.append(length.now())
        length.verified(drafted[-1], drafted[-1])
    assert drafted == [4, 8, 16, 16]
    length.verified(16, 3)
    assert length.now() == 4


def test_a_text_without_anything_in_common_gives_nothing() -> None:
    text = FollowedText([1, 2, 3])
    text.follow([9, 8], 2)
    assert text.next(4) == []
    text.follow([9, 8, 2], 1)
    assert text.next(4) == [3], "a single word that is near counts"
