"""Tests of texts with gaps: the drafts made from them, alone and with others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engines.drafts.test_draft_rows import MOST, TOKENS, WITH_GAPS, written
from hypothesis import given

from teola_plugin.engines.drafts.followed_texts import GAP_TOKEN as GAP
from teola_plugin.engines.drafts.followed_texts import Skeleton, encode_with_gaps
from teola_plugin.engines.drafts.request_drafter import RequestDrafter

LIST = [1, 2, GAP, 9, 3, 2, GAP, 9, 4, 2, GAP, 9, 5, 2, GAP]
"""`1. ...\\n2. ...\\n3. ...`"""


def row(*texts: Sequence[int], prompt: Sequence[int] = (50,)) -> RequestDrafter:
    return RequestDrafter(prompt, len(prompt), texts, None, MOST)


@given(TOKENS, WITH_GAPS, TOKENS)
def test_row_output_equals_written_tokens_for_any_skeletons(
    prompt: list[int], texts: list[list[int]], output: list[int]
) -> None:
    made = RequestDrafter(prompt, len(prompt), texts, None, MOST)
    assert written(made, output) <= len(output)
    assert made.output == output


def test_numbers_of_a_list_are_drafted_without_its_items() -> None:
    made, steps = row(LIST), 0
    output = [1, 2, 60, 61, 9, 3, 2, 62, 9, 4, 2, 63, 64, 9]
    done = 0
    while done < len(output):
        draft = made.draft(MOST)
        assert draft in ([], [2], [3, 2], [4, 2], [5, 2])
        accepted = 0
        while accepted < len(draft) and output[done + accepted : done + accepted + 1] == [draft[accepted]]:
            accepted += 1
        new = output[done : done + accepted + 1]
        made.grow(new)
        done, steps = done + len(new), steps + 1
    assert (steps, made.accepted) == (len(output) - 5, 5)


def test_matching_label_of_several_is_drafted() -> None:
    labels = [7, 20, 21, 22, GAP], [7, 30, 31, 32, GAP], [8, 40, GAP]
    made = row(*labels)
    made.grow([7])
    assert made.draft(MOST) == [20, 21, 22], "the first of those that begin so"
    made.grow([30])
    assert made.drafted == 3 and made.accepted == 0
    for _ in range(3):  # a pause, for the draft was wrong
        if draft := made.draft(MOST):
            assert draft == [31, 32][: len(draft)]
            break
    else:
        pytest.fail("nothing was drafted")


def test_differing_label_is_never_drafted_again() -> None:
    made = row([7, 20, 21, GAP])
    made.grow([8])
    assert made.draft(MOST) == []
    made.grow([7, 20])
    assert made.draft(MOST) == []


def test_text_after_leading_gap_waits_for_its_first_token() -> None:
    made = row([GAP, 7, 20, 21, GAP, 22])
    made.grow([1, 2, 3])
    assert made.draft(MOST) == []
    made.grow([7])
    assert made.draft(MOST) == [20, 21]


def test_optional_text_after_a_gap_may_be_skipped() -> None:
    """An optional key: the next one is expected."""
    followed = Skeleton([1, GAP, 5, 20, 21, GAP, 5, 30, GAP])
    followed.follow([1, 70, 5, 30])
    assert followed.next(MOST) == []
    followed = Skeleton([1, GAP, 5, 20, 21, GAP, 5, 30, 31, GAP])
    followed.follow([1, 70, 5, 99, 71, 5])
    assert followed.next(MOST) == [30, 31]


def test_earlier_call_is_preferred_to_form_while_it_matches() -> None:
    form, other = [1, 2, 10, 3, 4, GAP], [1, 2, 11, 3, 5, GAP]
    earlier = [1, 2, 10, 3, 4, 60, 61, 62]
    made = row(earlier, form, other)
    made.grow([1])
    assert made.draft(MOST) == earlier[1:]
    made = row(earlier, form, other)
    made.grow([1, 2, 11, 3])
    assert made.draft(MOST) == [5], "another tool: what has agreed longer"


def test_text_is_encoded_piece_by_piece() -> None:
    assert encode_with_gaps("ab|c||d", "|", lambda text: [ord(char) for char in text]) == [
        97,
        98,
        GAP,
        99,
        GAP,
        GAP,
        100,
    ]
    assert encode_with_gaps("|ab|", "|", lambda text: [len(text)]) == [GAP, 2, GAP]
