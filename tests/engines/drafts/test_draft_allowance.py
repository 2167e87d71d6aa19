"""Tests of how much drafting may slow down other requests: it pauses if it brought too little."""

from __future__ import annotations

import pytest

from teola_plugin.engines.drafts.draft_budget import WITH_TEXTS, WITHOUT_TEXTS, ChosenDraft, DraftBudget, StepAllowance
from teola_plugin.engines.drafts.draft_lengths import SharedStepModel

ROWS = 4


def tried() -> StepAllowance:
    """Return an allowance with half a step left for drafts."""
    allowance = StepAllowance()
    allowance.charge_drafts(ROWS, allowance.left(ROWS) - 0.5, saved=0.0)
    return allowance


def test_first_drafts_are_allowed_before_any_tokens_are_saved() -> None:
    allowance = StepAllowance()
    for _ in range(5):
        assert not allowance.debt(ROWS, 0.3)
        allowance.charge_drafts(ROWS, 0.3, saved=0.0)
    assert not allowance.debt(ROWS, 0.0) and allowance.left(16) == 2.0


def test_search_cost_is_repaid_by_small_share_of_step_time() -> None:
    allowance = tried()
    allowance.charge_search(ROWS, 0.55)
    assert allowance.debt(ROWS, 0.0) in (20, 21)
    for left in range(19, -1, -1):
        allowance.earn(ROWS, 1, 0.0)
        assert allowance.debt(ROWS, 0.0) == pytest.approx(left, abs=1)
    allowance.earn(ROWS, 1, 0.0)
    assert allowance.debt(ROWS, 0.0) == 0


def test_search_debt_is_capped_at_one_pause() -> None:
    allowance = StepAllowance()
    allowance.charge_search(ROWS, 100.0)
    assert 50 <= allowance.debt(ROWS, 0.0) <= 64


def test_drafts_are_searched_for_again_once_debt_is_repaid() -> None:
    allowance = tried()
    allowance.charge_drafts(ROWS, 0.5, saved=0.0)
    assert allowance.debt(ROWS, 0.2) == pytest.approx(80, abs=1) and allowance.debt(ROWS, 0.0) == 0
    for _ in range(81):
        allowance.earn(ROWS, 1, 0.2)
    assert allowance.debt(ROWS, 0.2) == 0 and allowance.left(ROWS) < 0.21


def test_expensive_drafts_are_tried_again_after_enough_steps() -> None:
    allowance = StepAllowance()
    for _ in range(2000):
        allowance.earn(ROWS, 1, 3.0)
    assert allowance.debt(ROWS, 3.0) == 0, "after some time"
    allowance.earn(ROWS, 1, 0.1)
    assert allowance.left(ROWS) == pytest.approx(3.0), "nothing that was earned is lost"
    for _ in range(2000):
        allowance.earn(16, 1, 0.1)
    assert allowance.left(16) == 2.0, "as far ahead as that"


def test_profitable_drafts_pay_for_their_search() -> None:
    allowance = StepAllowance()
    for _ in range(100):
        allowance.charge_search(ROWS, 0.3)
        allowance.charge_drafts(ROWS, 0.4, saved=2.0)
        assert allowance.debt(ROWS, 0.4) == 0


def test_unprofitable_drafts_run_into_debt_within_four_steps() -> None:
    allowance = tried()
    steps = 0
    while not allowance.debt(ROWS, 0.2):
        allowance.charge_drafts(ROWS, 0.2, saved=0.15)
        steps += 1
    assert 2 <= steps <= 4


def test_savings_count_more_when_freed_slots_are_reused() -> None:
    allowance = StepAllowance()
    for _ in range(100):
        allowance.charge_drafts(ROWS, 0.2, 0.3, slot_reuse=1.0)
    assert not allowance.debt(ROWS, 0.2) and allowance.left(ROWS) == pytest.approx(2.0)
    for _ in range(100):
        allowance.charge_drafts(ROWS, 0.2, 0.3)
    assert allowance.debt(ROWS, 0.2), "it pays for itself there only"


def test_debts_of_different_row_counts_are_separate() -> None:
    allowance = StepAllowance()
    allowance.charge_search(16, 50.0)
    assert allowance.debt(16, 0.0) == allowance.debt(13, 0.0) > 0 == allowance.debt(ROWS, 0.0)


def test_overrun_of_step_is_repaid_before_next_draft() -> None:
    allowance = tried()
    allowance.charge_drafts(ROWS, 1.5, saved=0.0)
    assert allowance.left(ROWS) == -1.0 and allowance.debt(ROWS, 0.0) == pytest.approx(400, abs=2)
    allowance.charge_search(ROWS, 100.0)
    assert allowance.debt(ROWS, 0.0) == pytest.approx(400, abs=2), "looking adds nothing to a debt that is deeper"
    for _ in range(401):
        allowance.earn(ROWS, 1, 0.0)
    assert allowance.left(ROWS) >= 0.0 and not allowance.debt(ROWS, 0.0)


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


