"""The number and the health of an engine's replicas while queries run.

The number changes by call, or by the length of the queue. Checks find replicas that hang; a dead one is revealed by
a failing call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from teola_plugin.cluster.config import Autoscale
from teola_plugin.cluster.deployment.room import Reservation, need_room
from teola_plugin.cluster.host.remote_replica import RemoteReplica
from teola_plugin.errors import TeolaError

if TYPE_CHECKING:
    from teola_plugin.cluster.host.engine_host import EngineHost


log = logging.getLogger("teola_plugin")
CHECK_INTERVAL_S = 1.0
"""Seconds between two checks of the queue."""


@dataclass(slots=True)
class QueueDepth:
    """The autoscaler's rule. Pure: from the time and the queue it computes how many replicas there should be."""

    rule: Autoscale
    _long_since: float | None = None
    _idle_since: float | None = None

    def target(self, at: float, queued: int, replicas: int) -> int:
        """Return the number of replicas for a queue of `queued` requests; it changes by at most one at a time."""
        rule = self.rule
        if replicas < rule.min_replicas or replicas > rule.max_replicas:
            return min(max(replicas, rule.min_replicas), rule.max_replicas)
        too_long = queued > rule.queued_per_replica * replicas
        self._long_since = (self._long_since if self._long_since is not None else at) if too_long else None
        self._idle_since = (self._idle_since if self._idle_since is not None else at) if queued == 0 else None
        if self._long_since is not None and at - self._long_since >= rule.up_after_s and replicas < rule.max_replicas:
            self._long_since = None
            return replicas + 1
        if self._idle_since is not None and at - self._idle_since >= rule.down_after_s and replicas > rule.min_replicas:
            self._idle_since = None
            return replicas - 1
        return replicas


class Scaler:
    """Scales one engine host. No work is lost: a replica leaves when its requests have ended."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._changing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._next_number = 0

    def begin(self) -> None:
        self._next_number = self._host.config.replicas
        if self._host.config.autoscale is not None:
            self._task = asyncio.ensure_future(self._watch(QueueDepth(self._host.config.autoscale)))

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch(self, rule: QueueDepth) -> None:
        """Follow the queue's length with the number of replicas, as `rule` says, until the task is cancelled.

        A replica that does not start is logged and tried again at the next check.
        """
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            queued = sum(len(primitive.requests) for primitive in self._host.port.scheduler.queue)
            count = len(self._host.replicas)
            target = rule.target(loop.time(), queued, count)
            if target != count:
                try:
                    await self.scale_to(target)
                except TeolaError as error:
                    log.warning("engine %s could not get %d replicas: %s", self._host.name, target, error)

    async def scale_to(self, target: int) -> int:
        """Add or remove replicas until there are `target`. Raises `EngineUnavailable` when one does not start."""
        if target < 1:
            raise TeolaError(f"an engine needs a replica, {target} were asked for.", hint="`teola down` ends a pool")
        async with self._changing:
            while len(self._host.replicas) < target:
                await self._add()
            while len(self._host.replicas) > target:
                await self._remove()
        return len(self._host.replicas)

    async def _add(self) -> None:
        """Start one more replica and give it to the host. Raise `EngineUnavailable` if the cluster has no room."""
        one_more = [Reservation.of(self._host.name, self._host.config, 1)]
        await asyncio.to_thread(need_room, one_more, partial(log.warning, "%s"))
        number, self._next_number = str(self._next_number), self._next_number + 1
        replica = self._host.make_replica(number)
        await replica.start()
        self._host.add(number, replica)

    async def _remove(self) -> None:
        """Stop the newest replica once its running requests have ended."""
        number = max(self._host.replicas, key=int)
        replica = self._host.replicas[number]
        await self._host.port.retire(number)
        del self._host.replicas[number]
        await replica.stop()


HEALTH_CHECK_INTERVAL_S, ANSWER_TIMEOUT_S, MAX_FAILURES = 5.0, 10.0, 3
"""Seconds between two checks, seconds to answer, checks in a row that may fail."""


class Health:
    """Pings all replicas regularly, and reports one that stays silent as lost. `on_check` runs after each round."""

    def __init__(
        self,
        replicas: Callable[[], Mapping[str, RemoteReplica]],
        on_lost: Callable[[str, str], None],
        on_check: Callable[[], Awaitable[None]],
    ) -> None:
        self._replicas, self._on_lost, self._on_check = replicas, on_lost, on_check
        self.every, self.patience = HEALTH_CHECK_INTERVAL_S, ANSWER_TIMEOUT_S
        self._failures: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self.end()
        self._task = asyncio.ensure_future(self._watch())

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        """Ping all replicas every `every` seconds, until the task is cancelled.

        Failures are forgotten after a round that took far too long: the machine slept, and nobody could answer.
        """
        while True:
            await asyncio.sleep(self.every)
            started_at = time.monotonic()
            await asyncio.gather(*(self._check(name, replica) for name, replica in list(self._replicas().items())))
            await self._on_check()
            if time.monotonic() - started_at > 4 * self.patience:
                self._failures.clear()  # the machine slept, so the failures mean nothing

    async def _check(self, name: str, replica: RemoteReplica) -> None:
        """Ping one replica; report it as lost after `MAX_FAILURES` pings in a row without an answer."""
        if await replica.is_alive(self.patience):
            self._failures.pop(name, None)
            return
        self._failures[name] = self._failures.get(name, 0) + 1
        if self._failures[name] >= MAX_FAILURES:
            del self._failures[name]
            self._on_lost(name, f"it has not answered {MAX_FAILURES} times")
