"""An estimate of the tokens of a prompt, without a tokenizer."""

from __future__ import annotations

from teola_plugin.requests.payloads import Generate, Warmup

_WEIGHT = 0.2
"""Weight of the newest answer, compared with all earlier ones."""
_LEAST = 32
"""Minimum tokens of a prompt whose ratio is used."""


class TokenEstimate:
    """An estimator of token counts from character counts. It learns the ratio from answers."""

    def __init__(self) -> None:
        self._characters = 4.0
        """Characters of a token."""

    def tokens(self, payload: Generate | Warmup) -> int:
        """Return the estimated number of tokens, at least 1."""
        text = payload.prompt.known_prefix() if isinstance(payload, Warmup) else payload.prompt.flat()
        return max(1, round(len(text) / self._characters))

    def learn(self, payload: Generate, prompt_tokens: int) -> None:
        """Correct the ratio by an answer that reports `prompt_tokens`.

        Prompts of fewer than 32 tokens are ignored. The newest answer has a weight of 0.2, and counts as half a
        character per token at least.
        """
        if prompt_tokens >= _LEAST:
            seen = len(payload.prompt.flat()) / prompt_tokens
            self._characters += _WEIGHT * (max(0.5, seen) - self._characters)
