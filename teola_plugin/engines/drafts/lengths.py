"""How long drafts should be, by rows in a step: from what verifying was measured to take."""

from __future__ import annotations

from collections.abc import Sequence

from teola_plugin.graph import EngineProfile

Lengths = Sequence[tuple[int, int]]
"""(rows, longest draft of each of them), ascending in rows."""

ACCEPTED = 0.8
"""Share of drafted tokens that is accepted one after the other: of text that a prompt holds, as a rule. Requests with
less draft less by themselves (`adaptive`); where even this does not pay, nobody is to draft."""
_GAIN = 1.05
"""Least gain for which a step is made longer: measuring is not more exact."""
_NEARLY = 0.85
"""Of the best: some drafts are better than `ACCEPTED`, and gain by their length."""
_TRIED = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)


def lengths_that_pay(profile: EngineProfile, most: int) -> Lengths:
    """For each batch size that was measured, the longest draft with which nearly as many tokens are written a second as
    with the best one; 0 where that is hardly more than without. Empty where nothing was measured."""
    return [(rows, _longest(profile, rows, most)) for rows in sorted(profile.verifying)]


def _longest(profile: EngineProfile, rows: int, most: int) -> int:
    if not profile.step(0, rows):  # an engine without time, in tests
        return most
    rates = {k: written(k) / profile.step(k, rows) for k in (0, most, *(k for k in _TRIED if k < most))}
    wanted = max(_NEARLY * max(rates.values()), _GAIN * rates[0])
    return max((k for k, rate in rates.items() if rate >= wanted), default=0)


def written(drafted: int) -> float:
    """Tokens of a step with such a draft, its own one among them: 1 + q + q^2 + ... (Leviathan et al., 2211.17192)."""
    return float((1 - ACCEPTED ** (drafted + 1)) / (1 - ACCEPTED))


def longest_draft(lengths: Lengths, rows: int) -> int:
    """Of one row among so many: as of the next larger number that is known, and beyond that the same in all."""
    for known, tokens in lengths:
        if rows <= known:
            return tokens
    known, tokens = lengths[-1]
    return tokens * known // rows