MODEL = SharedStepModel([(ROWS, 0.8, [(0, 1.0), (16, 1.5)])])
NAMES = ["a", "b", "c", "d"]


def step(
    budget: DraftBudget,
    clock: Clock,
    drafts: dict[int, ChosenDraft],
    took: float,
    look: float = 0.001,
    prefilling: int = 0,
) -> list[bool]:
    """End a step of `took` seconds. Return, for each row, True if the row is looked at.

    Each row writes one token, except those that still prefill.
    """
    clock.seconds += took
    found = list(budget.end_step(NAMES, [[1]] * (ROWS - prefilling) + [[]] * prefilling, MODEL))
    clock.seconds += look
    budget.record_drafts(ROWS, drafts, {has_texts: 2 for has_texts in found}, {WITH_TEXTS: 0, WITHOUT_TEXTS: 0})
    return found


def test_misleading_texts_do_not_stop_lookup_drafts() -> None:
    clock = Clock()
    budget = DraftBudget(clock)
    assert [step(budget, clock, {}, 1.0) for _ in range(2)] == [[], [WITH_TEXTS, WITHOUT_TEXTS]]
    wrong = {0: ChosenDraft(WITH_TEXTS, 8, 0.25)}
    found = [step(budget, clock, wrong, 1.5) for _ in range(12)]
    assert found[0] == [WITH_TEXTS, WITHOUT_TEXTS] and found[-1] == [WITHOUT_TEXTS]


def test_pause_lasts_until_debt_is_repaid_or_requests_change() -> None:
    clock = Clock()
    budget = DraftBudget(clock)
    for _ in range(4):
        step(budget, clock, {}, 1.0, look=3.0)
    assert not budget.skip_step([*NAMES, "e"])
    left_out = 0
    while budget.skip_step(NAMES):
        left_out += 1
    assert 40 <= left_out <= 64


def test_idle_time_of_engine_repays_no_debt() -> None:
    clock = Clock()
    budget = DraftBudget(clock)
    for _ in range(4):
        step(budget, clock, {}, 1.0, look=3.0)
    debt = budget._allowances[WITH_TEXTS].debt(ROWS, 0.0)
    step(budget, clock, {}, 10_000.0, look=0.0)
    assert budget._allowances[WITH_TEXTS].debt(ROWS, 0.0) == pytest.approx(debt, abs=3) and debt > 50


def test_steps_with_prefilling_are_not_counted_as_undrafted_steps() -> None:
    clock = Clock()
    budget = DraftBudget(clock)
    step(budget, clock, {}, 9.0, prefilling=2)
    assert step(budget, clock, {}, 9.0) == [], "the last of the prompts was prefilled in it"
    assert step(budget, clock, {}, 1.0) == [WITH_TEXTS, WITHOUT_TEXTS]
    assert budget._costs.undrafted(ROWS) == pytest.approx(1.0)


def test_slot_reuse_is_measured_and_reset_by_forget() -> None:
    clock = Clock()
    budget = DraftBudget(clock)

    def goes_on(*names: str, seconds: float = 1.0) -> None:
        clock.seconds += seconds
        budget.end_step(list(names), [[1]] * len(names), MODEL)

    goes_on(*NAMES)
    goes_on(*NAMES)
    goes_on("b", "c", "d", "e")
    assert budget.slot_reuse(ROWS) == 0.125
    goes_on("f", "g", "h", "i", seconds=100.0)
    assert budget.slot_reuse(ROWS) < 0.125, "the engine had nothing to do before these came"
    budget.forget()
    assert budget.slot_reuse(ROWS) == 0.0


def test_step_costs_at_most_half_of_remaining_allowance() -> None:
    clock = Clock()
    budget = DraftBudget(clock)
    step(budget, clock, {}, 1.0)
    assert budget.max_cost([WITH_TEXTS, WITHOUT_TEXTS], ROWS) == 1.0
    for _ in range(3):
        step(budget, clock, {0: ChosenDraft(WITH_TEXTS, 8, 0.25)}, 1.5, look=0.0)
    least = max(0.0, MODEL.shortest_duration(ROWS) - 1.0)
    assert 0.5 < budget.max_cost([WITH_TEXTS, WITHOUT_TEXTS], ROWS) < budget.max_cost([WITHOUT_TEXTS], ROWS) == 1.0
    for _ in range(9):
        step(budget, clock, {0: ChosenDraft(WITH_TEXTS, 8, 0.25)}, 1.5, look=0.0)
    assert budget.max_cost([WITH_TEXTS], ROWS) == pytest.approx(least), "but for the shortest drafts that there are"


