"""The pool of the engines that are made by themselves: one for the process, started when the first is wanted."""

from __future__ import annotations

import atexit
import os
import threading

from teola_plugin.adapters.serving.specs import EngineSpec
from teola_plugin.pool import EnginePool


class ServedPool:
    """Makes each engine once, and keeps it until the process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: EnginePool | None = None
        self._specs: dict[str, EngineSpec] = {}

    @property
    def pool(self) -> EnginePool | None:
        """None before the first engine."""
        return self._pool

    def engine_for(self, spec: EngineSpec) -> tuple[EnginePool, str]:
        """The pool, running, and the name of the engine in it. Raises what starting an engine raises."""
        with self._lock:
            pool = self._pool if self._pool is not None and self._pool.running else None
            if pool is None:
                self._specs = {}
            for name in self._specs:
                if pool is not None and spec.is_done_by(pool.engine(name)):
                    return pool, name
            name = self._free(spec.NAME)
            if pool is None:
                pool = EnginePool.local({name: spec.make(name)}).start()
                atexit.register(pool.close)
            else:
                pool.add(spec.make(name))
            self._pool, self._specs[name] = pool, spec
            return pool, name

    def _free(self, name: str) -> str:
        """`llm`, `llm2`, `llm3`, ..."""
        number = sum(name == known.NAME for known in self._specs.values())
        return f"{name}{number + 1}" if number else name

    def forget(self) -> None:
        """In a process that was forked: the pool, and its threads, are the parent's."""
        self.__init__()  # type: ignore[misc]


PROCESS = ServedPool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PROCESS.forget)
