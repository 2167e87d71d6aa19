"""Tests of `teola up`, `status`, `scale`, `down` and `calibrate` on a Ray cluster of their own."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
YAML = """\
name: commands
engines:
  embedder: {kind: fake}
  llm: {kind: fake, replicas: 2}
"""
SESSION = """
import contextlib, io, json, sys
from teola_plugin import EnginePool
from teola_plugin.cli.main import main
from teola_plugin.requests.payloads import EmbedText
from teola_plugin.graph import PrimitiveKind

def teola(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), err.getvalue()

path, changed = sys.argv[1:]
seen = {
    "again": teola("up", path),
    "status": teola("status", "--pool", "commands", "--json"),
    "scale": teola("scale", "llm", "3", "--pool", "commands"),
    "table": teola("status", "--pool", "commands"),
    "changed": teola("up", changed),
}
with EnginePool.connect(pool="commands") as pool:
    seen["app"] = len(pool.call(PrimitiveKind.EMBEDDING, "embedder", [EmbedText("x")]).result(60)[0])
print(json.dumps(seen))
"""
"""Several commands, and an app, in one process: each start of Ray's Python takes seconds."""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    return {**{key: value for key, value in os.environ.items() if not key.startswith("RAY_")}, **own}


def teola(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "teola_plugin.cli.main", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)


def at_once(*commands: tuple[dict[str, str], tuple[str, ...]]) -> list[subprocess.CompletedProcess[str]]:
    """Run independent commands in parallel, each with its environment, because most of their time is imports."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda command: teola(command[0], *command[1]), commands))


def rays() -> set[int]:
    """Return the processes of Ray on this machine."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if "ray::" in words or "raylet" in words or "gcs_server" in words:
            found.add(process.pid)
    return found


def shared_memory() -> set[str]:
    """Return the files in shared memory, without those of other tests' databases and scikit-learn's workers."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("PostgreSQL", "sem.loky"))}


def open_sockets(pid: int) -> list[tuple[str, int]]:
    """Return the addresses at which the process and its descendants listen."""
    one = psutil.Process(pid)
    found = [c for p in (one, *one.children(recursive=True)) for c in p.net_connections("inet")]
    return [(c.laddr.ip.removeprefix("::ffff:"), c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN]


def closed_to_others(env: dict[str, str], cache: Path) -> None:
    """Check that everything listens on this machine alone, without a Ray Client server, and requires a token."""
    [record] = [json.loads(path.read_text()) for path in (cache / "teola-plugin" / "pools").glob("*.json")]
    sockets = open_sockets(record["pid"])
    assert len(sockets) >= 8  # GCS, raylet, object manager, agents, a worker for each actor
    assert {ip for ip, _ in sockets} == {"127.0.0.1"} and 10001 not in {port for _, port in sockets}
    token = Path(record["token"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and len(token.read_text()) == 64
    stranger = {**env, "XDG_CACHE_HOME": str(cache / "another")}
    command = ("status", "--pool", "commands", "--address", record["address"])
    refused, accepted = at_once((stranger, command), ({**stranger, "RAY_AUTH_TOKEN": token.read_text()}, command))
    assert refused.returncode == 1 and "RAY_AUTH_TOKEN" in refused.stderr and "asks for a token" in refused.stderr
    assert accepted.returncode == 0, accepted.stderr


def test_pool_commands_work_from_up_to_down(env: dict[str, str], tmp_path: Path, slow_services: Any) -> None:
    slow_services.settle()  # a server that starts during the test would change the shared memory
    before, shared = rays(), shared_memory()
    path = tmp_path / "pool.yaml"
    path.write_text(YAML)
    changed = tmp_path / "changed.yaml"
    changed.write_text(YAML.replace("replicas: 2", "replicas: 1"))
    assert teola(env, "up", str(path)).returncode == 0
    try:
        command = [sys.executable, "-c", SESSION, str(path), str(changed)]
        used = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
        assert used.returncode == 0, used.stderr
        seen = json.loads(used.stdout)
        assert seen["again"][0] == 0  # it is there
        found = json.loads(seen["status"][1])
        assert [(one["engine"], len(one["replicas"])) for one in found] == [("embedder", 1), ("llm", 2)]
        assert seen["scale"][1].strip() == "llm: 3 replicas"
        assert seen["table"][0] == 0 and "embedder" in seen["table"][1]
        assert seen["changed"][0] == 2 and "other settings" in seen["changed"][2]
        assert seen["app"] == 32
        closed_to_others(env, tmp_path / "cache")
    finally:
        ended = teola(env, "down", "--pool", "commands")
    assert ended.returncode == 0, ended.stderr
    assert not rays() - before
    assert shared_memory() <= shared


def test_invalid_commands_are_reported_with_a_hint(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text("engines:\n  llm: {kind: vllm}\n")
    faulty, nothing, client, both = at_once(
        (env, ("up", str(path))),
        (env, ("status", "--address", "127.0.0.1:1")),
        (env, ("status", "--address", "ray://127.0.0.1:10001")),
        (env, ("up", str(good(tmp_path)), "--address", "127.0.0.1:1", "--host", "10.0.0.1")),
    )
    assert faulty.returncode == 2 and f"{path}, line 2" in faulty.stderr
    assert nothing.returncode == 1 and "teola up" in nothing.stderr
    assert client.returncode == 2 and "6379" in client.stderr
    assert both.returncode == 2 and "either --address or --host" in both.stderr


def addresses() -> list[str]:
    """Return this machine's IPv4 addresses."""
    return [one.address for found in psutil.net_if_addrs().values() for one in found if one.family == socket.AF_INET]


