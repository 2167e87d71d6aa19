"""Whether the instances of an engine react: one that hangs must not keep its slots, or its callers, for ever."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds after which an instance is given up."""

    cancel: float = 10.0
    """From a request's cancellation until the instance has let go of it."""
    silence: float = 1800.0
    """Without a result or a piece of one while it has work; only for engines that can be restarted."""
    restart: float = 900.0
    """For one attempt to start it again."""
    closing: float = 5.0
    """For what still runs when the pool closes."""


PATIENCE = Patience()
"""Of pools in one process."""
_SLEPT = 0.1
"""Share of the patience by which a timer may be late; beyond that the machine was asleep and nobody is to blame."""


class Watchdog:
    """Watches one instance with one timer. `lost` is called, with the reason, when it has kept us waiting too long."""

    def __init__(self, patience: Patience, lost: Callable[[str], None]) -> None:
        self._patience, self._lost = patience, lost
        self._batches = 0
        self._heard = 0.0
        self._asked: dict[str, float] = {}
        """When it was asked to cancel which requests, in that order."""
        self._timer: asyncio.TimerHandle | None = None

    def begun(self) -> None:
        """A batch was given to it."""
        if not self._batches:
            self.heard()
        self._batches += 1
        if self._timer is None:
            self._set()

    def heard(self) -> None:
        """It gave a result, or a piece of one."""
        self._heard = _now()

    def asked(self, request: str) -> None:
        """It was asked to cancel a request."""
        self._asked.setdefault(request, _now())
        self._set()

    def let_go(self, request: str) -> None:
        self._asked.pop(request, None)

    def ended(self) -> None:
        """A batch has ended."""
        self._batches -= 1

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._asked.clear()

    @property
    def _due(self) -> tuple[float, str]:
        silent = self._heard + self._patience.silence if self._batches else math.inf
        ignored = next(iter(self._asked.values()), math.inf) + self._patience.cancel
        if ignored <= silent:
            return ignored, f"it did not react to a cancellation within {self._patience.cancel:g} s"
        return silent, f"it has given nothing for {self._patience.silence:g} s"

    def _set(self) -> None:
        """An early timer looks again; a late one would be too late."""
        due, _ = self._due
        if due == math.inf or (self._timer is not None and self._timer.when() <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._look, context=Context())  # not a caller's: it stays

    def _look(self) -> None:
        timer, self._timer = self._timer, None
        now, (due, reason) = _now(), self._due
        late = now - timer.when() if timer is not None else 0.0
        if late > _SLEPT * min(self._patience.cancel, self._patience.silence):
            self._heard, self._asked = now, dict.fromkeys(self._asked, now)
        elif due <= now + 1e-6:
            self._lost(reason)
            return
        self._set()


def _now() -> float:
    return asyncio.get_running_loop().time()
