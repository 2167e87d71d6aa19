"""Tests of `langgraph.json`: its graphs in `teola serve` and `teola compare`, and errors in the file."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.langgraph_project import write_project
from support.service import running_server

from teola_plugin.adapters.named_objects import LangGraphFile, load
from teola_plugin.cli.main import main
from teola_plugin.cli.serve import add_serve
from teola_plugin.errors import ConfigError, RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.server.settings import ServiceConfig

AGENT = "./src/agent.py"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give back what a `langgraph.json` changes in the process: variables, and where modules come from."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    variables = dict(os.environ)
    yield
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]


# ------------------------------------------------------------ serving


def served_config(config: ServiceConfig) -> Any:
    """Run a server as `teola serve` does with these settings; without a database."""
    apps = {name: one.model_dump() for name, one in config.with_graphs().apps.items()}
    return running_server(EnginePool.from_yaml(config), apps=apps)


def chat_with(http: Any, model: str, text: str = "oats") -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    reply: dict[str, Any] = http.post("/v1/chat/completions", json=body).json()
    return reply


def test_graphs_of_a_file_are_apps_on_their_own_models(tmp_path: Path) -> None:
    graphs = {"chat": {"path": f"{AGENT}:make_chat", "description": "It answers."}, "ready": f"{AGENT}:chat"}
    config = ServiceConfig.model_validate({"langgraph": str(write_project(tmp_path, graphs))})

    with served_config(config) as server, server.client() as http:
        models = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
        replies = [chat_with(http, name) for name in graphs]
        activity = http.get("/v1/activity").json()["data"]
        metrics = http.get("/metrics")

    assert sorted(models) == ["chat", "ready"]
    assert models["chat"]["description"] == "It answers."
    expected = " | ".join(f"answer to {topic}: oats" for topic in ("one", "two", "three"))
    assert [reply["choices"][0]["message"]["content"] for reply in replies] == [expected, expected]
    assert {one["app"] for one in activity} == {"chat", "ready"}
    assert metrics.status_code == 200


def test_calls_of_a_served_graph_are_prefetched(tmp_path: Path) -> None:
    file = write_project(tmp_path, {"chat": f"{AGENT}:chat"})
    model = load(f"{file}:chat").plain.nodes["answer_message"].bound.afunc.__globals__["model"]

    with served_config(ServiceConfig.model_validate({"langgraph": str(file)})) as server, server.client() as http:
        chat_with(http, "chat")

    assert model.most_at_once == 3


def test_accelerated_graph_is_served_unchanged(tmp_path: Path) -> None:
    file = write_project(tmp_path, {"agent": f"{AGENT}:graph"})
    config = ServiceConfig.model_validate({"langgraph": str(file)})

    with served_config(config) as server, server.client() as http:
        body = {"model": "agent", "inputs": {"question": "oats,hay"}}
        query = http.post("/v1/queries", json=body).json()
        done = http.get(f"/v1/queries/{query['id']}", params={"wait": 20}).json()

    assert done["status"] == "done"
    assert json.loads(done["answer"]["text"])["notes"] == [f"answer to Write about {one}" for one in ("oats", "hay")]


def test_pool_file_declares_graphs_with_engines_and_apps(tmp_path: Path) -> None:
    file = write_project(tmp_path, {"chat": f"{AGENT}:chat", "other": f"{AGENT}:make_chat"})
    settings = tmp_path / "pool.yaml"
    settings.write_text(
        f"engines: {{llm: {{factory: 'teola_plugin.engines.fake:FakeLLM'}}}}\nlanggraph: {file}\n"
        f"apps: {{chat: {{object: '{file}:chat', goal: 30}}}}\n"
    )

    config = ServiceConfig.read(settings).with_graphs()

    assert sorted(config.apps) == ["chat", "other"]
    assert config.apps["chat"].goal == 30
    with served_config(config) as server, server.client() as http:
        assert {one["id"] for one in http.get("/v1/models").json()["data"]} == {"llm", "chat", "other"}
        assert chat_with(http, "other")["choices"][0]["message"]["content"].startswith("answer to one")


def test_settings_of_the_documentation_keep_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "serve-apps.md").read_text()
    [snippet] = [block for block in re.findall(r"(?ms)^```yaml\n(.*?)^```$", text) if block.startswith("langgraph:")]
    write_project(tmp_path, {"agent": f"{AGENT}:reviewed"})
    monkeypatch.chdir(tmp_path)
    config = ServiceConfig.parse(snippet)

    with served_config(config) as server, server.client() as http:
        query = http.post("/v1/queries", json={"model": "agent", "inputs": {"question": "oats"}}).json()
        waiting = http.get(f"/v1/queries/{query['id']}", params={"wait": 20}).json()
        http.post(f"/v1/queries/{query['id']}/resume", json={"value": "yes"})
        done = http.get(f"/v1/queries/{query['id']}", params={"wait": 20}).json()

    assert [one["value"] for one in waiting["waiting"]["interrupts"]] == ["Is that right?"]
    assert done["answer"]["text"] == "yes"


def test_file_path_may_have_a_leading_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_project(tmp_path, {"chat": f"{AGENT}:chat"})
    monkeypatch.chdir(tmp_path)
    apps = {"chat": {"object": "langgraph.json:chat", "goal": 30}}

    config = ServiceConfig.model_validate({"langgraph": "./langgraph.json", "apps": apps}).with_graphs()

    assert config.apps["chat"].goal == 30


def test_duplicate_app_name_raises(tmp_path: Path) -> None:
    file = write_project(tmp_path, {"chat": f"{AGENT}:chat"})
    config = ServiceConfig.model_validate({"langgraph": str(file), "apps": {"chat": {"object": "other.module:chat"}}})

    with pytest.raises(ConfigError, match="'chat', and so has the pool's file"):
        config.with_graphs()


def test_empty_service_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to serve"):
        ServiceConfig.parse("name: empty")


def test_serve_command_serves_a_langgraph_file(tmp_path: Path) -> None:
    """In a process of its own, from another folder, with variables of the file."""
    write_project(tmp_path / "project", {"chat": f"{AGENT}:chat"}, env="./.env")
    (tmp_path / "project" / ".env").write_text("PROJECT_SETTING=1\n")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "XDG_DATA_HOME": str(tmp_path / "data")}
    command = [sys.executable, "-m", "teola_plugin.cli.main", "serve", "project/langgraph.json", "--port", "0"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first_line = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)

    assert first_line.startswith("serving chat at http://127.0.0.1:"), errors


def test_langgraph_file_of_the_documentation_is_read(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "serve-apps.md").read_text()
    [snippet] = [block for block in re.findall(r"(?ms)^```json\n(.*?)^```$", text) if '"graphs"' in block]
    write_project(tmp_path, {})
    (tmp_path / "langgraph.json").write_text(snippet)
    (tmp_path / ".env").write_text("PROJECT_SETTING=1\n")
    for name in ("agent.py", "project_prompts.py"):
        (tmp_path / name).write_text((tmp_path / "src" / name).read_text())

    config = ServiceConfig.model_validate({"langgraph": str(tmp_path / "langgraph.json")}).with_graphs()

    assert {name: load(app.object).fast is not None for name, app in config.apps.items()} == {"agent": True}


def test_serve_help_mentions_langgraph_json(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_serve(parser.add_subparsers())

    with pytest.raises(SystemExit):
        parser.parse_args(["serve", "--help"])

    assert "langgraph.json" in capsys.readouterr().out


# ------------------------------------------------------------ loading


@pytest.mark.parametrize("name", ["original", "builder", "make_graph_later", "graph", "make_graph"])
def test_every_kind_of_export_is_a_graph(tmp_path: Path, name: str) -> None:
    target = load(f"{write_project(tmp_path, {'agent': f'{AGENT}:{name}'})}:agent")

    assert hasattr(target.plain, "ainvoke")
    assert (target.fast is not None) == (name in ("graph", "make_graph"))


def test_only_graph_needs_no_name(tmp_path: Path) -> None:
    assert load(str(write_project(tmp_path, {"agent": f"{AGENT}:original"}))).plain.name == "LangGraph"


async def test_async_factory_is_called_where_a_loop_runs(tmp_path: Path) -> None:
    assert load(str(write_project(tmp_path, {"agent": f"{AGENT}:make_graph_later"}))).fast is None


def test_graphs_of_one_file_share_its_module(tmp_path: Path) -> None:
    file = write_project(tmp_path, {"one": f"{AGENT}:original", "two": f"{AGENT}:chat"})

    one, two = (load(f"{file}:{name}").plain for name in ("one", "two"))

    assert one.nodes["plan"].bound.afunc.__globals__ is two.nodes["answer_message"].bound.afunc.__globals__


def test_module_of_a_dependency_is_importable(tmp_path: Path) -> None:
    file = write_project(tmp_path, {"agent": "agent_package:graph"}, dependencies=["langchain-openai", "./src"])
    (tmp_path / "src" / "agent_package.py").write_text((tmp_path / "src" / "agent.py").read_text())

    assert load(f"{file}:agent").fast is not None


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"A": "1"}, {"A": "1"}),
        ("./.env", {"A": "1", "B": "two words", "C": "x#y", "D": "", "E": "a=b", "F": "quoted # text"}),
    ],
)
def test_environment_of_the_file_is_read(tmp_path: Path, env: Any, expected: dict[str, str]) -> None:
    lines = [
        "# a comment",
        "",
        "A=1",
        "export B='two words' # more",
        "C=x#y # more",
        "D=",
        "E=a=b",
        'F="quoted # text"',
    ]
    (tmp_path / ".env").write_text("\n".join(lines))

    file = LangGraphFile.read(write_project(tmp_path, {"agent": f"{AGENT}:graph"}, env=env))

    assert file.environment == expected
    assert "1" not in repr(file).replace(str(tmp_path), "")  # values may be keys of providers


def test_environment_is_set_before_the_graph_is_imported(tmp_path: Path) -> None:
    file = write_project(tmp_path, {"agent": f"{AGENT}:original"}, env={"PROJECT_SETTING": "on"})

    graph = load(f"{file}:agent").plain

    assert graph.nodes["plan"].bound.afunc.__globals__["setting"] == "on"


# ------------------------------------------------------------ comparing


def test_compare_takes_a_graph_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, inputs = write_project(tmp_path, {"agent": f"{AGENT}:original"}), tmp_path / "inputs.jsonl"
    inputs.write_text('{"question": "oats,hay"}\n')

    status = main(["compare", f"{file}:agent", "--inputs", str(inputs), "--repeats", "1", "--json", "--no-stream"])

    summary = json.loads(capsys.readouterr().out)
    assert (status, summary["equality"]["state"]) == (0, "equal")


# ------------------------------------------------------------ what is wrong


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1, column 2"),
        ("[]", "holds no object"),
        ("{}", "names no graphs"),
        ('{"graphs": {"a": 7}}', "graph 'a' has no source"),
        ('{"graphs": {"a": "agent.py"}}', "graph 'a' has no source"),
        ('{"graphs": {"a": "./agent.ts:graph"}}', "graph 'a' is no Python"),
        ('{"graphs": {"a": "./agent.py:graph"}, "env": 7}', "env is neither an object of texts nor a file"),
        ('{"graphs": {"a": "./agent.py:graph"}, "env": "./.env"}', "No such file"),
        ('{"graphs": {"a": "./agent.py:graph"}, "dependencies": "."}', "dependencies is no list"),
        ('{"graphs": {"a": "./agent.py:graph"}, "dependencies": ["./nowhere"]}', "there is no folder"),
        ('{"graphs": {"a": "./nowhere.py:graph"}}', "there is no file"),
        ('{"graphs": {"a": "no_such_package.agent:graph"}}', "no_such_package"),
    ],
)
def test_invalid_langgraph_file_raises(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "langgraph.json"
    file.write_text(text)

    with pytest.raises(RegistrationError, match=message):
        load(f"{file}:a")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "has no 'missing'"),
        ("number", "is a int, which is no graph"),
        ("make_none", "is a NoneType, which is no graph"),
        ("fail", "ZeroDivisionError: no graph today"),
        ("make_graph_for_a_while", "returns a context manager"),
        ("make_graph_with_runtime", "only LangGraph's server has"),
    ],
)
def test_invalid_graph_entry_raises(tmp_path: Path, name: str, message: str) -> None:
    file = write_project(tmp_path, {"agent": f"{AGENT}:{name}"})

    with pytest.raises(RegistrationError, match=message):
        load(f"{file}:agent")


def test_missing_file_and_unknown_graph_raise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_project(tmp_path, {"one": f"{AGENT}:graph", "two": f"{AGENT}:graph"})

    with pytest.raises(RegistrationError, match=r"unknown graph of .*'three'.*one, two"):
        load(f"{file}:three")
    with pytest.raises(RegistrationError, match="has the graphs one, two"):
        load(str(file))
    assert main(["serve", str(tmp_path / "nowhere.json")]) == 2
    assert "give the path of a langgraph.json" in capsys.readouterr().err


def test_invalid_line_of_env_file_raises(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("A=1\nno value\n")

    with pytest.raises(RegistrationError, match=r"\.env, line 2"):
        LangGraphFile.read(write_project(tmp_path, {"agent": f"{AGENT}:graph"}, env="./.env"))
