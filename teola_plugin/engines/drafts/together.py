"""What a step takes by how many tokens are drafted in it, of all rows together; and how many pay there.

Measured on vLLM's CPU build, a step grows with the tokens drafted in all, whosever they are, and the first of them costs
some more: one row's draft is paid for by all that share the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from teola_plugin.graph import Curve, EngineProfile

Steps = Sequence[tuple[int, Sequence[tuple[int, float]]]]
"""(rows, [(tokens drafted by all of them, seconds of such a step in those without)]), ascending in both."""

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_DRAFTED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_GAIN = 1.05
"""Least gain for which a step is made longer: as for a single row (see `lengths`)."""


def steps_of(profile: EngineProfile) -> Steps:
    """Empty where batches were not measured: then nothing is known of what rows cost each other."""
    if len(profile.verifying) < 2:
        return ()
    return [(rows, _growth(profile, rows)) for rows in _ROWS if profile.step(0, rows)]


def _growth(profile: EngineProfile, rows: int) -> Sequence[tuple[int, float]]:
    """Batches are measured with the same number for each row, which hides what the first tokens cost: that is what they
    cost a row alone."""
    without, most = profile.step(0, rows), max(k for k, _ in profile.verifying[min(profile.verifying)].points)
    found = [(0, 1.0)]
    for drafted in _DRAFTED:
        if drafted > rows * most:
            break
        extra = max(profile.verify(drafted / rows, rows), profile.verify(min(drafted, most), 1))
        found.append((drafted, max(found[-1][1], 1.0 + extra / without)))
    return found


class Together:
    """Which tokens of the drafts of one step pay."""

    def __init__(self, steps: Steps) -> None:
        self._took = [(rows, _filled(points)) for rows, points in steps]

    def __bool__(self) -> bool:
        return bool(self._took)

    def lengths(self, drafts: Sequence[tuple[int, float]], rows: int) -> Sequence[int]:
        """Of each draft, given its tokens and the share of them that is right: those with which all `rows` together
        write most a second. All 0 where that is hardly more than without."""
        chances = [share**k for length, share in drafts for k in range(1, length + 1)]
        chances.sort(reverse=True)
        written = accumulate(chances, initial=float(rows))
        rates = [tokens / took for tokens, took in zip(written, self._seconds(rows), strict=False)]
        best = max(range(len(rates)), key=rates.__getitem__)
        if rates[best] < _GAIN * rates[0]:
            return [0] * len(drafts)
        least = chances[best - 1]
        return [sum(share**k >= least for k in range(1, length + 1)) for length, share in drafts]

    def _seconds(self, rows: int) -> Sequence[float]:
        """Of so many rows, or of the next larger number that is known."""
        return next((took for known, took in self._took if rows <= known), self._took[-1][1])


def _filled(points: Sequence[tuple[int, float]]) -> Sequence[float]:
    """By tokens drafted, from 0 to the most that is known."""
    curve = Curve(tuple((float(k), took) for k, took in points))
    return [curve(k) for k in range(points[-1][0] + 1)]
