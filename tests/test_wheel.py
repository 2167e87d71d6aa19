"""Tests of the release: the wheel works when installed alone with its dependencies.

The long version builds it from the source distribution.
"""

from __future__ import annotations

import argparse
import json
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
from test_public_api import PUBLIC

from teola_plugin.cli.main import parser

ROOT = Path(__file__).parents[1]
UV = [sys.executable, "-m", "uv", "--no-config", "--offline", "--quiet"]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "teola_plugin", "adapters", "tracer", "server")
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
    """Build the wheel from a copy, because setuptools leaves files next to its sources."""
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
    """Return what a process prints that does not see the checkout."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(folder: Path, wheel: Path, extra: str) -> Path:
    """Return the interpreter of a new environment with the wheel and its dependencies, and nothing else."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    run([*UV, "pip", "install", "--no-deps", "--python", str(python), str(wheel)])
    site = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    (installed,) = site.glob("teola_plugin-*.dist-info")
    for needed in closure(Distribution.at(installed), extra):
        lend(needed, site)
    return python


def closure(asking: Distribution, extra: str) -> Iterator[Distribution]:
    """Return the installed distributions of these requirements and of their requirements, without a network."""
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
    """Link the files of a distribution into the environment, compiled ones included, programs excluded."""
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


def test_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    """Modules, models, styles and scripts: all that lies in the folders, under its import path."""
    there = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = set()
    for top in ("teola_plugin", "adapters", "tracer", "server"):
        for folder, _, files in os.walk(ROOT / top, followlinks=False):
            where = Path(folder).relative_to(ROOT)
            where = where if top == "teola_plugin" else Path("teola_plugin") / where
            wanted |= {(where / name).as_posix() for name in files if not name.endswith(".pyc")}
    assert there == wanted


def test_example_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "langchain", wheel, "langchain")
    shutil.copy(ROOT / "examples" / "01_no_gpu.py", tmp_path)
    assert re.search(r"same answer, 1\.\d\d times sooner", run([str(python), "01_no_gpu.py"], tmp_path))


def test_llamaindex_example_needs_no_langchain(wheel: Path, tmp_path: Path) -> None:
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
    assert_type(accelerate(engine).with_request_context(tenant="acme").query("?"), RESPONSE_TYPE)
    accelerate(engine).with_request_context(deadline="soon")
""",
}
"""Programs of who has one framework alone. The last line of each is wrong, and nothing else."""


@pytest.mark.long
@pytest.mark.skipif(not LONG, reason="mypy reads each framework anew (make test-all)")
@pytest.mark.parametrize("extra", ALONE)
def test_single_framework_install_has_its_types(wheel: Path, tmp_path: Path, extra: str) -> None:
    python = environment(tmp_path / extra, wheel, extra)
    (tmp_path / "app.py").write_text(ALONE[extra].lstrip())
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "app.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    errors = [line for line in done.stdout.splitlines() if " error: " in line]
    assert len(errors) == 1 and errors[0].startswith(f"app.py:{ALONE[extra].count(chr(10)) - 1}:"), done.stdout


def test_trace_page_is_rendered_on_the_base_install(bare: Path, tmp_path: Path) -> None:
    """Style and script of the page are files of the package."""
    code = "from teola_plugin.observe import QueryTrace, html_page; print(html_page([QueryTrace('q', 'a', 0.0, 1.0)]))"
    assert "<script" in run([str(bare), "-c", code], tmp_path)


def test_bundled_models_are_installed(bare: Path, tmp_path: Path) -> None:
    code = "from teola_plugin.engines.model_cache import llm_folder; print(llm_folder())"
    folder = Path(run([str(bare), "-c", code], tmp_path).strip())
    assert folder.is_relative_to(bare.parents[1])


def test_base_install_has_the_teola_command(bare: Path, tmp_path: Path) -> None:
    assert "compare" in run([str(bare.parent / "teola"), "--help"], tmp_path)


def test_base_modules_import_without_extras(bare: Path, tmp_path: Path) -> None:
    """vLLM's scheduler is loaded by vLLM alone."""
    assert int(run([str(bare), "-I", "-c", EVERY_MODULE, *BASE], tmp_path)) > 150


