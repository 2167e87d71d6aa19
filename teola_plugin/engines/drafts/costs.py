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
    """The durations of steps, in seconds, by number of rows.

    A number of rows without data takes the data of the nearest one up to the same power of two.
    """

    def __init__(self) -> None:
        self._plain: dict[int, _Seen] = {}
        """A step without drafts."""
        self._slower: dict[int, _Seen] = {}
        """How much longer than expected one with drafts takes, by rows up to a power of two."""

    def plain(self, rows: int, seconds: float) -> None:
        """Record the seconds of a step without drafts."""
        self._plain.setdefault(rows, _Seen(seconds)).saw(seconds)

    def without(self, rows: int) -> float | None:
        """Return the seconds of a step without drafts; None if unknown for about as many rows."""
        known = [rows] if rows in self._plain else [one for one in self._plain if about(one) == about(rows)]
        return self._plain[min(known, key=lambda one: abs(one - rows))].median if known else None

    def drafted(self, rows: int, seconds: float, expected: float) -> None:
        """Record the seconds of a step with drafts, which was expected to take `expected` steps without drafts."""
        plain = self.without(rows)
        if plain:
            self._slower.setdefault(about(rows), _Seen(1.0)).saw(seconds / plain / expected)

    def slower(self, rows: int) -> float:
        """Return the ratio of measured to expected duration of steps with drafts, 1 at least and by default.

        Below 1 it would be wrong: where drafts are frequent, data on steps without drafts may be old.
        """
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
