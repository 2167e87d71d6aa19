"""Starting and ending a pool: its Ray cluster, if it has none yet, its directory and its engines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from teola_plugin.cluster import connection
from teola_plugin.cluster.config import PoolConfig
from teola_plugin.cluster.names import actor_name, directory_name, directory_options
from teola_plugin.cluster.ray_errors import translated
from teola_plugin.cluster.wire import EngineFacts
from teola_plugin.engines.model_cache import cache_folder
from teola_plugin.errors import EngineUnavailable, RegistrationError

STORE_MB = 256
"""Shared memory of a Ray node that `up` starts: large values are in it until they are read, models are not."""
HEAD_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Record:
    """What is kept of a pool that `up` started on this machine, so that `status`, `down` and apps find it."""

    name: str
    address: str
    pid: int = 0
    """Process that holds the Ray node; 0 for a cluster that was there before."""

    @staticmethod
    def path(name: str) -> Path:
        return cache_folder() / "pools" / f"{name}.json"

    @classmethod
    def read(cls, name: str) -> Record | None:
        try:
            return cls(**json.loads(cls.path(name).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self) -> None:
        path = self.path(self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)) + "\n")

    def forget(self) -> None:
        self.path(self.name).unlink(missing_ok=True)


def address_of(pool: str, address: str | None = None) -> str | None:
    """The address given, or that of the pool that was started on this machine; None where neither is known."""
    if address or os.environ.get(connection.ADDRESS):
        return address
    found = Record.read(pool)
    return found.address if found is not None else None


def up(config: PoolConfig, address: str | None = None, *, told: Callable[[EngineFacts], None] = lambda _: None) -> str:
    """Start the pool, on a cluster of its own if no address is given. Returns the cluster's address.

    `told` hears of every engine as it is up. What was started is ended again if something fails. Raises
    `EngineUnavailable`, `ConfigError`, `RegistrationError` (a pool of that name runs with other settings).
    """
    record = _running(config.name) if address is None else None
    started = None
    if record is None:
        started = _start_head() if address is None else None
        record = Record(config.name, address or (started.address if started else ""), started.pid if started else 0)
    try:
        connection.connect(record.address)
        _create(config, told)
    except BaseException:
        if started is not None:
            _end_process(started.pid)
        raise
    record.write()
    return record.address


def _running(name: str) -> Record | None:
    record = Record.read(name)
    if record is not None and record.pid and not _alive(record.pid):
        record.forget()
        return None
    return record


def _create(config: PoolConfig, told: Callable[[EngineFacts], None]) -> None:
    ray = connection.ensure_ray()
    from teola_plugin.cluster.directory import Directory

    directory = ray.remote(Directory).options(**directory_options(config.name)).remote(config.model_dump())
    if ray.get(directory.settings.remote()) != config.model_dump():
        raise RegistrationError(
            f"a pool {config.name!r} runs already, with other settings.",
            hint="end it with `teola down`, or give this one another name",
        )
    waiting = {directory.start.remote(name): name for name in config.engines}
    while waiting:
        ended, _ = ray.wait(list(waiting), num_returns=1)
        for ref in ended:
            name = waiting.pop(ref)
            try:
                told(ray.get(ref))
            except Exception as error:
                _kill(ray, config.name)
                raise translated(error, name) from None


def status(pool: str, address: str | None = None) -> list[dict[str, Any]]:
    """How each engine is, as plain data. Raises `EngineUnavailable`, `RegistrationError`."""
    connection.connect(address_of(pool, address))
    found: list[dict[str, Any]] = connection.ensure_ray().get(_directory(pool).status.remote())
    return found


def batches(pool: str, engine: str, address: str | None = None) -> list[dict[str, Any]]:
    """The engine's last batches, oldest first: `batch`, `instance`, `at` (seconds since 1970), `apps`, and `members`:
    (client, app, primitive) of each request."""
    connection.connect(address_of(pool, address))
    found: list[dict[str, Any]] = connection.ensure_ray().get(_host(pool, engine).recent_batches.remote())
    return found


def scale(pool: str, engine: str, instances: int, address: str | None = None) -> int:
    """Add or take away instances of an engine while queries run. Returns how many there are."""
    connection.connect(address_of(pool, address))
    host = _host(pool, engine)
    try:
        return int(connection.ensure_ray().get(host.scale.remote(instances)))
    except Exception as error:
        raise translated(error, engine) from None


def down(pool: str, address: str | None = None) -> None:
    """End the pool's engines, then its cluster if `up` started one. Raises `EngineUnavailable`, `RegistrationError`."""
    record = Record.read(pool)
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
                _end_process(record.pid)
            record.forget()


def _kill(ray: Any, pool: str) -> None:
    """Every actor of the pool that is left."""
    for found in ray.util.list_named_actors(all_namespaces=True):
        name = found["name"]
        if name == directory_name(pool) or name.startswith(f"{directory_name(pool)}/"):
            try:
                ray.kill(ray.get_actor(name, namespace=found["namespace"]), no_restart=True)
            except ValueError:
                pass  # gone meanwhile


def _directory(pool: str) -> Any:
    try:
        return connection.actor(directory_name(pool))
    except ValueError:
        raise RegistrationError(
            f"there is no pool {pool!r} in this cluster.", hint="start it with `teola up pool.yaml`"
        ) from None


def _host(pool: str, engine: str) -> Any:
    try:
        return connection.actor(actor_name(pool, engine))
    except ValueError:
        raise RegistrationError(f"pool {pool!r} has no engine {engine!r}.", hint="`teola status` lists them") from None


# ---------------------------------------------------------------- a Ray node of our own


@dataclass(frozen=True, slots=True)
class _Head:
    pid: int
    address: str


def _start_head() -> _Head:
    """`ray start --head --block` in a process of its own: it ends with all its children when it is told to."""
    connection.ensure_ray()
    log = cache_folder() / "pools" / "ray-head.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"]
    command += ["--include-dashboard=false", f"--object-store-memory={STORE_MB * 2**20}", "--disable-usage-stats"]
    command += ["--node-ip-address=127.0.0.1"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    for text in _growing(log, process):
        found = re.search(r"--address='([\d.]+:\d+)'", text)
        if found:
            return _Head(process.pid, found[1])
    _end_process(process.pid)
    tail = "\n".join(log.read_text(errors="replace").strip().splitlines()[-5:])
    raise EngineUnavailable(f"Ray did not start: {tail}", hint=f"see {log}")


def _growing(log: Path, process: subprocess.Popen[bytes]) -> Iterator[str]:
    """What the log says so far, again and again, while the process lives."""
    ends = time.monotonic() + HEAD_SECONDS
    while time.monotonic() < ends and process.poll() is None:
        yield log.read_text(errors="replace")
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _end_process(pid: int) -> None:
    """The Ray node and everything it started, politely; by force after a while."""
    for number, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(pid, number) if number == signal.SIGKILL else os.kill(pid, number)
        except OSError:
            return
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            if _reaped(pid):
                return
            time.sleep(0.1)


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return not _alive(pid)
