"""Tests of the longest draft that pays, from the time that verifying takes."""

from __future__ import annotations

import pytest

from teola_plugin.engines.drafts.draft_lengths import (
    SHARES,
    for_share,
    longest_drafts,
    longest_of_rows,
    step_durations,
    tokens_per_step,
    unmeasured_longest_drafts,
)
from teola_plugin.engines.profiles import from_json, to_json
from teola_plugin.graph import Curve, EngineProfile

PROFILE = EngineProfile(
    verifying={
        1: Curve(((0, 0.010), (4, 0.011), (16, 0.012))),
        4: Curve(((0, 0.012), (4, 0.024), (16, 0.060))),
        16: Curve(((0, 0.020), (4, 0.090), (16, 0.300))),
    }
)


def test_verification_cost_is_interpolated_between_batches() -> None:
    assert PROFILE.step(0, 1) == pytest.approx(0.010) and PROFILE.step(10, 1) == pytest.approx(0.0115)
    assert PROFILE.verify(16, 1) == pytest.approx(0.002)
    assert PROFILE.verify(4, 10) == pytest.approx((0.012 + 0.070) / 2)
    assert PROFILE.verify(0, 16) == 0.0
    assert PROFILE.scaled(0.5).verify(4, 4) == pytest.approx(0.006)
    assert EngineProfile().verify(8, 4) == 0.0


def of(rows: int, share: float, most: int = 16) -> int:
    return for_share(longest_of_rows(longest_drafts(PROFILE, most), rows), share)


def test_longest_draft_shrinks_with_rows_down_to_none() -> None:
    assert of(1, 0.8) == 16 and 0 < of(4, 0.8) < 16 and of(16, 0.8) == 0
    for rows, longest in longest_drafts(PROFILE, 16):
        for i, k in enumerate(longest):
            share = (i + 0.5) / SHARES
            assert tokens_per_step(k, share) / PROFILE.step(k, rows) >= 1 / PROFILE.step(0, rows)
    assert of(1, 0.8, most=5) == 5
    assert not longest_drafts(EngineProfile(), 16)


def test_longest_draft_shrinks_with_acceptance_rate() -> None:
    for _, longest in (*longest_drafts(PROFILE, 16), *unmeasured_longest_drafts(16)):
        assert list(longest) == sorted(longest)
    assert of(1, 0.02) == 0 < of(1, 0.3) < of(1, 0.95)
    assert of(4, 0.1) == 0 and of(1, 1.0) == 16


def test_draft_lengths_cover_row_counts_that_were_not_measured() -> None:
    known = [(1, (16,)), (4, (8,)), (16, (2,))]
    found = [longest_of_rows(known, rows)[0] for rows in (1, 2, 4, 5, 16, 17, 32, 64)]
    assert found == [16, 8, 8, 2, 2, 1, 1, 0]
    one = EngineProfile(verifying={1: PROFILE.verifying[1]})
    assert [rows for rows, _ in longest_drafts(one, 16)] == [1], "what rows cost each other is not known"
    assert max(rows for rows, _ in longest_drafts(PROFILE, 16)) == 256


def test_slow_outlier_in_profile_does_not_raise_draft_lengths() -> None:
    noisy = EngineProfile(verifying={1: Curve(((0, 0.020), (4, 0.011), (16, 0.012)))})
    [(_, longest)] = longest_drafts(noisy, 16)
    assert for_share(longest, 0.02) == 0, "not the slow one is the measure of what a step takes without"


def test_noisy_profile_with_zero_step_time_is_accepted() -> None:
    """Times of larger batches than measured are extrapolated, here down to zero."""
    points = {1: ((0, 0.010), (4, 0.030)), 4: ((0, 0.011), (4, 0.020)), 16: ((0, 0.012), (4, 0.013))}
    noisy = EngineProfile(verifying={rows: Curve(curve) for rows, curve in points.items()})
    assert noisy.step(4, 64) == 0 < noisy.step(0, 64)
    assert longest_drafts(noisy, 4) and step_durations(noisy)


def test_unmeasured_engine_drafts_nothing_for_large_batches() -> None:
    assert for_share(longest_of_rows(unmeasured_longest_drafts(16), 1), 0.95) == 16
    assert set(longest_of_rows(unmeasured_longest_drafts(16), 100)) == {0}


def test_verification_curves_survive_json_round_trip() -> None:
    assert EngineProfile(**from_json(to_json(PROFILE))) == PROFILE
