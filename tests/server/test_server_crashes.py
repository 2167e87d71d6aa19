"""Tests of servers that are killed with queries under way, and of others on the same store, with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
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
KINDS = ("slow", "pure", "writing", "steps", "asking", "flow", "code")
"""What is asked: an engine, an app that may be repeated, one that may write, a graph, a graph that stops to ask,
a workflow without code of its user's, and one with a function."""
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
        "flow": {"object": "support.stopping_graphs:pure_workflow"},
        "code": {"object": "support.stopping_graphs:workflow_with_code"},
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
    """Return a folder that PostgreSQL's user can enter. If the tests run as root, PostgreSQL runs as another user."""
    with tempfile.TemporaryDirectory(prefix="teola-server-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextmanager
def server(folder: Path, stored: dict[str, Any], seconds: float, end: signal.Signals) -> Iterator[TeolaClient]:
    """Run a process of `teola serve` whose apps and slow engine take this long. Send it the signal at the end."""
    pool = json.loads(json.dumps(POOL))
    pool["engines"]["slow"]["options"]["seconds"] = seconds
    pool["server"] = {"port": 0, "log": "off", "drain": 5, **stored}
    (folder / "pool.yaml").write_text(json.dumps({"name": folder.name, **pool}))
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"TEOLA_TEST_NOTES": str(folder / "notes"), "TEOLA_TEST_SECONDS": str(seconds), "PYTHONPATH": path}
    command = [sys.executable, "-m", "teola_plugin.cli.main", "serve", "pool.yaml"]
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **environment}
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
    """Count the runs of each node, by `name text`."""
    return Counter((folder / "notes").read_text().splitlines())


def killed(folder: Path, stored: dict[str, Any], per_kind: int) -> None:
    """Kill a server with `per_kind` running queries of each kind, and start another one.

    Check that each query is finished, started again, or reported as lost.
    """
    with server(folder, stored, 60, signal.SIGKILL) as client:
        done = client.wait(client.submit("llm", "before").id)
        submitted = {(kind, i): client.submit(kind, f"{kind} {i}") for kind in KINDS for i in range(per_kind)}
        started = {kind: 0 for kind in KINDS}
        while any(count < per_kind for count in started.values()):  # all are as far as they get
            now = [client.get(one.id) for one in submitted.values()]
            ran = lines(folder)
            started = Counter(one.model for one in now if one.status in ("running", "waiting"))
            started["steps"] = sum(ran[f"work steps {i}"] for i in range(per_kind))
            started["code"] = sum(ran[f"write code {i}"] for i in range(per_kind))
            started["asking"] = sum(one.status == "waiting" for one in now)
        last_ids = {key: next(iter(client.events(one.id))).id for key, one in submitted.items()}
    with server(folder, stored, 0.01, signal.SIGTERM) as client:
        assert client.get(done.id).text == done.text
        queries = {key: client.wait(one.id) for key, one in submitted.items()}
        for key, one in queries.items():
            events = list(client.events(one.id, last=last_ids[key]))
            assert events[0].kind == "reset"  # what was heard of the first run is void, and not gone on with
            assert events[-1].kind == one.status
        for i in range(per_kind):
            client.resume(queries["asking", i].id, "yes")
            assert client.wait(queries["asking", i].id).text == f"asking {i}: yes"
    check(queries, lines(folder), per_kind)


def check(results: dict[tuple[str, int], SubmittedQuery], ran: Counter[str], per_kind: int) -> None:
    statuses = {kind: {one.status for (of, _), one in results.items() if of == kind} for kind in KINDS}
    assert statuses == {
        "slow": {"done"},
        "pure": {"done"},
        "writing": {"interrupted"},
        "steps": {"done"},
        "asking": {"waiting"},
        "flow": {"done"},
        "code": {"interrupted"},
    }
    for i in range(per_kind):
        assert ran[f"write pure {i}"] == 2  # said to write nothing
        assert ran[f"write writing {i}"] == ran[f"write code {i}"] == 1  # at most once
        assert (ran[f"plan steps {i}"], ran[f"work steps {i}"], ran[f"answer steps {i}"]) == (1, 2, 1)
        assert (ran[f"plan asking {i}"], ran[f"answer asking {i}"]) == (1, 1)


def test_killed_server_loses_no_query(tmp_path: Path, postgres_dsn: str) -> None:
    killed(tmp_path, {"store": postgres_dsn}, 2)


@pytest.mark.long
def test_killed_server_with_embedded_store_loses_no_query(tmp_path: Path, open_folder: Path) -> None:
    """A hundred queries; its PostgreSQL goes with it."""
    killed(tmp_path, {"data": str(open_folder / "data")}, 15)


async def test_second_server_waits_until_the_first_has_ended(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second server does not run again what the first one runs. It takes over when the first has ended."""
    name = f"pool {time.monotonic_ns()}"
    one, other = (store.PostgresStore(postgres_dsn, name) for _ in range(2))
    elsewhere = store.PostgresStore(postgres_dsn, f"{name} too")
    await one.open()
    try:
        await elsewhere.open()
        await elsewhere.close()
        monkeypatch.setattr(store, "_LOCK_TIMEOUT_S", 0.3)
        with pytest.raises(EngineUnavailable, match="another server"):
            await other.open()
        monkeypatch.setattr(store, "_LOCK_TIMEOUT_S", 20)
        opening = asyncio.create_task(other.open())
        await asyncio.sleep(0.2)
        assert not opening.done()
    finally:
        await one.close()
    await opening
    await other.close()
