"""Runs the tutorial docs/serve-many-apps.md in an empty folder, with an interpreter that the caller chooses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from support.documents import ROOT, code

SERVE_TUTORIAL = ROOT / "docs" / "serve-many-apps.md"
_ADDRESS = "http://127.0.0.1:8000"
"""The address of the server in the tutorial; a test takes a free port."""


@dataclass(frozen=True)
class _Platform:
    """The running server of the tutorial, and the keys of its teams."""

    url: str
    first_line: str
    keys: Mapping[str, str]

    def get(self, path: str, team: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers=self._headers(team), trust_env=False, timeout=30)

    def ask(self, app: str, text: str, team: str) -> httpx.Response:
        body: dict[str, Any] = {"model": app, "messages": [{"role": "user", "content": text}]}
        address = f"{self.url}/v1/chat/completions"
        return httpx.post(address, json=body, headers=self._headers(team), trust_env=False, timeout=60)

    def _headers(self, team: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[team]}"}


def check_serve_tutorial(python: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Follow the tutorial in an empty folder with the interpreter `python`, and check each answer that it promises.

    One server serves all steps, since it takes seconds to start.
    """
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    full_environment = {**inherited, "NO_PROXY": "127.0.0.1", **environment}
    with _running_platform(python, folder, full_environment) as platform:
        printed = platform.first_line.replace(platform.url, _ADDRESS)
        assert f"`{printed}`" in SERVE_TUTORIAL.read_text()

        (folder / "support_team.py").write_text(_block("text", "SUPPORT_KEY").replace(_ADDRESS, platform.url))
        team_environment = {**full_environment, "SUPPORT_KEY": platform.keys["support-team"]}
        assert _output([python, "support_team.py"], folder, team_environment).strip()

        models = platform.get("/v1/models", "legal-team").json()["data"]
        assert [one["id"] for one in models] == ["review"]
        assert platform.ask("support", "How do I return a parcel?", "legal-team").status_code == 404
        assert platform.ask("review", "The supplier may change prices at any time.", "legal-team").status_code == 200

        metrics = platform.get("/metrics", "operator").text
        assert re.search(r'teola_queries_ended_total\{app="support",.*\} 1\.0', metrics)
        assert re.search(r'teola_queries_ended_total\{app="review",.*\} 1\.0', metrics)
        assert re.search(r'teola_tokens_total\{app="review",', metrics)
        assert platform.get("/metrics", "legal-team").status_code == 403


@contextmanager
def _running_platform(python: str, folder: Path, environment: Mapping[str, str]) -> Iterator[_Platform]:
    """Write the tutorial's files into the folder, and run its server."""
    teola = [python, "-m", "teola_plugin.cli.main"]
    settings, keys = _block("yaml", "name: platform"), dict[str, str]()
    for name in re.findall(r"\{name: ([\w-]+), hash", settings):
        printed = _output([*teola, "key", name], folder, environment)
        [key_hash] = re.findall(r'hash: "(sha256:[0-9a-f]{64})"', printed)
        keys[name] = printed.splitlines()[0]
        settings = settings.replace("sha256:...", key_hash, 1)
    [apps] = code(SERVE_TUTORIAL)
    (folder / "apps.py").write_text(apps)
    (folder / "pool.yaml").write_text(settings)
    command = [*teola, "serve", "pool.yaml", "--port", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        first_line = process.stdout.readline().strip()
        url = first_line.rpartition(" ")[2]
        try:
            assert url.startswith("http://"), process.communicate(timeout=60)
            yield _Platform(url, first_line, keys)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
    assert process.returncode == 0


def _output(command: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Run a command in the folder, and return its standard output; fail if the command does."""
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def _block(language: str, mark: str) -> str:
    """Return the one block of the tutorial in this language that contains the mark."""
    blocks = re.findall(rf"(?ms)^```{language}\n(.*?)^```$", SERVE_TUTORIAL.read_text())
    [text] = [one for one in blocks if mark in one]
    return text
