"""Tests of how the drafts of one step are weighed against each other."""

from __future__ import annotations

import pytest

from teola_plugin.engines.drafts.draft_lengths import DraftCandidate, SharedStepModel, step_durations
from teola_plugin.graph import Curve, EngineProfile

PROFILE = EngineProfile(
    verifying={
        1: Curve(((0, 2.3), (1, 2.7), (8, 3.1), (16, 3.4))),
        4: Curve(((0, 2.8), (2, 3.4), (8, 4.4))),
        16: Curve(((0, 3.8), (2, 6.0), (8, 10.2))),
    }
)
"""As of a model with random weights on one core, in milliseconds."""


def lengths(*drafts: tuple[int, float], rows: int = 16, speed: float = 1.0, others: float = 1.0) -> list[int]:
    """Return the lengths of the drafts of rows with this speed, in a step with `rows` rows."""
    offers = [DraftCandidate(*draft, 1.0, speed) for draft in drafts]
    speeds = [*[speed] * len(drafts), *[others] * (rows - len(drafts))]
    return list(SharedStepModel(step_durations(PROFILE)).lengths(offers, speeds))


def test_steps_slower_than_measured_end_drafting() -> None:
    offers, together = [DraftCandidate(8, 0.9, 1.0, 1.0)] * 4, SharedStepModel(step_durations(PROFILE))
    found = [sum(together.lengths(offers, [1.0] * 4, slower)) for slower in (0.8, 1.0, 4.0)]
    assert found[0] == found[1] > 0 == found[2]


def test_drafts_cost_at_most_the_allowance() -> None:
    offers, together = [DraftCandidate(16, 0.97, 1.0, 1.0)] * 16, SharedStepModel(step_durations(PROFILE))
    found = {left: sum(together.lengths(offers, [1.0] * 16, 1.2, left)) for left in (0.0, 0.3, 0.6, 1.0, 9.0)}
    assert list(found.values()) == sorted(found.values()) and found[0.0] == 0 < found[0.6] < found[9.0]
    assert all(1.2 * together.duration(16, drafted) <= 1.0 + left for left, drafted in found.items() if drafted)
    assert together.shortest_duration(16) == together.duration(16, 8) and together.shortest_duration(
        4
    ) == together.duration(4, 2)


def measured(rows: int) -> dict[int, float]:
    """Return the seconds of steps, by the number of drafted tokens."""
    known = {n: dict(points) for n, _, points in step_durations(PROFILE)}
    return known[min(n for n in known if n >= min(rows, 256))]


def test_unlikely_draft_of_one_row_is_dropped_in_large_batch() -> None:
    assert lengths((4, 0.5)) == [0] and lengths((1, 0.9)) == [0]
    assert lengths((4, 0.5), rows=1)[0] > 0


def test_copying_row_gets_its_draft_among_rows_that_do_not_copy() -> None:
    long, *others = lengths((16, 0.97), *[(2, 0.3)] * 8)
    assert long >= 8 and others == [0] * 8


def test_drafts_are_cut_where_the_next_token_does_not_pay() -> None:
    sure, likely = lengths((16, 0.97), (16, 0.7), rows=4)
    assert sure == 16 > likely > 0
    assert sum(lengths(*[(16, 0.9)] * 16)) < 16 * 16, "all together cost more"


@pytest.mark.parametrize("rows", [1, 3, 16, 40, 256, 300])
def test_chosen_drafts_raise_tokens_per_second(rows: int) -> None:
    drafts = [(16, 0.05 + 0.9 * i / min(rows, 32)) for i in range(min(rows, 32))]
    found = lengths(*drafts, rows=rows)
    steps = measured(rows)
    assert all(0 <= length <= 16 for length in found)
    if total := sum(found):
        written = rows + sum(share**k for n, (_, share) in zip(found, drafts, strict=True) for k in range(1, n + 1))
        least = max(seconds for k, seconds in steps.items() if k <= total)
        assert written / rows > 1.1 * least


def test_steps_have_one_of_a_few_sizes() -> None:
    """An engine that meets a size for the first time prepares it: each may come again."""
    sizes = {
        rows + sum(lengths(*[(1 + i % 16, share)] * i, rows=rows))
        for rows in range(2, 33)
        for i in range(rows + 1)
        for share in (0.5, 0.7, 0.9, 0.97)
    } - set(range(2, 33))
    assert sizes and sizes <= {48, 64, 96, 128, 192, 256, 384, 512} | {3, 4, 6, 8, 12, 16, 24, 32}


def test_equal_drafts_are_cut_to_a_step_size_that_pays() -> None:
    found = lengths(*[(1, 0.95)] * 16)
    assert sum(found) == 16 and sum(lengths(*[(1, 0.95)] * 15)) == 8


def test_first_drafted_token_costs_as_much_as_for_a_single_row() -> None:
    found = measured(16)
    assert found[1] == pytest.approx(1 + 0.4 / 3.8) and found[32] == pytest.approx(6.0 / 3.8)
    assert list(found.values()) == sorted(found.values())


def test_profile_of_a_single_row_gives_no_shared_step_model() -> None:
    assert step_durations(EngineProfile()) == () == step_durations(EngineProfile(verifying={1: PROFILE.verifying[1]}))
    assert not SharedStepModel(())


def test_fast_row_drafts_less_while_slower_rows_run() -> None:
    """All rows wait for the slowest one, so time that a fast row saves is of no use before that has ended."""
    drafts = [(16, 0.9)] * 8
    assert sum(lengths(*drafts)) > 0
    assert sum(lengths(*drafts, speed=3.0)) < sum(lengths(*drafts)) / 2
    assert sum(lengths(*drafts, others=3.0)) >= sum(lengths(*drafts)), "but they are waited for"
    assert lengths((16, 0.9), rows=1, speed=3.0) == lengths((16, 0.9), rows=1), "nobody else is there"


def test_tokens_of_all_rows_count_equally_when_slots_are_reused() -> None:
    """One that is ahead makes room for another; where none waits it is hardly missed."""
    together, speeds = SharedStepModel(step_durations(PROFILE)), [3.0, 1.0, 1.0, 1.0]
    ahead, behind = together.token_values([3.0, 1.0], speeds)
    assert ahead < behind / 3
    assert together.token_values([3.0, 1.0], speeds, 1.0) == pytest.approx([0.25, 0.25])
    assert ahead < together.token_values([3.0], speeds, 0.5)[0] < 0.25
    offers = [DraftCandidate(16, 0.8, 1.0, 3.0)]
    ending, waited = (sum(together.lengths(offers, speeds, slot_reuse=share)) for share in (0.0, 1.0))
    assert ending < waited
