"""What steps have taken of late where several rows share them: without drafts, and with drafts by what was expected.

Measuring an idle engine says what a token more or less costs. What a step with drafts takes beside real requests is
more: their contexts are longer, and what is done only now and then is done slowly.
"""

from __future__ import annotations

_NEARER = 0.03
"""By so much of it what steps take is corrected, for each that takes more or less: the median is found, whatever else
runs on the machine now and then."""
_QUICKLY = 0.5
"""By so much the first time, a half of that the second, a third the third: until then it is only expected."""


class StepCosts:
    """By the number of rows in a step: of other numbers as much is known as of the nearest up to the same power of two.
    Times are in seconds."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}
        """A step without drafts."""
        self._slower: dict[int, tuple[float, int]] = {}
        """How much more than expected one with drafts takes, and how many were seen, by rows up to a power of two."""

    def plain(self, rows: int, seconds: float) -> None:
        """A step of so many rows without drafts took so long."""
        before = self._plain.get(rows)
        self._plain[rows] = seconds if before is None else _nearer(before, seconds, _NEARER)

    def without(self, rows: int) -> float | None:
        """Seconds of a step of so many rows without drafts; None where nothing is known of about as many."""
        if rows in self._plain:
            return self._plain[rows]
        known = [one for one in self._plain if about(one) == about(rows)]
        return self._plain[min(known, key=lambda one: abs(one - rows))] if known else None

    def drafted(self, rows: int, seconds: float, expected: float) -> None:
        """A step of so many rows with drafts took so long, `expected` times one without."""
        plain = self.without(rows)
        if plain is not None:
            before, seen = self._slower.get(about(rows), (1.0, 0))
            most = max(_NEARER, _QUICKLY / (seen + 1))
            self._slower[about(rows)] = _nearer(before, seconds / plain / expected, most), seen + 1

    def slower(self, rows: int) -> float:
        """How much longer than expected steps of so many rows with drafts take: 1 where none was seen."""
        return self._slower.get(about(rows), (1.0, 0))[0]


def _nearer(median: float, seen: float, most: float) -> float:
    if abs(seen - median) < most * median:
        return seen
    return median * (1 + most if seen > median else 1 - most)


def about(rows: int) -> int:
    """Up to the next power of two."""
    return 1 << (rows - 1).bit_length()
