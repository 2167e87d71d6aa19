"""Servers that are killed with queries under way, and others on the same store: real processes, a real database."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from teola_plugin.errors import EngineUnavailable
from teola_plugin.server.client import SubmittedQuery, TeolaClient
from teola_plugin.server.queries import store

TESTS = Path(__file__).parents[1]
KINDS = ("slow", "pure", "writing", "steps", "asking")
"""What is asked: an engine, an app that may be repeated, one that may write, a graph, a graph that stops to ask."""
POOL: dict[str, Any] = {
    "engines": {
        "llm": {"kind": "fake"},
        "slow": {"kind": "fake", "options": {"like": "llm", "seconds": 60}},
    },
    "apps": {
        "pure": {"object": "support.stopping_graphs:writing", "repeatable": True},
        "writing": {"object": "support.stopping_graphs:writing"},
        "steps": {"object": "support.stopping_graphs:steps", "checkpoints": True},
        "asking": {"object": "support.stopping_graphs:asking", "checkpoints": True},
    },
}
for _graph in ("steps", "asking"):
    POOL["apps"][_graph] |= {"input": "text", "output": "answer"}

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.skipif(not find_spec("langgraph.checkpoint.postgres"), reason="extra `checkpoints`"),
]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that PostgreSQL's user can reach, too: as root, it runs as somebody else."""
    with tempfile.TemporaryDirectory(prefix="teola-server-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextmanager
def server(folder: Path, kept: dict[str, Any], seconds: float, end: signal.Signals) -> Iterator[TeolaClient]:
    """A process of `teola serve`, whose apps and slow engine take so many seconds; it gets the signal at the end."""
    pool = json.loads(json.dumps(POOL))
    pool["engines"]["slow"]["options"]["seconds"] = seconds
    pool["server"] = {"port": 0, "log": "off", "drain": 5, **kept}
    (folder / "pool.yaml").write_text(json.dumps({"name": folder.name, **pool}))
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"TEOLA_TEST_NOTES": str(folder / "notes"), "TEOLA_TEST_SECONDS": str(seconds), "PYTHONPATH": path}
    command = [sys.executable, "-m", "teola_plugin.cli.main", "serve", "pool.yaml"]
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **own}
        )
    try:
        assert process.stdout is not None
        hello = process.stdout.readline().split()
        assert hello, (folder / "log").read_text()
        with TeolaClient(hello[-1], trust_env=False, timeout=60) as client:
            yield client
    finally:
        os.kill(process.pid, end)
        process.communicate(timeout=60)


def lines(folder: Path) -> Counter[str]:
    """How often each node ran, by `name text`."""
    return Counter((folder / "notes").read_text().splitlines())


def killed(folder: Path, kept: dict[str, Any], each: int) -> None:
    """So many queries of each kind under way, kill -9, another server: each is finished, begun again or reported."""
    with server(folder, kept, 60, signal.SIGKILL) as client:
        done = client.wait(client.submit("llm", "before").id)
        asked = {(kind, i): client.submit(kind, f"{kind} {i}") for kind in KINDS for i in range(each)}
        begun = {kind: 0 for kind in KINDS}
        while any(count < each for count in begun.values()):  # all are as far as they get
            now = [client.get(one.id) for one in asked.values()]
            ran = lines(folder)
            begun = Counter(one.model for one in now if one.status in ("running", "waiting"))
            begun["steps"] = sum(ran[f"work steps {i}"] for i in range(each))
            begun["asking"] = sum(one.status == "waiting" for one in now)
        heard = {key: next(iter(client.events(one.id))).id for key, one in asked.items()}
    with server(folder, kept, 0.01, signal.SIGTERM) as client:
        assert client.get(done.id).text == done.text
        found = {key: client.wait(one.id) for key, one in asked.items()}
        for key, one in found.items():
            told = list(client.events(one.id, last=heard[key]))
            assert told[0].kind == "reset"  # what was heard of the first run is void, and not gone on with
            assert told[-1].kind == one.status
        for i in range(each):
            client.resume(found["asking", i].id, "yes")
            assert client.wait(found["asking", i].id).text == f"asking {i}: yes"
    check(found, lines(folder), each)


def check(found: dict[tuple[str, int], SubmittedQuery], ran: Counter[str], each: int) -> None:
    ended = {kind: {one.status for (of, _), one in found.items() if of == kind} for kind in KINDS}
    assert ended == {
        "slow": {"done"},
        "pure": {"done"},
        "writing": {"interrupted"},
        "steps": {"done"},
        "asking": {"waiting"},
    }
    for i in range(each):
        assert ran[f"write pure {i}"] == 2  # said to write nothing
        assert ran[f"write writing {i}"] == 1  # at most once
        assert (ran[f"plan steps {i}"], ran[f"work steps {i}"], ran[f"answer steps {i}"]) == (1, 2, 1)
        assert (ran[f"plan asking {i}"], ran[f"answer asking {i}"]) == (1, 1)


def test_a_server_that_is_killed_loses_nothing(tmp_path: Path, postgres_dsn: str) -> None:
    killed(tmp_path, {"store": postgres_dsn}, 2)


@pytest.mark.long
def test_a_server_with_a_store_of_its_own_that_is_killed_loses_nothing(tmp_path: Path, open_folder: Path) -> None:
    """A hundred queries; its PostgreSQL goes with it."""
    killed(tmp_path, {"data": str(open_folder / "data")}, 20)


def test_one_server_at_a_time(tmp_path: Path, postgres_dsn: str) -> None:
    """What the first one runs is not begun again by a second one."""
    with server(tmp_path, {"store": postgres_dsn}, 60, signal.SIGTERM) as client:
        other = store.PostgresStore(postgres_dsn, tmp_path.name)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(EngineUnavailable, match="another server"):
            patch.setattr(store, "_PATIENCE", 0.3)
            asyncio.run(other.open())
        assert client.latest() == []
