#!/usr/bin/env python3
"""Run the frameworks' own tests, plain and with every app object accelerated: chains, graphs, agents, query engines.

Source distributions of the locked versions come from the package registry. Each package's tests run in an environment
of their own (`langchain` changes the snapshots of langchain-core). What passes plainly has to pass in every mode, but
for what `upstream_suites.py` declares with a reason. Everything lands in out/upstream. Exit code 1 on any difference.

    make test-upstream
    make test-upstream ARGS="--suites langgraph,langchain --modes default"
    make test-upstream ARGS="--suites langgraph --tests tests/test_state.py --names"
    make test-upstream ARGS="--suites langchain-core --tests tests/unit_tests"     all of its tests
    make test-upstream ARGS="--suites llama-index-core --checkout ../llama_index"  it has no tests in its distribution
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upstream_suites import ROOT, SUITES, TIMEOUT, Suite, environment, source

WORDS = {
    "chains": {
        "copy": "calls ran as a routed copy beside their graph",
        "ahead": "calls ran beside their graph",
        "watched": "calls ran as a query with nothing to run ahead",
        "original": "calls went to the original (no pool, and nothing that would start sooner)",
    },
    "graphs": {
        "graph": "graphs were made, and accelerated",
        "call": "calls of accelerated graphs",
        "query": "of them began a query; the others belong to one, or have no pool",
        "node": "nodes said when they ran",
        "part": "parts of a query ran ahead of a node",
        "asked": "calls of models asked an engine",
        "used": "steps on engines that ran ahead were of use",
        "unused": "were of none",
    },
    "objects": {"object": "objects were replaced by accelerated ones"},
}
"""What became of what tests made and called, by kind of suite."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of the tests."""

    outcomes: dict[str, str]
    errors: dict[str, str]
    """The first line of the message, for tests that failed."""
    calls: dict[str, dict[str, int]]
    seconds: float

    @property
    def passed(self) -> set[str]:
        return {test for test, outcome in self.outcomes.items() if outcome == "passed"}

    def count(self) -> str:
        found = Counter(self.outcomes.values())
        return ", ".join(f"{found[kind]} {kind}" for kind in sorted(found))


def main() -> int:
    options = _options()
    return 0 if all([_passes(suite, options) for suite in options.suites]) else 1


def _options() -> Any:
    known = {suite.label: suite for suite in SUITES}
    modes = list(dict.fromkeys(mode for suite in SUITES for mode in suite.modes))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--suites", type=_names, default=[], help="by default all that need no checkout: " + ",".join(known)
    )
    parser.add_argument("--checkout", type=Path, help="a checkout of the repository of the one suite in --suites")
    parser.add_argument("--modes", type=_names, default=modes, help=f"{','.join(modes)}; those that a suite has")
    parser.add_argument("--tests", type=_names, default=[], help="folders, files or tests of one suite's distribution")
    parser.add_argument("--names", action="store_true", help="name each test that routes nothing")
    options = parser.parse_args()
    for what, given, allowed in (("suite", options.suites, known), ("mode", options.modes, modes)):
        for name in given:
            if name not in allowed:
                parser.error(f"unknown {what} {name!r}; known: {', '.join(allowed)}")
    for option in ("tests", "checkout"):
        if getattr(options, option) and len(options.suites) != 1:
            parser.error(f"--{option} needs one suite: --suites " + "|".join(known))
    options.suites = options.suites or [name for name, suite in known.items() if not suite.checkout_folder]
    options.suites = [known[name] for name in options.suites]
    for suite in options.suites:
        if bool(options.checkout) != bool(suite.checkout_folder):
            need = (
                "needs --checkout: its source distribution has no tests"
                if suite.checkout_folder
                else "takes no --checkout"
            )
            parser.error(f"{suite.label} {need}")
    return options


def _names(text: str) -> list[str]:
    return text.split(",")


def _passes(suite: Suite, options: Any) -> bool:
    """Whether all that passes plainly passes in every mode. Exits where nothing passes plainly."""
    folder = source(suite, options.checkout)
    tests = Tests(suite, folder, environment(suite, folder))
    wanted = options.tests or list(suite.tests)
    print(f"{suite.label} {suite.version}, {len(wanted)} of its files and folders", flush=True)
    for path, reason in suite.ignored.items():
        print(f"  ignored, since {reason}: {path}")
    plain = tests.run("", wanted)
    print(f"plain    {plain.count()} in {plain.seconds:.0f} s", flush=True)
    if not plain.passed:
        sys.exit(f"upstream: no test passes plainly; see {suite.home / 'plain.log'}")
    modes = [mode for mode in suite.modes if mode in options.modes]
    good = [_compared(tests, mode, plain, wanted, (mode == modes[0]) + options.names) for mode in modes]
    print(flush=True)
    return all(good)


