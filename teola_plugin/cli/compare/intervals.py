"""How many times faster, and how sure that is: from pairs of runs of one input that ran right behind each other."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from teola_plugin.cli.compare.measure import Run

FEWEST = 6
"""Pairs below which no interval of their median holds with 95 %."""
_RESAMPLES, _SEED = 2000, 0

Said = Literal["faster", "slower", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Ratio:
    """The time of one way over that of another: the median over pairs, and its bootstrap interval of 95 %."""

    ratio: float
    low: float
    high: float
    pairs: int

    def said(self, control: Ratio | None = None) -> Said:
        """`faster` or `slower` only where the interval does not hold 1, and where the plain object does not differ as
        much from itself."""
        noise = 0.0 if control is None else abs(math.log(control.ratio))
        if self.pairs < FEWEST or self.low <= 1.0 <= self.high or abs(math.log(self.ratio)) <= noise:
            return "cannot tell"
        return "faster" if self.ratio > 1.0 else "slower"


def ratio_of(runs: Sequence[Run], one: str, other: str, *, first: bool = False) -> Ratio | None:
    """How many times longer `one` takes than `other` (to the `first` token); None without a pair that ended well."""
    found = {(run.way, run.input, run.round): run for run in runs if run.way in (one, other) and not run.raised}
    ratios = []
    for (way, index, round_), run in found.items():
        beside = found.get((other, index, round_)) if way == one else None
        times = () if beside is None else (_time(run, first=first), _time(beside, first=first))
        if times and all(times):
            ratios.append(times[0] / times[1])  # type: ignore[operator]
    return _interval(ratios) if ratios else None


def _time(run: Run, *, first: bool) -> float | None:
    return run.first if first else run.seconds


def _interval(ratios: Sequence[float]) -> Ratio:
    """By resampling the pairs; always the same for the same ratios."""
    dice = random.Random(_SEED)  # no secret is drawn
    drawn = sorted(median(dice.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    low, high = drawn[int(0.025 * _RESAMPLES)], drawn[int(0.975 * _RESAMPLES) - 1]
    return Ratio(median(ratios), low, high, len(ratios))
