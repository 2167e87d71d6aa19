"""Which instance of an engine a batch goes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class LeastOutstanding:
    """The instance with the fewest running requests; requests of one session stay together.

    The session of a full prefilling is that of its partial prefillings, so it finds the prefix they left.
    """

    _homes: dict[str, str] = field(default_factory=dict)
    remembered: int = 10_000

    def choose(self, free: Mapping[str, int], outstanding: Mapping[str, int], session: str = "") -> str | None:
        """`free`: slots by instance (only instances with some count); None when there is none."""
        usable = [name for name, slots in free.items() if slots > 0]
        if not usable:
            return None
        home = self._homes.get(session) if session else None
        if home in free and home is not None:
            return home if free[home] > 0 else None
        return min(usable, key=lambda name: (outstanding.get(name, 0), name))

    def remember(self, session: str, instance: str) -> None:
        if not session:
            return
        self._homes[session] = instance
        if len(self._homes) > self.remembered:
            del self._homes[next(iter(self._homes))]

    def forget_instance(self, instance: str) -> None:
        self._homes = {s: i for s, i in self._homes.items() if i != instance}
