"""Hints for values that no engine accepts."""

from __future__ import annotations


def advice(error: BaseException) -> str:
    """Return a hint for an error that was raised while a payload was read."""
    if isinstance(error, UnicodeError):
        return "clean the text: text.encode('utf-8', 'replace').decode() leaves no half of a character"
    return "look at the values that are sent: texts are str, vectors are flat sequences of numbers"


def lone_surrogate(text: str) -> str:
    """Describe the first lone surrogate in a text, which broken decoding leaves; return "" if there is none."""
    if text.isascii():
        return ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} of the text is a lone surrogate, U+{ord(text[error.start]):04X}."
    return ""
