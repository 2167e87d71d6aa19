"""The benchmark of drafts: its prompts are there, its ratios are those of what was timed, and proposing is quick."""

from __future__ import annotations

import pytest

from benchmarks import drafts, drafts_gpu
from benchmarks.draft_cases import CONTROL
from benchmarks.draft_load import faster, load_row
from benchmarks.draft_prompts import HELD_OUT, QUESTIONS, passages
from benchmarks.draft_runs import proposing_us


@pytest.mark.parametrize(("topic", "question"), [*QUESTIONS, *HELD_OUT])
def test_every_question_has_two_passages(topic: str, question: str) -> None:
    assert all(len(passage) > 200 for passage in passages(topic, question))


def test_the_sets_have_nothing_in_common() -> None:
    assert not {topic for topic, _ in QUESTIONS} & {topic for topic, _ in HELD_OUT}
    assert not {question for _, question in QUESTIONS} & {question for _, question in HELD_OUT}


def test_a_row_has_ratios_and_says_in_which_way_answers_differ() -> None:
    rounds = {"plain": [[2.0], [3.0]], "lookup": [[1.0], [1.5]], CONTROL: [[2.0], [3.0]]}
    row = load_row("answer", 4, rounds, {"plain": 1, "lookup": 2, "lookup drafted": 7, "lookup accepted": 5})
    assert row["plain s"] == 2.5 and row["lookup faster"] == 2.0 and row["control faster"] == 1.0
    assert row["differ"] == 3 and row["plain differ"] == 1
    assert (row["lookup drafted"], row["lookup accepted"]) == (7, 5) and "control drafted" not in row
    assert row["rounds"]["plain"] == ["2.000", "3.000"]


def test_several_at_once_are_compared_with_both_engines_without_drafts() -> None:
    rounds = {"plain": [[2.0, 4.0]], CONTROL: [[4.0, 4.0]], "graph": [[1.0, 2.5]]}
    assert faster(rounds, "graph") == [2.0] and faster(rounds, CONTROL) == [0.75]


def test_a_proposal_looks_at_few_places_of_a_long_row() -> None:
    """Four times as long a row takes about as long; an index of it all would not."""
    short, long = (min(proposing_us(n)["lookup"]["median"] for _ in range(5)) for n in (4096, 16384))
    assert long < 3 * short


def test_without_a_gpu_it_says_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="no CUDA GPU"):
        drafts_gpu.hardware(cpu=False)
    assert [*drafts.ROUNDS] == [*drafts.ROUNDS_WRITTEN] == [4, 16]
