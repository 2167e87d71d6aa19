"""What drafting may cost where several rows share a step: no more than it has brought of late, and a little to try.

What a draft is worth is a forecast (see `together`). Here is kept what comes of it: what verifying took, what looking
for drafts took, and what the accepted tokens saved. Whatever the forecasts are worth, drafting costs at most a small
share of the time where it does not pay.
"""

from __future__ import annotations

import math

from teola_plugin.engines.drafts.costs import about

SHARE, SHARE_OF_TEXTS = 0.0025, 0.001
"""Of the time, which looking for drafts may cost while it brings nothing; and where texts are looked through that came
with the requests, as those take longer to read."""
_AHEAD, _BEHIND, _LOOKED = 2.0, 1.0, 0.15
"""Steps that drafting may be ahead or behind, at most, and behind by looking alone: what was longer ago does not count.
Drafts may cost what it is ahead by, so that they are behind only where they cost more than was expected."""
_START = 2.0
"""Steps that may be spent before anything was brought: with less it is chance whether a gain is ever found."""
_COMES, _COMES_WAITED_FOR = 0.4, 0.9
"""Of what is saved early, as rows that are ahead wait for others in the end; and where others wait for their places."""


class Allowance:
    """The cost that drafting may have, by number of rows in a step. The unit is a step without drafts."""

    def __init__(self, share: float = SHARE) -> None:
        """`share`: of the time, see `SHARE`."""
        self._share = share
        self._left: dict[int, float] = {}
        """What may be spent, by rows up to the next power of two."""

    def debt(self, rows: int, least: float) -> int:
        """Return the number of steps until drafts that cost `least` are tried again; 0 for now."""
        return max(0, math.ceil((least - self.left(rows)) / self._share))

    def left(self, rows: int) -> float:
        """Return the steps that drafts for so many rows may cost; negative if they cost more than they saved."""
        return self._left.get(about(rows), _START)

    def looked(self, rows: int, cost: float) -> None:
        """Record that the search for drafts took the time of `cost` steps."""
        self._add(rows, -cost, _LOOKED)

    def passed(self, rows: int, steps: int, least: float) -> None:
        """Record that `steps` steps were made. A share of them may be spent, up to `least` in any case.

        The share is of steps, not of time: an idle engine earns nothing.
        """
        self._add(rows, self._share * steps, _BEHIND, max(_AHEAD, least))

    def drafted(self, rows: int, cost: float, saved: float, waited_for: float = 0.0) -> None:
        """Record that the verification took `cost` steps and the accepted tokens save `saved` steps.

        `waited_for` is the frequency with which the slots of rows that end are reused (see `places`).
        """
        comes = _COMES + (_COMES_WAITED_FOR - _COMES) * waited_for
        self._add(rows, comes * saved - cost, _BEHIND)

    def _add(self, rows: int, steps: float, behind: float, ahead: float = _AHEAD) -> None:
        left = self.left(rows)
        self._left[about(rows)] = max(min(left, -behind), min(max(left, ahead), left + steps))
