"""The instance with the fewest running requests: for engines that keep nothing of earlier requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class SessionAffinity:
    """The instance of each session, the last `most` of them."""

    most: int = 10_000
    _by_session: dict[str, str] = field(default_factory=dict)

    def get(self, session: str) -> str | None:
        return self._by_session.get(session) if session else None

    def remember(self, session: str, instance: str) -> None:
        if not session:
            return
        self._by_session[session] = instance
        if len(self._by_session) > self.most:
            del self._by_session[next(iter(self._by_session))]

    def forget_instance(self, instance: str) -> None:
        self._by_session = {s: i for s, i in self._by_session.items() if i != instance}


@dataclass(slots=True)
class LeastOutstanding:
    """The instance with the fewest running requests; requests of one session stay together.

    The session of a full prefilling is that of its partial prefillings, so it finds the prefix they left.
    """

    _affinity: SessionAffinity = field(default_factory=SessionAffinity)

    def choose(self, free: Mapping[str, int], outstanding: Mapping[str, int], session: str = "") -> str | None:
        """`free`: slots by instance (only instances with some count); None when there is none."""
        usable = [name for name, slots in free.items() if slots > 0]
        if not usable:
            return None
        home = self._affinity.get(session)
        if home in free and home is not None:
            return home if free[home] > 0 else None
        return min(usable, key=lambda name: (outstanding.get(name, 0), name))

    def remember(self, session: str, instance: str) -> None:
        self._affinity.remember(session, instance)

    def forget_instance(self, instance: str) -> None:
        self._affinity.forget_instance(instance)
