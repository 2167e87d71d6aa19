"""How long drafts should be, by rows in a step and by how often a row's guesses are right: from what verifying was
measured to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from teola_plugin.graph import Curve, EngineProfile

Lengths = Sequence[tuple[int, Sequence[int]]]
"""(rows, longest draft of one of them for each share of right tokens: see `of_share`), ascending in rows."""

SHARES = 20
"""Shares of tokens that are right, from 0 to 1, are told apart in so many steps."""
ACCEPTED = 0.8
"""Share of drafted tokens that is accepted one after the other where a text is copied, as a rule."""
_GAIN = 1.05
"""Least gain for which a step is made longer: measuring is not more exact."""
_NEARLY = 0.97
"""Of the best: a longer draft gains more where the share is higher than it seems."""
_TRIED = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_UNMEASURED = EngineProfile(
    verifying={1: Curve(((0, 1.0), (64, 1.0 + 64 / 20))), 16: Curve(((0, 1.5), (64, 1.5 + 16 * 64 / 20)))}
)
"""Where nothing was measured, a drafted token is taken for a twentieth of a step, and a row for a thirtieth."""


def lengths_that_pay(profile: EngineProfile, most: int) -> Lengths:
    """Return the longest draft that pays, by rows in a step and share of right tokens.

    It produces nearly as many tokens per second as the best length. The length is 0 if the gain is small, and the
    result is () if nothing was measured.
    """
    if not profile.verifying:
        return ()
    known = replace(profile, verifying=_never_quicker(profile.verifying))
    last = _ROWS[-1] if len(known.verifying) > 1 else max(known.verifying)
    return [(rows, _by_share(known, rows, most)) for rows in sorted({*_ROWS, *known.verifying}) if rows <= last]


def unmeasured(most: int) -> Lengths:
    """Return the same for an engine without measurements."""
    return lengths_that_pay(_UNMEASURED, most)


def _never_quicker(verifying: Mapping[int, Curve]) -> dict[int, Curve]:
    """Return curves in which no longer draft takes less time: such a measurement of a shorter one was disturbed."""
    found: dict[int, Curve] = {}
    for rows, curve in verifying.items():
        points, least = list[tuple[int, float]](), float("inf")
        for drafted, seconds in reversed(curve.points):
            least = min(least, seconds)
            points.append((drafted, least))
        found[rows] = Curve(tuple(reversed(points)))
    return found


def _by_share(profile: EngineProfile, rows: int, most: int) -> Sequence[int]:
    least = profile.step(0, rows)
    if not least:  # an engine without time, in tests
        return (most,) * SHARES
    tried = (0, most, *(k for k in _TRIED if k < most))
    seconds = {k: max(least, profile.step(k, rows)) for k in tried}  # beyond what was measured it may come out as 0
    return tuple(_longest(seconds, (i + 0.5) / SHARES) for i in range(SHARES))


def _longest(seconds: Mapping[int, float], share: float) -> int:
    rates = {k: written(k, share) / took for k, took in seconds.items()}
    wanted = max(_NEARLY * max(rates.values()), _GAIN * rates[0])
    return max((k for k, rate in rates.items() if rate >= wanted), default=0)


def written(drafted: int, share: float = ACCEPTED) -> float:
    """Tokens of a step with such a draft, its own one among them: 1 + q + q^2 + ... (Leviathan et al., 2211.17192)."""
    return float((1 - share ** (drafted + 1)) / (1 - share))


def longest_drafts(lengths: Lengths, rows: int) -> Sequence[int]:
    """Return the longest drafts by share of right tokens, for one of `rows` rows.

    A number of rows between two measured ones takes the larger; beyond the largest, the total stays the same.
    """
    for known, longest in lengths:
        if rows <= known:
            return longest
    known, longest = lengths[-1]
    return tuple(tokens * known // rows for tokens in longest)


def of_share(longest: Sequence[int], share: float) -> int:
    """The longest draft where that share of tokens is right."""
    return longest[min(SHARES - 1, int(share * SHARES))]
