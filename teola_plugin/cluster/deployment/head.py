"""Starts and ends a Ray node for a pool: for this machine alone, unless others are invited, and with a token.

The node listens on loopback, and so does all that it starts. Ray can bind its ports to loopback or to every interface,
to nothing between: with another host than this machine's own name, its token protects it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teola_plugin.cluster.connection import ensure_ray, host_and_port
from teola_plugin.cluster.deployment import token
from teola_plugin.cluster.deployment.records import LOOPBACK, folder
from teola_plugin.errors import ConfigError, EngineUnavailable
from teola_plugin.shims import ray as shim

STORE_MB = 256
"""Shared memory of the Ray node: it holds large values until they are read, but no models."""
HEAD_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Head:
    """A Ray node that was started."""

    pid: int
    address: str
    token: str
    """The token file that was made for it; empty if the user has chosen a token."""


def start_head(pool: str, host: str = "") -> Head:
    """Run `ray start --head --block` in a process of its own, which ends with all its children when it is told to.

    `host` is the `address` or `address:port` under which other machines reach this one. Raises `EngineUnavailable`,
    `ConfigError`.
    """
    token.check_support(ensure_ray())
    command = _command(host)
    file = _make_token(pool)
    log = folder() / f"{pool}-ray.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(file),
        )
    for text in _log_texts(log, process):
        match = re.search(r"--address='([^']+:\d+)'", text)
        if match:
            return Head(process.pid, match[1], file)
    end_process(process.pid)
    if file:
        Path(file).unlink(missing_ok=True)
    tail = "\n".join(log.read_text(errors="replace").strip().split("\n")[-5:])
    raise EngineUnavailable(f"Ray did not start: {tail}", hint=f"see {log}")


def _make_token(pool: str) -> str:
    """Create the file with the token of a pool's cluster and return its path; empty if no file is needed.

    None is needed where no token is wanted, and where the user has set one.
    """
    return (
        str(token.create_file(folder() / f"{pool}.token")) if token.is_wanted() and not token.is_set_by_user() else ""
    )


def _command(host: str) -> list[str]:
    """Return the command line that starts the Ray node. Raise `ConfigError` if `host` is no address to reach it by."""
    name, port = host_and_port(host)
    if name in ("0.0.0.0", "::"):
        raise ConfigError(
            f"{name} is no address at which other machines reach this one.",
            hint="give that of a network, e.g. 10.0.0.1",
        )
    command = [*shim.COMMAND, "start", "--head", "--block", f"--port={port}"]
    command += ["--include-dashboard=false", f"--object-store-memory={STORE_MB * 2**20}", "--disable-usage-stats"]
    return [*command, f"--node-ip-address={name}"] if name and name not in LOOPBACK else command


def _environment(file: str) -> Mapping[str, str]:
    return {**os.environ, **token.environment(file), shim.START_HOOK: f"{__name__}.prepare"}


def prepare(settings: Any, head: bool) -> None:
    """Change Ray's settings in its start hook. The node's own children do not run the hook."""
    os.environ.pop(shim.START_HOOK, None)
    shim.stay_on_loopback(settings, head)


def _log_texts(log: Path, process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield the text of the log so far, again and again, while the process lives.

    It is read ten times a second, for `HEAD_SECONDS` (60 s) at most. Blocks between two reads.
    """
    deadline = time.monotonic() + HEAD_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        yield log.read_text(errors="replace")
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    """Return True if a process with this id exists and may be signalled by this user."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def end_process(pid: int) -> None:
    """End the Ray node and everything it started, politely at first, then by force."""
    for number, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(pid, number) if number == signal.SIGKILL else os.kill(pid, number)
        except OSError:
            return
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if _has_ended(pid):
                return
            time.sleep(0.1)


def _has_ended(pid: int) -> bool:
    """Return True if the process has ended; reap it if it is a child of this process."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return not is_alive(pid)
