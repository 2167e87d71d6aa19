"""More and fewer instances while queries run: by call, or by how long the queue is."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from teola_plugin.cluster.config import Autoscale
from teola_plugin.cluster.deployment.cluster_room import need_room
from teola_plugin.cluster.deployment.room import Ask
from teola_plugin.errors import TeolaError

if TYPE_CHECKING:
    from teola_plugin.cluster.host.engine_host import EngineHost

log = logging.getLogger("teola_plugin")
EVERY = 1.0
"""Seconds between two looks at the queue."""


@dataclass(slots=True)
class QueueDepth:
    """The autoscaler's rule. Pure: told the time and the queue, it says how many instances there should be."""

    rule: Autoscale
    _long_since: float | None = None
    _idle_since: float | None = None

    def wanted(self, at: float, queued: int, instances: int) -> int:
        """`queued`: requests that wait; `at` in seconds. One instance more or less at a time."""
        rule = self.rule
        if instances < rule.least or instances > rule.most:
            return min(max(instances, rule.least), rule.most)
        too_long = queued > rule.queued_per_instance * instances
        self._long_since = (self._long_since if self._long_since is not None else at) if too_long else None
        self._idle_since = (self._idle_since if self._idle_since is not None else at) if queued == 0 else None
        if self._long_since is not None and at - self._long_since >= rule.up_after and instances < rule.most:
            self._long_since = None
            return instances + 1
        if self._idle_since is not None and at - self._idle_since >= rule.down_after and instances > rule.least:
            self._idle_since = None
            return instances - 1
        return instances


class Scaler:
    """Carries it out for one engine host. Nothing is lost: an instance leaves when its work has ended."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._changing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._made = 0

    def begin(self) -> None:
        self._made = self._host.config.instances
        if self._host.config.autoscale is not None:
            self._task = asyncio.ensure_future(self._watch(QueueDepth(self._host.config.autoscale)))

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch(self, rule: QueueDepth) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(EVERY)
            queued = sum(len(primitive.requests) for primitive in self._host.port.scheduler.queue)
            now = len(self._host.instances)
            wanted = rule.wanted(loop.time(), queued, now)
            if wanted != now:
                try:
                    await self.to(wanted)
                except TeolaError as error:
                    log.warning("engine %s could not get %d instances: %s", self._host.name, wanted, error)

    async def to(self, wanted: int) -> int:
        """Add or take away until there are `wanted`. Raises `EngineUnavailable` when one does not start."""
        if wanted < 1:
            raise TeolaError(f"an engine needs an instance, {wanted} were asked for.", hint="`teola down` ends a pool")
        async with self._changing:
            while len(self._host.instances) < wanted:
                await self._add()
            while len(self._host.instances) > wanted:
                await self._remove()
        return len(self._host.instances)

    async def _add(self) -> None:
        one_more = [Ask.of(self._host.name, self._host.config, 1)]
        await asyncio.to_thread(need_room, one_more, partial(log.warning, "%s"))
        number, self._made = str(self._made), self._made + 1
        instance = self._host.make_instance(number)
        await instance.start()
        self._host.add(number, instance)

    async def _remove(self) -> None:
        number = max(self._host.instances, key=int)
        instance = self._host.instances[number]
        await self._host.port.retire(number)
        del self._host.instances[number]
        await instance.stop()