# ------------------------------------------------------------ packages that are missing

COMMANDS = {
    "demo": ("", "langchain-core", "demo"),
    "compare": ("app:chain --inputs questions.jsonl", "pydantic", "langchain"),
    "simulate": ("pool.yaml --app app:make", "pydantic", "yaml"),
    "up": ("pool.yaml", "PyYAML", "ray"),
    "status": ("", "PyYAML", "ray"),
    "scale": ("llm 2", "PyYAML", "ray"),
    "down": ("", "PyYAML", "ray"),
    "calibrate": ("pool.yaml", "PyYAML", "yaml"),
    "serve": ("pool.yaml", "fastapi", "server"),
    "key": ("acme", "pydantic", "server"),
}
"""Command -> its arguments, the first package that it lacks with the base alone, and the extra that brings it."""


def failing(command: list[str], folder: Path) -> tuple[int, str, str]:
    """Return exit status, stdout and stderr of a command that may fail."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_command_names_its_missing_package_in_one_line(bare: Path, tmp_path: Path, command: str) -> None:
    arguments, package, extra = COMMANDS[command]
    (tmp_path / "pool.yaml").write_text("engines:\n  llm: {kind: vllm, model: bundled}\n")
    (tmp_path / "questions.jsonl").write_text('"Why?"\n')
    (tmp_path / "app.py").write_text("chain = make = print\n")
    code, output, errors = failing([str(bare.parent / "teola"), command, *arguments.split()], tmp_path)
    assert (code, output) == (1, "")
    assert re.fullmatch(rf"teola: teola {command} needs {package}, which is not installed\. Next: .*\n", errors), errors
    assert f"pip install '.[{extra}]'" in errors


def test_every_command_has_a_missing_package_test() -> None:
    [commands] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    assert set(COMMANDS) == set(commands.choices) - {"doctor"}


def test_doctor_runs_on_the_base_install(bare: Path, tmp_path: Path) -> None:
    code, output, errors = failing([str(bare.parent / "teola"), "doctor"], tmp_path)
    assert code == 1 and not errors
    assert output.startswith("Not ready: langchain_core: not installed")
    assert "pip install '.[langchain]'" in output


def test_import_error_of_user_code_is_reported_unchanged(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "langchain", wheel, "langchain")
    (tmp_path / "app.py").write_text("import nothing_like_it\n")
    (tmp_path / "questions.jsonl").write_text('"Why?"\n')
    command = [str(python.parent / "teola"), "compare", "app:chain", "--inputs", "questions.jsonl"]
    code, _, errors = failing(command, tmp_path)
    assert code == 2 and "importing app raised ModuleNotFoundError: No module named 'nothing_like_it'" in errors


@pytest.mark.parametrize("extra", ["langchain", "llamaindex"])
def test_no_command_prints_a_traceback_where_one_framework_is_installed(
    wheel: Path, tmp_path: Path, extra: str
) -> None:
    python = environment(tmp_path / extra, wheel, extra)
    (tmp_path / "pool.yaml").write_text("engines:\n  llm: {kind: vllm, model: bundled}\n")
    (tmp_path / "questions.jsonl").write_text('"Why?"\n')
    (tmp_path / "app.py").write_text("chain = make = 3\n")
    for command in set(COMMANDS) - {"key"}:  # it needs no more
        _, _, errors = failing([str(python.parent / "teola"), command, *COMMANDS[command][0].split()], tmp_path)
        assert re.fullmatch(r"teola: .* Next: .*\n", errors), errors


EVERY_PUBLIC_NAME = """
import importlib, json, sys
from teola_plugin import MissingPackage
missing, others = {}, {}
for module, names in json.loads(sys.argv[1]).items():
    for name in names:
        try:
            getattr(importlib.import_module(module), name)
        except MissingPackage as error:
            missing[f"{module}.{name}"] = str(error)
        except BaseException as error:
            others[f"{module}.{name}"] = repr(error)
