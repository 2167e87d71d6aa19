"""What drafting may cost beside other rows, by what it has brought: steps in, pauses out."""

from __future__ import annotations

import pytest

from teola_plugin.engines.drafts.allowance import Allowance
from teola_plugin.engines.drafts.pacing import TOLD, UNTOLD, Pacing, Stake
from teola_plugin.engines.drafts.together import Together

ROWS = 4


def tried() -> Allowance:
    """Half a step is left of what may be tried."""
    allowance = Allowance()
    allowance.drafted(ROWS, allowance.left(ROWS) - 0.5, saved=0.0)
    return allowance


def test_some_guesses_are_tried_before_anything_was_brought() -> None:
    allowance = Allowance()
    for _ in range(5):
        assert not allowance.debt(ROWS, 0.3)
        allowance.drafted(ROWS, 0.3, saved=0.0)
    assert not allowance.debt(ROWS, 0.0) and allowance.left(16) == 2.0


def test_looking_is_paid_for_by_a_small_share_of_the_time() -> None:
    allowance = tried()
    allowance.looked(ROWS, 0.55)
    assert allowance.debt(ROWS, 0.0) in (20, 21)
    for left in range(19, -1, -1):
        allowance.passed(ROWS, 1, 0.0)
        assert allowance.debt(ROWS, 0.0) == pytest.approx(left, abs=1)
    allowance.passed(ROWS, 1, 0.0)
    assert allowance.debt(ROWS, 0.0) == 0


def test_debts_of_looking_are_no_longer_than_a_pause() -> None:
    allowance = Allowance()
    allowance.looked(ROWS, 100.0)
    assert 50 <= allowance.debt(ROWS, 0.0) <= 64


def test_drafts_are_looked_for_once_they_can_be_paid_for() -> None:
    allowance = tried()
    allowance.drafted(ROWS, 0.5, saved=0.0)
    assert allowance.debt(ROWS, 0.2) == pytest.approx(80, abs=1) and allowance.debt(ROWS, 0.0) == 0
    for _ in range(81):
        allowance.passed(ROWS, 1, 0.2)
    assert allowance.debt(ROWS, 0.2) == 0 and allowance.left(ROWS) < 0.21


def test_where_all_drafts_cost_much_they_are_tried_all_the_same() -> None:
    allowance = Allowance()
    for _ in range(2000):
        allowance.passed(ROWS, 1, 3.0)
    assert allowance.debt(ROWS, 3.0) == 0, "after some time"
    allowance.passed(ROWS, 1, 0.1)
    assert allowance.left(ROWS) == pytest.approx(3.0), "nothing that was earned is lost"
    for _ in range(2000):
        allowance.passed(16, 1, 0.1)
    assert allowance.left(16) == 2.0, "as far ahead as that"


def test_drafts_that_save_more_than_they_take_pay_for_what_is_looked_for() -> None:
    allowance = Allowance()
    for _ in range(100):
        allowance.looked(ROWS, 0.3)
        allowance.drafted(ROWS, 0.4, saved=2.0)
        assert allowance.debt(ROWS, 0.4) == 0


def test_drafts_that_save_less_do_not() -> None:
    allowance = tried()
    steps = 0
    while not allowance.debt(ROWS, 0.2):
        allowance.drafted(ROWS, 0.2, saved=0.15)
        steps += 1
    assert 2 <= steps <= 4


def test_where_others_wait_for_places_more_comes_of_what_is_saved() -> None:
    allowance = Allowance()
    for _ in range(100):
        allowance.drafted(ROWS, 0.2, 0.3, waited_for=1.0)
    assert not allowance.debt(ROWS, 0.2) and allowance.left(ROWS) == pytest.approx(2.0)
    for _ in range(100):
        allowance.drafted(ROWS, 0.2, 0.3)
    assert allowance.debt(ROWS, 0.2), "it pays for itself there only"


def test_numbers_of_rows_are_apart() -> None:
    allowance = Allowance()
    allowance.looked(16, 50.0)
    assert allowance.debt(16, 0.0) == allowance.debt(13, 0.0) > 0 == allowance.debt(ROWS, 0.0)


def test_a_step_that_cost_more_than_was_expected_is_paid_for_before_the_next() -> None:
    allowance = tried()
    allowance.drafted(ROWS, 1.5, saved=0.0)
    assert allowance.left(ROWS) == -1.0 and allowance.debt(ROWS, 0.0) == pytest.approx(400, abs=2)
    allowance.looked(ROWS, 100.0)
    assert allowance.debt(ROWS, 0.0) == pytest.approx(400, abs=2), "looking adds nothing to a debt that is deeper"
    for _ in range(401):
        allowance.passed(ROWS, 1, 0.0)
    assert allowance.left(ROWS) >= 0.0 and not allowance.debt(ROWS, 0.0)


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


