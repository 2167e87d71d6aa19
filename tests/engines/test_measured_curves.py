"""What is made of times that were measured beside other work."""

from __future__ import annotations

import pytest

from teola_plugin.engines.vllm.measure import rising


def test_times_that_rise_are_kept() -> None:
    points = [(27, 0.006), (110, 0.010), (420, 0.030)]
    assert rising(points).points == tuple(points)


def test_a_short_prompt_that_was_held_up_is_left_out() -> None:
    assert rising([(27, 0.030), (110, 0.010), (420, 0.030)]).points == ((110, 0.010), (420, 0.030))


@pytest.mark.parametrize("points", [[(1, 0.00665), (27, 0.0063)], [(27, 0.0063)]])
def test_one_time_is_in_proportion(points: list[tuple[int, float]]) -> None:
    """A line through both would have long prompts take no time at all."""
    curve = rising(points)
    assert curve(27) == pytest.approx(0.0063) and 0 < curve(256) < curve(4096)
