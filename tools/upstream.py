#!/usr/bin/env python3
"""langchain-core's own tests of Runnables, plain and with every composite routed through the accelerator.

The source distribution of the locked langchain-core comes from the package registry; its tests run in an environment
of their own, without `langchain`, whose presence changes snapshots. What passes plainly has to pass in every mode (see
`upstream_plugin.MODES`). Everything lands in out/upstream. Exit code 1 on any difference.

    make test-upstream
    make test-upstream ARGS="--tests tests/unit_tests"             all of its tests
    make test-upstream ARGS="--modes default,pool --names"
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tarfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootstrap import uv_environment

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "out" / "upstream"
LOCK = ROOT / "requirements" / "cpu.lock"
PACKAGE, TESTS = "langchain-core", "tests/unit_tests/runnables"
MODES = ("default", "copies", "pool")
UNUSED = ("pytest-watcher", "pytest-xdist")
"""Test requirements that the tests themselves do without."""

_HANDLER = "it compares the config that a leaf gets, and a query on a pool adds one callback handler to it"
_BLOCKS = "it calls a chain's sync `invoke` on a running loop, and waits there for a call that was made ahead"
EXCLUDED: dict[str, dict[str, str]] = {
    "default": {},
    "copies": {"test_tool_from_runnable": _BLOCKS},
    "pool": {
        "test_with_config": _HANDLER,
        "test_with_config_async": _HANDLER,
        "test_with_config_metadata_passthrough": _HANDLER,
        "test_tool_from_runnable": _BLOCKS,
    },
}
"""By mode: tests that may fail there, and why. None in the mode that users get by `accelerate(chain)`."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of the tests."""

    outcomes: dict[str, str]
    calls: dict[str, dict[str, int]]
    seconds: float

    @property
    def passed(self) -> set[str]:
        return {test for test, outcome in self.outcomes.items() if outcome == "passed"}

    def count(self) -> str:
        found = collections.Counter(self.outcomes.values())
        return ", ".join(f"{found[kind]} {kind}" for kind in sorted(found))


def main() -> int:
    options = _options()
    HOME.mkdir(parents=True, exist_ok=True)
    version = _locked(PACKAGE)
    source = _source(version)
    python = _environment(version, source)
    print(f"{PACKAGE} {version}, {options.tests}", flush=True)
    plain = _run(python, source, "", [options.tests])
    print(f"plain    {plain.count()} in {plain.seconds:.0f} s", flush=True)
    if not plain.passed:
        sys.exit("upstream: no test passes plainly; see " + str(HOME / "plain.log"))
    good = [_compare(python, source, mode, plain, options, mode == options.modes[0]) for mode in options.modes]
    return 0 if all(good) else 1