TOGETHER = Together([(ROWS, 0.8, [(0, 1.0), (16, 1.5)])])
NAMES = ["a", "b", "c", "d"]


def step(
    pacing: Pacing, clock: Clock, stakes: dict[int, Stake], took: float, look: float = 0.001, prefilling: int = 0
) -> list[bool]:
    """Which rows are looked at behind a step that took so long, in which one token a row was written, but for those
    that were still prefilling."""
    clock.seconds += took
    found = list(pacing.over(NAMES, [[1]] * (ROWS - prefilling) + [[]] * prefilling, TOGETHER))
    clock.seconds += look
    pacing.said(ROWS, stakes, {told: 2 for told in found}, {TOLD: 0, UNTOLD: 0})
    return found


def test_rows_with_a_text_that_misleads_do_not_stop_the_others() -> None:
    clock = Clock()
    pacing = Pacing(clock)
    assert [step(pacing, clock, {}, 1.0) for _ in range(2)] == [[], [TOLD, UNTOLD]]
    wrong = {0: Stake(TOLD, 8, 0.25)}
    found = [step(pacing, clock, wrong, 1.5) for _ in range(12)]
    assert found[0] == [TOLD, UNTOLD] and found[-1] == [UNTOLD]


def test_a_pause_is_as_long_as_what_is_owed_and_over_with_other_requests() -> None:
    clock = Clock()
    pacing = Pacing(clock)
    for _ in range(4):
        step(pacing, clock, {}, 1.0, look=3.0)
    assert not pacing.leaves_out([*NAMES, "e"])
    left_out = 0
    while pacing.leaves_out(NAMES):
        left_out += 1
    assert 40 <= left_out <= 64


def test_an_engine_that_had_nothing_to_do_has_earned_nothing() -> None:
    clock = Clock()
    pacing = Pacing(clock)
    for _ in range(4):
        step(pacing, clock, {}, 1.0, look=3.0)
    debt = pacing._allowances[TOLD].debt(ROWS, 0.0)
    step(pacing, clock, {}, 10_000.0, look=0.0)
    assert pacing._allowances[TOLD].debt(ROWS, 0.0) == pytest.approx(debt, abs=3) and debt > 50


def test_a_step_in_which_a_row_was_prefilled_says_nothing_of_steps_without_drafts() -> None:
    clock = Clock()
    pacing = Pacing(clock)
    step(pacing, clock, {}, 9.0, prefilling=2)
    assert step(pacing, clock, {}, 9.0) == [], "the last of the prompts was prefilled in it"
    assert step(pacing, clock, {}, 1.0) == [TOLD, UNTOLD]
    assert pacing._costs.without(ROWS) == pytest.approx(1.0)


def test_it_is_seen_whether_places_are_waited_for() -> None:
    clock = Clock()
    pacing = Pacing(clock)

    def goes_on(*names: str, seconds: float = 1.0) -> None:
        clock.seconds += seconds
        pacing.over(list(names), [[1]] * len(names), TOGETHER)

    goes_on(*NAMES)
    goes_on(*NAMES)
    goes_on("b", "c", "d", "e")
    assert pacing.waited_for(ROWS) == 0.125
    goes_on("f", "g", "h", "i", seconds=100.0)
    assert pacing.waited_for(ROWS) < 0.125, "the engine had nothing to do before these came"
    pacing.forget()
    assert pacing.waited_for(ROWS) == 0.0


def test_one_step_costs_no_more_than_half_of_what_is_left() -> None:
    clock = Clock()
    pacing = Pacing(clock)
    step(pacing, clock, {}, 1.0)
    assert pacing.left([TOLD, UNTOLD], ROWS) == 1.0
    for _ in range(3):
        step(pacing, clock, {0: Stake(TOLD, 8, 0.25)}, 1.5, look=0.0)
    least = max(0.0, TOGETHER.least(ROWS) - 1.0)
    assert 0.5 < pacing.left([TOLD, UNTOLD], ROWS) < pacing.left([UNTOLD], ROWS) == 1.0
    for _ in range(9):
        step(pacing, clock, {0: Stake(TOLD, 8, 0.25)}, 1.5, look=0.0)
    assert pacing.left([TOLD], ROWS) == pytest.approx(least), "but for the shortest drafts that there are"


