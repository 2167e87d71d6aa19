"""What `make serve` prints can be run as it stands, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import json
import shlex
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

from teola_plugin.cli.serve.command import commands

ROOT = Path(__file__).parents[2]
EXAMPLE = "examples/service/pool.yaml"


def test_commands_hold_any_text() -> None:
    text = """Who's "there"? $HOME \\ é"""
    by_curl, by_client = commands("http://127.0.0.1:1", "my/app", text, keys=True)
    asked = json.loads(shlex.split(by_curl)[-1])
    assert asked == {"model": "my/app", "messages": [{"role": "user", "content": text}]}
    assert "$TEOLA_API_KEY" in by_curl
    code = shlex.split(by_client)[-1]
    compile(code, "command", "exec")
    assert json.dumps(text) in code


def test_make_serve_serves_the_example() -> None:
    assert f"serve {EXAMPLE} " in (ROOT / "Makefile").read_text()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that PostgreSQL's user can reach, too: as root, it runs as somebody else."""
    with tempfile.TemporaryDirectory(prefix="teola-server-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.postgres
@pytest.mark.timeout(600)
def test_what_is_printed_works(tmp_path: Path, open_folder: Path) -> None:
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
        told = json.loads(_run(by_curl))
        assert "nearest enclosing loop" in told["choices"][0]["message"]["content"]
        assert told["usage"]["prompt_tokens"] > told["usage"]["completion_tokens"] > 0
        assert "nearest enclosing loop" in _run(by_client)
        assert "<!doctype html>" in httpx.get(page.split()[-1], trust_env=False).text
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert [pid for pid in started if psutil.pid_exists(pid)] == []


def _run(command: str) -> str:
    return subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout
