"""The runtime of a process that uses a shared pool: graphs and user code run here, engines in the cluster."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from teola_plugin.cluster import connection
from teola_plugin.cluster.client.shared_engine import SharedEngine
from teola_plugin.cluster.client.shared_port import SharedPort
from teola_plugin.cluster.names import actor_name, directory_name, pool_of
from teola_plugin.cluster.ray_errors import translated
from teola_plugin.cluster.remote_values import RayValue, fetch_or_remake
from teola_plugin.cluster.wire import PROTOCOL, EngineFacts, Hello
from teola_plugin.errors import EngineUnavailable, RegistrationError, pool_closed
from teola_plugin.runtime.local import LocalRuntime
from teola_plugin.runtime.ports.port import Port

START_SECONDS = 900.0
"""Seconds that an engine may take to start: it may have to load its model."""


def find_engines(address: str | None, pool: str) -> dict[str, SharedEngine]:
    """Connect this process and look up the pool's engines, started. Raises `ConfigError`, `EngineUnavailable`."""
    connection.connect(address)
    ray = connection.ensure_ray()
    try:
        directory = connection.actor(directory_name(pool))
    except ValueError:
        raise RegistrationError(
            f"there is no pool {pool!r} in this Ray cluster; running: {', '.join(_pools(ray)) or 'none'}.",
            hint="start it with `teola up pool.yaml`, or name another",
        ) from None
    try:
        names = ray.get(directory.describe.remote())["engines"]
        engine_facts: list[EngineFacts] = ray.get(
            [directory.start.remote(name) for name in names], timeout=START_SECONDS
        )
    except Exception as error:
        raise translated(error, pool) from error
    return {facts.name: SharedEngine(facts) for facts in engine_facts}


def _pools(ray: Any) -> list[str]:
    names = (entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True))
    return sorted({pool for name in names if (pool := pool_of(name))})


class ClusterRuntime(LocalRuntime):
    """A `LocalRuntime` whose engines are shared ones. Engines of the client itself (wrapped objects) stay in this
    process."""

    shared = True

    def __init__(self, pool: str, engines: Mapping[str, SharedEngine], **options: Any) -> None:
        super().__init__({name: [engine] for name, engine in engines.items()}, **options)
        self._pool = pool
        self._shared = dict(engines)
        self._fetching: set[asyncio.Task[None]] = set()

    async def astart(self) -> None:
        """Connect to every engine's host."""
        withdraw, hello = self._driver.withdraw_all, _hello()
        ports = {
            name: SharedPort(self._pool, engine, hello, self._listener, withdraw, self._host_was_lost)
            for name, engine in self._shared.items()
        }
        await asyncio.gather(*(port.open() for port in ports.values()))
        self._open(ports)

    async def _close_engines(self) -> None:
        """Leave the shared engines running, for others; stop fetching results for callers of this client."""
        for task in self._fetching:
            task.cancel()

    def _host_was_lost(self) -> None:
        """Have every shared engine's port send those requests again that the lost host was to forward to its engine.

        A port calls this when another host has taken the place of its engine's. A host takes a request once, so that
        one that was forwarded before the loss is not computed twice.
        """
        for port in self._ports.values():
            if isinstance(port, SharedPort):
                port.resend()

    def _deliver(self, future: Future[list[Any]], values: list[Any]) -> None:
        """Give the caller the values themselves, wherever they are kept."""
        if any(isinstance(value, RayValue) for value in values):
            task = asyncio.ensure_future(_fetch(future, values))
            self._fetching.add(task)
            task.add_done_callback(self._fetching.discard)
        else:
            future.set_result(values)

    async def areset(self) -> None:
        for name in self._shared:
            await self._host(name).reset.remote()

    async def aforget(self, tenant: str) -> None:
        """Forget a tenant's queries in this process, and have each shared engine's host forget its requests, too."""
        self._forget_queries(tenant)
        for name in self._shared:
            await self._host(name).forget.remote(tenant)

    async def _administer(self, port: Port, method: str, args: tuple[Any, ...]) -> Any:
        """Run an administrative operation of an engine, such as deleting a collection, where the engine is.

        For a shared engine its host in the cluster runs it; raise what the host raises, translated to this package's
        errors.
        """
        if not isinstance(port, SharedPort):
            return await super()._administer(port, method, args)
        try:
            return await self._host(port.name).admin.remote(method, args)
        except Exception as error:
            raise translated(error, port.name) from error

    def _host(self, engine: str) -> Any:
        """Return the handle of the actor that hosts an engine of this pool. Raise `EngineUnavailable` if it is gone."""
        try:
            return connection.actor(actor_name(self._pool, engine))
        except ValueError:
            raise EngineUnavailable(
                f"engine {engine!r} of pool {self._pool!r} is gone.", engine=engine, hint="`teola up` starts it again"
            ) from None


async def _fetch(future: Future[list[Any]], values: list[Any]) -> None:
    """Fetch values that were kept where they were made, since the caller needs them here."""
    try:
        fetched = await fetch_or_remake([value for value in values if isinstance(value, RayValue)])
    except asyncio.CancelledError:
        future.set_exception(pool_closed())
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result([fetched[value] if isinstance(value, RayValue) else value for value in values])


def _hello() -> Hello:
    """Return the greeting of a new client."""
    return Hello(f"{os.getpid()}-{uuid.uuid4().hex[:8]}", PROTOCOL, tuple(sys.version_info[:3]), _version())


def _version() -> str:
    from importlib.metadata import version

    return version("teola-plugin")
