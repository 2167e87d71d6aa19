"""Base classes of the events that go into both schedulers and of the instructions that come out.

All are frozen and hold plain data. Schedulers do no I/O and read no clock: every event carries the time (`at`, seconds
on the runtime's clock), and `WakeAt` requests a later call. A driver carries instructions out and feeds the outcomes
back as events.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at `at`."""

    at: float


@dataclass(frozen=True, slots=True)
class Instruction:
    """Something the driver has to do."""


@dataclass(frozen=True, slots=True)
class WakeAt(Instruction):
    """Send a `Tick` at this time (or later)."""

    at: float


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Only time has passed."""


Instructions = list[Instruction]
