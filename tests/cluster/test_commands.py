"""`teola up`, `status`, `scale`, `down`, `calibrate`: as a person uses them, with a Ray cluster of the pool's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
YAML = """\
name: commands
engines:
  embedder: {kind: fake}
  llm: {kind: fake, instances: 2}
"""
SESSION = """
import contextlib, io, json, sys
from teola_plugin import EnginePool
from teola_plugin.cli.main import main
from teola_plugin.engines.payloads import EmbedText
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
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    return {**{key: value for key, value in os.environ.items() if not key.startswith("RAY_")}, **own}


def teola(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "teola_plugin.cli.main", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)


def rays() -> set[int]:
    """Processes of Ray on this machine."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if "ray::" in words or "raylet" in words or "gcs_server" in words:
            found.add(process.pid)
    return found


def test_a_pool_from_up_to_down(env: dict[str, str], tmp_path: Path) -> None:
    before, shared = rays(), set(os.listdir("/dev/shm"))
    path = tmp_path / "pool.yaml"
    path.write_text(YAML)
    changed = tmp_path / "changed.yaml"
    changed.write_text(YAML.replace("instances: 2", "instances: 1"))
    assert teola(env, "up", str(path)).returncode == 0
    try:
        command = [sys.executable, "-c", SESSION, str(path), str(changed)]
        used = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
        assert used.returncode == 0, used.stderr
        seen = json.loads(used.stdout)
        assert seen["again"][0] == 0  # it is there
        found = json.loads(seen["status"][1])
        assert [(one["engine"], len(one["instances"])) for one in found] == [("embedder", 1), ("llm", 2)]
        assert seen["scale"][1].strip() == "llm: 3 instances"
        assert seen["table"][0] == 0 and "embedder" in seen["table"][1]
        assert seen["changed"][0] == 1 and "other settings" in seen["changed"][2]
        assert seen["app"] == 32
    finally:
        ended = teola(env, "down", "--pool", "commands")
    assert ended.returncode == 0, ended.stderr
    assert not rays() - before
    assert set(os.listdir("/dev/shm")) <= shared


def test_faults_are_named(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text("engines:\n  llm: {kind: vllm}\n")
    faulty = teola(env, "up", str(path))
    assert faulty.returncode == 1 and f"{path}, line 2" in faulty.stderr
    nothing = teola(env, "status", "--address", "127.0.0.1:1")
    assert nothing.returncode == 1 and "teola up" in nothing.stderr
    client = teola(env, "status", "--address", "ray://127.0.0.1:10001")
    assert client.returncode == 1 and "6379" in client.stderr


def test_calibrating(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text("engines: {embedder: {kind: embedding}, other: {kind: fake, options: {like: llm}}}\n")
    done = teola(env, "calibrate", str(path), "--engine", "embedder", "--json")
    assert done.returncode == 0, done.stderr
    profile = json.loads(done.stdout)["embedder"]
    assert len(profile["curves"]["embedding"]) >= 1 and profile["max_efficient_batch"] >= 1
    assert list((tmp_path / "cache").rglob("embedder-*.json"))
    wrong = teola(env, "calibrate", str(path), "--engine", "embeder")
    assert wrong.returncode == 1 and "embedder" in wrong.stderr