def test_rows_with_texts_are_limited_when_allowance_is_low() -> None:
    """With a large allowance all rows are looked at. Rows without texts, which cost less, always are."""
    clock, rows = Clock(), 16
    budget, model = DraftBudget(clock), SharedStepModel([(rows, 0.8, [(0, 1.0), (64, 3.0)])])
    names = [str(i) for i in range(rows)]
    budget.end_step(names, [[1]] * rows, model)
    least = model.shortest_duration(rows) - 1.0
    assert (
        budget.max_cost([WITH_TEXTS], rows) == 1.0
        and budget.max_rows(WITH_TEXTS, rows) == budget.max_rows(WITHOUT_TEXTS, rows) == rows
    )
    budget._allowances[WITH_TEXTS].charge_drafts(rows, 2.0 - least, saved=0.0)
    budget._allowances[WITHOUT_TEXTS].charge_drafts(rows, 2.0 - least, saved=0.0)
    assert budget.max_rows(WITH_TEXTS, rows) == rows // 4 and budget.max_rows(WITHOUT_TEXTS, rows) == rows
    budget._allowances[WITH_TEXTS].charge_drafts(rows, least, saved=0.0)
    assert budget.max_rows(WITH_TEXTS, rows) == 0 and budget.max_rows(WITHOUT_TEXTS, rows) == rows


def test_texts_are_retried_later_than_lookups() -> None:
    clock = Clock()
    budget = DraftBudget(clock)
    for _ in range(2):
        step(budget, clock, {}, 1.0)
    for allowance in budget._allowances.values():
        allowance.charge_drafts(ROWS, 2.0, saved=0.0)
    looked: dict[bool, int] = {}
    for number in range(400):
        for has_texts in step(budget, clock, {}, 1.0, look=0.0):
            looked.setdefault(has_texts, number)
    assert 2 * looked[WITHOUT_TEXTS] < looked[WITH_TEXTS] < 3 * looked[WITHOUT_TEXTS]


def test_forget_clears_debts_and_measured_costs() -> None:
    clock = Clock()
    budget = DraftBudget(clock)
    for _ in range(4):
        step(budget, clock, {}, 1.0, look=3.0)
    budget.forget()
    assert not budget.skip_step(NAMES)
    assert [step(budget, clock, {}, 1.0) for _ in range(2)] == [[], [WITH_TEXTS, WITHOUT_TEXTS]]


def test_steps_with_changed_requests_are_charged() -> None:
    """One leaves with each step, and another one comes: what such steps take is known from others."""
    clock = Clock()
    budget = DraftBudget(clock)
    step(budget, clock, {}, 1.0)
    assert step(budget, clock, {}, 1.0) == [WITH_TEXTS, WITHOUT_TEXTS]
    names = list(NAMES)
    for i in range(8):
        budget.record_drafts(ROWS, {1: ChosenDraft(WITH_TEXTS, 8, 0.25)}, {WITH_TEXTS: 0, WITHOUT_TEXTS: 0}, {})
        names = [*names[1:], f"new-{i}"]
        clock.seconds += 1.0
        found = budget.end_step(names, [[1]] * ROWS, MODEL)
    assert found == [WITHOUT_TEXTS]
    gone = DraftBudget(clock)
    for _ in range(2):
        step(gone, clock, {}, 1.0)
    for i in range(8):
        gone.record_drafts(ROWS, {1: ChosenDraft(WITH_TEXTS, 8, 0.25)}, {WITH_TEXTS: 0, WITHOUT_TEXTS: 0}, {})
        found = gone.end_step([f"{i}-{name}" for name in NAMES], [[1]] * ROWS, MODEL)
    assert found == [WITH_TEXTS, WITHOUT_TEXTS], "nothing was verified for those that have left"


def test_measured_step_times_override_the_profile() -> None:
    """Verifying was measured on an idle engine."""
    clock = Clock()
    budget = DraftBudget(clock)
    for took in (1.0, 1.0, *[2.5] * 4):
        step(budget, clock, {0: ChosenDraft(WITH_TEXTS, 16, 1.0)} if clock.seconds else {}, took)
    assert budget.slowdown(ROWS) == pytest.approx(2.5 / 1.5, rel=0.05)


def test_cost_of_shared_step_is_split_by_drafted_tokens() -> None:
    clock = Clock()
    budget = DraftBudget(clock)
    shared = {0: ChosenDraft(WITH_TEXTS, 12, 0.25), 1: ChosenDraft(WITHOUT_TEXTS, 4, 0.25)}
    for drafts in ({}, shared, {}):
        step(budget, clock, drafts, 1.0 if not clock.seconds else 1.5, look=0.0)
    left = {has_texts: 2.0 - 2.0 * budget.max_cost([has_texts], ROWS) for has_texts in (WITH_TEXTS, WITHOUT_TEXTS)}
    assert left[WITH_TEXTS] == pytest.approx(3 * left[WITHOUT_TEXTS], rel=0.1) and left[WITHOUT_TEXTS] > 0.1