def good(folder: Path) -> Path:
    path = folder / "good.yaml"
    path.write_text(YAML)
    return path


@pytest.mark.long
def test_cluster_on_another_address_requires_its_token(env: dict[str, str], tmp_path: Path) -> None:
    """Ray binds all interfaces then: no option of it makes that fewer. Still no Ray Client server."""
    here = next((ip for ip in addresses() if not ip.startswith("127.")), "")
    if not here:
        pytest.skip("this machine has no address but loopback")
    assert teola(env, "up", str(good(tmp_path)), "--host", here).returncode == 0
    try:
        record = json.loads((tmp_path / "cache/teola-plugin/pools/commands.json").read_text())
        assert record["address"].startswith(f"{here}:")
        assert 10001 not in {port for _, port in open_sockets(record["pid"])}
        stranger = {**env, "XDG_CACHE_HOME": str(tmp_path / "another"), "RAY_AUTH_MODE": "disabled"}
        refused = teola(stranger, "status", "--pool", "commands", "--address", record["address"])
        assert refused.returncode == 1 and "RAY_AUTH_TOKEN" in refused.stderr
        assert teola(env, "status", "--pool", "commands").returncode == 0
    finally:
        assert teola(env, "down", "--pool", "commands").returncode == 0


@pytest.mark.long
def test_cluster_runs_without_a_token_if_disabled(env: dict[str, str], tmp_path: Path) -> None:
    open_to_all = {**env, "RAY_AUTH_MODE": "disabled"}
    assert teola(open_to_all, "up", str(good(tmp_path))).returncode == 0
    try:
        assert teola(open_to_all, "status", "--pool", "commands").returncode == 0
        record = json.loads((tmp_path / "cache/teola-plugin/pools/commands.json").read_text())
        assert record["token"] == "" and {ip for ip, _ in open_sockets(record["pid"])} == {"127.0.0.1"}
    finally:
        assert teola(open_to_all, "down", "--pool", "commands").returncode == 0


def test_calibrate_command_measures_one_engine(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text("engines: {embedder: {kind: embedding}, other: {kind: fake, options: {like: llm}}}\n")
    calibrate = ("calibrate", str(path), "--engine")
    done, wrong = at_once((env, (*calibrate, "embedder", "--json")), (env, (*calibrate, "embeder")))
    assert done.returncode == 0, done.stderr
    profile = json.loads(done.stdout)["embedder"]
    assert len(profile["curves"]["embedding"]) >= 1 and profile["max_efficient_batch"] >= 1
    assert list((tmp_path / "cache").rglob("embedder-*.json"))
    assert wrong.returncode == 2 and "embedder" in wrong.stderr
