"""How large a text to embed or a pair to score is, in slots."""

from __future__ import annotations

from typing import Any

_LEAST_SIZE = 1 / 16
"""Slots of the shortest text: every text costs something, however short."""


def text_size(payload: Any) -> float:
    """Slots of an `EmbedText` or a `ScorePair`: 1 for a text as long as the samples or longer."""
    characters = len(getattr(payload, "text", "")) + len(getattr(payload, "query", ""))
    return min(1.0, max(_LEAST_SIZE, characters / len(sample_chunk(0))))


def sample_chunk(number: int) -> str:
    """About 250 tokens, a chunk as most pipelines cut them: with short texts, larger batches seem to help more."""
    line = "A function that ends without a return statement gives None to the one who called it, and line {} says so. "
    return "".join(line.format(number + at) for at in range(10))
