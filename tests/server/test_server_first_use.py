"""Tests that the commands printed by `make serve` run as they are, and that Ctrl-C leaves nothing behind."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from teola_plugin.cli.demo.command import exiting_on_sigterm
from teola_plugin.cli.serve import request_commands
from tests.support.service import until

ROOT = Path(__file__).parents[2]
EXAMPLE = "examples/service/pool.yaml"


def test_example_commands_quote_any_text() -> None:
    text = """Who's "there"? $HOME \\ é"""
    by_curl, by_client = request_commands("http://127.0.0.1:1", "my/app", text, has_keys=True)
    body = json.loads(shlex.split(by_curl)[-1])
    assert body == {"model": "my/app", "messages": [{"role": "user", "content": text}]}
    assert "$TEOLA_API_KEY" in by_curl
    code = shlex.split(by_client)[-1]
    compile(code, "command", "exec")
    assert json.dumps(text) in code


def test_make_serve_serves_the_example() -> None:
    assert f"serve {EXAMPLE} " in (ROOT / "Makefile").read_text()


STUB = """#!{python}
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
pathlib.Path(r"{file}.new").write_text(str(os.getpid()))
os.replace(r"{file}.new", r"{file}")
time.sleep(60)
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
@pytest.mark.parametrize("target", ["serve", "demo"])
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_signal_to_make_ends_the_command_of_its_recipe(tmp_path: Path, target: str, end: signal.Signals) -> None:
    command_id = tmp_path / "pid"
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(STUB.format(python=sys.executable, file=command_id))
    python.chmod(0o755)
    (tmp_path / "venv/.ready").touch()
    make = ["make", "-s", target, f"VENV={tmp_path / 'venv'}"]
    with subprocess.Popen(make, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL) as process:
        until(command_id.exists)
        command = psutil.Process(int(command_id.read_text()))

        process.send_signal(end)

        process.wait(20)
        until(lambda: not command.is_running())


def test_sigterm_runs_the_cleanup_of_the_demo() -> None:
    closed = []

    with pytest.raises(SystemExit) as exit, exiting_on_sigterm():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            closed.append("server")

    assert exit.value.code == 128 + signal.SIGTERM
    assert closed == ["server"]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a folder that PostgreSQL's user can enter. If the tests run as root, PostgreSQL runs as another user."""
    with tempfile.TemporaryDirectory(prefix="teola-server-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.postgres
@pytest.mark.timeout(600)
def test_commands_printed_by_serve_work(tmp_path: Path, open_folder: Path) -> None:
    """On the bundled models; the server's folder and port are its own here, for others may run."""
    pool = yaml.safe_load((ROOT / EXAMPLE).read_text())
    pool["server"] |= {"port": 0, "data": str(open_folder / "data")}
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(pool))
    command = [sys.executable, "-m", "teola_plugin.cli.main", "serve", str(tmp_path / "pool.yaml")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        _, by_curl, by_client, page = (process.stdout.readline().strip() for _ in range(4))
        started = [process.pid, *(one.pid for one in psutil.Process(process.pid).children(recursive=True))]
        reply = json.loads(_run(by_curl))
        assert "nearest enclosing loop" in reply["choices"][0]["message"]["content"]
        assert reply["usage"]["prompt_tokens"] > reply["usage"]["completion_tokens"] > 0
        assert "nearest enclosing loop" in _run(by_client)
        assert "<!doctype html>" in httpx.get(page.split()[-1], trust_env=False).text
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert "Traceback" not in (tmp_path / "log").read_text()
    _all_end(started)


def _all_end(processes: list[int]) -> None:
    """Wait until all processes have ended. Those that watch their parent end a moment after it."""
    until(lambda: not any(map(psutil.pid_exists, processes)), 15)


def _run(command: str) -> str:
    return subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.postgres
@pytest.mark.parametrize("end", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_stopping_the_server_stops_its_processes(tmp_path: Path, open_folder: Path, end: signal.Signals) -> None:
    """A PostgreSQL of its own, here."""
    pool = {"engines": {"llm": {"kind": "fake"}}, "server": {"port": 0, "data": str(open_folder / "data")}}
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(pool))
    command = [sys.executable, "-m", "teola_plugin.cli.main", "serve", "pool.yaml"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        started = [process.pid, *(one.pid for one in psutil.Process(process.pid).children(recursive=True))]
        assert len(started) > 1
        process.send_signal(end)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == (0 if end is signal.SIGTERM else 130)
    assert "Traceback" not in errors
    _all_end(started)
