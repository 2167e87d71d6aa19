"""How far guesses are trusted: the share of their tokens that were right lately, whether they were drafted or not."""

from __future__ import annotations

from enum import IntEnum

_KEPT = 0.94
"""Weight of what was seen before, for each token seen since."""
AGREED = 4
_FIRST = 4.0
"""Tokens that the share expected at first counts for."""


class Kind(IntEnum):
    """Guesses that are right about as often as each other."""

    ONE = 1
    """What stood behind a token that agrees."""
    TWO = 2
    THREE = 3
    SOME = 4
    """Behind `AGREED` that agree."""
    MANY = 5
    """Behind twice as many, or more."""
    TEXT = 6
    """From a text that came with the request."""
    FOLLOWED = 7
    """The same, where its last `AGREED` tokens have been right."""
    SKELETON = 8
    """Up to the next gap of what is known of an answer's form."""

    @staticmethod
    def behind(agreed: int) -> Kind:
        """Of a guess behind so many tokens that agree, 1 or more."""
        return _BEHIND[min(agreed, 2 * AGREED)]


_BEHIND = {n: Kind(n) if n <= AGREED else Kind.SOME for n in range(1, 2 * AGREED)} | {2 * AGREED: Kind.MANY}
_EXPECTED = {1: 0.3, 2: 0.5, 3: 0.6, 4: 0.85, 5: 0.89, 6: 0.9, 7: 0.95, 8: 0.97}


class Trust:
    """The share of one kind's tokens that was right. Later tokens count for more."""

    __slots__ = ("_right", "_seen")

    def __init__(self, kind: Kind) -> None:
        self._right, self._seen = _EXPECTED[kind] * _FIRST, _FIRST

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self._right / self._seen

    def saw(self, right: int, *, wrong: bool) -> None:
        """So many tokens were right one after the other, and then perhaps one was not."""
        seen = right + wrong
        kept = _KEPT**seen
        self._right, self._seen = self._right * kept + right, self._seen * kept + seen
