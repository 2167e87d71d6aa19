"""Tests of the tutorial docs/serve-many-apps.md from an empty folder, and of the YAML settings in the documents."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.documents import DOCUMENTS, ROOT, code

from teola_plugin import EnginePool, accelerate
from teola_plugin.cli.main import main
from teola_plugin.engines import fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.server.settings import ServiceConfig

TUTORIAL = ROOT / "docs" / "serve-many-apps.md"
ADDRESS = "http://127.0.0.1:8000"
"""The address of the server in the tutorial; the test takes a free port."""


def block(language: str, mark: str) -> str:
    """Return the one block of the tutorial in this language that contains the mark."""
    blocks = re.findall(rf"(?ms)^```{language}\n(.*?)^```$", TUTORIAL.read_text())
    [found] = [text for text in blocks if mark in text]
    return found


def make_key(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Return a new key and its hash, as `teola key` prints them."""
    assert main(["key", name]) == 0
    printed = capsys.readouterr().out
    [key_hash] = re.findall(r'hash: "(sha256:[0-9a-f]{64})"', printed)
    return printed.splitlines()[0], key_hash


@dataclass(frozen=True)
class Platform:
    """The running server of the tutorial, and the keys of its teams."""

    url: str
    first_line: str
    folder: Path
    keys: dict[str, str]

    def get(self, path: str, team: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers=self._headers(team), trust_env=False, timeout=30)

    def ask(self, app: str, text: str, team: str) -> httpx.Response:
        body: dict[str, Any] = {"model": app, "messages": [{"role": "user", "content": text}]}
        address = f"{self.url}/v1/chat/completions"
        return httpx.post(address, json=body, headers=self._headers(team), trust_env=False, timeout=60)

    def _headers(self, team: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[team]}"}


@pytest.fixture
def platform(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Platform]:
    """Write the tutorial's files into an empty folder, and start its server."""
    settings, keys = block("yaml", "name: platform"), {}
    for name in re.findall(r"\{name: ([\w-]+), hash", settings):
        keys[name], key_hash = make_key(name, capsys)
        settings = settings.replace("sha256:...", key_hash, 1)
    [apps] = code(TUTORIAL)
    (tmp_path / "apps.py").write_text(apps)
    (tmp_path / "pool.yaml").write_text(settings)
    command = [sys.executable, "-m", "teola_plugin.cli.main", "serve", "pool.yaml", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first_line = process.stdout.readline().strip()
        url = first_line.rpartition(" ")[2]
        try:
            assert url.startswith("http://"), process.communicate(timeout=60)
            yield Platform(url, first_line, tmp_path, keys)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
    assert process.returncode == 0


def test_serve_tutorial_runs_from_an_empty_folder(platform: Platform) -> None:
    """One server for all steps, since it takes seconds to start."""
    printed = platform.first_line.replace(platform.url, ADDRESS)
    assert f"`{printed}`" in TUTORIAL.read_text()

    script = block("text", "SUPPORT_KEY").replace(ADDRESS, platform.url)
    (platform.folder / "support_team.py").write_text(script)
    environment = {**os.environ, "SUPPORT_KEY": platform.keys["support-team"], "NO_PROXY": "127.0.0.1"}
    ran = subprocess.run(
        [sys.executable, "support_team.py"],
        cwd=platform.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()

    models = platform.get("/v1/models", "legal-team").json()["data"]
    assert [one["id"] for one in models] == ["review"]
    assert platform.ask("support", "How do I return a parcel?", "legal-team").status_code == 404
    assert platform.ask("review", "The supplier may change prices at any time.", "legal-team").status_code == 200

    metrics = platform.get("/metrics", "operator").text
    assert re.search(r'teola_queries_ended_total\{app="support",.*\} 1\.0', metrics)
    assert re.search(r'teola_queries_ended_total\{app="review",.*\} 1\.0', metrics)
    assert re.search(r'teola_tokens_total\{app="review",', metrics)
    assert platform.get("/metrics", "legal-team").status_code == 403


def test_parts_of_the_tutorial_app_run_concurrently() -> None:
    names: dict[str, Any] = {}
    [apps] = code(TUTORIAL)
    exec(apps, names)

    with EnginePool.local(fake_engines(rtx3090())) as pool:
        fast = accelerate(names["review"](pool), pool=pool)
        fast.invoke({"text": "The supplier may change prices at any time."})
        trace = fast.last_trace()

    decodings = sorted((span for span in trace.spans if span.kind == "DECODING"), key=lambda span: span.begin)
    assert len(decodings) == 3
    assert decodings[1].begin < decodings[0].done
    assert decodings[2].begin >= decodings[1].done


def yaml_blocks(document: Path) -> list[str]:
    return re.findall(r"(?ms)^```yaml\n(.*?)^```$", document.read_text())


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if yaml_blocks(path)], ids=lambda path: path.name)
def test_settings_shown_in_documents_are_accepted(document: Path) -> None:
    for text in yaml_blocks(document):
        for number in range(text.count("sha256:...")):
            text = text.replace("sha256:...", f"sha256:{number:064x}", 1)
        if not re.search(r"(?m)^(engines|apps|langgraph):", text):
            text = f"engines: {{llm: {{kind: fake}}}}\n{text}"
        ServiceConfig.parse(text, document.name)
