"""Tests of the estimated time of steps with and without drafts, from measured steps."""

from __future__ import annotations

import pytest

from teola_plugin.engines.drafts.draft_budget import StepCosts


def seen(*seconds: float, rows: int = 4, expected: float = 1.2) -> StepCosts:
    """Return the costs after steps with drafts that took `seconds`, and one of a second without drafts."""
    costs = StepCosts()
    costs.record_undrafted(rows, 1.0)
    for one in seconds:
        costs.record_drafted(rows, one, expected)
    return costs


def test_unseen_row_count_uses_cost_of_nearest() -> None:
    """While requests end one after another, each step has a new number of rows."""
    costs = StepCosts()
    costs.record_undrafted(16, 2.0)
    costs.record_undrafted(12, 1.0)
    assert costs.undrafted(13) == 1.0 and costs.undrafted(15) == 2.0
    assert costs.undrafted(8) is None and costs.undrafted(17) is None


def test_slowdown_is_one_until_both_kinds_of_step_are_seen() -> None:
    assert StepCosts().slowdown(4) == 1.0 == seen().slowdown(4)
    unknown = StepCosts()
    unknown.record_drafted(4, 5.0, 1.2)
    assert unknown.slowdown(4) == 1.0, "nobody knows what one without takes"


def test_slowdown_follows_first_measured_steps() -> None:
    assert seen(1.8).slowdown(4) == pytest.approx(1.5)
    assert seen(2.4, 2.4, 2.4).slowdown(4) == pytest.approx(2.0, rel=0.1)
    assert seen(0.9, 0.9).slowdown(4) == 1.0, "the step without drafts that was seen took long for another reason"
    assert seen(1.8).slowdown(3) == pytest.approx(1.5), "up to a power of two"
    assert seen(1.8).slowdown(8) == 1.0


def test_slow_outliers_do_not_change_the_estimate() -> None:
    often = [1.2] * 9
    assert seen(*often, 30.0, *often, 30.0, *often).slowdown(4) == pytest.approx(1.0, rel=0.05)
    assert seen(30.0, *often, *often).slowdown(4) == pytest.approx(1.0, rel=0.05), "the first one, too"
    plain = StepCosts()
    for one in (1.0, *often, 30.0):
        plain.record_undrafted(4, one / 1.2)
    assert plain.undrafted(4) == pytest.approx(1.0, rel=0.05)
