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
    """A pool without engines. One serves all objects of a framework in the process that have no pool."""

    @property
    def profiles(self) -> Mapping[str, EngineProfile]:
        """Return no profiles: passes leave unknown engines alone."""
        return {}

    def forked(self) -> None:
        """Begin anew in a child process, with its first query; the user's objects are there, too."""
        super().forked()
        self._started = False
        self.runtime.renew()

    def running_now(self) -> None:
        """Start the loop, which runs until the process ends. Raise `EngineUnavailable` if that fails."""
        with _lock.lock:
            if not self._started:
                self.start()
                atexit.unregister(self.close)  # of a parent process
                atexit.register(self.close)


_watching: list[OwnPool] = []


def watching_pool() -> OwnPool:
    """Return the process's pool without engines, in which queries are traced. Raise `EngineUnavailable` if it fails."""
    with _lock.lock:
        if not _watching:
            _watching.append(OwnPool(LocalRuntime({}), {}, ()))
    _watching[0].running_now()
    return _watching[0]
