"""Whether instances still answer. A dead one is noticed by the call that fails; this finds those that hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from teola_plugin.cluster.host.remote_instance import RemoteInstance

EVERY, PATIENCE, STRIKES = 5.0, 10.0, 3
"""Seconds between two checks, seconds to answer, checks in a row that may fail."""


class Health:
    """Asks every instance in turn; one that stays silent is reported lost. `beside` is done as often."""

    def __init__(
        self,
        instances: Callable[[], Mapping[str, RemoteInstance]],
        lost: Callable[[str, str], None],
        beside: Callable[[], Awaitable[None]],
    ) -> None:
        self._instances, self._lost, self._beside = instances, lost, beside
        self.every, self.patience = EVERY, PATIENCE
        self._failed: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self.end()
        self._task = asyncio.ensure_future(self._watch())

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.every)
            began = time.monotonic()
            await asyncio.gather(*(self._check(name, one) for name, one in list(self._instances().items())))
            await self._beside()
            if time.monotonic() - began > 4 * self.patience:
                self._failed.clear()  # the machine slept: nobody is to blame

    async def _check(self, name: str, instance: RemoteInstance) -> None:
        if await instance.alive(self.patience):
            self._failed.pop(name, None)
            return
        self._failed[name] = self._failed.get(name, 0) + 1
        if self._failed[name] >= STRIKES:
            del self._failed[name]
            self._lost(name, f"it has not answered {STRIKES} times")