@dataclass(frozen=True, slots=True)
class Tests:
    """Runs tests of a suite."""

    suite: Suite
    folder: Path
    python: Path

    def run(self, mode: str, tests: list[str], again: str = "") -> Ran:
        """`mode`: "" for plain; `again`: an ending for the names of what it leaves in the suite's folder."""
        name = (mode or "plain") + again
        report = self.suite.home / f"{name}.json"
        report.unlink(missing_ok=True)
        command = [str(self.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "upstream_plugin"]
        command += ["--tb=short"]
        if (self.folder / "pyproject.toml").exists():  # else pytest takes the settings of a folder above
            command += ["-c", "pyproject.toml"]
        command += ["--continue-on-collection-errors", *(f"--ignore={path}" for path in self.suite.ignored)]
        command += [*self.suite.options, f"--timeout={TIMEOUT}", f"--teola-report={report}"]
        command += [f"--teola-route={self.suite.kind}:{mode}"] if mode else []
        path = os.pathsep.join(filter(None, (str(ROOT / "tools"), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, **self.suite.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        started = time.monotonic()
        with (self.suite.home / f"{name}.log").open("w") as log:
            subprocess.run([*command, *tests], cwd=self.folder, env=env, stdout=log, stderr=subprocess.STDOUT)
        if not report.exists():
            sys.exit(f"upstream: pytest did not come to its end; see {log.name}")
        found = json.loads(report.read_text())
        return Ran(found["outcomes"], found["errors"], found["calls"], time.monotonic() - started)

    def twice(self, mode: str, tests: list[str]) -> set[str]:
        """Those that differ once more; a test that a busy machine upsets is named and let go."""
        plain, routed = self.run("", tests, "-again"), self.run(mode, tests, "-again")
        again = plain.passed ^ routed.passed
        for test in sorted(set(tests) - again):
            print(f"  unsteady: {test}: the same when it ran alone")
        return again


def _compared(tests: Tests, mode: str, plain: Ran, wanted: list[str], unrouted: int) -> bool:
    """Whether the mode makes no difference that is not declared; prints what it makes.

    `unrouted`: of tests that route nothing, say nothing (0), how many they are (1), their names (2).
    """
    suite, ran = tests.suite, {name for test in plain.outcomes for name in names_of(test)}
    excluded = {test: why for test, why in suite.excluded[mode].items() if test in ran}
    routed = tests.run(mode, wanted)
    print(f"{mode:<8} {routed.count()} in {routed.seconds:.0f} s")
    _print_calls(routed, WORDS[suite.kind])
    if unrouted:
        _print_unrouted(plain, routed, names=unrouted > 1)
    for why in dict.fromkeys(excluded.values()):
        print(f"  excluded, since {why}: {', '.join(test for test, one in excluded.items() if one == why)}")
    different = {test for test in plain.passed ^ routed.passed if excluded.keys().isdisjoint(names_of(test))}
    if different:
        different = tests.twice(mode, sorted(different))
    for test in sorted(different):
        print(f"  DIFFERENT: {test}: plain {plain.outcomes.get(test)}, routed {routed.outcomes.get(test)}")
        if test in routed.errors:
            print(f"    {routed.errors[test]}")
    if different:
        print(f"  see {suite.home / mode}.log")
    return not different


def names_of(test: str) -> tuple[str, str]:
    """By which it is excluded: without its file, with its parameters and without them."""
    path, bracket, parameters = test.partition("[")
    name = path.rsplit("::", 1)[-1]
    return name, name + bracket + parameters


def _print_calls(routed: Ran, words: dict[str, str]) -> None:
    total: Counter[str] = Counter()
    for calls in routed.calls.values():
        total.update(calls)
    print(f"  routed in {len(routed.calls)} tests:")
    for kind, word in words.items():
        if total[kind]:
            print(f"    {total[kind]:>5} {word}")


def _print_unrouted(plain: Ran, routed: Ran, names: bool) -> None:
    """These call nothing that is accelerated: schemas, configs, bare leaves, classes of the test's own."""
    unrouted = sorted(plain.passed - routed.calls.keys())
    files = Counter(Path(test.partition("::")[0]).stem for test in unrouted)
    where = ", ".join(f"{file} {n}" for file, n in files.most_common(10)) + (", ..." if len(files) > 10 else "")
    print(f"  {len(unrouted)} tests route nothing{': ' + where if where else ''}", flush=True)
    for test in unrouted if names else ():
        print(f"    {test}")


if __name__ == "__main__":
    sys.exit(main())
