"""What an app's objects see of an engine that runs elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from teola_plugin.cluster.wire import EngineFacts
from teola_plugin.engines.base import EngineLoad, Request, Result
from teola_plugin.errors import EngineError
from teola_plugin.graph import EngineProfile, PrimitiveKind


class SharedEngine:
    """An `Engine` in name, kinds, profile and versions; it executes nothing here."""

    def __init__(self, facts: EngineFacts) -> None:
        self.name = facts.name
        self.kinds: frozenset[PrimitiveKind] = facts.kinds
        self.facts = facts

    def take(self, facts: EngineFacts) -> None:
        """Newer facts of the same engine."""
        self.facts = facts

    @property
    def profile(self) -> EngineProfile:
        return self.facts.profile

    def versions(self) -> Mapping[str, str]:
        return self.facts.versions

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self.facts.settings:
            return self.facts.settings[name]
        raise AttributeError(f"engine {self.__dict__.get('name')!r} of the shared pool has no {name!r} here")

    # What only the instances do

    async def start(self) -> None:
        """Nothing: the pool starts its engines."""

    async def stop(self) -> None:
        """Nothing: the pool ends its engines."""

    def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        raise EngineError(
            f"engine {self.name!r} runs in the shared pool and executes nothing in this process.",
            engine=self.name,
            hint="call it through its pool",
        )

    async def cancel(self, request_id: str) -> None:
        """Nothing: requests are cancelled at the pool."""

    def size(self, request: Request) -> float:
        return 1

    def load(self) -> EngineLoad:
        return EngineLoad()

    async def reset(self) -> None:
        """Nothing: see `EnginePool.reset`."""
