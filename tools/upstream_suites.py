"""Tests of other projects that `upstream.py` runs: which, in what environment, and where it comes from."""

from __future__ import annotations

import json
import re
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
UNUSED = ("pytest-watcher", "pytest-xdist", "pytest-cov")
"""Test requirements that the tests themselves do without."""
TIMEOUT = "120"
"""Seconds for one test; plain ones take 3 at most."""

_HANDLER = "it compares the config that a leaf gets, and a query on a pool adds one callback handler to it"
_BLOCKS = "it calls a chain's sync `invoke` on a running loop, and waits there for a call that was made ahead"
_WAITS = "it calls a sync `invoke` on a running loop, which a model on an engine of a pool holds up"


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests from the source distribution of the locked version of a package."""

    package: str
    tests: tuple[str, ...]
    kind: str
    """What of them is accelerated: `chains` or `graphs`; see `upstream_plugin.KINDS`."""
    excluded: Mapping[str, Mapping[str, str]]
    """By mode: tests that may fail there, and why. The modes are the keys; the first is what `accelerate(x)` does."""
    needs: tuple[str, ...] = ()
    """What the tests import beside what their `test` group lists."""
    unused: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(self.excluded)

    @property
    def home(self) -> Path:
        return HOME / self.package

    @property
    def version(self) -> str:
        found = re.search(rf"(?m)^{re.escape(self.package)}==([^ ;]+)", LOCK.read_text())
        return found[1] if found else sys.exit(f"upstream: {LOCK} does not lock {self.package}")


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
        options=("--disable-socket", "--allow-unix-socket"),
    ),
    Suite(
        "langgraph",
        (
            "tests/test_pregel.py",
            "tests/test_pregel_async.py",
            "tests/test_large_cases.py",
            "tests/test_large_cases_async.py",
            "tests/test_state.py",
            "tests/test_interruption.py",
        ),
        "graphs",
        {"default": {}, "pool": {}, "models": {}},
        unused=("pytest-repeat", "langgraph-cli", "uvloop", "pyperf", "py-spy"),
        environ={"NO_DOCKER": "true"},  # checkpointers and caches in memory and SQLite, without PostgreSQL and Redis
    ),
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
        options=("--disable-socket", "--allow-unix-socket", "--benchmark-disable"),
        environ={"LANGGRAPH_TEST_FAST": "1"},  # the same: services are left out
    ),
)


def _do(*command: str | Path) -> None:
    if subprocess.run(command, cwd=ROOT, env=uv_environment()).returncode:
        sys.exit("upstream: this command failed; see above:\n  " + " ".join(map(str, command)))


def source(suite: Suite) -> Path:
    """The folder of the source distribution: its tests and settings; not its package, the installed one is tested."""
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
    needed = [one for one in groups["test"] if not one.startswith((*UNUSED, *suite.unused))]
    wanted = [f"{suite.package}=={suite.version}", "setuptools", "pytest-timeout", *suite.needs, *needed]
    venv = suite.home / "venv"
    python, stamp = venv / "bin" / "python", venv / ".ready"
    state = json.dumps([sys.version, wanted, LOCK.read_text()])
    if not stamp.exists() or stamp.read_text() != state:
        uv = [sys.executable, "-m", "uv"]
        _do(*uv, "venv", "-q", "--no-config", "--clear", "--python", sys.executable, venv)
        install: list[str | Path] = [*uv, "pip", "install", "-q", "--no-config", "--python", python]
        _do(*install, "--constraints", LOCK, *wanted)
        _do(*install, "--no-deps", "--no-build-isolation", "--editable", ROOT)
        stamp.write_text(state)
    return python
