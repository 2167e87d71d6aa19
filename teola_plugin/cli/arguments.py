"""What options of the commands take."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number of 1 or more. Raises what argparse tells as one line."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number
