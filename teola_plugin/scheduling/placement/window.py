"""Means over a sliding window in constant space: its two halves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SlidingMean:
    """Values of the half window that is under way and of the one before it. `half` is in seconds."""

    half: float
    era: int = 0
    count: int = 0
    total: float = 0.0
    count_before: int = 0
    total_before: float = 0.0

    def add(self, at: float, value: float) -> None:
        self.roll(at)
        self.count += 1
        self.total += value

    def roll(self, at: float) -> None:
        """Begin the half window of `at`, if it is a new one."""
        era = int(at // self.half)
        if era == self.era:
            return
        follows = era == self.era + 1
        self.count_before, self.total_before = (self.count, self.total) if follows else (0, 0.0)
        self.era, self.count, self.total = era, 0, 0.0

    def grown(self, at: float, factor: float, least: int) -> bool:
        """Whether the mean is now `factor` times that of the half window before, with `least` values in both."""
        self.roll(at)
        if min(self.count, self.count_before) < least:
            return False
        return self.total / self.count >= factor * self.total_before / self.count_before
