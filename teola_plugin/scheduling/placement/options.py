"""Settings of E2; the defaults are Preble's."""

from __future__ import annotations

from dataclasses import dataclass

from teola_plugin.scheduling.placement.load_model import WINDOW

CAPACITY = 12_288
"""Blocks of an instance's cache where nobody says: 196,608 tokens, a 7B model on 48 GB."""
DECODING = 0.7
"""Share of prompt tokens found in the cache from which an instance mostly decodes."""


@dataclass(frozen=True, slots=True)
class E2Options:
    """Preble's settings; times in seconds."""

    capacity: int | None = None
    """Blocks of an instance's cache; by default what the engine's profile says, else `CAPACITY`."""
    window: float = WINDOW
    decoding: float = DECODING
    interval: float = 10.0
    """Between two looks at the balance of loads."""
    least_requests: int = 50
    """Per instance and window, below which loads are not balanced."""
    gangs: int = 1000


PREBLE = E2Options()
