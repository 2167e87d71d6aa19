"""Start and end of a pool: its Ray cluster, if it has none yet, its directory and its engines."""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any

from teola_plugin.cluster import connection
from teola_plugin.cluster.config import PoolConfig
from teola_plugin.cluster.deployment.head import end_process, is_alive, start_head
from teola_plugin.cluster.deployment.records import DeploymentRecord, address_of
from teola_plugin.cluster.deployment.room import Reservation, need_room
from teola_plugin.cluster.names import actor_name, directory_name, directory_options, host_options, pool_of
from teola_plugin.cluster.ray_errors import translated
from teola_plugin.cluster.wire import EngineFacts
from teola_plugin.errors import ConfigError, RegistrationError

log = logging.getLogger("teola_plugin")
REPORT_AFTER_S = 60.0
"""Seconds after which the engines that are still starting are reported: a large model takes minutes."""


def up(
    config: PoolConfig,
    address: str | None = None,
    *,
    host: str = "",
    on_started: Callable[[EngineFacts], None] = lambda _: None,
    on_waiting: Callable[[str], None] = log.warning,
) -> str:
    """Start the pool, on a cluster of its own if no address is given. Returns the cluster's address.

    A cluster of its own asks for a token and listens on this machine alone, unless `host` (`address` or `address:port`)
    says where others reach it. `on_started` is called with each engine that is up, `on_waiting` with a line about what
    is still missing. What was started is ended again if something fails. Raises `EngineUnavailable` (also if the
    cluster is too small for what the engines reserve, and does not grow by itself), `ConfigError`, `RegistrationError`
    (a pool of that name runs with other settings).
    """
    if address and host:
        raise ConfigError(
            "a cluster that is there listens where it does: host is for one that is started.",
            hint="give either --address or --host",
        )
    record = _running(config.name) if address is None else None
    started = record is None and address is None
    if record is None:
        record = _start_cluster(config.name, host) if address is None else DeploymentRecord(config.name, address)
    try:
        connection.connect(record.address, token=record.token)
        if not _exists(config.name):
            need_room(
                [
                    Reservation.of(name, engine_config, engine_config.replicas)
                    for name, engine_config in config.engines.items()
                ],
                on_waiting,
            )
        _create(config, on_started, on_waiting)
    except BaseException:
        if started:
            end_process(record.pid)
            record.forget()
        raise
    record.write()
    return record.address


def _start_cluster(name: str, host: str) -> DeploymentRecord:
    head = start_head(name, host)
    return DeploymentRecord(name, head.address, head.pid, head.token)


def _running(name: str) -> DeploymentRecord | None:
    """Return the record of a pool that this machine started and that still runs; None if there is none.

    Delete the record of a pool whose Ray node has ended.
    """
    record = DeploymentRecord.read(name)
    if record is not None and record.pid and not is_alive(record.pid):
        record.forget()
        return None
    return record


def _exists(pool: str) -> bool:
    """Return True if the connected cluster has a pool of this name."""
    try:
        connection.actor(directory_name(pool))
    except ValueError:
        return False
    return True


def _create(config: PoolConfig, on_started: Callable[[EngineFacts], None], on_waiting: Callable[[str], None]) -> None:
    """Create the pool's directory actor and start all engines at once; call `on_started` for each engine that is up.

    A pool with the same settings is joined. Raise `RegistrationError` if it runs with other settings. If an engine does
    not start, kill the whole pool and raise the engine's error. `on_waiting` gets a line whenever no engine has come up
    for `REPORT_AFTER_S`.
    """
    ray = connection.ensure_ray()

    directory = ray.remote(Directory).options(**directory_options(config.name)).remote(config.model_dump())
    if ray.get(directory.settings.remote()) != config.model_dump():
        raise RegistrationError(
            f"a pool {config.name!r} runs already, with other settings.",
            hint="end it with `teola down`, or give this one another name",
        )
    starting, started_at = {directory.start.remote(name): name for name in config.engines}, time.monotonic()
    while starting:
        done_refs, _ = ray.wait(list(starting), num_returns=1, timeout=REPORT_AFTER_S)
        if not done_refs:
            on_waiting(f"still starting after {time.monotonic() - started_at:.0f} s: {', '.join(starting.values())}")
        for ref in done_refs:
            name = starting.pop(ref)
            try:
                on_started(ray.get(ref))
            except Exception as error:
                _kill(ray, config.name)
                raise translated(error, name) from None


