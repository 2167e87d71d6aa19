"""How long a draft pays, by what verifying takes."""

from __future__ import annotations

import pytest

from teola_plugin.engines.calibration import from_json, to_json
from teola_plugin.engines.drafts.lengths import lengths_that_pay, longest_draft, written
from teola_plugin.graph import Curve, EngineProfile

PROFILE = EngineProfile(
    verifying={
        1: Curve(((0, 0.010), (4, 0.011), (16, 0.012))),
        4: Curve(((0, 0.012), (4, 0.024), (16, 0.060))),
        16: Curve(((0, 0.020), (4, 0.090), (16, 0.300))),
    }
)


def test_what_verifying_costs() -> None:
    assert PROFILE.step(0, 1) == pytest.approx(0.010) and PROFILE.step(10, 1) == pytest.approx(0.0115)
    assert PROFILE.verify(16, 1) == pytest.approx(0.002)
    assert PROFILE.verify(4, 10) == pytest.approx((0.012 + 0.070) / 2)
    assert PROFILE.verify(0, 16) == 0.0
    assert PROFILE.scaled(0.5).verify(4, 4) == pytest.approx(0.006)
    assert EngineProfile().verify(8, 4) == 0.0


def test_drafts_are_shorter_where_they_cost_more_and_none_where_they_do_not_pay() -> None:
    lengths = dict(lengths_that_pay(PROFILE, 16))
    assert lengths[1] == 16 and 0 < lengths[4] < 16 and lengths[16] == 0
    for rows, k in lengths.items():
        assert written(k) / PROFILE.step(k, rows) >= 1 / PROFILE.step(0, rows)
    assert dict(lengths_that_pay(PROFILE, 5))[1] == 5
    assert not lengths_that_pay(EngineProfile(), 16)


def test_between_and_beyond_the_batches_that_were_measured() -> None:
    known = [(1, 16), (4, 8), (16, 2)]
    assert [longest_draft(known, rows) for rows in (1, 2, 4, 5, 16, 17, 32, 64)] == [16, 8, 8, 2, 2, 1, 1, 0]


def test_it_is_kept_with_the_profile() -> None:
    assert EngineProfile(**from_json(to_json(PROFILE))) == PROFILE
