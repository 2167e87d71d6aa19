"""What drafting may cost where several rows share a step: no more than it has brought of late, and a little to try.

What a draft is worth is a forecast (see `together`). Here is kept what comes of it: what verifying took, what looking
for drafts took, and what the accepted tokens saved. Whatever the forecasts are worth, drafting costs at most a small
share of the time where it does not pay.
"""

from __future__ import annotations

import math

_SHARE = 0.0025
"""Of the time, which looking for drafts may cost while it brings nothing."""
_AHEAD, _BEHIND, _LOOKED = 1.0, 1.0, 0.15
"""Steps that drafting may be ahead or behind, at most, and behind by looking alone: what was longer ago does not count.
A step with drafts for many rows may cost more than a step without them."""
_COMES = 0.4
"""Of what is saved early, as rows that are ahead may be waited for by others, or wait for them."""
_NEARER = 0.03
"""By so much of it what steps take is corrected, for each that takes more or less: the median is found, whatever else
runs on the machine now and then."""


class Allowance:
    """By the number of rows in a step, apart: at 2 rows it may pay, and at 16 not. Times are in seconds."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}
        """A step without drafts, by rows."""
        self._drafted: dict[tuple[int, int], float] = {}
        """One with drafts, in those, by rows and by tokens drafted, both up to the next power of two."""
        self._left: dict[int, float] = {}
        """What may be spent, by rows up to the next power of two."""

    def debt(self, rows: int) -> int:
        """Steps of so many rows until drafts are looked for again: 0 for now. At first one without them is seen."""
        plain = self._takes(rows)
        if plain is None:
            return 1
        left = self._left[_about(rows)]
        return 0 if left >= 0.0 else math.ceil(-left / (_SHARE * plain))

    def spent(self, rows: int) -> bool:
        """Whether drafts for so many rows are behind what they have brought."""
        return self._left.get(_about(rows), 0.0) < 0.0

    def looked(self, rows: int, seconds: float) -> None:
        """So long was looked for drafts."""
        self._add(rows, -seconds, _LOOKED)

    def passed(self, rows: int, steps: int) -> None:
        """So many steps went before: a share of what they take without drafts may be spent. Not of the time: an engine
        that had nothing to do has earned nothing."""
        self._add(rows, _SHARE * steps * (self._takes(rows) or 0.0))

    def plain(self, rows: int, seconds: float) -> None:
        """A step of so many rows without drafts took so long."""
        before = self._plain.get(rows)
        self._plain[rows] = seconds if before is None else _nearer(before, seconds)
        self._left.setdefault(_about(rows), _AHEAD * seconds)

    def drafted(
        self, rows: int, tokens: int, seconds: float, expected: float, *, saved: float, part: float = 1.0
    ) -> None:
        """A step of so many rows with so many tokens drafted took so long, `expected` times one without. A `part` of
        those tokens is to be paid for here, which saves so much of a step."""
        plain = self._takes(rows)
        if plain is not None:
            kind = _about(rows), _about(tokens)
            self._drafted[kind] = _nearer(self._drafted.get(kind, expected), seconds / plain)
            self._add(rows, (_COMES * saved - part * (self._drafted[kind] - 1.0)) * plain)

    def _takes(self, rows: int) -> float | None:
        """A step of so many rows without drafts: where there was none, as of about as many, the nearest known."""
        if rows in self._plain:
            return self._plain[rows]
        known = [one for one in self._plain if _about(one) == _about(rows)]
        return self._plain[min(known, key=lambda one: abs(one - rows))] if known else None

    def _add(self, rows: int, seconds: float, behind: float = _BEHIND) -> None:
        plain = self._takes(rows)
        if plain is not None:
            left = self._left[_about(rows)]
            self._left[_about(rows)] = max(min(left, -behind * plain), min(_AHEAD * plain, left + seconds))


def _nearer(median: float, seen: float) -> float:
    if abs(seen - median) < _NEARER * median:
        return seen
    return median * (1 + _NEARER if seen > median else 1 - _NEARER)


def _about(rows: int) -> int:
    return 1 << (rows - 1).bit_length()
