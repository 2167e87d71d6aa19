"""Pools without engines of their own: the user's own models do the work, the pool plans and traces it."""

from __future__ import annotations

import atexit
from collections.abc import Mapping

from teola_plugin.graph import EngineProfile
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.forks import ForkedLock
from teola_plugin.runtime.local import LocalRuntime

_lock = ForkedLock()


class OwnPool(EnginePool):
    """Nothing but the user's own objects. One serves all of a framework's in the process that have no pool."""

    @property
    def profiles(self) -> Mapping[str, EngineProfile]:
        """None: what is not known is left alone."""
        return {}

    def forked(self) -> None:
        """In a child process it begins anew, with its first query: the objects themselves are there, too."""
        super().forked()
        self._started = False
        self.runtime.renew()

    def running_now(self) -> None:
        """Starts its loop, which runs until the process ends. Raises `EngineUnavailable`."""
        with _lock.here:
            if not self._started:
                self.start()
                atexit.unregister(self.close)  # of a parent process
                atexit.register(self.close)


_watching: list[OwnPool] = []


def watching_pool() -> OwnPool:
    """The process's pool of nothing: queries in it are traced. Raises `EngineUnavailable`."""
    with _lock.here:
        if not _watching:
            _watching.append(OwnPool(LocalRuntime({}), {}, ()))
    _watching[0].running_now()
    return _watching[0]
