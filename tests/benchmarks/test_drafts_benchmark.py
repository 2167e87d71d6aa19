"""Tests of the benchmark of drafts: its prompts exist, its ratios match its timings, and proposing is quick."""

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


def test_question_sets_do_not_overlap() -> None:
    assert not {topic for topic, _ in QUESTIONS} & {topic for topic, _ in HELD_OUT}
    assert not {question for _, question in QUESTIONS} & {question for _, question in HELD_OUT}


def test_row_has_ratios_and_counts_of_different_answers() -> None:
    rounds = {"plain": [[2.0], [3.0]], "lookup": [[1.0], [1.5]], CONTROL: [[2.0], [3.0]]}
    row = load_row("answer", 4, rounds, {"plain": 1, "lookup": 2, "lookup drafted": 7, "lookup accepted": 5})
    assert row["plain s"] == 2.5 and row["lookup faster"] == 2.0 and row["control faster"] == 1.0
    assert row["differ"] == 3 and row["plain differ"] == 1
    assert (row["lookup drafted"], row["lookup accepted"]) == (7, 5) and "control drafted" not in row
    assert row["rounds"]["plain"] == ["2.000", "3.000"]


def test_concurrent_runs_are_compared_with_both_undrafted_engines() -> None:
    rounds = {"plain": [[2.0, 4.0]], CONTROL: [[4.0, 4.0]], "graph": [[1.0, 2.5]]}
    assert faster(rounds, "graph") == [2.0] and faster(rounds, CONTROL) == [0.75]


def test_proposing_time_does_not_grow_with_row_length() -> None:
    """Four times as long a row takes about as long; an index of it all would not."""
    short, long = (min(proposing_us(n)["lookup"]["median"] for _ in range(5)) for n in (4096, 16384))
    assert long < 3 * short


def test_benchmark_without_gpu_exits_with_a_message() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="no CUDA GPU"):
        drafts_gpu.hardware(cpu=False)
    assert [*drafts.ROUNDS] == [*drafts.ROUNDS_WRITTEN] == [4, 16]
