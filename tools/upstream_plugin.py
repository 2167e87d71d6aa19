"""A pytest plugin: whatever a test makes, or calls, of a framework's composites goes through the accelerator.

Options: `--teola-route KIND:MODE` (see `KINDS`; without it nothing is routed) and `--teola-report` (a JSON file: the
outcome of each test, and what became of its routed calls).
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Protocol

import pytest

KINDS = {"chains": "upstream_chains", "graphs": "upstream_graphs"}
"""Modules with a class `Routing`, made for one mode, and the modes themselves, `MODES`."""


class Routing(Protocol):
    test: str
    """The one that runs now."""
    calls: dict[str, Counter[str]]
    """Per test, how many routed calls ended as what."""

    def start(self) -> None:
        """Routes whatever is called from now on."""

    def stop(self) -> None: ...


class Report:
    """What each test came to."""

    def __init__(self, path: Path, routing: Routing | None) -> None:
        self._path, self._routing = path, routing
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._routing is not None:
            self._routing.test = item.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            expected = hasattr(report, "wasxfail")
            self._outcomes[report.nodeid] = "xfailed" if expected and report.skipped else report.outcome

    def pytest_sessionfinish(self) -> None:
        if self._routing is not None:
            self._routing.stop()
        calls = {} if self._routing is None else self._routing.calls
        self._path.write_text(json.dumps({"outcomes": self._outcomes, "calls": calls}, indent=1))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--teola-route", help="KIND:MODE, accelerate what tests make or call")
    parser.addoption("--teola-report", type=Path, help="JSON file for the outcomes")


def pytest_configure(config: pytest.Config) -> None:
    route, path = config.getoption("--teola-route"), config.getoption("--teola-report")
    routing = _routing(route) if route else None
    if routing is not None:
        routing.start()
    if path is not None:
        config.pluginmanager.register(Report(path, routing), "teola-report")


def _routing(route: str) -> Routing:
    kind, _, mode = route.partition(":")
    if kind not in KINDS:
        raise pytest.UsageError(f"--teola-route: unknown kind {kind!r}; known: {', '.join(KINDS)}")
    module = importlib.import_module(KINDS[kind])
    if mode not in module.MODES:
        raise pytest.UsageError(f"--teola-route: unknown mode {mode!r}; known: {', '.join(module.MODES)}")
    made: Routing = module.Routing(mode)
    return made