def _options() -> Any:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES), help=",".join(MODES))
    parser.add_argument("--tests", default=TESTS, help="a folder, file or test of the source distribution")
    parser.add_argument("--names", action="store_true", help="name each test that routes nothing")
    options = parser.parse_args()
    for mode in options.modes:
        if mode not in MODES:
            parser.error(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
    return options


# ------------------------------------------------------------ where they run


def _locked(package: str) -> str:
    found = re.search(rf"(?m)^{re.escape(package)}==([^ ;]+)", LOCK.read_text())
    return found[1] if found else sys.exit(f"upstream: {LOCK} does not lock {package}")


def _do(*command: str | Path) -> None:
    if subprocess.run(command, cwd=ROOT, env=uv_environment()).returncode:
        sys.exit("upstream: this command failed; see above:\n  " + " ".join(map(str, command)))


def _source(version: str) -> Path:
    """The folder of the source distribution: its tests and settings; not its package, the installed one is tested."""
    folder = HOME / f"langchain_core-{version}"
    if not (folder / "pyproject.toml").exists():
        here = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        _do(*here, "--no-deps", "--no-binary", PACKAGE, "--dest", HOME, f"{PACKAGE}=={version}")
        with tarfile.open(HOME / f"{folder.name}.tar.gz") as archive:
            wanted = [m for m in archive.getmembers() if m.name.split("/")[1] in ("tests", "pyproject.toml")]
            wanted.sort(key=lambda member: member.name.endswith("pyproject.toml"))  # the last one says: complete
            archive.extractall(HOME, wanted, filter="data")
    return folder


def _environment(version: str, source: Path) -> Path:
    """Its Python. Versions are the locked ones where the lock file has them."""
    groups = tomllib.loads((source / "pyproject.toml").read_text())["dependency-groups"]
    needed = [one for one in groups["test"] if not one.startswith(UNUSED)]
    wanted = [f"{PACKAGE}=={version}", "rich", "setuptools", *needed]
    venv = HOME / "venv"
    python, stamp = venv / "bin" / "python", venv / ".ready"
    state = json.dumps([sys.version, wanted, LOCK.read_text()])
    if not stamp.exists() or stamp.read_text() != state:
        uv = [sys.executable, "-m", "uv"]
        _do(*uv, "venv", "-q", "--no-config", "--clear", "--python", sys.executable, venv)
        install = [*uv, "pip", "install", "-q", "--no-config", "--python", python]
        _do(*install, "--constraints", LOCK, *wanted)
        _do(*install, "--no-deps", "--no-build-isolation", "--editable", ROOT)
        stamp.write_text(state)
    return python


# ------------------------------------------------------------ running and comparing


def _run(python: Path, source: Path, mode: str, tests: list[str]) -> Ran:
    name = mode or "plain"
    report = HOME / f"{name}.json"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "upstream_plugin", "--tb=short"]
    command += ["--disable-socket", "--allow-unix-socket", f"--teola-report={report}"]
    command += [f"--teola-route={mode}"] if mode else []
    started = time.monotonic()
    with (HOME / f"{name}.log").open("w") as log:
        env = {**os.environ, "PYTHONPATH": str(ROOT / "tools"), "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run([*command, *tests], cwd=source, env=env, stdout=log, stderr=subprocess.STDOUT)
    if not report.exists():
        sys.exit(f"upstream: pytest did not come to its end; see {log.name}")
    found = json.loads(report.read_text())
    return Ran(found["outcomes"], found["calls"], time.monotonic() - started)


def _compare(python: Path, source: Path, mode: str, plain: Ran, options: Any, first: bool) -> bool:
    routed = _run(python, source, mode, [options.tests])
    print(f"\n{mode:<8} {routed.count()} in {routed.seconds:.0f} s")
    _print_calls(routed)
    if first:
        _print_unrouted(plain, routed, options.names)
    excluded = EXCLUDED[mode]
    for test, why in excluded.items():
        if any(_short(full) == test for full in plain.outcomes):
            print(f"  excluded: {test}: {why}")
    different = {test for test in plain.passed ^ routed.passed if _short(test) not in excluded}
    if different:
        different = _twice(python, source, mode, sorted(different))
    for test in sorted(different):
        print(f"  DIFFERENT: {test}: plain {plain.outcomes.get(test)}, routed {routed.outcomes.get(test)}")
    if different:
        print(f"  see {HOME / mode}.log")
    return not different


def _twice(python: Path, source: Path, mode: str, tests: list[str]) -> set[str]:
    """Those that differ once more; a test that a busy machine upsets is named and let go."""
    plain, routed = _run(python, source, "", tests), _run(python, source, mode, tests)
    again = plain.passed ^ routed.passed
    for test in set(tests) - again:
        print(f"  unsteady: {test}: the same when it ran alone")
    return again


def _short(test: str) -> str:
    return test.rsplit("::", 1)[-1].partition("[")[0]


def _print_calls(routed: Ran) -> None:
    total: collections.Counter[str] = collections.Counter()
    for calls in routed.calls.values():
        total.update(calls)
    words = {
        "copy": "ran as a routed copy beside their graph",
        "ahead": "ran beside their graph",
        "watched": "ran as a query with nothing to run ahead",
        "original": "went to the original (no pool, and nothing that would start sooner)",
    }
    print(f"  {sum(total.values())} calls in {len(routed.calls)} tests were routed:")
    for kind, word in words.items():
        if total[kind]:
            print(f"    {total[kind]:>4} {word}")


def _print_unrouted(plain: Ran, routed: Ran, names: bool) -> None:
    """These call no composite: graphs, schemas, configs, bare leaves, classes of the test's own."""
    unrouted = sorted(plain.passed - routed.calls.keys())
    files = collections.Counter(Path(test.partition("::")[0]).stem for test in unrouted)
    where = ", ".join(f"{file} {n}" for file, n in files.most_common(15)) + (", ..." if len(files) > 15 else "")
    print(f"  {len(unrouted)} tests call no composite: {where}")
    for test in unrouted if names else ():
        print(f"    {test}")


if __name__ == "__main__":
    sys.exit(main())
