"""Tests of other projects that `upstream.py` runs: which, in what environment, and where it comes from."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bootstrap import uv_environment

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "out" / "upstream"
LOCK = ROOT / "requirements" / "cpu.lock"
UNUSED = ("pytest-watcher", "pytest-xdist", "pytest-cov", "mypy", "ruff", "types-")
"""Test requirements that the tests themselves do without."""
TIMEOUT = "120"
"""Seconds for one test; plain ones take 3 at most."""

_HANDLER = "it compares the config that a leaf gets, and a query on a pool adds one callback handler to it"
_BLOCKS = "it calls a chain's sync `invoke` on a running loop, and waits there for a call that was made ahead"
_SUBCLASS = "it spies on, or reads a value from, the class of an object; an accelerated object is of a subclass"
_POSTGRES = "it needs a PostgreSQL server"
_WAITS = "it calls a sync `invoke` on a running loop, which a model on an engine of a pool holds up"


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests of a package: from its source distribution, or from a checkout of its repository."""

    package: str
    tests: tuple[str, ...]
    kind: str
    """How the tests meet accelerated objects: `chains`, `graphs` or `objects`; see `upstream_plugin.KINDS`."""
    excluded: Mapping[str, Mapping[str, str]]
    """By mode: tests that may fail there, with the reason. The modes are the keys; the first is `accelerate(x)`."""
    name: str = ""
    """What `--suites` calls it; the package by default."""
    pinned_version: str = ""
    """The version, where the lock file has none."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Files and folders that do not run here, with the reason."""
    checkout_folder: str = ""
    """The folder of the tests in the repository, for a package whose source distribution has no tests."""
    group: str = "test"
    """The dependency group with what the tests need; none if empty."""
    needs: tuple[str, ...] = ()
    """What the tests import beside what their group lists."""
    unused: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(self.excluded)

    @property
    def home(self) -> Path:
        return HOME / self.label

    @property
    def label(self) -> str:
        return self.name or self.package

    @property
    def version(self) -> str:
        if self.pinned_version:
            return self.pinned_version
        locked = re.search(rf"(?m)^{re.escape(self.package)}==([^ ;]+)", LOCK.read_text())
        return locked[1] if locked else sys.exit(f"upstream: {LOCK} does not lock {self.package}")


_OFFLINE = ("--disable-socket", "--allow-unix-socket")
_OBJECTS: Mapping[str, Mapping[str, str]] = {"default": {}, "all": {}, "pool": {}}

SUITES = (
    Suite(
        "langchain-core",
        ("tests/unit_tests/runnables",),
        "chains",
        {
            "default": {},
            "copies": {"test_tool_from_runnable": _BLOCKS},
            "pool": {
                "test_with_config": _HANDLER,
                "test_with_config_async": _HANDLER,
                "test_with_config_metadata_passthrough": _HANDLER,
                "test_tool_from_runnable": _BLOCKS,
            },
        },
        needs=("rich",),
        options=_OFFLINE,
    ),
    Suite(
        "langchain-core",
        ("tests/unit_tests",),
        "objects",
        {
            "default": {},
            "all": {
                "test_prompt_with_chat_model": _SUBCLASS,
                "test_prompt_with_chat_model_async": _SUBCLASS,
                "test_prompt_with_llm": _SUBCLASS,
                "test_prompt_with_llm_parser": _SUBCLASS,
                "test_stream_events_v3_strips_ls_structured_output_format": _SUBCLASS,
                "test_stream_events_v3_strips_structured_output_format": _SUBCLASS,
            },
            "pool": {
                "test_default_method_implementations": _HANDLER,
                "test_default_method_implementations_async": _HANDLER,
                "test_with_config": _HANDLER,
                "test_with_config_async": _HANDLER,
            },
        },
        name="langchain-core-objects",
        needs=("rich",),
        options=_OFFLINE,
    ),
    Suite(
        "langgraph",
        ("tests",),
        "graphs",
        {"default": {}, "pool": {}, "models": {}},
        ignored={"tests/test_prune_postgres.py": _POSTGRES},
        unused=("pytest-repeat", "langgraph-cli", "uvloop", "pyperf", "py-spy"),
        environ={"NO_DOCKER": "true"},  # checkpointers and caches in memory and SQLite, without PostgreSQL and Redis
    ),
    Suite(
        "langgraph-prebuilt",
        ("tests",),
        "graphs",
        {"default": {}, "pool": {}, "models": {}},
        environ={"NO_DOCKER": "true"},
    ),
    Suite("langgraph-supervisor", ("tests",), "graphs", {"default": {}, "pool": {}}, pinned_version="0.0.31"),
    Suite("langgraph-swarm", ("tests",), "graphs", {"default": {}, "pool": {}}, pinned_version="0.1.0"),
    Suite(
        "langchain",
        ("tests/unit_tests/agents",),
        "graphs",
        {
            "default": {},
            "pool": {},
            "models": {
                "test_execution_order[False]": _WAITS,
                "test_hook_execution[after-False]": _WAITS,
                "test_hook_execution[before-False]": _WAITS,
                "test_hook_with_class_inheritance[after-False]": _WAITS,
                "test_hook_with_class_inheritance[before-False]": _WAITS,
            },
        },
        options=(*_OFFLINE, "--benchmark-disable"),
        unused=("fastmcp",),  # of tests that do not run here; it needs another mcp than the locked one
        environ={"LANGGRAPH_TEST_FAST": "1"},  # the same: services are left out
    ),
    Suite("langchain-classic", ("tests/unit_tests",), "objects", _OBJECTS, needs=("greenlet",), options=_OFFLINE),
    Suite(
        "langchain-openai",
        ("tests/unit_tests",),
        "objects",
        _OBJECTS,
        ignored={"tests/unit_tests/test_check_version.py": "its source distribution lacks the script that it tests"},
        options=(*_OFFLINE, "-o", "addopts="),
    ),
    Suite("llama-index-instrumentation", ("tests",), "objects", {"default": {}}, group="dev"),
    Suite(
        "llama-index-core",
        ("tests",),
        "objects",
        _OBJECTS,
        checkout_folder="llama-index-core",
        group="",
        needs=(
            *("pytest-asyncio", "pytest-mock", "openai", "pandas", "llama-index-llms-openai", "rake-nltk"),
            *("tree-sitter", "tree-sitter-language-pack<1.0", "pytest-socket"),
        ),
        options=(*_OFFLINE, "--tb=native"),  # a test that recurses without end breaks the other forms
    ),
    Suite(
        "llama-index-workflows",
        ("tests",),
        "objects",
        _OBJECTS,
        checkout_folder="packages/llama-index-workflows",
        group="dev",
        needs=("llama-index-core",),
        unused=("pre-commit",),
        options=("-o", "addopts="),
    ),
)


