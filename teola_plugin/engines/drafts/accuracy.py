"""The accuracy of guesses: the share of their tokens that were right lately, whether they were drafted or not."""

from __future__ import annotations

from enum import IntEnum

_DECAY = 0.94
"""Factor by which the weight of earlier tokens of a request falls with each later one."""
AGREED = 4
"""Number of matching tokens from which guesses count as equally good."""
_PRIOR_WEIGHT = 4.0
"""Number of tokens for which the accuracy expected at first counts."""


class GuessKind(IntEnum):
    """A kind of guess. Guesses of one kind are right about equally often."""

    ONE = 1
    """The continuation of an earlier text in which a single token matches."""
    TWO = 2
    THREE = 3
    SOME = 4
    """The same, where `AGREED` tokens match."""
    MANY = 5
    """The same, where twice as many match, or more."""
    TEXT = 6
    """From a text that came with the request."""
    FOLLOWED = 7
    """The same, where its last `AGREED` tokens have been right."""
    SKELETON = 8
    """From a text with gaps, up to its next gap."""

    @staticmethod
    def after_match(agreed: int) -> GuessKind:
        """Return the kind of a guess after `agreed` tokens that match an earlier text, 1 or more."""
        return _BY_MATCH[min(agreed, 2 * AGREED)]


_BY_MATCH = {n: GuessKind(n) if n <= AGREED else GuessKind.SOME for n in range(1, 2 * AGREED)} | {
    2 * AGREED: GuessKind.MANY
}
_UNPROVEN_ACCURACY = 0.05
"""Accuracy expected after a single matching token in a new app: too low for a draft until one such guess was right."""
_UNPROVEN_WEIGHT = 2.0
"""As `_PRIOR_WEIGHT`, for those guesses."""
_APP_DECAY = 0.995
"""As `_DECAY`, for all requests of an app."""
_USUAL_ACCURACY = {1: 0.3, 2: 0.5, 3: 0.6, 4: 0.85, 5: 0.89, 6: 0.9, 7: 0.95, 8: 0.97}
"""Accuracy by kind of guess before anything was seen."""


class GuessAccuracy:
    """The share of the tokens of one kind of guess that were right. Recent tokens count more."""

    __slots__ = ("_decay", "_right", "_total", "proven")

    def __init__(
        self, expected: float, decay: float = _DECAY, weight: float = _PRIOR_WEIGHT, *, proven: bool = False
    ) -> None:
        """Create the accuracy of a kind of guess.

        Args:
            expected: Share of right tokens that is expected before any were seen.
            decay: Factor by which the weight of earlier tokens falls with each later one.
            weight: Number of tokens for which `expected` counts.
            proven: True if `expected` comes from tokens that were seen.
        """
        self._right, self._total, self._decay, self.proven = expected * weight, weight, decay, proven

    @property
    def share(self) -> float:
        """The share of right tokens, from 0 to 1."""
        return self._right / self._total

    def record(self, right: int, *, wrong: bool) -> None:
        """Record that `right` tokens in a row were right, and that the next one was wrong if `wrong`."""
        seen = right + wrong
        self.proven |= seen > 0
        remaining_weight = self._decay**seen
        self._right, self._total = self._right * remaining_weight + right, self._total * remaining_weight + seen


def usual_accuracy(kind: GuessKind) -> float:
    """Return the usual share of right tokens of a kind of guess."""
    return _USUAL_ACCURACY[kind]


class AppAccuracy:
    """The accuracy of guesses in all requests of one app and tenant, with which new requests begin."""

    def __init__(self) -> None:
        self._kinds: dict[GuessKind, GuessAccuracy] = {}

    def for_new_request(self, kind: GuessKind) -> GuessAccuracy:
        """Return the accuracy with which a new request begins.

        Guesses after a single token occur everywhere, so their accuracy is corrected quickly.
        """
        of_app = self._accuracy_of_kind(kind)
        weight = _UNPROVEN_WEIGHT if kind is GuessKind.ONE else _PRIOR_WEIGHT
        return GuessAccuracy(of_app.share, weight=weight, proven=of_app.proven)

    def record(self, kind: GuessKind, right: int, *, wrong: bool) -> None:
        self._accuracy_of_kind(kind).record(right, wrong=wrong)

    def _accuracy_of_kind(self, kind: GuessKind) -> GuessAccuracy:
        """Return the accuracy of one kind of guess; create it with the usual accuracy at first use."""
        accuracy = self._kinds.get(kind)
        if accuracy is None:
            if kind is GuessKind.ONE:
                accuracy = GuessAccuracy(_UNPROVEN_ACCURACY, _APP_DECAY, _UNPROVEN_WEIGHT)
            else:
                accuracy = GuessAccuracy(usual_accuracy(kind), _APP_DECAY)
            self._kinds[kind] = accuracy
        return accuracy


class ForecastRatio:
    """The ratio of right tokens to expected right tokens in all requests of an engine, by kind of guess."""

    def __init__(self) -> None:
        self._kinds = {kind: (_PRIOR_WEIGHT, _PRIOR_WEIGHT) for kind in GuessKind}
        """Numbers of right and of expected tokens; later ones count for more."""

    def record(self, kind: GuessKind, share: float, guessed: int, right: int) -> None:
        """Record that `right` of `guessed` tokens were right. Each was expected to be with probability `share`.

        Earlier records lose weight with each token, so that the ratio follows a change of the texts.
        """
        right_before, expected_before = self._kinds[kind]
        remaining_weight = _APP_DECAY**guessed
        expected = sum(share**k for k in range(1, guessed + 1))
        self._kinds[kind] = right_before * remaining_weight + right, expected_before * remaining_weight + expected

    def of(self, kind: GuessKind) -> float:
        """Return the number of right tokens per expected right token, 1 at most."""
        right, expected = self._kinds[kind]
        return min(1.0, right / expected)
