"""How far guesses are trusted: the share of their tokens that were right lately, whether they were drafted or not."""

from __future__ import annotations

from enum import Enum

_KEPT = 0.94
"""Weight of what was seen before, for each token seen since."""


class Kind(Enum):
    """Guesses that are right about as often as each other. Values: the share that is expected at first."""

    FOLLOWED = 0.95
    """From a text that came with the request, of which the last `AGREED` tokens have been right."""
    TEXT = 0.9
    """From a text that came with the request."""
    MANY = 0.89
    """What stood behind twice `AGREED` tokens that agree, or more."""
    SOME = 0.85
    """Behind `AGREED` that agree."""
    THREE = 0.6
    TWO = 0.5
    ONE = 0.3

    @staticmethod
    def behind(agreed: int) -> Kind:
        """Of a guess behind so many tokens that agree, 1 or more."""
        if agreed < AGREED:
            return _FEW[agreed - 1]
        return Kind.MANY if agreed >= 2 * AGREED else Kind.SOME


AGREED = 4
_FIRST = 4.0
"""Tokens that the share expected at first counts for."""
_FEW = (Kind.ONE, Kind.TWO, Kind.THREE)


class Trust:
    """The share of one kind's tokens that was right. Later tokens count for more."""

    __slots__ = ("_right", "_seen")

    def __init__(self, kind: Kind) -> None:
        self._right, self._seen = kind.value * _FIRST, _FIRST

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self._right / self._seen

    def saw(self, right: int, *, wrong: bool) -> None:
        """So many tokens were right one after the other, and then perhaps one was not."""
        seen = right + wrong
        kept = _KEPT**seen
        self._right, self._seen = self._right * kept + right, self._seen * kept + seen
