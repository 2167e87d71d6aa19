"""What a user can do about a value that no engine can take."""

from __future__ import annotations


def advice(error: BaseException) -> str:
    """A hint for what a payload raised."""
    if isinstance(error, UnicodeError):
        return "clean the text: text.encode('utf-8', 'replace').decode() leaves no half of a character"
    return "look at the values that are sent: texts are str, vectors are flat sequences of numbers"


def lone_surrogate(text: str) -> str:
    """What is wrong with a text that is no Unicode: halves of characters, as broken decoding leaves them. Empty if
    nothing is."""
    if text.isascii():
        return ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} of the text is a lone surrogate, U+{ord(text[error.start]):04X}."
    return ""
