"""Whether the place of a request that ends is soon taken by another one.

Where requests wait for a place, each token that a row is ahead makes room for them. Where none does, a row that ends
sooner is hardly missed: the others' steps are only shorter by its part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from teola_plugin.engines.drafts.costs import about

SOON = 16
"""Steps: who asks one request after the other needs some to ask again."""
_NEARER = 0.125
"""Of the difference, by which each request that ends corrects the share."""


class Places:
    """The frequency with which slots of ended requests are reused, by number of rows up to a power of two."""

    def __init__(self) -> None:
        self._taken: dict[int, float] = {}
        self._empty: deque[tuple[int, int]] = deque()
        """Places that may still be taken: of how many rows, and the step in which each became empty."""
        self._step = 0

    def taken(self, rows: int) -> float:
        """Return the recent share of slots that were soon reused; 0 if none has become free yet."""
        return self._taken.get(about(rows), 0.0)

    def passed(self, before: Sequence[str], names: Sequence[str], steps: int, *, idle: bool) -> None:
        """Record `steps` steps, from one with the requests `before` to one with `names`.

        `idle` is True if the engine had nothing to do in between, so that the new requests did not wait.
        """
        self._step += steps
        if before != names:
            ended = set(before).difference(names)
            self._empty.extend([(about(len(before)), self._step)] * len(ended))
        while self._empty and (idle or self._step - self._empty[0][1] > SOON):
            self._saw(0.0)
        if self._empty and before != names:
            came = set(names).difference(before)
            for _ in range(min(len(came), len(self._empty))):
                self._saw(1.0)

    def _saw(self, taken: float) -> None:
        """Record if the slot that has been free for longest was reused (1.0) or not (0.0)."""
        rows, _ = self._empty.popleft()
        known = self._taken.get(rows, 0.0)
        self._taken[rows] = known + _NEARER * (taken - known)
