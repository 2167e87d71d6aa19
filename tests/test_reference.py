"""Tests that the reference has each public name, flag, setting, variable, metric, address and error."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import yaml
from test_docs_site import docs_site
from test_public_api import ERRORS, PUBLIC

from teola_plugin import engines
from teola_plugin.cli.main import parser
from teola_plugin.cluster.config import Kind
from teola_plugin.server import routes
from teola_plugin.server.callers import APP, DEADLINE, DEPTH, GANG, GOAL, QUERY
from teola_plugin.server.settings import ServiceConfig
from tools import reference_pages, source_texts

ROOT = Path(__file__).parents[1]


@cache
def reference(name: str) -> str:
    return (ROOT / "docs" / f"reference-{name}.md").read_text()


def shown_modules() -> set[str]:
    return {name for names in docs_site.REFERENCE.values() for name in names}


@pytest.mark.parametrize("name", sorted({*importlib.import_module("teola_plugin").__all__}))
def test_every_name_of_the_package_has_an_entry(name: str) -> None:
    shown = shown_modules()
    home = {"Workflow": "teola_plugin.workflow"}.get(name, "teola_plugin.errors" if name in ERRORS else "")

    assert f"teola_plugin.{name}" in shown or home in shown


@pytest.mark.parametrize("module", PUBLIC)
def test_every_name_of_a_public_module_has_an_entry(module: str) -> None:
    """Names are shown with the module that users import, whose `__all__` lists them."""
    shown = {name for home in shown_modules() for name in getattr(_load(home), "__all__", ())}
    shown |= {path.rpartition(".")[2] for path in shown_modules()}

    assert sorted(set(PUBLIC[module]) - shown) == []


def _load(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return None


def test_every_flag_has_an_entry() -> None:
    page = docs_site.command_page()
    for name, command in docs_site.commands(parser()):
        section = page.partition(f"## {name}\n")[2].partition("\n## ")[0]
        for flag in command._option_string_actions:
            assert re.search(rf"(?<![\w-]){flag}\b", section), f"{name} {flag}"
        for action in command._actions:
            assert action.help or isinstance(action, argparse._SubParsersAction), f"{name} {action.dest} has no help"


def test_every_setting_has_an_entry_with_a_meaning() -> None:
    page = reference("settings")
    for path, model in reference_pages.levels("", ServiceConfig):
        section = page.partition(f"## `{path}`\n" if path else "## The file\n")[2].partition("\n## ")[0]
        for name in model.model_fields:
            assert re.search(rf"(?m)^\| `{name}` \|.*\| .+ \|$", section), f"{path}.{name}: write a docstring below it"


def test_every_kind_of_engine_has_an_entry_with_its_class() -> None:
    assert set(reference_pages.ENGINE_CLASSES) == set(reference_pages.PURPOSES) == set(get_args(Kind))
    assert set(reference_pages.ENGINE_CLASSES.values()) <= set(engines.__all__)


def test_every_variable_that_is_read_has_an_entry_with_a_meaning() -> None:
    page = docs_site.environment_page()
    named = set()
    for path in source_texts.python_files(ROOT):
        text = path.read_text()
        named |= set(re.findall(r"\bTEOLA_[A-Z_]+", text))
        named |= set(re.findall(r"\benviron(?:\.get\(|\[)\"([A-Z_]+)\"", text))

    assert named - set(docs_site.ENVIRONMENT) <= SYSTEM
    assert all(f"| `{name}` | {meaning} |" in page for name, meaning in docs_site.ENVIRONMENT.items())


SYSTEM = {"HF_HUB_CACHE", "HF_HOME", "VLLM_CACHE_ROOT", "OMP_NUM_THREADS"}
"""Variables of other packages, whose values are looked at and mean what they mean there."""


def test_every_variable_of_the_reference_is_named_in_the_sources() -> None:
    texts = [path.read_text() for path in source_texts.python_files(ROOT)]

    assert [name for name in docs_site.ENVIRONMENT if not any(name in text for text in texts)] == []


def test_every_metric_has_an_entry_with_a_meaning() -> None:
    page = reference("metrics")
    for name, kind, labels, text in reference_pages.metrics():
        cells = (f"`{name}`", kind, ", ".join(f"`{label}`" for label in labels), text)
        assert f"| {' | '.join(cells)} |" in page
    assert len(reference_pages.metrics()) > 20


NO_ROUTES = SimpleNamespace(routes=[])


def test_every_address_of_the_server_has_an_entry() -> None:
    page = reference("http")
    modules = [
        importlib.import_module(f"{routes.__name__}.{one.name}") for one in pkgutil.iter_modules(routes.__path__)
    ]
    shown = [route for module in modules for route in getattr(module, "router", NO_ROUTES).routes]
    addresses = {
        f"`{method} {re.sub(r':[a-z]+}', '}', route.path)}`"
        for route in shown
        if route.include_in_schema
        for method in route.methods
    }

    assert len(addresses) > 20
    assert [address for address in sorted(addresses) if address not in page] == []


def test_every_header_of_a_query_has_an_entry() -> None:
    headers = reference_pages.query_headers().values()

    assert [name.lower() for name in headers] == [QUERY, APP, DEADLINE, GOAL, DEPTH, GANG]
    assert all(f"| `{name}` | " in reference("http") for name in headers)


@cache
def errors_page() -> str:
    page: str = docs_site.errors_page()
    return page


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_has_an_entry(name: str) -> None:
    assert f"\n## {name}\n\n{(ERRORS[name].__doc__ or '').splitlines()[0]}" in errors_page()


def test_page_of_errors_shows_messages_with_hints() -> None:
    page = errors_page()

    assert page.count("\n| ") > 400
    assert "| the engine pool is not running. | call its start(), or use it inside `with EnginePool...:` |" in page
    assert "| 401 | `invalid_api_key` |" in page


def test_reference_pages_are_in_the_navigation() -> None:
    text = yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])

    for page in ("reference-settings.md", "reference-http.md", "reference-metrics.md", "reference/errors.md"):
        assert page in text