def _do(*command: str | Path) -> None:
    if subprocess.run(command, cwd=ROOT, env=uv_environment()).returncode:
        sys.exit("upstream: this command failed; see above:\n  " + " ".join(map(str, command)))


def source(suite: Suite, checkout: Path | None = None) -> Path:
    """Return the folder with the tests and settings of the suite, without its package: the installed one is tested.

    They come from the source distribution, or from `checkout`, a checkout of the repository.
    """
    if checkout is not None:
        folder = suite.home / "checkout"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(checkout / suite.checkout_folder / "tests", folder / "tests")
        shutil.copy(checkout / suite.checkout_folder / "pyproject.toml", folder)
        return folder
    folder = suite.home / f"{suite.package.replace('-', '_')}-{suite.version}"
    if not (folder / "pyproject.toml").exists():
        suite.home.mkdir(parents=True, exist_ok=True)
        here = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        wanted = f"{suite.package}=={suite.version}"
        _do(*here, "--no-deps", "--no-binary", suite.package, "--dest", suite.home, wanted)
        with tarfile.open(suite.home / f"{folder.name}.tar.gz") as archive:
            found = [m for m in archive.getmembers() if m.name.split("/")[1] in ("tests", "pyproject.toml")]
            found.sort(key=lambda member: member.name.endswith("pyproject.toml"))  # the last one says: complete
            archive.extractall(suite.home, found, filter="data")
    return folder


def environment(suite: Suite, folder: Path) -> Path:
    """Its Python. Versions are the locked ones where the lock file has them."""
    groups = tomllib.loads((folder / "pyproject.toml").read_text())["dependency-groups"]
    group = groups[suite.group] if suite.group else []
    needed = [one for one in group if not one.startswith((*UNUSED, *suite.unused))]
    wanted = [f"{suite.package}=={suite.version}", "setuptools", "pytest-timeout", *suite.needs, *needed]
    venv = suite.home / "venv"
    python, stamp = venv / "bin" / "python", venv / ".ready"
    state = json.dumps([sys.version, wanted, LOCK.read_text()])
    if not stamp.exists() or stamp.read_text() != state:
        uv = [sys.executable, "-m", "uv"]
        _do(*uv, "venv", "-q", "--no-config", "--clear", "--python", sys.executable, venv)
        install: list[str | Path] = [*uv, "pip", "install", "-q", "--no-config", "--python", python]
        install.append("--compile-bytecode")  # the runs of the tests write none
        _do(*install, "--constraints", LOCK, *wanted)
        _do(*install, "--no-deps", "--no-build-isolation", "--editable", ROOT)
        stamp.write_text(state)
    return python
