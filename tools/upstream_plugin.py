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

KINDS = {"chains": "upstream_chains", "graphs": "upstream_graphs", "objects": "upstream_objects"}
"""Modules with a class `Routing`, made for one mode, and the modes themselves, `MODES`."""


class Routing(Protocol):
    test: str
    """The one that runs now."""
    calls: dict[str, Counter[str]]
    """Per test, how many routed calls ended as what."""

    def start(self) -> None:
        """Route what is called from now on, and what modules make that are imported from now on."""

    def stop(self) -> None: ...


class Report:
    """What each test came to."""

    def __init__(self, path: Path, routing: Routing | None) -> None:
        self._path, self._routing = path, routing
        self._outcomes: dict[str, str] = {}
        self._errors: dict[str, str] = {}

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._routing is not None:
            self._routing.test = item.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            expected = hasattr(report, "wasxfail")
            self._outcomes[report.nodeid] = "xfailed" if expected and report.skipped else report.outcome
        crash = getattr(report.longrepr, "reprcrash", None)
        if report.failed and crash is not None:
            self._errors[report.nodeid] = crash.message.partition("\n")[0][:200]

    def pytest_sessionfinish(self) -> None:
        if self._routing is not None:
            self._routing.stop()
        calls = {} if self._routing is None else self._routing.calls
        content = {"outcomes": self._outcomes, "errors": self._errors, "calls": calls}
        self._path.write_text(json.dumps(content, indent=1))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--teola-route", help="KIND:MODE, accelerate what tests make or call")
    parser.addoption("--teola-report", type=Path, help="JSON file for the outcomes")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Start before the first conftest is imported, which may make objects, too."""
    options = early_config.known_args_namespace
    routing = _routing(options.teola_route) if options.teola_route else None
    if routing is not None:
        routing.start()
    if options.teola_report is not None:
        early_config.pluginmanager.register(Report(options.teola_report, routing), "teola-report")


def _routing(route: str) -> Routing:
    kind, _, mode = route.partition(":")
    if kind not in KINDS:
        raise pytest.UsageError(f"--teola-route: unknown kind {kind!r}; known: {', '.join(KINDS)}")
    module = importlib.import_module(KINDS[kind])
    if mode not in module.MODES:
        raise pytest.UsageError(f"--teola-route: unknown mode {mode!r}; known: {', '.join(module.MODES)}")
    made: Routing = module.Routing(mode)
    return made
