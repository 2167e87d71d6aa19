"""Calls of the user's own objects, made early or in their place: how far one is, and what came of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from teola_plugin.adapters.snapshots import NotCopied, snapshot


class State(Enum):
    WAITING = "waiting"
    """It is wanted ahead; nobody has made it yet."""
    EARLY = "early"
    PLAIN = "plain"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gave; the user's own exception is a value here."""

    value: Any = None
    error: BaseException | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    def copied(self) -> Outcome:
        """The same, with a value that nobody else has; an error where it cannot be copied."""
        try:
            return Outcome(snapshot(self.value), self.error)
        except NotCopied as error:
            return Outcome(error=error)


def outcome_of(make: Callable[[], Any]) -> Outcome:
    """What the call gives or raises."""
    try:
        return Outcome(make())
    except BaseException as error:
        return Outcome(error=error)


async def aoutcome_of(made: Awaitable[Any]) -> Outcome:
    """`outcome_of` in a loop; being cancelled is an outcome too."""
    try:
        return Outcome(await made)
    except BaseException as error:
        return Outcome(error=error)
