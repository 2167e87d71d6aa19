"""The host process of an LLM engine, which is ended for certain.

The host leads its own process group, so that vLLM's children are found and ended with it. vLLM has nothing to save, and
a graceful end takes 5 s, so the end is always a kill. Python's resource trackers are spared: they remove the shared
memory of the dead and leave by themselves.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from teola_plugin.engines.model_cache import cache_folder

PARENT = "TEOLA_PARENT"
"""Environment variable of the host: the id of the process with which it ends."""
_LAUNCHER = ("/bin/sh", "-c", f'{PARENT}=$$ "$@"; exit $?', "teola")
"""Ray kills the children of this process at its end. It then kills the shell, and the host ends its group. If the host
itself were killed, vLLM would be left behind."""
_LOG_LINES = 12
_KEEP_LOGS = 7 * 86400.0
_numbers = itertools.count(1)


@dataclass(slots=True)
class HostProcess:
    """A running host, our end of the socket to it, its log and its private folder."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    folder: Path
    log: Path
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def spawn(cls, module: str, env: dict[str, str], folder: Path, log: Path) -> HostProcess:
        """Run `python -m module` with this process's import path; its output goes to `log`."""
        ours, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [*_LAUNCHER, sys.executable, "-P", "-m", module, str(theirs.fileno()), str(folder)]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with theirs, log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                env=env | {"PYTHONPATH": path},
                start_new_session=True,
            )
        return cls(process, ours, folder, log)

    def end(self) -> None:
        """Kill the whole group and remove the folder; returns when nothing is left. Idempotent."""
        kill_group(self.process.pid)
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.socket.close()
        deadline = time.monotonic() + 5.0
        while group_members(self.process.pid, trackers=True) and time.monotonic() < deadline:
            time.sleep(0.01)
        shutil.rmtree(self.folder, ignore_errors=True)

    def log_tail(self) -> str:
        """The last lines of the log that are not empty."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return ""
        return "\n".join([line for line in lines if line.strip()][-_LOG_LINES:])


def private_folder() -> Path:
    """A new folder with a short path: sockets in it must stay below 108 characters."""
    return Path(tempfile.mkdtemp(prefix="teola-"))


def log_file(name: str) -> Path:
    """Return the default log file of the host of this name. Removes logs of crashed runs after a week."""
    folder = cache_folder() / "logs"
    for old in folder.glob("*.log"):
        try:
            if time.time() - old.stat().st_mtime > _KEEP_LOGS:
                old.unlink()
        except OSError:  # another process removes it as well
            continue
    return folder / f"{name}-{os.getpid()}-{next(_numbers)}.log"  # replicas may share a name


def kill_group(group: int) -> None:
    """SIGKILL to every process of the group but Python's resource trackers, the caller last."""
    for _ in range(3):  # a process may start another while we look
        members = group_members(group)
        for pid in members:
            if pid != os.getpid():
                _kill(pid)
        if not members:
            break
    if os.getpgrp() == group:
        _kill(os.getpid())


def group_members(group: int, *, trackers: bool = False) -> list[int]:
    """Return the living processes of a group, with Python's resource trackers if `trackers`; [] without /proc."""
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) != group or state in "ZX":
                continue
            if trackers or b"resource_tracker" not in (entry / "cmdline").read_bytes():
                members.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return members


def _kill(pid: int) -> None:
    """Send SIGKILL to a process; do nothing if it has ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
