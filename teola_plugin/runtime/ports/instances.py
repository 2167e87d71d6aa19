"""The instances of an engine at a port: which take work, which are being started again, which are given up."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from teola_plugin.engines.base import Engine
from teola_plugin.runtime.timeouts import at_most

log = logging.getLogger("teola_plugin")
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.2, 30.0
"""Pauses between two attempts to start an instance again."""
_PAUSE_AFTER_GIVING_UP_S = 300.0
"""The pause once the instance is given up."""


class Instances:
    """The instances of an engine. Lost ones are started again.

    `on_up` is called with the name of one that takes work again, `on_give_up` with that of one that cannot be started.
    """

    def __init__(
        self,
        name: str,
        engines: Mapping[str, Engine],
        *,
        restarts: int,
        restart_timeout_s: float,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        on_up: Callable[[str], None],
        on_give_up: Callable[[str], None],
    ) -> None:
        """`restarts`: attempts before an instance is given up; `restart_timeout_s`: time for each of them."""
        self.name, self.engines = name, dict(engines)
        self._restarts, self._restart_timeout_s = restarts, restart_timeout_s
        self._spawn, self._on_up, self._on_give_up = spawn, on_up, on_give_up
        self._restarting: set[str] = set()
        self._given_up: dict[str, str] = {}
        """Causes, by instance."""
        self._failures: dict[str, int] = {}
        """Numbers of restarts in a row without any work in between, by instance."""

    @property
    def down_reason(self) -> str:
        """The reason why no instance is left, and none coming; empty while there is one."""
        is_down = bool(self.engines) and self._given_up.keys() >= self.engines.keys()
        return next(reversed(self._given_up.values())) if is_down else ""

    def takes_work(self, instance: str) -> bool:
        """Return True if the instance exists and is not being started again."""
        return instance in self.engines and instance not in self._restarting

    def remove(self, instance: str) -> Engine:
        """Remove an instance and return it."""
        self._restarting.discard(instance)
        self._given_up.pop(instance, None)
        self._failures.pop(instance, None)
        return self.engines.pop(instance)

    def note_work(self, instance: str) -> None:
        """Note that an instance has done a request."""
        if self._failures:
            self._failures.pop(instance, None)

    def revive(self, instance: str) -> None:
        """Start an instance again, with longer and longer pauses; once it is given up, every few minutes."""
        self._restarting.add(instance)
        self._failures[instance] = self._failures.get(instance, 0) + 1
        self._spawn(self._restart(instance, self.engines[instance]))

    async def _restart(self, instance: str, engine: Engine) -> None:
        if (earlier_failures := self._failures[instance] - 1) > 0:
            await asyncio.sleep(_pause_s(earlier_failures))
        for attempt in itertools.count(1):
            try:
                await at_most(self._restart_timeout_s, restart_engine(engine))
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # an engine that calls sys.exit() is broken, and nothing else is
                cause = error
            else:
                break
            if self.engines.get(instance) is not engine:
                return
            if attempt >= self._restarts and instance not in self._given_up:
                self._give_up(instance, cause, attempt)
            await asyncio.sleep(_PAUSE_AFTER_GIVING_UP_S if attempt >= self._restarts else _pause_s(attempt))
        if self.engines.get(instance) is engine:  # not retired meanwhile
            self._restarting.discard(instance)
            if self._given_up.pop(instance, None) is not None:
                log.warning("engine %s: instance %s is there again", self.name, instance)
            self._on_up(instance)

    def _give_up(self, instance: str, cause: BaseException, attempts: int) -> None:
        log.warning(
            "engine %s: instance %s could not be started again in %d attempts: %r. %d of %d instances are left; it is "
            "tried again every %d s. Look at the cause, and at memory, device and files, or start a new pool",
            self.name,
            instance,
            attempts,
            cause,
            len(self.engines) - len(self._given_up) - 1,
            len(self.engines),
            _PAUSE_AFTER_GIVING_UP_S,
        )
        self._given_up[instance] = f"{type(cause).__name__}: {cause}."
        self._on_give_up(instance)


async def restart_engine(engine: Engine) -> None:
    """Restart an engine; one without `restart` is stopped and started."""
    restart = getattr(engine, "restart", None)
    if restart is not None:
        await restart()
    else:
        await engine.stop()
        await engine.start()


def _pause_s(attempt: int) -> float:
    return min(_MAX_PAUSE_S, _MIN_PAUSE_S * 2.0 ** (attempt - 1))
