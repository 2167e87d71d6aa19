"""Tests that warnings fail the tests, and that each exception is listed with its reason."""

from __future__ import annotations

import ast
import tomllib
import warnings

import pytest
from support.private_names import ROOT

SETTINGS = (ROOT / "pyproject.toml").read_text("utf-8")
FILTERS = tomllib.loads(SETTINGS)["tool"]["pytest"]["ini_options"]["filterwarnings"]


@pytest.mark.parametrize("category", [DeprecationWarning, PendingDeprecationWarning, FutureWarning, UserWarning])
def test_warnings_raise_as_errors_in_tests(category: type[Warning]) -> None:
    with pytest.raises(category):
        warnings.warn("this is going away", category, stacklevel=1)


def test_every_ignored_warning_names_its_message() -> None:
    assert FILTERS[0] == "error"
    for entry in FILTERS[1:]:
        action, message, category, *_ = entry.split(":")
        assert (action, category) == ("ignore", "DeprecationWarning") and len(message) > 20


def test_every_ignored_warning_has_a_reason() -> None:
    lines = [line.strip() for line in SETTINGS.splitlines()]
    start = lines.index("filterwarnings = [")
    entries = lines[start + 1 : lines.index("]", start)]
    groups = "\n".join(entries[1:]).split("# ")[1:]
    assert entries[0] == '"error",' and entries[1].startswith("# ")
    assert sum(group.count('"ignore:') for group in groups) == len(FILTERS) - 1
    assert all("\n" in group for group in groups), "a reason without a warning"


def test_no_test_file_ignores_all_warnings() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                given = [ast.unparse(one) for one in (*node.args, *node.keywords)]
                whole = node.func.attr in ("filterwarnings", "simplefilter") and given == ["'ignore'"]
                assert not whole, f"{path.relative_to(ROOT)}:{node.lineno}"
