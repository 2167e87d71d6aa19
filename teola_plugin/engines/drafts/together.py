"""What a step takes by how many tokens are drafted in it, of all rows together; and how many pay there.

Measured on vLLM's CPU build, a step grows with the tokens drafted in all, whosever they are, and the first of them
costs some more: one row's draft is paid for by all that share the step. What it is worth to them is less: a row that
ends sooner makes their steps shorter by its part, while the part that a row alone would take is there until the last
has ended. So tokens of rows that are ahead count for less than those of rows that are behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from typing import NamedTuple

from teola_plugin.graph import Curve, EngineProfile

Steps = Sequence[tuple[int, float, Sequence[tuple[int, float]]]]
"""(rows, seconds of a row's step alone, [(tokens drafted by all of them, seconds of such a step)]), ascending. Seconds
are in those of a step of so many rows without drafts."""

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_DRAFTED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_BEHIND = 4
"""How much more a row counts that is slower: twice as slow, 16 times."""
_GAIN = 1.2
"""Least gain for which a step is made longer: more than for a row alone (see `lengths`), as others wait for it."""


def steps_of(profile: EngineProfile) -> Steps:
    """Return the durations of steps from a profile; () if batches were not measured."""
    if len(profile.verifying) < 2:
        return ()
    alone = profile.step(0, 1)
    return [(n, min(1.0, alone / profile.step(0, n)), _growth(profile, n)) for n in _ROWS if profile.step(0, n)]


def _growth(profile: EngineProfile, rows: int) -> Sequence[tuple[int, float]]:
    """Return the durations of steps of `rows` rows by number of drafted tokens.

    Batches are measured with equally many tokens for each row, which hides the cost of the first ones. That cost is
    taken from the measurement of a single row.
    """
    without, most = profile.step(0, rows), max(k for k, _ in profile.verifying[min(profile.verifying)].points)
    found = [(0, 1.0)]
    for drafted in _DRAFTED:
        if drafted > rows * most:
            break
        extra = max(profile.verify(drafted / rows, rows), profile.verify(min(drafted, most), 1))
        found.append((drafted, max(found[-1][1], 1.0 + extra / without)))
    return found


UNMEASURED = steps_of(
    EngineProfile(
        verifying={1: Curve(((0, 1.0), (64, 1.0 + 64 / 40))), 16: Curve(((0, 1.5), (64, 1.5 + 16 * 64 / 40)))}
    )
)
"""Where nothing was measured: a row is taken for a thirtieth of a step, and a drafted token for a fortieth, as on one
core it was of small models. What it takes beside real requests is learned (see `costs`)."""


class Offer(NamedTuple):
    """The draft of a row, with the facts that decide how much of it pays."""

    length: int
    share: float
    """Of its tokens that is right, as the row's own guesses have it."""
    trust: float
    """Tokens that have come of late for each that was expected so."""
    speed: float
    """Tokens a step that the row has written so far."""

    @property
    def tokens(self) -> range:
        """The numbers of its tokens, from 1."""
        return range(1, self.length + 1)


class Together:
    """A model of steps in which several rows draft, which decides how many tokens pay."""

    def __init__(self, steps: Steps) -> None:
        self._took = [(rows, alone, _filled(points)) for rows, alone, points in steps]

    def __bool__(self) -> bool:
        return bool(self._took)

    def lengths(
        self,
        drafts: Sequence[Offer],
        speeds: Sequence[float],
        slower: float = 1.0,
        left: float = math.inf,
        waited_for: float = 0.0,
    ) -> Sequence[int]:
        """Return the lengths of drafts with which all rows together gain most per second.

        All are 0 if the gain is small.

        Args:
            drafts: The drafts.
            speeds: Tokens per step of every row, with or without a draft.
            slower: Recent ratio of measured to expected duration of steps with drafts.
            left: Steps that the drafts may cost.
            waited_for: See `worths`.
        """
        took = self._of(len(speeds))[1]
        worths = self.worths([offer.speed for offer in drafts], speeds, waited_for)
        each = [worth * offer.trust for worth, offer in zip(worths, drafts, strict=True)]
        gains = [
            (worth * offer.share**k, i)
            for i, (worth, offer) in enumerate(zip(each, drafts, strict=True))
            for k in offer.tokens
        ]
        gains.sort(key=lambda gain: -gain[0])
        gained = list(accumulate((gain for gain, _ in gains), initial=1.0))
        steps = {k: took[k] * slower if k else 1.0 for k in _known(len(speeds), min(len(gained), len(took)))}
        rates = {k: gained[k] / step for k, step in steps.items() if step <= 1.0 + left or not k}
        best = max(rates, key=rates.__getitem__)
        lengths = [0] * len(drafts)
        if rates[best] >= _GAIN * rates[0]:
            for _, i in gains[:best]:
                lengths[i] += 1
        return lengths

    def worths(self, drafting: Sequence[float], speeds: Sequence[float], waited_for: float = 0.0) -> Sequence[float]:
        """Return the value of one more token of each drafting row, in steps that all rows save.

        Args:
            drafting: Speeds of the drafting rows.
            speeds: Speeds of all rows.
            waited_for: Frequency with which slots of ended rows are reused (see `places`). At 1, the tokens of all rows
                have the same value.
        """
        alone, behind = self._of(len(speeds))[0], sum(speed**-_BEHIND for speed in speeds)
        alone *= 1.0 - waited_for
        return [(1 - alone) / len(speeds) + alone * speed**-_BEHIND / behind for speed in drafting]

    def takes(self, rows: int, drafted: int) -> float:
        """Return the duration of a step with `drafted` tokens, in steps without drafts."""
        took = self._of(rows)[1]
        return took[min(drafted, len(took) - 1)]

    def least(self, rows: int) -> float:
        """Return the duration of a step with the smallest number of drafted tokens."""
        return self.takes(rows, next((k for k in _known(rows, 2 * rows + 2) if k), 0))

    def _of(self, rows: int) -> tuple[float, Sequence[float]]:
        """Return the share of a single row's step, and the durations of steps by number of drafted tokens."""
        return next(((one, took) for known, one, took in self._took if rows <= known), self._took[-1][1:])


def sizes() -> Iterator[int]:
    """Yield the sizes of steps in which rows draft together: 2, 3, 4, 6, 8, 12, 16, 24 and so on.

    They are few, because vLLM's CPU build prepares each new size for about as long as a small model's step takes.
    """
    octave = 2
    while True:
        yield octave
        yield octave + octave // 2
        octave *= 2


def _known(rows: int, most: int) -> Iterator[int]:
    """Yield the numbers of drafted tokens, below `most`, with which a step has one of `sizes`; 0 first."""
    yield 0
    for size in takewhile(lambda size: size - rows < most, sizes()):
        if size > rows:
            yield size - rows


def _filled(points: Sequence[tuple[int, float]]) -> Sequence[float]:
    """Return the durations for each number of drafted tokens, from 0 to the largest measured one."""
    curve = Curve(tuple((k, took) for k, took in points))
    return [curve(k) for k in range(points[-1][0] + 1)]