def status(pool: str, address: str | None = None) -> list[dict[str, Any]]:
    """Return the state of each engine, as plain data. Raises `EngineUnavailable`, `RegistrationError`."""
    connection.connect(address_of(pool, address))
    rows: list[dict[str, Any]] = connection.ensure_ray().get(_directory(pool).status.remote())
    return rows


def batches(pool: str, engine: str, address: str | None = None) -> list[dict[str, Any]]:
    """Return the engine's last batches, oldest first.

    Each has `batch`, `replica`, `at` (seconds since 1970), `apps`, and `members`: (client, app, primitive) of each
    request.
    """
    connection.connect(address_of(pool, address))
    rows: list[dict[str, Any]] = connection.ensure_ray().get(_host(pool, engine).recent_batches.remote())
    return rows


def scale(pool: str, engine: str, replicas: int, address: str | None = None) -> int:
    """Add or remove replicas of an engine while queries run. Returns their number.

    Raises `EngineUnavailable` if the cluster has no room for more.
    """
    connection.connect(address_of(pool, address))
    host = _host(pool, engine)
    try:
        return int(connection.ensure_ray().get(host.scale.remote(replicas)))
    except Exception as error:
        raise translated(error, engine) from None


def down(pool: str, address: str | None = None) -> None:
    """End the pool's engines, then its cluster if `up` started one. Raises `EngineUnavailable`, `RegistrationError`."""
    record = DeploymentRecord.read(pool)
    connection.connect(address_of(pool, address))
    ray = connection.ensure_ray()
    directory = _directory(pool)
    try:
        ray.get(directory.stop.remote(), timeout=120)
    finally:
        _kill(ray, pool)
        ray.shutdown()
        if record is not None and not address:
            if record.pid:
                end_process(record.pid)
            record.forget()


def _kill(ray: Any, pool: str) -> None:
    """Kill every actor of the pool that is left."""
    for entry in ray.util.list_named_actors(all_namespaces=True):
        name = entry["name"]
        if pool_of(name) == pool:
            try:
                ray.kill(ray.get_actor(name, namespace=entry["namespace"]), no_restart=True)
            except ValueError:
                pass  # it has ended meanwhile


def _directory(pool: str) -> Any:
    """Return the handle of a pool's directory actor. Raise `RegistrationError` if the cluster has no such pool."""
    try:
        return connection.actor(directory_name(pool))
    except ValueError:
        raise RegistrationError(
            f"there is no pool {pool!r} in this cluster.", hint="start it with `teola up pool.yaml`"
        ) from None


def _host(pool: str, engine: str) -> Any:
    """Return the handle of the actor that hosts an engine of a pool. Raise `RegistrationError` if there is none."""
    try:
        return connection.actor(actor_name(pool, engine))
    except ValueError:
        raise RegistrationError(f"pool {pool!r} has no engine {engine!r}.", hint="`teola status` lists them") from None


# ------------------------------------------------------------ the directory of a pool


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
        """Return the handle of the actor that hosts the engine; create the actor at first use."""
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
        """Return the state of one engine as plain data, or an error if its host does not answer within 10 s."""
        try:
            status: dict[str, Any] = await asyncio.wait_for(self._host(engine).status.remote(), 10)
            return status
        except Exception as error:
            return {"engine": engine, "running": False, "error": f"{type(error).__name__}", "replicas": []}

    async def stop(self) -> None:
        """End every engine, then their hosts."""
        import ray

        await asyncio.gather(*(self._stop(engine) for engine in self.config.engines))
        for host in self._hosts.values():
            ray.kill(host, no_restart=True)

    async def _stop(self, engine: str) -> None:
        """End one engine through its host, within 60 s. Errors are ignored, since `stop` kills the host next."""
        try:
            await asyncio.wait_for(self._host(engine).stop.remote(), 60)
        except Exception:
            pass  # it is killed next
