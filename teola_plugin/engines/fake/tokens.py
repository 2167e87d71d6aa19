"""What a token of the fake LLM is."""

from __future__ import annotations

import re


def split_tokens(text: str) -> list[str]:
    """Tokens of up to four characters with the space before them. Joined they are the text again, and the tokens of
    a prefix are the prefix of the tokens, but for the last."""
    return re.findall(r"\s*\S{1,4}|\s+", text)
