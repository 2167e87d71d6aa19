"""How many drafted tokens pay, by what verifying them was measured to take.

For a row alone, or a budget, `LongestDrafts` gives the longest draft that pays. For several rows that share a step,
`SharedStepModel` decides how many tokens of each draft pay together. On vLLM's CPU build, a step grows with the total
of drafted tokens, and the first of them costs some more: one row's draft is paid for by all that share the step.
What it is worth to them is less: a row that ends sooner makes their steps shorter by its part, while the part that a
row alone would take is there until the last has ended. So tokens of rows that are ahead count for less than those of
rows that are behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, takewhile
from typing import NamedTuple

from teola_plugin.graph import Curve, EngineProfile

LongestDrafts = Sequence[tuple[int, Sequence[int]]]
"""(rows, longest draft of one of them for each share of right tokens: see `for_share`), ascending in rows."""
StepDurations = Sequence[tuple[int, float, Sequence[tuple[int, float]]]]
"""(rows, duration of a row's step alone, [(tokens drafted by all rows, duration of such a step)]), ascending. The unit
is a step of so many rows without drafts."""

SHARES = 20
"""Number of intervals into which shares of right tokens, from 0 to 1, are divided."""
ACCEPTED_SHARE = 0.8
"""Usual share of drafted tokens that is accepted one after the other where a text is copied."""
_MIN_GAIN = 1.05
"""Least gain for which the step of a row alone is made longer: measurements are not more exact."""
_MIN_SHARED_GAIN = 1.2
"""Least gain for which a step of several rows is made longer: others wait for it."""
_NEAR_BEST = 0.97
"""Share of the best rate that suffices: a longer draft gains more where more tokens are right than it seems."""
_TRIED_LENGTHS = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_DRAFTED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_SPEED_EXPONENT = 4
"""A row that is twice as slow as another counts for 2**4 times as much."""
_UNMEASURED_PROFILE = EngineProfile(
    verifying={1: Curve(((0, 1.0), (64, 1.0 + 64 / 20))), 16: Curve(((0, 1.5), (64, 1.5 + 16 * 64 / 20)))}
)
"""Assumed where nothing was measured: a drafted token takes a twentieth of a step, and a row a thirtieth."""


def longest_drafts(profile: EngineProfile, max_tokens: int) -> LongestDrafts:
    """Return the longest draft that pays, by rows in a step and share of right tokens.

    It produces nearly as many tokens per second as the best length. The length is 0 if the gain is small, and the
    result is () if nothing was measured.
    """
    if not profile.verifying:
        return ()
    monotone = replace(profile, verifying=_never_quicker(profile.verifying))
    last = _ROWS[-1] if len(monotone.verifying) > 1 else max(monotone.verifying)
    all_rows = sorted({*_ROWS, *monotone.verifying})
    return [(rows, _longest_by_share(monotone, rows, max_tokens)) for rows in all_rows if rows <= last]


def unmeasured_longest_drafts(max_tokens: int) -> LongestDrafts:
    """Return the longest drafts for an engine without measurements."""
    return longest_drafts(_UNMEASURED_PROFILE, max_tokens)


def _never_quicker(verifying: Mapping[int, Curve]) -> dict[int, Curve]:
    """Return curves in which no longer draft takes less time: such a measurement of a shorter one was disturbed."""
    curves: dict[int, Curve] = {}
    for rows, curve in verifying.items():
        points, shortest = list[tuple[int, float]](), float("inf")
        for drafted, seconds in reversed(curve.points):
            shortest = min(shortest, seconds)
            points.append((drafted, shortest))
        curves[rows] = Curve(tuple(reversed(points)))
    return curves


def _longest_by_share(profile: EngineProfile, rows: int, max_tokens: int) -> Sequence[int]:
    """Return the longest draft that pays for one of `rows` rows, for each of the `SHARES` intervals of right tokens."""
    undrafted = profile.step(0, rows)
    if not undrafted:  # an engine without time, in tests
        return (max_tokens,) * SHARES
    lengths = (0, max_tokens, *(k for k in _TRIED_LENGTHS if k < max_tokens))
    seconds = {k: max(undrafted, profile.step(k, rows)) for k in lengths}  # extrapolated, it may come out as 0
    return tuple(_longest(seconds, (i + 0.5) / SHARES) for i in range(SHARES))


def _longest(seconds: Mapping[int, float], share: float) -> int:
    """Return the largest number of drafted tokens whose rate of output is near the best one; 0 if drafts do not pay.

    A rate is near the best from 97 % of it on, and pays if it is 5 % above that of steps without drafts.

    Args:
        seconds: The duration of a step by its number of drafted tokens, with 0 among them.
        share: The probability that a drafted token is right.
    """
    rates = {k: tokens_per_step(k, share) / duration for k, duration in seconds.items()}
    least_rate = max(_NEAR_BEST * max(rates.values()), _MIN_GAIN * rates[0])
    return max((k for k, rate in rates.items() if rate >= least_rate), default=0)


def tokens_per_step(drafted: int, share: float = ACCEPTED_SHARE) -> float:
    """Return the expected tokens of a step with a draft: 1 + q + q^2 + ... (Leviathan et al., 2211.17192)."""
    return float((1 - share ** (drafted + 1)) / (1 - share))


def longest_of_rows(longest_drafts: LongestDrafts, rows: int) -> Sequence[int]:
    """Return the longest drafts by share of right tokens, for one of `rows` rows.

    A number of rows between two measured ones takes the larger; beyond the largest, the total stays the same.
    """
    for measured_rows, longest in longest_drafts:
        if rows <= measured_rows:
            return longest
    measured_rows, longest = longest_drafts[-1]
    return tuple(tokens * measured_rows // rows for tokens in longest)


def for_share(longest: Sequence[int], share: float) -> int:
    """Return the longest draft where that share of tokens is right."""
    return longest[min(SHARES - 1, int(share * SHARES))]


def step_durations(profile: EngineProfile) -> StepDurations:
    """Return the durations of steps from a profile; () if batches were not measured.

    Each entry has a number of rows, the duration of a single row's step as a share of theirs (1.0 at most), and how the
    duration grows with drafted tokens. Numbers of rows that were not measured are left out.
    """
    if len(profile.verifying) < 2:
        return ()
    single_row = profile.step(0, 1)
    return [(n, min(1.0, single_row / profile.step(0, n)), _growth(profile, n)) for n in _ROWS if profile.step(0, n)]


def _growth(profile: EngineProfile, rows: int) -> Sequence[tuple[int, float]]:
    """Return the durations of steps of `rows` rows by number of drafted tokens.

    Batches are measured with equally many tokens for each row, which hides the cost of the first ones. That cost is
    taken from the measurement of a single row.
    """
    undrafted, longest = profile.step(0, rows), max(k for k, _ in profile.verifying[min(profile.verifying)].points)
    durations = [(0, 1.0)]
    for drafted in _DRAFTED:
        if drafted > rows * longest:
            break
        extra = max(profile.verify(drafted / rows, rows), profile.verify(min(drafted, longest), 1))
        durations.append((drafted, max(durations[-1][1], 1.0 + extra / undrafted)))
    return durations


UNMEASURED_DURATIONS = step_durations(
    EngineProfile(
        verifying={1: Curve(((0, 1.0), (64, 1.0 + 64 / 40))), 16: Curve(((0, 1.5), (64, 1.5 + 16 * 64 / 40)))}
    )
)
"""Assumed where nothing was measured: a row takes a thirtieth of a step, and a drafted token a fortieth, as for small
models on one core. What it takes under load is learned (see `StepCosts`)."""


class DraftCandidate(NamedTuple):
    """The draft of a row, with the facts that decide how much of it pays."""

    length: int
    share: float
    """Share of right tokens, as the row's own guesses have it."""
    forecast_ratio: float
    """Right tokens per expected right token, lately."""
    speed: float
    """Tokens per step that the row has written so far."""

    @property
    def tokens(self) -> range:
        """The numbers of its tokens, from 1."""
        return range(1, self.length + 1)


class SharedStepModel:
    """A model of steps in which several rows draft, which decides how many tokens pay."""

    def __init__(self, durations: StepDurations) -> None:
        self._durations = [(rows, row_share, _filled(points)) for rows, row_share, points in durations]

    def __bool__(self) -> bool:
        return bool(self._durations)

    def lengths(
        self,
        drafts: Sequence[DraftCandidate],
        speeds: Sequence[float],
        slowdown: float = 1.0,
        max_cost: float = math.inf,
        slot_reuse: float = 0.0,
    ) -> Sequence[int]:
        """Return the lengths of drafts with which all rows together gain most per second.

        All are 0 if the gain is small.

        Args:
            drafts: The drafts.
            speeds: Tokens per step of every row, with or without a draft.
            slowdown: Recent ratio of measured to expected duration of steps with drafts.
            max_cost: Steps that the drafts may cost.
            slot_reuse: See `token_values`.
        """
        durations = self._of_rows(len(speeds))[1]
        values = self.token_values([draft.speed for draft in drafts], speeds, slot_reuse)
        first_values = [value * draft.forecast_ratio for value, draft in zip(values, drafts, strict=True)]
        gains = [
            (value * draft.share**k, i)
            for i, (value, draft) in enumerate(zip(first_values, drafts, strict=True))
            for k in draft.tokens
        ]
        gains.sort(key=lambda gain: -gain[0])
        total_gains = list(accumulate((gain for gain, _ in gains), initial=1.0))
        totals = _allowed_totals(len(speeds), min(len(total_gains), len(durations)))
        steps = {k: durations[k] * slowdown if k else 1.0 for k in totals}
        rates = {k: total_gains[k] / step for k, step in steps.items() if step <= 1.0 + max_cost or not k}
        best = max(rates, key=rates.__getitem__)
        lengths = [0] * len(drafts)
        if rates[best] >= _MIN_SHARED_GAIN * rates[0]:
            for _, i in gains[:best]:
                lengths[i] += 1
        return lengths

    def token_values(
        self, drafting: Sequence[float], speeds: Sequence[float], slot_reuse: float = 0.0
    ) -> Sequence[float]:
        """Return the value of one more token of each drafting row, in steps that all rows save.

        Args:
            drafting: Speeds of the drafting rows.
            speeds: Speeds of all rows.
            slot_reuse: Frequency with which slots of ended rows are soon reused (see `SlotReuseEstimator`). At 1, the
                tokens of all rows have the same value.
        """
        row_share, total = self._of_rows(len(speeds))[0], sum(speed**-_SPEED_EXPONENT for speed in speeds)
        row_share *= 1.0 - slot_reuse
        return [(1 - row_share) / len(speeds) + row_share * speed**-_SPEED_EXPONENT / total for speed in drafting]

    def duration(self, rows: int, drafted: int) -> float:
        """Return the duration of a step with `drafted` tokens, in steps without drafts."""
        durations = self._of_rows(rows)[1]
        return durations[min(drafted, len(durations) - 1)]

    def shortest_duration(self, rows: int) -> float:
        """Return the duration of a step with the smallest number of drafted tokens."""
        return self.duration(rows, next((k for k in _allowed_totals(rows, 2 * rows + 2) if k), 0))

    def _of_rows(self, rows: int) -> tuple[float, Sequence[float]]:
        """Return the share of a single row's step, and the durations of steps by number of drafted tokens."""
        measured = ((row_share, durations) for limit, row_share, durations in self._durations if rows <= limit)
        return next(measured, self._durations[-1][1:])


def step_sizes() -> Iterator[int]:
    """Yield the sizes of steps in which rows draft together: 2, 3, 4, 6, 8, 12, 16, 24 and so on.

    They are few, because vLLM's CPU build prepares each new size for about as long as a small model's step takes.
    """
    octave = 2
    while True:
        yield octave
        yield octave + octave // 2
        octave *= 2


def _allowed_totals(rows: int, end: int) -> Iterator[int]:
    """Yield the numbers of drafted tokens, below `end`, with which a step has one of `step_sizes`; 0 first."""
    yield 0
    for size in takewhile(lambda size: size - rows < end, step_sizes()):
        if size > rows:
            yield size - rows


def _filled(points: Sequence[tuple[int, float]]) -> Sequence[float]:
    """Return the durations for each number of drafted tokens, from 0 to the largest measured one."""
    curve = Curve(tuple((k, duration) for k, duration in points))
    return [curve(k) for k in range(points[-1][0] + 1)]