print(json.dumps([missing, others]))
"""
LACKING = {
    "teola_plugin.adapters.langchain": "LangChain support needs langchain-core",
    "teola_plugin.langchain": "LangChain support needs langchain-core",
    "teola_plugin.adapters.llamaindex": "LlamaIndex support needs llama-index-core",
    "teola_plugin.llamaindex": "LlamaIndex support needs llama-index-core",
    "teola_plugin.cluster": "a pool's YAML file needs PyYAML",
    "teola_plugin.server.client": "teola_plugin.server.client needs httpx",
}
"""Beginning of a public name -> the error with the base alone. All other public names need nothing more."""


def test_every_public_name_exists_or_names_its_extra(bare: Path, tmp_path: Path) -> None:
    public = {**PUBLIC, "teola_plugin.server.client": ["QueryClient"]}
    missing, others = json.loads(run([str(bare), "-c", EVERY_PUBLIC_NAME, json.dumps(public)], tmp_path))
    assert others == {}
    for name, message in missing.items():
        [expected] = [text for begin, text in LACKING.items() if name.startswith(f"{begin}.")]
        assert message.startswith(f"{expected}, which is not installed. Next: "), name
        assert "pip install '.[" in message and "\n" not in message
    lacking = [f"{module}.{name}" for module in public for name in public[module]]
    assert set(missing) == {name for name in lacking if name.startswith(tuple(f"{begin}." for begin in LACKING))}


STARTS = {
    "EnginePool.local(llm='bundled')": "vllm",
    "EnginePool.local(embedder='a/model')": "embed",
    "EnginePool.local(reranker='a/model')": "embed",
    "EnginePool.local(store='embedded')": "embedded-postgres",
    "EnginePool.local(store='postgresql://localhost/none')": "postgres",
    "EnginePool.local(llm=OpenAIServer(base_url='http://localhost:1/v1', model='m'))": "openai",
    "EnginePool.local({'e': EmbeddingServer(base_url='http://localhost:1/v1', model='m')})": "openai",
    "EnginePool.local({'r': RerankingServer(base_url='http://localhost:1', model='m')})": "openai",
    "EnginePool.local({'w': WebSearchEngine(base_url='http://localhost:1')})": "websearch",
    "EnginePool.local({'f': FullTextSearch(dsn='postgresql://localhost/none')})": "postgres",
    "EnginePool.local(fake_engines(), tracing='opentelemetry')": "otel",
    "EnginePool.from_yaml('pool.yaml')": "yaml",
    "EnginePool.connect()": "ray",
}
"""Ways to a pool, and the extra that each needs."""


@pytest.mark.parametrize("code", STARTS)
def test_pool_names_its_missing_extra(bare: Path, tmp_path: Path, code: str) -> None:
    """The error is one of this package, has one line, and comes before anything hangs or is tried again."""
    program = f"""
from teola_plugin import EnginePool, TeolaError
from teola_plugin.engines import *
try:
    {code}.start()
except TeolaError as error:
    print(error)
"""
    (message,) = run([str(bare), "-c", program], tmp_path).splitlines()
    assert f"pip install '.[{STARTS[code]}]'" in message


# ------------------------------------------------------------ the first steps


def test_first_readme_snippet_runs_with_the_documented_install(wheel: Path, tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    (extra, *_) = re.findall(r"pip install '\.\[([\w-]+)\]'", text)
    (snippet, *_) = re.findall(r"(?ms)^```python\n(.*?)^```$", text)
    python = environment(tmp_path / "environment", wheel, extra)
    (tmp_path / "snippet.py").write_text(snippet)
    printed = run([str(python), "snippet.py"], tmp_path)
    (_, plain, answer), (_, fast, same) = re.findall(r"(?m)^(plain|accelerated) +(\d+\.\d) s  (.+)$", printed)
    assert answer == same
    assert float(fast) < float(plain)
