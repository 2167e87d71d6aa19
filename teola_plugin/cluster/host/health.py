"""Checks that instances still answer. A failing call reveals a dead instance; this finds those that hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from teola_plugin.cluster.host.remote_instance import RemoteInstance

CHECK_INTERVAL_S, ANSWER_TIMEOUT_S, MAX_FAILURES = 5.0, 10.0, 3
"""Seconds between two checks, seconds to answer, checks in a row that may fail."""


class Health:
    """Pings all instances regularly, and reports one that stays silent as lost. `on_check` runs after each round."""

    def __init__(
        self,
        instances: Callable[[], Mapping[str, RemoteInstance]],
        on_lost: Callable[[str, str], None],
        on_check: Callable[[], Awaitable[None]],
    ) -> None:
        self._instances, self._on_lost, self._on_check = instances, on_lost, on_check
        self.every, self.patience = CHECK_INTERVAL_S, ANSWER_TIMEOUT_S
        self._failures: dict[str, int] = {}
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
            started_at = time.monotonic()
            await asyncio.gather(*(self._check(name, instance) for name, instance in list(self._instances().items())))
            await self._on_check()
            if time.monotonic() - started_at > 4 * self.patience:
                self._failures.clear()  # the machine slept, so the failures mean nothing

    async def _check(self, name: str, instance: RemoteInstance) -> None:
        if await instance.is_alive(self.patience):
            self._failures.pop(name, None)
            return
        self._failures[name] = self._failures.get(name, 0) + 1
        if self._failures[name] >= MAX_FAILURES:
            del self._failures[name]
            self._on_lost(name, f"it has not answered {MAX_FAILURES} times")
