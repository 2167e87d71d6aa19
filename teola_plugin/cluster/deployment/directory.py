"""The directory of a pool: one small actor that knows the pool's settings and its engine hosts."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Mapping
from typing import Any

from teola_plugin.cluster.config import PoolConfig
from teola_plugin.cluster.names import host_options
from teola_plugin.cluster.wire import EngineFacts


class Directory:
    """The actor by whose name a pool is found. It makes the engine hosts, and makes them again when asked."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = PoolConfig.model_validate(config)
        self._hosts: dict[str, Any] = {}

    async def start(self, engine: str) -> EngineFacts:
        """Start one engine. Idempotent. Raises `EngineUnavailable`."""
        facts: EngineFacts = await self._host(engine).start.remote()
        return facts

    def _host(self, engine: str) -> Any:
        import ray

        from teola_plugin.cluster.host.engine_host import EngineHost

        if engine not in self._hosts:
            settings = self.config.engines[engine].model_dump()
            actor_class = ray.remote(EngineHost).options(**host_options(self.config.name, engine))
            self._hosts[engine] = actor_class.remote(self.config.name, engine, settings)
        return self._hosts[engine]

    def settings(self) -> dict[str, Any]:
        """Return the pool's settings, as plain data."""
        return self.config.model_dump()

    def describe(self) -> dict[str, Any]:
        """Return name, engines and versions, as plain data."""
        from importlib.metadata import version

        return {
            "name": self.config.name,
            "engines": list(self.config.engines),
            "python": platform.python_version(),
            "ray": version("ray"),
        }

    async def status(self) -> list[dict[str, Any]]:
        """Return the state of each engine; `{"engine": ..., "error": ...}` for one that does not answer."""
        return list(await asyncio.gather(*(self._status(engine) for engine in self.config.engines)))

    async def _status(self, engine: str) -> dict[str, Any]:
        try:
            status: dict[str, Any] = await asyncio.wait_for(self._host(engine).status.remote(), 10)
            return status
        except Exception as error:
            return {"engine": engine, "running": False, "error": f"{type(error).__name__}", "instances": []}

    async def stop(self) -> None:
        """End every engine, then their hosts."""
        import ray

        await asyncio.gather(*(self._stop(engine) for engine in self.config.engines))
        for host in self._hosts.values():
            ray.kill(host, no_restart=True)

    async def _stop(self, engine: str) -> None:
        try:
            await asyncio.wait_for(self._host(engine).stop.remote(), 60)
        except Exception:
            pass  # it is killed next
