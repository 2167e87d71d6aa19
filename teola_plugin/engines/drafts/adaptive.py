"""How far guesses are trusted: the share of their tokens that were right lately, whether they were drafted or not."""

from __future__ import annotations

from enum import IntEnum

_KEPT = 0.94
"""Weight of what was seen before, for each token seen since."""
AGREED = 4
_FIRST = 4.0
"""Tokens that the share expected at first counts for."""


class Kind(IntEnum):
    """A kind of guess. Guesses of one kind are right about equally often."""

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
        """Return the kind of a guess after `agreed` tokens that match an earlier text, 1 or more."""
        return _BEHIND[min(agreed, 2 * AGREED)]


_BEHIND = {n: Kind(n) if n <= AGREED else Kind.SOME for n in range(1, 2 * AGREED)} | {2 * AGREED: Kind.MANY}
_UNSEEN = 0.05
"""Share expected behind a single token where nothing is known of an app: too few for a draft, until one was right."""
_QUICKLY = 2.0
"""As `_FIRST`, for those."""
_MEMORY = 0.995
"""As `_KEPT`, of what all requests of an app have seen."""
_EXPECTED = {1: 0.3, 2: 0.5, 3: 0.6, 4: 0.85, 5: 0.89, 6: 0.9, 7: 0.95, 8: 0.97}


class Trust:
    """The share of the tokens of one kind of guess that were right. Recent tokens count more."""

    __slots__ = ("_kept", "_right", "_seen", "proven")

    def __init__(self, expected: float, kept: float = _KEPT, weight: float = _FIRST, *, proven: bool = False) -> None:
        """`expected`: the share, of what was not seen yet, which counts for `weight` tokens. `proven`: it is not only
        expected, some tokens were seen."""
        self._right, self._seen, self._kept, self.proven = expected * weight, weight, kept, proven

    @property
    def share(self) -> float:
        """The share, from 0 to 1."""
        return self._right / self._seen

    def saw(self, right: int, *, wrong: bool) -> None:
        """Record that `right` tokens in a row were right, and that the next one was wrong if `wrong`."""
        seen = right + wrong
        self.proven |= seen > 0
        kept = self._kept**seen
        self._right, self._seen = self._right * kept + right, self._seen * kept + seen


def expected(kind: Kind) -> float:
    """Return the usual share of right tokens of a kind of guess."""
    return _EXPECTED[kind]


class Experience:
    """The shares of right guesses in all requests of one app and tenant, with which new requests begin."""

    def __init__(self) -> None:
        self._kinds: dict[Kind, Trust] = {}

    def begin(self, kind: Kind) -> Trust:
        """Return the initial trust of a new request in a kind of guess.

        Guesses after a single token occur everywhere, so their share is corrected quickly.
        """
        known = self._known(kind)
        return Trust(known.share, weight=_QUICKLY if kind is Kind.ONE else _FIRST, proven=known.proven)

    def saw(self, kind: Kind, right: int, *, wrong: bool) -> None:
        self._known(kind).saw(right, wrong=wrong)

    def _known(self, kind: Kind) -> Trust:
        found = self._kinds.get(kind)
        if found is None:
            one = kind is Kind.ONE
            found = Trust(_UNSEEN, _MEMORY, _QUICKLY) if one else Trust(expected(kind), _MEMORY)
            self._kinds[kind] = found
        return found


class Calibration:
    """The ratio of right tokens to expected right tokens in all requests of an engine, by kind of guess."""

    def __init__(self) -> None:
        self._kinds = {kind: (_FIRST, _FIRST) for kind in Kind}
        """Tokens that have come, and that were expected; later ones count for more."""

    def saw(self, kind: Kind, share: float, guessed: int, right: int) -> None:
        """Record that `right` of `guessed` tokens were right. Each was expected to be with probability `share`."""
        came, promised = self._kinds[kind]
        kept = _MEMORY**guessed
        self._kinds[kind] = came * kept + right, promised * kept + sum(share**k for k in range(1, guessed + 1))

    def of(self, kind: Kind) -> float:
        """Return the number of right tokens per expected right token, 1 at most."""
        came, promised = self._kinds[kind]
        return min(1.0, came / promised)
