"""Types of command-line options, for argparse."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """Parse a whole number of 1 or more. Raise `ArgumentTypeError`, which argparse prints as one line."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number
