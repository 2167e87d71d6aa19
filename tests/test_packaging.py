"""Tests of the layout: every package is listed, links exist, and no top-level module has a generic name."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
OUTSIDE = ("adapters", "tracer", "server")
"""Folders beside the package that are imported as its parts."""
HEAVY = ("torch", "vllm", "ray", "langchain_core", "numpy", "psycopg", "rich", "sentence_transformers", "pydantic")


@pytest.fixture(scope="module")
def setuptools() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return found


def found_packages() -> dict[str, str]:
    """Return the folder of each package, by import name. Links are not followed, because their targets are walked."""
    made = {}
    for top in ("teola_plugin", *OUTSIDE):
        for folder, below, files in os.walk(ROOT / top, followlinks=False):
            below[:] = [name for name in below if name != "__pycache__"]
            if "__init__.py" in files:
                where = Path(folder).relative_to(ROOT)
                name = ".".join(where.parts)
                made[name if top == "teola_plugin" else f"teola_plugin.{name}"] = str(where)
    return made


def test_every_package_is_listed(setuptools: dict[str, Any]) -> None:
    listed = setuptools["packages"]
    assert len(set(listed)) == len(listed)
    assert sorted(listed) == sorted(found_packages()), "repair [tool.setuptools] packages in pyproject.toml"


def test_every_package_outside_the_main_one_is_mapped(setuptools: dict[str, Any]) -> None:
    outside = {name: where for name, where in found_packages().items() if not where.startswith("teola_plugin")}
    assert setuptools["package-dir"] == outside


@pytest.mark.parametrize("name", OUTSIDE)
def test_package_links_point_to_the_folders(name: str) -> None:
    link = ROOT / "teola_plugin" / name
    assert link.is_symlink(), f"restore it: ln -s ../{name} {link.relative_to(ROOT)}"
    assert os.readlink(link) == f"../{name}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
@pytest.mark.parametrize("name", OUTSIDE)
def test_links_are_committed_as_links(name: str) -> None:
    command = ["git", "-C", str(ROOT), "ls-files", "-s", "--", f"teola_plugin/{name}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("120000 ")


def elsewhere(code: str, folder: Path) -> str:
    """Run `code` in a new interpreter whose current folder is not the project's."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_folders_are_importable_by_full_name_only(tmp_path: Path) -> None:
    code = f"""
import importlib, importlib.util
for name in {OUTSIDE}:
    importlib.import_module("teola_plugin." + name)
    assert importlib.util.find_spec(name) is None, name + " can be imported under a name of others"
"""
    elsewhere(code, tmp_path)


def test_importing_the_package_loads_the_standard_library_only(tmp_path: Path) -> None:
    code = """
import sys
before = {name.partition(".")[0] for name in sys.modules}
import teola_plugin
after = {name.partition(".")[0] for name in sys.modules}
print(*sorted(after - before - set(sys.stdlib_module_names)))
"""
    assert elsewhere(code, tmp_path) == "teola_plugin"


def test_importing_engines_loads_no_heavy_package(tmp_path: Path) -> None:
    code = f"""
import importlib, pkgutil, sys, teola_plugin.engines as engines
for found in pkgutil.walk_packages(engines.__path__, "teola_plugin.engines."):
    importlib.import_module(found.name)
print(*sorted(set({HEAVY}) & set(sys.modules)))
"""
    assert elsewhere(code, tmp_path) == ""


@pytest.mark.parametrize("name", ["py.typed", "observe/page.css", "observe/page.js"])
def test_packaged_data_files_exist(name: str) -> None:
    assert resources.files("teola_plugin").joinpath(name).is_file()


def test_licence_is_the_full_apache_text() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text and len(text) > 10_000


def test_metadata_has_authors_and_python_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["authors"] == [{"name": "The teola-plugin authors"}]
    pythons = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)}
    assert pythons | {"Typing :: Typed"} <= set(project["classifiers"])
    assert project["requires-python"] == ">=3.11,<3.14"


def test_security_page_names_reporting_form_and_no_email() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert "Report a vulnerability" in text and "@" not in text
