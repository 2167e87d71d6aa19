"""Tests of `make test-upstream` with a few small tests and its plugin, in this environment."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
GRAPHS = """
from typing_extensions import TypedDict

import pytest
from langgraph.channels import EphemeralValue
from langgraph.func import entrypoint
from langgraph.graph import END, START, StateGraph
from langgraph.pregel import NodeBuilder, Pregel

class State(TypedDict):
    n: int

def more(state: State) -> State:
    return {"n": state["n"] + 1}

def built(node=more):
    return StateGraph(State).add_node("more", node).add_edge(START, "more").add_edge("more", END).compile()

def is_ours(graph) -> bool:
    return hasattr(type(graph), "__teola_accelerated__")

def test_compiled():
    assert built().invoke({"n": 1}) == {"n": 2}

def test_graph_in_a_graph():
    assert built(built()).invoke({"n": 1}) == {"n": 2}

def test_entrypoint():
    @entrypoint()
    def doubled(n: int) -> int:
        return 2 * n
    assert doubled.invoke(2) == 4

def test_pregel():
    node = NodeBuilder().subscribe_only("a").do(lambda x: x + x).write_to("b")
    given = {"a": EphemeralValue(str), "b": EphemeralValue(str)}
    graph = Pregel(nodes={"n": node}, channels=given, input_channels="a", output_channels="b")
    assert graph.invoke("x") == "xx"
    assert type(graph.with_config(tags=["t"])) is type(graph)

def test_drawn():
    assert "more" in built().get_graph().nodes

def test_nothing():
    assert State(n=1)

def test_plain():
    assert not is_ours(built()), "accelerated"

@pytest.mark.xfail
def test_expected():
    raise ValueError
"""
MODELS = """
from typing_extensions import TypedDict

from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableParallel
from langgraph.graph import START, StateGraph

class State(TypedDict, total=False):
    question: str
    first: str
    second: str

def test_asked():
    graph = StateGraph(State)
    for name in ("first", "second"):
        model = FakeListChatModel(responses=[name + "!"])
        chain = ChatPromptTemplate.from_template(name + ": {question}") | model | StrOutputParser()
        graph.add_node("say_" + name, RunnableParallel({name: chain}))
    graph.add_edge(START, "say_first").add_edge("say_first", "say_second")
    assert graph.compile().invoke({"question": "Q"}) == {"question": "Q", "first": "first!", "second": "second!"}
"""
CHAINS = """
from langchain_core.runnables import RunnableLambda

def test_called():
    assert (RunnableLambda(lambda x: x + 1) | RunnableLambda(str)).invoke(1) == "2"
"""
OBJECTS = """
import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.runnables import Runnable, RunnableLambda

def build():
    return RunnableLambda(lambda x: x + 1) | str

@pytest.fixture
def chain():
    return build()

async def give(value):
    return value

def is_ours(value) -> bool:
    return hasattr(type(value), "__teola_accelerated__")

def test_constructor():
    assert is_ours(RunnableLambda(str))

def test_operator():
    chain = RunnableLambda(str)
    assert is_ours(chain | str)

def test_fixture(chain):
    assert is_ours(chain)
    assert chain.invoke(1) == "2"

@pytest.mark.asyncio
async def test_await():
    values = {"plain": await give(RunnableLambda(str))}
    assert is_ours(values["plain"])

@pytest.mark.parametrize("chain", [RunnableLambda(str)])
def test_parameter(chain):
    assert is_ours(chain)

def test_same_object():
    values = {"chain": build()}
    assert values.get("chain") is values["chain"]

def test_annotation():
    value: int | str = 1
    assert value == 1

def test_nested_function():
    def inner():
        return RunnableLambda(str)
    class Holder:
        def make(self):
            return RunnableLambda(str)
    make = lambda: RunnableLambda(str)
    found = []
    for function in (inner, Holder().make, make):
        found += [value for value in map(type, map(lambda f: f(), [function]))]
    assert not any(hasattr(cls, "__teola_accelerated__") for cls in found)

