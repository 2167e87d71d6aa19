"""The instances of an engine at a port: which take work, which are being started again, which are beyond repair."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from teola_plugin.engines.base import Engine
from teola_plugin.runtime.timeouts import at_most

log = logging.getLogger("teola_plugin")
_FIRST_BACK_OFF, _LONGEST_BACK_OFF = 0.2, 30.0
"""Seconds between two attempts to start an instance again."""
_NOW_AND_THEN = 300.0
"""The same once it counts as beyond repair."""


class Instances:
    """Starts lost ones again. `up` is told of one that takes work again, `hopeless` of one that is beyond repair, with
    the cause."""

    def __init__(
        self,
        name: str,
        engines: Mapping[str, Engine],
        *,
        restarts: int,
        seconds: float,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        up: Callable[[str], None],
        hopeless: Callable[[str], None],
    ) -> None:
        """`restarts`: attempts before an instance is beyond repair; `seconds`: for each of them."""
        self.name, self.engines = name, dict(engines)
        self._restarts, self._seconds = restarts, seconds
        self._spawn, self._up, self._hopeless = spawn, up, hopeless
        self._restarting: set[str] = set()
        self._beyond: dict[str, str] = {}
        self._broke: dict[str, int] = {}
        """How often in a row they were started again without doing any work in between."""

    @property
    def given_up(self) -> str:
        """Why there is no instance left, and none coming; empty while there is one."""
        hopeless = bool(self.engines) and self._beyond.keys() >= self.engines.keys()
        return next(reversed(self._beyond.values())) if hopeless else ""

    def works(self, instance: str) -> bool:
        """Whether it is there and is not being started again."""
        return instance in self.engines and instance not in self._restarting

    def add(self, instance: str, engine: Engine) -> None:
        self.engines[instance] = engine

    def remove(self, instance: str) -> Engine:
        self._restarting.discard(instance)
        self._beyond.pop(instance, None)
        self._broke.pop(instance, None)
        return self.engines.pop(instance)

    def worked(self, instance: str) -> None:
        """It has done a request."""
        if self._broke:
            self._broke.pop(instance, None)

    def revive(self, instance: str) -> None:
        """Start it again, with longer and longer pauses; once it is beyond repair, now and then."""
        self._restarting.add(instance)
        self._broke[instance] = self._broke.get(instance, 0) + 1
        self._spawn(self._revived(instance, self.engines[instance]))

    async def _revived(self, instance: str, engine: Engine) -> None:
        if (before := self._broke[instance] - 1) > 0:
            await asyncio.sleep(_back_off(before))
        for attempt in itertools.count(1):
            try:
                await at_most(self._seconds, restarted(engine))
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # an engine that calls sys.exit() is broken, and nothing else is
                cause = error
            else:
                break
            if self.engines.get(instance) is not engine:
                return
            if attempt >= self._restarts and instance not in self._beyond:
                self._lose(instance, cause, attempt)
            await asyncio.sleep(_NOW_AND_THEN if attempt >= self._restarts else _back_off(attempt))
        if self.engines.get(instance) is engine:  # not retired meanwhile
            self._restarting.discard(instance)
            if self._beyond.pop(instance, None) is not None:
                log.warning("engine %s: instance %s is there again", self.name, instance)
            self._up(instance)

    def _lose(self, instance: str, cause: BaseException, attempts: int) -> None:
        log.warning(
            "engine %s: instance %s could not be started again in %d attempts: %r. %d of %d instances are left; it is "
            "tried again every %d s. Look at the cause, and at memory, device and files, or start a new pool",
            self.name,
            instance,
            attempts,
            cause,
            len(self.engines) - len(self._beyond) - 1,
            len(self.engines),
            _NOW_AND_THEN,
        )
        self._beyond[instance] = f"{type(cause).__name__}: {cause}."
        self._hopeless(instance)


async def restarted(engine: Engine) -> None:
    """Bring it back; one that has no `restart` is stopped and started."""
    restart = getattr(engine, "restart", None)
    if restart is not None:
        await restart()
    else:
        await engine.stop()
        await engine.start()


def _back_off(attempt: int) -> float:
    return min(_LONGEST_BACK_OFF, _FIRST_BACK_OFF * 2.0 ** (attempt - 1))
