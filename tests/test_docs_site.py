"""Tests of the documentation site, which `make docs` builds: every document is a page, and links lead to pages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from teola_plugin.cli.main import BAD_INPUT, FAILED, INTERRUPTED, NO_READER

ROOT = Path(__file__).parents[1]


def load_hook() -> Any:
    """Import tools/docs_site.py, which is no part of a package."""
    specification = importlib.util.spec_from_file_location("docs_site", ROOT / "tools" / "docs_site.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


docs_site = load_hook()
PAGES = {"index.md", "architecture.md", "compare.md", "images/real.svg"}


def pages_of(navigation: Any) -> list[str]:
    if isinstance(navigation, str):
        return [navigation]
    entries = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for entry in entries for page in pages_of(entry)]


def test_navigation_has_every_page_once() -> None:
    navigation = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])

    documents = [path.name for path in (ROOT / "docs").glob("*.md")]
    assert sorted(navigation) == sorted([*documents, *docs_site.generated_pages()])


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("index.md", "[a](docs/compare.md#start)", "[a](compare.md#start)"),
        ("index.md", '<img src="docs/images/real.svg">', '<img src="images/real.svg">'),
        ("compare.md", "[a](../README.md)", "[a](index.md)"),
        ("compare.md", "[a](../ARCHITECTURE.md#x), [b](#here)", "[a](architecture.md#x), [b](#here)"),
        ("compare.md", "[a](../examples/01_no_gpu.py)", "a"),
        ("compare.md", "[a](https://example.org/x)", "[a](https://example.org/x)"),
        ("compare.md", "```text\n[a](../README.md)\n```", "```text\n[a](../README.md)\n```"),
    ],
)
def test_site_links_point_to_pages(page: str, text: str, expected: str) -> None:
    assert docs_site.site_links(text, page, PAGES) == expected


def test_links_to_other_files_use_the_repository_address() -> None:
    text = docs_site.site_links("[a](../examples/x.py)", "compare.md", PAGES, "https://example.org/tree/main/")

    assert text == "[a](https://example.org/tree/main/examples/x.py)"


def test_command_page_shows_every_command() -> None:
    page = docs_site.command_page()

    for command in ("demo", "compare", "simulate", "doctor", "up", "status", "serve"):
        assert f"## teola {command}" in page
    for status in (FAILED, BAD_INPUT, f"{INTERRUPTED}, {NO_READER}"):
        assert f"| {status} |" in page


def test_environment_page_lists_variables_of_the_package() -> None:
    assert "| `TEOLA_DISABLE` |" in docs_site.environment_page()
