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
        self._plain: dict[int, _Seen] = {}
        """A step without drafts."""
        self._slower: dict[int, _Seen] = {}
        """How much longer than expected one with drafts takes, by rows up to a power of two."""

    def plain(self, rows: int, seconds: float) -> None:
        """A step of so many rows without drafts took so long."""
        self._plain.setdefault(rows, _Seen(seconds)).saw(seconds)

    def without(self, rows: int) -> float | None:
        """Seconds of a step of so many rows without drafts; None where nothing is known of about as many."""
        known = [rows] if rows in self._plain else [one for one in self._plain if about(one) == about(rows)]
        return self._plain[min(known, key=lambda one: abs(one - rows))].median if known else None

    def drafted(self, rows: int, seconds: float, expected: float) -> None:
        """A step of so many rows with drafts took so long, `expected` times one without."""
        plain = self.without(rows)
        if plain:
            self._slower.setdefault(about(rows), _Seen(1.0)).saw(seconds / plain / expected)

    def slower(self, rows: int) -> float:
        """How much longer than expected steps of so many rows with drafts take: 1 where none was seen, and 1 at least,
        as what is known of steps without drafts may be old where drafts are many."""
        found = self._slower.get(about(rows))
        return 1.0 if found is None else max(1.0, found.median)


class _Seen:
    """About the median of what was seen."""

    def __init__(self, expected: float) -> None:
        self.median, self._times = expected, 0

    def saw(self, value: float) -> None:
        self._times += 1
        most = max(_NEARER, _QUICKLY / self._times)
        if abs(value - self.median) < most * self.median:
            self.median = value
        else:
            self.median *= 1 + most if value > self.median else 1 - most


def about(rows: int) -> int:
    """Up to the next power of two."""
    return 1 << (rows - 1).bit_length()
