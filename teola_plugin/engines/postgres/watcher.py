"""A process that runs a PostgreSQL server for its parent process, and ends it when the parent is gone.

Run as `python -I -S watcher.py JSON`, standard library only. Its standard input is the lifeline: the parent
writes one order (`fast`, `immediate` or `keep`), or vanishes, which ends the pipe even after a kill -9.
On standard output it writes JSON lines: `{"state": "ready" | "failed" | "held" | "exited", "detail": ...}`.
It leads a session of its own, so Ctrl-C in the parent's terminal does not reach it.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, Any

_ORPHANED = "orphaned"
_START_SECONDS = 120.0
_LOCK_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1


class StartRefused(Exception):
    """An error that prevents the start of the server. `state` is sent to the parent with the text."""

    def __init__(self, state: str, detail: str) -> None:
        super().__init__(detail)
        self.state = state


class Lifeline:
    """The orders of the parent process; its end counts as one."""

    def __init__(self, parent: int) -> None:
        self._parent = parent

    def order(self, seconds: float) -> str:
        """Return the next order within this time; "" for none, `orphaned` if the parent is gone."""
        if os.getppid() != self._parent:  # a forked child of it may still hold the pipe open
            return _ORPHANED
        if not select.select([0], [], [], seconds)[0]:
            return ""
        return os.read(0, 64).decode().strip() or _ORPHANED


def main() -> int:
    """Run the server that the job in the first argument describes until the parent orders its end or is gone.

    Return the exit status. Unless the order was `keep`, delete the folders of the job's `remove` at the end.
    """
    job = json.loads(sys.argv[1])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))
    keep = False
    try:
        with open(job["lock"], "a+") as lock:
            try:
                _lock_folder(lock, job)
                keep = _run_server(job, Lifeline(job["parent"])) == "keep"
            finally:
                if not keep:
                    _remove(job["remove"])
    except StartRefused as error:
        _report(error.state, str(error))
        return 1
    except (OSError, subprocess.SubprocessError) as error:
        _report("failed", f"{type(error).__name__}: {error}")
        return 1
    return 0


def _run_server(job: dict[str, Any], line: Lifeline) -> str:
    """Start the server, wait for an order, stop the server. Return the order."""
    if job["cores"]:
        os.sched_setaffinity(0, job["cores"])
    _create(job)
    _clear(job["pgdata"])
    server, order = _start(job), "immediate"
    try:
        _await_ready(server, job, line)
        order = _serve(server, line)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _stop(server, signal.SIGINT if order == "fast" else signal.SIGQUIT)
        _kill_strays(job["pgdata"])
    return order


def _serve(server: subprocess.Popen[bytes], line: Lifeline) -> str:
    """Wait for an order of the parent and return it; report once to the parent if the server ends by itself."""
    has_reported = False
    while not (order := line.order(0.5)):
        if not has_reported and server.poll() is not None:
            has_reported = True
            _report("exited", str(server.returncode))
    return order


def _lock_folder(lock: IO[str], job: dict[str, Any]) -> None:
    """Lock the data folder. Wait for a holder whose process has died: it is stopping its server."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            lock.seek(0)
            pid, _, holder = lock.read().partition(" ")
            if time.monotonic() > deadline or (pid.isdigit() and _lives(int(pid))):
                raise StartRefused("held", f"process {pid} ({holder.strip()})") from None
            time.sleep(0.05)
    lock.truncate(0)
    lock.write(f"{job['parent']} {job['owner']}")
    lock.flush()


def _create(job: dict[str, Any]) -> None:
    """Create the database cluster unless it exists, first under another name: an incomplete one is never used."""
    if os.path.isdir(job["pgdata"]):
        return
    new = job["pgdata"] + ".new"
    shutil.rmtree(new, ignore_errors=True)
    os.mkdir(new, 0o700)
    if job["user"]:
        os.chown(new, *job["user"])
    initdb = subprocess.run([*job["initdb"], "-D", new], capture_output=True, text=True, **_child(job))
    if initdb.returncode:
        shutil.rmtree(new, ignore_errors=True)
        raise StartRefused("failed", f"initdb: {(initdb.stderr or initdb.stdout)[-800:].strip()}")
    os.rename(new, job["pgdata"])


