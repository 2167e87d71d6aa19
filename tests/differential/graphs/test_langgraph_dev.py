"""An accelerated graph as an exported graph of `langgraph dev`: the server loads, copies and runs it as any other.

With `TEOLA_LANGGRAPH=/path/to/langgraph`, the command of an environment that has `langgraph-cli[inmem]`, the server
itself runs too; else what it does with graphs is done here.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.pregel import Pregel
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command
from support.langgraph_project import graph_of_a_run, load_graph, write_project

QUESTION = {"question": "oats,hay,grass"}
NOTES = [f"answer to Write about {topic}" for topic in ("oats", "hay", "grass")]
ACCELERATED = ("graph", "make_graph", "make_graph_for_a_while")


@pytest.fixture
def agent_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_project(tmp_path, {"agent": "./src/agent.py:graph"})
    monkeypatch.syspath_prepend(tmp_path / "src")
    return tmp_path / "src" / "agent.py"


def model_of(agent_file: Path) -> Any:
    name = str(agent_file).replace("/", "__").replace(".py", "").replace(" ", "_").lstrip(".")
    return sys.modules[name].model


async def run_on_server(agent_file: Path, variable: str) -> dict[str, Any]:
    """Return all that a client of the server sees of one run, and the prompts that the model got."""
    checkpointer, store = InMemorySaver(), InMemoryStore()
    value = load_graph(agent_file, variable)
    config: Any = {"configurable": {"thread_id": "t1"}}
    async with graph_of_a_run(value, "agent", checkpointer, store) as graph:
        modes = ["updates", "values", "messages"]
        chunks = [chunk async for chunk in graph.astream(QUESTION, config, stream_mode=modes)]
        state = await graph.aget_state(config)
        history = [one.values async for one in graph.aget_state_history(config)]
    return {
        "modes": [mode for mode, _ in chunks],
        "updates": [chunk for mode, chunk in chunks if mode == "updates"],
        "state": state.values,
        "next": state.next,
        "history": history,
        "prompts": model_of(agent_file).prompts,
        "schemas": [graph.get_input_jsonschema(), graph.get_output_jsonschema()],
        "drawn": sorted(graph.get_graph(xray=True).nodes),
        "stored": len([one async for one in checkpointer.alist(config)]),
    }


@pytest.mark.parametrize("variable", ACCELERATED)
async def test_client_of_langgraph_server_sees_the_originals_run(agent_file: Path, variable: str) -> None:
    expected = await run_on_server(agent_file, "original")

    seen = await run_on_server(agent_file, variable)

    assert seen == expected
    assert seen["state"]["notes"] == NOTES


@pytest.mark.parametrize(("variable", "calls_at_once"), [("original", 1), *((name, 3) for name in ACCELERATED)])
async def test_graph_copied_by_langgraph_server_prefetches(agent_file: Path, variable: str, calls_at_once: int) -> None:
    await run_on_server(agent_file, variable)

    assert model_of(agent_file).most_at_once == calls_at_once


async def test_server_copy_has_server_parts_and_exported_graph_is_unchanged(agent_file: Path) -> None:
    exported = load_graph(agent_file, "graph")
    checkpointer, store = InMemorySaver(), InMemoryStore()

    async with graph_of_a_run(exported, "agent", checkpointer, store) as graph:
        assert isinstance(exported, Pregel)
        assert isinstance(graph, type(exported))
        assert (graph.checkpointer, graph.store, graph.name) == (checkpointer, store, "agent")
        configured = graph.with_config({"recursion_limit": 7})
        await configured.ainvoke(QUESTION, {"configurable": {"thread_id": "t2"}})

    assert (exported.checkpointer, exported.store, exported.name) == (None, None, "LangGraph")
    assert model_of(agent_file).most_at_once == 3


async def test_interrupted_run_on_langgraph_server_resumes(agent_file: Path) -> None:
    exported, checkpointer = load_graph(agent_file, "reviewed"), InMemorySaver()
    config: Any = {"configurable": {"thread_id": "t1"}}

    async with graph_of_a_run(exported, "agent", checkpointer, None) as graph:
        stopped = await graph.ainvoke(QUESTION, config)
    async with graph_of_a_run(exported, "agent", checkpointer, None) as graph:  # each run has a copy of its own
        done = await graph.ainvoke(Command(resume="yes"), config)

    assert [one.value for one in stopped["__interrupt__"]] == ["Is that right?"]
    assert done["answer"] == "yes"
    assert model_of(agent_file).prompts == sorted(f"Write about {topic}" for topic in ("oats", "hay", "grass"))


# ------------------------------------------------------------ the server itself

COMMAND = os.environ.get("TEOLA_LANGGRAPH", "")


@contextmanager
def langgraph_dev(folder: Path) -> Iterator[str]:
    """Run the in-memory server in this folder. Yield its address."""
    root = Path(__file__).parents[3]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}", "LANGSMITH_TRACING": "false"}
    command = [COMMAND, "dev", "--no-browser", "--no-reload", "--port", str(port)]
    with (folder / "dev.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.skipif(not COMMAND, reason="TEOLA_LANGGRAPH names no langgraph command with the extra inmem")
def test_langgraph_dev_server_runs_accelerated_graphs(tmp_path: Path) -> None:
    import httpx

    names = ("original", "graph", "make_graph", "make_graph_later", "make_graph_for_a_while")
    write_project(tmp_path, {name: f"./src/agent.py:{name}" for name in names})
    with langgraph_dev(tmp_path) as url, httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
        until = time.monotonic() + 60
        while time.monotonic() < until and not _is_up(http):
            time.sleep(0.5)
        replies = {}
        for name in names:
            thread = http.post("/threads", json={}).json()["thread_id"]
            body = {"assistant_id": name, "input": QUESTION, "stream_mode": ["updates", "values", "messages-tuple"]}
            stream = http.post(f"/threads/{thread}/runs/stream", json=body).text
            state = http.get(f"/threads/{thread}/state").json()
            events = [line for line in stream.splitlines() if line.startswith("event:")]
            replies[name] = json.dumps([events, state["values"], state["next"]])

    assert json.loads(replies["graph"])[1]["notes"] == NOTES
    assert set(replies.values()) == {replies["original"]}


def _is_up(http: Any) -> bool:
    import httpx

    try:
        return bool(http.get("/ok").status_code == 200)
    except httpx.TransportError:
        return False
