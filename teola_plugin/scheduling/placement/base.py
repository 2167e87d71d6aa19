"""The interface between the engine scheduler and a placement that chooses a replica for each request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from teola_plugin.graph.prefix_blocks import PrefixBlocks
from teola_plugin.scheduling.engine_queue import CacheEvent

Fits = Callable[[str, int], bool]
"""Returns True if a replica has a free slot for a request that takes so many units (tokens to compute) there."""


class PlacementRule(Enum):
    """The rule that chose a replica."""

    SESSION = "session"
    EXPLOIT = "exploit"
    MOVED = "moved"
    """The request's key portion was moved or copied to the replica."""
    BALANCE = "balance"
    EXPLORE = "explore"
    SPILL = "spill"
    """The replica where the request belongs is full, and waiting would take longer than computing elsewhere."""


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """The replica of a request, and how many of its tokens are not known to be cached there (at least 1)."""

    replica: str
    units: int
    rule: PlacementRule


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A request that is to be placed on a replica."""

    id: str
    size: int
    blocks: PrefixBlocks = ()
    session: str = ""
    gang: str = ""
    """Name of the primitive that puts its value together with others."""
    urgent: bool = False
    """True once it has waited long enough: then any replica with a free slot will do."""
    warm_up: bool = False
    """True if fewer slots are open to it than to others."""
    uncontended: bool = True
    """True if nobody else wants the slots that are free now, so that it may leave the replica where it belongs."""


class RequestPlacement(Protocol):
    """Chooses a replica for each request. It keeps no slots: `fits` says which are free."""

    def begin_round(self, at: float) -> None:
        """Begin a round of decisions at this time; requests follow in the order in which they should run."""
        ...

    def choose_replica(self, request: PlacementRequest, fits: Fits) -> PlacementChoice | None:
        """Return the choice, or None if the request is to wait for a replica that is full. Only `record_sent` is
        binding."""
        ...

    def record_sent(self, request: PlacementRequest, choice: PlacementChoice) -> None: ...

    def record_prefilled(self, at: float, request: str) -> None: ...

    def record_ended(self, at: float, requests: Iterable[str]) -> None:
        """Record that requests have ended. Also called without any, when time has passed."""
        ...

    def record_cache_event(self, event: CacheEvent) -> None:
        """Record a change of a replica's prefix cache."""
        ...

    def add_replica(self, replica: str) -> None: ...

    def forget_replica(self, replica: str) -> None: ...


@dataclass(slots=True)
class SessionAffinity:
    """The replicas of the latest sessions, at most `max_sessions` of them."""

    max_sessions: int = 10_000
    _by_session: dict[str, str] = field(default_factory=dict)

    def get(self, session: str) -> str | None:
        return self._by_session.get(session) if session else None

    def remember(self, session: str, replica: str) -> None:
        """Note that a session's requests run on this replica, and forget the session that was noted first if they are
        too many."""
        if not session:
            return
        self._by_session[session] = replica
        if len(self._by_session) > self.max_sessions:
            del self._by_session[next(iter(self._by_session))]

    def forget_replica(self, replica: str) -> None:
        self._by_session = {s: i for s, i in self._by_session.items() if i != replica}


@dataclass(slots=True)
class LeastOutstanding(SessionAffinity):
    """Chooses the replica with the fewest running requests; requests of one session stay together.

    It suits engines that keep nothing of earlier requests. A full prefilling has the session of its partial ones, so it
    finds the prefix they left.
    """

    def choose(self, free: Mapping[str, int], outstanding: Mapping[str, int], session: str = "") -> str | None:
        """Return a replica with free slots, or None if there is none. `free` has slots by replica."""
        usable = [name for name, slots in free.items() if slots > 0]
        if not usable:
            return None
        home = self.get(session)
        if home in free and home is not None:
            return home if free[home] > 0 else None
        return min(usable, key=lambda name: (outstanding.get(name, 0), name))