def _start(job: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the server's first process, in a session of its own, with output to the log file.

    On Linux it quits if this process is killed.
    """
    die_with_us = _death_signal()
    with open(job["log"], "ab") as log:
        return subprocess.Popen(
            job["postgres"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_us,
            **_child(job),
        )


def _await_ready(server: subprocess.Popen[bytes], job: dict[str, Any], line: Lifeline) -> None:
    """Wait until the server accepts connections, and report that to the parent.

    Raise `StartRefused` if the server ends, is not ready within `_START_SECONDS`, or an order comes first.
    """
    deadline = time.monotonic() + _START_SECONDS
    while not _ready(job["pgdata"], server.pid):
        if server.poll() is not None:
            raise StartRefused("failed", f"it ended with status {server.returncode}: {_tail(job['log'])}")
        if line.order(0.01) or time.monotonic() > deadline:
            raise StartRefused("failed", f"it was not ready in time: {_tail(job['log'])}")
    _report("ready", str(server.pid))


def _child(job: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the server's processes. PostgreSQL refuses to run as root; PG* variables change it."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PG", "LC_", "LANG"))}
    options: dict[str, Any] = {"cwd": "/", "env": env | {"LC_ALL": "C"}}
    if job["user"]:
        uid, gid = job["user"]
        options |= {"user": uid, "group": gid, "extra_groups": []}
    return options


def _death_signal() -> Callable[[], None] | None:
    """Return a function that makes the server quit if this process is killed; None if the system cannot.

    Only Linux can (`PR_SET_PDEATHSIG`). The function must run in the child, before the server's program begins.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, int(signal.SIGQUIT)) and None


def _ready(pgdata: str, pid: int) -> bool:
    lines = _pid_file(pgdata)
    return len(lines) > 7 and lines[0] == str(pid) and lines[7] == "ready"


def _pid_file(pgdata: str) -> list[str]:
    """Return the lines of the server's pid file, which says its process and state; [] if there is none."""
    try:
        with open(os.path.join(pgdata, "postmaster.pid")) as file:
            return [line.strip() for line in file]
    except OSError:
        return []


def _clear(pgdata: str) -> None:
    """Remove the last processes of a killed server and its pid file, whose pid may belong to another process."""
    lines = _pid_file(pgdata)
    if not lines:
        return
    if lines[0].isdigit() and int(lines[0]) in _servers(pgdata):
        raise StartRefused("held", f"process {lines[0]}, a PostgreSQL server that was started by other means")
    _kill_strays(pgdata)
    os.unlink(os.path.join(pgdata, "postmaster.pid"))


def _servers(pgdata: str) -> list[int]:
    """Return the living PostgreSQL processes in this folder; [] without /proc, PostgreSQL then checks by itself."""
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        try:
            with open(f"/proc/{name}/comm") as comm:
                if comm.read().startswith("postgres") and os.readlink(f"/proc/{name}/cwd") == pgdata:
                    pids.append(int(name))
        except OSError:
            continue
    return pids


def _kill_strays(pgdata: str) -> None:
    """End the processes of a server whose first process is gone; usually they have ended by themselves."""
    deadline = time.monotonic() + 5.0
    while (left := _servers(pgdata)) and time.monotonic() < deadline:
        for pid in left:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.02)


def _stop(server: subprocess.Popen[bytes], number: int) -> None:
    """End the server by a signal, then by stronger ones if it does not end within 20 s and another 6 s."""
    for signal_number, seconds in ((number, 20.0), (signal.SIGQUIT, 6.0), (signal.SIGKILL, 5.0)):
        if server.poll() is None:
            _signal(server.pid, signal_number)
        try:
            server.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            continue


def _remove(paths: list[str]) -> None:
    """Delete folders, trying again for up to a second while ending processes still write into them."""
    for path in paths:
        for _ in range(50):
            shutil.rmtree(path, ignore_errors=True)
            if not os.path.exists(path):
                break
            time.sleep(0.02)


def _signal(pid: int, number: int) -> None:
    """Send a signal to a process; do nothing if it has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _lives(pid: int) -> bool:
    """Return True if a process with this id is running; an ended one that nobody has waited for does not count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return True


def _tail(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read()[-800:].strip()


def _report(state: str, detail: str) -> None:
    """Write a state to the parent as a line of JSON; do nothing if the parent is gone."""
    try:
        os.write(1, json.dumps({"state": state, "detail": detail}).encode() + b"\n")
    except OSError:  # the parent is gone
        pass


if __name__ == "__main__":
    sys.exit(main())
