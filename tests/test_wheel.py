"""What is released works: the wheel, installed alone with what it asks for. The long version makes it from the source
distribution.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
UV = [sys.executable, "-m", "uv", "--no-config", "--offline", "--quiet"]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "teola_plugin", "adapters", "tracer", "server")
LONG = bool(os.environ.get("TEOLA_TEST_LONG"))
BASE = [
    "cli.main",
    "cli.doctor",
    "engines",
    "graph",
    "observe",
    "passes",
    "pool",
    "requests",
    "runtime",
    "scheduling",
]
EVERY_MODULE = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module("teola_plugin." + name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), module.__name__ + "."):
        importlib.import_module(found.name)
print(len([name for name in sys.modules if name.startswith("teola_plugin.")]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy, since setuptools leaves things beside its sources."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            unwanted = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, source / name)
    way = [] if LONG else ["--wheel"]
    run([*UV, "build", *way, "--no-build-isolation", "--python", sys.executable, "--out-dir", str(built), str(source)])
    (found,) = built.glob("*.whl")
    return found


def run(command: list[str], folder: Path | None = None) -> str:
    """What it prints, in a process that knows nothing of the checkout."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(folder: Path, wheel: Path, extra: str) -> Path:
    """The interpreter of a new environment with the wheel and what it, with an extra, asks for: nothing else."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    run([*UV, "pip", "install", "--no-deps", "--python", str(python), str(wheel)])
    site = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    (installed,) = site.glob("teola_plugin-*.dist-info")
    for needed in closure(Distribution.at(installed), extra):
        lend(needed, site)
    return python


def closure(asking: Distribution, extra: str) -> Iterator[Distribution]:
    """What is asked for, and what that asks for, as it is installed here: no network, no other versions."""
    left, seen = [(asking, extra)], set[tuple[str, str]]()
    while left:
        current, chosen = left.pop()
        for one in map(Requirement, current.requires or ()):
            name = canonicalize_name(one.name)
            if one.marker and not one.marker.evaluate({"extra": chosen}):
                continue
            for inner in {"", *one.extras} - {e for n, e in seen if n == name}:
                seen.add((name, inner))
                left.append((asking if name == "teola-plugin" else distribution(name), inner))
    for name in {name for name, _ in seen} - {"teola-plugin"}:
        yield distribution(name)


def lend(needed: Distribution, site: Path) -> None:
    """Its files as links, compiled ones too; programs outside of the folder of packages are not needed."""
    for file in needed.files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            source = Path(str(needed.locate_file(file)))
            link(source, site / file)
            if file.suffix == ".py" and (compiled := Path(cache_from_source(str(source)))).exists():
                link(compiled, Path(cache_from_source(str(site / file))))


def link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(source)


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("bare"), wheel, "")


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    """Modules, models, styles and scripts: all that lies in the folders, under its import path."""
    there = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = set()
    for top in ("teola_plugin", "adapters", "tracer", "server"):
        for folder, _, files in os.walk(ROOT / top, followlinks=False):
            where = Path(folder).relative_to(ROOT)
            where = where if top == "teola_plugin" else Path("teola_plugin") / where
            wanted |= {(where / name).as_posix() for name in files if not name.endswith(".pyc")}
    assert there == wanted


def test_an_example_runs(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "langchain", wheel, "langchain")
    shutil.copy(ROOT / "examples" / "01_no_gpu.py", tmp_path)
    assert re.search(r"same answer, 1\.\d\d times sooner", run([str(python), "01_no_gpu.py"], tmp_path))


def test_whoever_has_llamaindex_needs_no_langchain(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "llamaindex", wheel, "llamaindex")
    example = (ROOT / "examples" / "07_llamaindex_rag.py").read_text()
    (tmp_path / "rag.py").write_text(example.replace("rtx3090()", ""))  # engines that take next to no time
    assert "same answer: True, same passages: True" in run([str(python), "rag.py"], tmp_path)


ALONE = {
    "langgraph": """
from typing import assert_type
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from teola_plugin import accelerate
chain = ChatPromptTemplate.from_template("{question}") | FakeListChatModel(responses=["oats"]) | StrOutputParser()
assert_type(accelerate(chain).invoke({"question": "?"}), str)
accelerate("a chain")
""",
    "llamaindex": """
from typing import assert_type
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.response.schema import RESPONSE_TYPE
from teola_plugin import accelerate
def ask(engine: BaseQueryEngine) -> None:
    assert_type(accelerate(engine).with_terms(tenant="acme").query("?"), RESPONSE_TYPE)
    accelerate(engine).with_terms(deadline="soon")
""",
}
"""Programs of who has one framework alone. The last line of each is wrong, and nothing else."""


@pytest.mark.long
@pytest.mark.skipif(not LONG, reason="mypy reads each framework anew (make test-all)")
@pytest.mark.parametrize("extra", ALONE)
def test_whoever_has_one_framework_has_its_types(wheel: Path, tmp_path: Path, extra: str) -> None:
    python = environment(tmp_path / extra, wheel, extra)
    (tmp_path / "app.py").write_text(ALONE[extra].lstrip())
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "app.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    errors = [line for line in done.stdout.splitlines() if " error: " in line]
    assert len(errors) == 1 and errors[0].startswith(f"app.py:{ALONE[extra].count(chr(10)) - 1}:"), done.stdout


def test_traces_become_a_page(bare: Path, tmp_path: Path) -> None:
    """Style and script of the page are files of the package."""
    code = "from teola_plugin.observe import QueryTrace, html_page; print(html_page([QueryTrace('q', 'a', 0.0, 1.0)]))"
    assert "<script" in run([str(bare), "-c", code], tmp_path)


def test_the_bundled_models_come_along(bare: Path, tmp_path: Path) -> None:
    code = "from teola_plugin.engines.bundled.files import llm_folder; print(llm_folder())"
    folder = Path(run([str(bare), "-c", code], tmp_path).strip())
    assert folder.is_relative_to(bare.parents[1])


def test_the_base_alone_has_its_command(bare: Path, tmp_path: Path) -> None:
    assert "compare" in run([str(bare.parent / "teola"), "--help"], tmp_path)


def test_modules_of_the_base_need_nothing_else(bare: Path, tmp_path: Path) -> None:
    """vLLM's scheduler is loaded by vLLM alone."""
    assert int(run([str(bare), "-I", "-c", EVERY_MODULE, *BASE], tmp_path)) > 150
