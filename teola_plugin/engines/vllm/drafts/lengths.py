"""How long a draft pays, by rows in a step: from what verifying was measured to take."""

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
_TRIED = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)


def lengths_that_pay(profile: EngineProfile, most: int) -> Lengths:
    """For each batch size that was measured, the longest draft with which a step writes more tokens a second than
    without; 0 where there is none. Empty where nothing was measured."""
    return [(rows, _longest_that_pays(profile, rows, most)) for rows in sorted(profile.verifying)]


def _longest_that_pays(profile: EngineProfile, rows: int, most: int) -> int:
    plain = profile.step(0, rows)
    tried = sorted({most, *(k for k in _TRIED if k < most)}, reverse=True)
    return next((k for k in tried if written(k) * plain >= _GAIN * profile.step(k, rows)), 0)


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
