"""How the engine scheduler and a placement that looks at every request talk to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from teola_plugin.graph.prefix_blocks import PrefixBlocks
from teola_plugin.scheduling.engine_events import CacheEvent

Fits = Callable[[str, int], bool]
"""Whether an instance has a free slot for a request that takes so many units (tokens to be computed) there."""


class Why(Enum):
    """Which rule chose the instance."""

    SESSION = "session"
    EXPLOIT = "exploit"
    MOVED = "moved"
    """Its key portion was moved or copied there."""
    BALANCE = "balance"
    EXPLORE = "explore"
    SPILL = "spill"
    """Where it belongs is full, and to wait would take longer than to compute it elsewhere."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a request goes, and how many of its tokens are not cached there as far as known (at least 1)."""

    instance: str
    units: int
    why: Why


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that is to be placed."""

    id: str
    size: int
    blocks: PrefixBlocks = ()
    session: str = ""
    gang: str = ""
    """Members of one aggregate."""
    urgent: bool = False
    """It has waited long enough: any instance with a free slot will do."""
    warm_up: bool = False
    """Fewer slots may do for it than for others."""
    uncontended: bool = True
    """Nobody else wants the slots that are free now, so it may take one away from where it belongs."""


class RequestPlacement(Protocol):
    """Chooses an instance request by request. Holds no slots: `fits` says what is free."""

    def begin(self, at: float) -> None:
        """A round of decisions at this time; requests are asked for in the order in which they should run."""
        ...

    def place(self, asked: Asked, fits: Fits) -> Placed | None:
        """None: it waits for an instance that is full. An answer is not binding; `sent` is."""
        ...

    def sent(self, asked: Asked, placed: Placed) -> None: ...

    def prefilled(self, at: float, request: str) -> None: ...

    def ended(self, at: float, requests: Iterable[str]) -> None:
        """Also called without any, when time has passed."""
        ...

    def cached(self, event: CacheEvent) -> None:
        """News of an instance's prefix cache."""
        ...

    def up(self, instance: str) -> None: ...

    def forget_instance(self, instance: str) -> None: ...