def test_few_of_those_that_are_told_find_out_whether_drafts_pay() -> None:
    """All of them as long as much is left; the others, whose looks take less, in any case."""
    clock, rows = Clock(), 16
    pacing, together = Pacing(clock), Together([(rows, 0.8, [(0, 1.0), (64, 3.0)])])
    names = [str(i) for i in range(rows)]
    pacing.over(names, [[1]] * rows, together)
    least = together.least(rows) - 1.0
    assert pacing.left([TOLD], rows) == 1.0 and pacing.most(TOLD, rows) == pacing.most(UNTOLD, rows) == rows
    pacing._allowances[TOLD].drafted(rows, 2.0 - least, saved=0.0)
    pacing._allowances[UNTOLD].drafted(rows, 2.0 - least, saved=0.0)
    assert pacing.most(TOLD, rows) == rows // 4 and pacing.most(UNTOLD, rows) == rows
    pacing._allowances[TOLD].drafted(rows, least, saved=0.0)
    assert pacing.most(TOLD, rows) == 0 and pacing.most(UNTOLD, rows) == rows


def test_texts_are_tried_again_later_than_what_is_looked_up() -> None:
    clock = Clock()
    pacing = Pacing(clock)
    for _ in range(2):
        step(pacing, clock, {}, 1.0)
    for allowance in pacing._allowances.values():
        allowance.drafted(ROWS, 2.0, saved=0.0)
    looked: dict[bool, int] = {}
    for number in range(400):
        for told in step(pacing, clock, {}, 1.0, look=0.0):
            looked.setdefault(told, number)
    assert 2 * looked[UNTOLD] < looked[TOLD] < 3 * looked[UNTOLD]


def test_all_is_forgotten() -> None:
    clock = Clock()
    pacing = Pacing(clock)
    for _ in range(4):
        step(pacing, clock, {}, 1.0, look=3.0)
    pacing.forget()
    assert not pacing.leaves_out(NAMES)
    assert [step(pacing, clock, {}, 1.0) for _ in range(2)] == [[], [TOLD, UNTOLD]]


def test_a_step_with_other_requests_is_paid_for_as_well() -> None:
    """One leaves with each step, and another one comes: what such steps take is known from others."""
    clock = Clock()
    pacing = Pacing(clock)
    step(pacing, clock, {}, 1.0)
    assert step(pacing, clock, {}, 1.0) == [TOLD, UNTOLD]
    names = list(NAMES)
    for i in range(8):
        pacing.said(ROWS, {1: Stake(TOLD, 8, 0.25)}, {TOLD: 0, UNTOLD: 0}, {})
        names = [*names[1:], f"new-{i}"]
        clock.seconds += 1.0
        found = pacing.over(names, [[1]] * ROWS, TOGETHER)
    assert found == [UNTOLD]
    gone = Pacing(clock)
    for _ in range(2):
        step(gone, clock, {}, 1.0)
    for i in range(8):
        gone.said(ROWS, {1: Stake(TOLD, 8, 0.25)}, {TOLD: 0, UNTOLD: 0}, {})
        found = gone.over([f"{i}-{name}" for name in NAMES], [[1]] * ROWS, TOGETHER)
    assert found == [TOLD, UNTOLD], "nothing was verified for those that have left"


def test_what_steps_take_is_believed_more_than_what_was_expected() -> None:
    """Verifying was measured on an idle engine."""
    clock = Clock()
    pacing = Pacing(clock)
    for took in (1.0, 1.0, *[2.5] * 4):
        step(pacing, clock, {0: Stake(TOLD, 16, 1.0)} if clock.seconds else {}, took)
    assert pacing.slower(ROWS) == pytest.approx(2.5 / 1.5, rel=0.05)


def test_only_a_part_is_paid_where_others_drafted_the_rest() -> None:
    clock = Clock()
    pacing = Pacing(clock)
    shared = {0: Stake(TOLD, 12, 0.25), 1: Stake(UNTOLD, 4, 0.25)}
    for stakes in ({}, shared, {}):
        step(pacing, clock, stakes, 1.0 if not clock.seconds else 1.5, look=0.0)
    left = {told: 2.0 - 2.0 * pacing.left([told], ROWS) for told in (TOLD, UNTOLD)}
    assert left[TOLD] == pytest.approx(3 * left[UNTOLD], rel=0.1) and left[UNTOLD] > 0.1
