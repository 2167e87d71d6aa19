"""How many tokens a prompt has, where no tokenizer is at hand."""

from __future__ import annotations

from teola_plugin.requests.payloads import Generate, Warmup

_WEIGHT = 0.2
"""Of the newest answer, against all before it."""
_LEAST = 32
"""Tokens of a prompt from which its ratio says something."""


class TokenEstimate:
    """An estimator of token counts from character counts. It learns the ratio from answers."""

    def __init__(self) -> None:
        self._characters = 4.0
        """Of a token."""

    def tokens(self, payload: Generate | Warmup) -> int:
        """At least 1."""
        text = payload.prompt.known_prefix() if isinstance(payload, Warmup) else payload.prompt.flat()
        return max(1, round(len(text) / self._characters))

    def learn(self, payload: Generate, prompt_tokens: int) -> None:
        """`prompt_tokens`: what the answer said of the prompt."""
        if prompt_tokens >= _LEAST:
            seen = len(payload.prompt.flat()) / prompt_tokens
            self._characters += _WEIGHT * (max(0.5, seen) - self._characters)