def test_model():
    assert is_ours(FakeListChatModel(responses=["a"]))

def test_none():
    assert [1]
"""


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return the command as a module. What it runs, and its reports, are in a folder of this test."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    module = importlib.import_module("upstream")
    monkeypatch.setattr(importlib.import_module("upstream_suites"), "HOME", tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "test_graphs.py").write_text(GRAPHS)
    (tmp_path / "own" / "test_models.py").write_text(MODELS)
    (tmp_path / "own" / "test_chains.py").write_text(CHAINS)
    (tmp_path / "own" / "test_objects.py").write_text(OBJECTS)
    return module


def own_tests(upstream: Any, kind: str, excluded: dict[str, dict[str, str]] | None = None) -> Any:
    suite = upstream.Suite("own", (f"test_{kind}.py",), kind, excluded or {"default": {}, "pool": {}})
    return upstream.Tests(suite, suite.home, Path(sys.executable))


def test_every_suite_has_a_locked_package_and_known_modes(upstream: Any) -> None:
    kinds = importlib.import_module("upstream_plugin").KINDS
    for suite in upstream.SUITES:
        assert suite.version
        assert set(suite.modes) <= set(importlib.import_module(kinds[suite.kind]).MODES)
        assert suite.kind in upstream.WORDS


def test_no_test_is_routed_without_a_mode(upstream: Any) -> None:
    ran = own_tests(upstream, "graphs").run("", ["test_graphs.py"])
    assert ran.count() == "7 passed, 1 xfailed"
    assert not ran.calls


def test_every_way_to_create_a_graph_is_routed(upstream: Any) -> None:
    ran = own_tests(upstream, "graphs").run("default", ["test_graphs.py"])
    assert ran.count() == "1 failed, 6 passed, 1 xfailed"
    assert ran.outcomes["test_graphs.py::test_plain"] == "failed"
    assert {test.partition("::")[2]: calls for test, calls in ran.calls.items()} == {
        "test_compiled": {"graph": 1, "call": 1, "node": 2},  # the start is a node, too
        "test_graph_in_a_graph": {"graph": 2, "call": 2, "node": 4},
        "test_entrypoint": {"graph": 1, "call": 1, "node": 1},
        "test_pregel": {"graph": 1, "call": 1, "node": 1},
        "test_drawn": {"graph": 1},
        "test_plain": {"graph": 1},
    }


def test_call_of_nested_graphs_begins_one_query(upstream: Any) -> None:
    ran = own_tests(upstream, "graphs").run("pool", ["test_graphs.py"])
    calls = ran.calls["test_graphs.py::test_graph_in_a_graph"]
    assert {**calls, "part": 0} == {"graph": 2, "call": 2, "query": 1, "node": 4, "part": 0}
    assert calls["part"]


def test_models_mode_serves_models_by_an_engine(upstream: Any) -> None:
    ran = own_tests(upstream, "graphs").run("models", ["test_models.py"])
    assert ran.count() == "1 passed"
    calls = ran.calls["test_models.py::test_asked"]
    assert calls["asked"] == 2 and calls["used"] >= 4, "a prefilling and a decoding for each model"


def test_chains_are_routed_at_their_call(upstream: Any) -> None:
    ran = own_tests(upstream, "chains").run("default", ["test_chains.py"])
    assert [sum(calls.values()) for calls in ran.calls.values()] == [1]


def test_objects_created_by_a_test_are_replaced_in_it(upstream: Any) -> None:
    result = own_tests(upstream, "objects").run("default", ["test_objects.py"])
    failed = [test.partition("::")[2] for test, outcome in result.outcomes.items() if outcome == "failed"]
    assert failed == ["test_model"]
    unreplaced = {"test_annotation", "test_none", "test_nested_function", "test_model"}
    assert unreplaced.isdisjoint(test.partition("::")[2] for test in result.calls)


def test_models_are_replaced_in_mode_all(upstream: Any) -> None:
    result = own_tests(upstream, "objects").run("all", ["test_objects.py::test_model"])
    assert result.count() == "1 passed"


def test_objects_use_the_pool_in_mode_pool(upstream: Any) -> None:
    result = own_tests(upstream, "objects").run("pool", ["test_objects.py::test_fixture"])
    assert result.count() == "1 passed"


def test_report_holds_the_error_of_each_failed_test(upstream: Any) -> None:
    result = own_tests(upstream, "graphs").run("default", ["test_graphs.py"])
    assert list(result.errors) == ["test_graphs.py::test_plain"]
    assert result.errors["test_graphs.py::test_plain"].startswith("AssertionError: accelerated")


def test_ignored_files_do_not_run(upstream: Any) -> None:
    suite = upstream.Suite("own", (".",), "objects", {"default": {}}, ignored={"test_objects.py": "it needs a server"})
    result = upstream.Tests(suite, suite.home, Path(sys.executable)).run("", ["."])
    assert {test.partition("::")[0] for test in result.outcomes} == {
        "test_chains.py",
        "test_graphs.py",
        "test_models.py",
    }


def test_tests_of_a_checkout_are_copied_without_the_package(upstream: Any, tmp_path: Path) -> None:
    package = tmp_path / "repository" / "core"
    (package / "tests").mkdir(parents=True)
    (package / "tests" / "test_a.py").write_text("")
    (package / "pyproject.toml").write_text("")
    (package / "core.py").write_text("")
    suite = upstream.Suite("core", ("tests",), "objects", {"default": {}}, checkout_folder="core")
    folder = upstream.source(suite, tmp_path / "repository")
    assert sorted(path.name for path in folder.rglob("*")) == ["pyproject.toml", "test_a.py", "tests"]


@pytest.mark.parametrize(("suite", "verb"), [("llama-index-core", "needs"), ("langgraph", "takes no")])
def test_suite_and_checkout_must_match(
    upstream: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], suite: str, verb: str
) -> None:
    checkout = ["--checkout", "."] if verb == "takes no" else []
    monkeypatch.setattr(sys, "argv", ["upstream.py", "--suites", suite, *checkout])
    with pytest.raises(SystemExit):
        upstream._options()
    assert f"{suite} {verb} --checkout" in capsys.readouterr().err


def test_undeclared_difference_fails(upstream: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def compared(excluded: dict[str, str]) -> bool:
        tests = own_tests(upstream, "graphs", {"default": excluded})
        plain = tests.run("", ["test_graphs.py"])
        return bool(upstream._compared(tests, "default", plain, ["test_graphs.py"], unrouted=2))

    assert not compared({})
    stdout = capsys.readouterr().out
    assert "DIFFERENT: test_graphs.py::test_plain: plain passed, routed failed" in stdout
    assert "1 tests route nothing: test_graphs 1\n    test_graphs.py::test_nothing" in stdout
    assert compared({"test_plain": "it asks whether it is plain"})
    assert "excluded, since it asks whether it is plain: test_plain" in capsys.readouterr().out


def test_is_excluded_by_name_or_by_parameters(upstream: Any) -> None:
    assert upstream.names_of("tests/test_a.py::TestB::test_c[x::y-1]") == ("test_c", "test_c[x::y-1]")
    assert upstream.names_of("tests/test_a.py::test_c") == ("test_c", "test_c")


@pytest.mark.parametrize("route", ["graphs:sideways", "trees:default"])
def test_unknown_route_is_reported(upstream: Any, tmp_path: Path, route: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "upstream_plugin", f"--teola-route={route}"]
    env = {"PYTHONPATH": str(ROOT / "tools"), "PATH": ""}
    ran = subprocess.run(command, cwd=tmp_path / "own", env=env, capture_output=True, text=True)
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--teola-route: unknown" in ran.stderr
