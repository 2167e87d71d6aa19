"""Tests that commands, flags, targets, paths, settings, classes and functions in the documents exist."""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.documents import DOCUMENTS, MADE
from test_hints import SOURCES

from teola_plugin import EnginePool
from teola_plugin.cli.main import parser
from teola_plugin.server.settings import ServiceConfig

ROOT = Path(__file__).parents[1]
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS if path.name != "CHANGELOG.md"]
"""The changelog names what is gone."""
PYTHON_FOLDERS = ("teola_plugin", "adapters", "tracer", "server", "tests", "examples", "benchmarks", "tools")
FENCE = re.compile(r"(?ms)^ *```(\w*)[^\n]*\n(.*?)^ *```$")
FILE_ENDINGS = frozenset({"yaml", "json", "py", "html"})
OTHER_FLAGS = {
    "gunicorn": ("--preload",),
    "ray start": ("--head", "--address"),
    "vllm serve": ("--generation-config", "--scheduling-policy"),
    "vllm bench serve": ("--burstiness",),
}
"""Flags of other programs that documents name by themselves."""
OTHER_CLASSES = {"RemoteGraph": "langgraph.pregel.remote"}
"""Classes of frameworks that documents name and no code of the repository does, with their modules."""


# ------------------------------------------------------------ the names in a document


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and content of each block of code, but for generated ones."""
    for found in FENCE.finditer(MADE.sub("", text)):
        yield found[1], found[2]


def spans(text: str) -> list[str]:
    """Return what stands between backticks, outside of blocks of code."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def command_lines(text: str) -> Iterator[str]:
    """Yield the commands that a reader would type: lines of consoles, and code in the text."""
    for language, content in blocks(text):
        if language in ("console", "bash", "sh"):
            for line in content.replace("\\\n", " ").splitlines():
                yield re.sub(r"\s#.*", "", line).removeprefix("$ ").strip()
    yield from spans(text)


# ------------------------------------------------------------ what exists


@cache
def commands() -> dict[str, argparse.ArgumentParser]:
    [subparsers] = [one for one in parser()._actions if isinstance(one, argparse._SubParsersAction)]
    return dict(subparsers.choices)


@cache
def targets() -> frozenset[str]:
    return frozenset(re.findall(r"(?m)^([a-z-]+):.*## ", (ROOT / "Makefile").read_text()))


@cache
def own_flags() -> frozenset[str]:
    """Return the flags of the commands, the benchmarks and the examples."""
    paths = [path for folder in ("benchmarks", "examples", "tools", "tests") for path in (ROOT / folder).rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in paths if path != Path(__file__)]
    others = {flag for text in texts for flag in re.findall(r"\"(--[a-z][a-z-]*)\"", text)}
    return frozenset(flag for command in commands().values() for flag in command._option_string_actions) | others


@cache
def identifiers() -> frozenset[str]:
    """Return all words in the Python files of the repository except this one."""
    paths = [path for folder in PYTHON_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in {path.resolve() for path in paths} - {Path(__file__)}]
    return frozenset(word for text in texts for word in re.findall(r"\b[A-Za-z_]\w*", text))


@cache
def own_definitions() -> frozenset[str]:
    """Return the names of functions, parameters, fields and attributes that the sources define."""
    pattern = re.compile(r"\bdef (\w+)|^\s+(?:self\.)?(\w+)\s*[:=][^:]|\b(\w+): |^class (\w+)", re.MULTILINE)
    return frozenset(
        name for path in SOURCES for found in pattern.findall(path.read_text(encoding="utf-8")) for name in found
    )


def resolves(path: str) -> bool:
    """Return True if a dotted path is a module, or an attribute of one."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            if not hasattr(value, name) and name not in getattr(value, "__annotations__", {}):
                return isinstance(value, type) and f"self.{name} " in inspect.getsource(value)
            value = getattr(value, name, None)
        return True
    return False


# ------------------------------------------------------------ the checks


def wrong_commands(text: str) -> Iterator[str]:
    """Yield commands, flags and targets that do not exist."""
    for line in command_lines(text):
        for part in re.split(r"[;&|]+ ", line):
            words = part.split()
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # variables before the command
                words = words[1:]
            if words[:1] == ["make"] and len(words) > 1 and words[1] not in targets():
                yield f"make {words[1]}"
            if words[:1] != ["teola"] or len(words) == 1 or not re.match(r"[a-z]", words[1]):
                continue
            command = commands().get(words[1])
            if command is None:
                yield f"teola {words[1]}"
                continue
            known = {*command._option_string_actions}
            given = {flag for word in words[2:] for flag in re.findall(r"^\[?(--[a-z][a-z-]*)", word)}
            yield from (f"teola {words[1]} {flag}" for flag in given - known)
    known = {flag for flags in OTHER_FLAGS.values() for flag in flags} | own_flags()
    yield from (flag for span in spans(text) for flag in re.findall(r"^(--[a-z][a-z-]*)", span) if flag not in known)


def wrong_names(text: str) -> Iterator[str]:
    """Yield dotted names of the package, imports and classes that do not exist."""
    code = "\n".join([*spans(text), *(content for _, content in blocks(text))])
    for path in re.findall(r"(?<![\w./-])teola_plugin(?:\.\w+)+(?![\w/])", MADE.sub("", text)):
        if not resolves(path) and not path.endswith((".py", ".md")):
            yield path
    for module, imported in re.findall(r"(?m)^ *from (teola_plugin[\w.]*) import (\([^)]*\)|[\w, ]+)", code):
        yield from (f"{module}.{name}" for name in re.findall(r"\w+", imported) if not resolves(f"{module}.{name}"))
    for span in spans(text):
        for name in re.findall(r"(?<![\w/.-])([A-Z][a-z]+[A-Z]\w*)(?![\w/-])", span):
            is_other = name in OTHER_CLASSES and resolves(f"{OTHER_CLASSES[name]}.{name}")
            if name not in identifiers() and not name.startswith("My") and not is_other:
                yield name
        for owner, name in re.findall(r"(?<![\w.])(fast|pool|trace|EnginePool|client)\.([a-z]\w+)", span):
            if name not in own_definitions() | FILE_ENDINGS and not hasattr(EnginePool, name):
                yield f"{owner}.{name}"
        for name in re.findall(r"(?<![\w.\"'-])([a-z_]+)=(?![=.])", span):
            if not span.startswith(("pip ", "make ", "$")) and name not in identifiers():
                yield f"{name}="


def wrong_settings(text: str) -> Iterator[str]:
    """Yield settings of YAML blocks that a pool's file does not have."""
    numbers = itertools.count()  # each key has a hash of its own
    for language, content in blocks(text):
        content = re.sub(r"sha256:\.\.\.", lambda _: f"sha256:{next(numbers):064}", content)
        data = yaml.safe_load(content) if language == "yaml" else None
        if not isinstance(data, dict) or not {"engines", "server", "apps", "langgraph"} & data.keys():
            continue
        data.setdefault("engines", {"any": {"kind": "fake"}})
        try:
            ServiceConfig.model_validate(data)
        except ValueError as error:
            yield str(error)


@pytest.mark.parametrize("document", NAMES)
def test_commands_flags_and_targets_exist(document: str) -> None:
    assert list(wrong_commands((ROOT / document).read_text())) == []


@pytest.mark.parametrize("document", NAMES)
def test_names_of_modules_classes_and_arguments_exist(document: str) -> None:
    assert list(wrong_names((ROOT / document).read_text())) == []


@pytest.mark.parametrize("document", NAMES)
def test_settings_in_documented_yaml_exist(document: str) -> None:
    assert list(wrong_settings((ROOT / document).read_text())) == []


@pytest.mark.parametrize("document", NAMES)
def test_files_in_commands_exist(document: str) -> None:
    for line in command_lines((ROOT / document).read_text()):
        for path in re.findall(r"(?<![\w/.])((?:examples|benchmarks|tests|tools|docs)/[\w/.-]+\.\w+)", line):
            assert (ROOT / path).exists(), f"{document} names {path}"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`make nothing`", "make nothing"),
        ("```console\n$ make nothing\n```", "make nothing"),
        ("```console\n$ TEOLA_QUIET=1 teola launch pool.yaml   # starts it\n```", "teola launch"),
        ("`teola compare --nothing`", "teola compare --nothing"),
        ("```console\n$ teola compare x \\\n    --nothing 3\n```", "teola compare --nothing"),
        ("`--nothing-like-it`", "--nothing-like-it"),
    ],
)
def test_unknown_commands_are_found(text: str, wrong: str) -> None:
    assert list(wrong_commands(text)) == [wrong]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("see teola_plugin.nothing for it", "teola_plugin.nothing"),
        ("`teola_plugin.EnginePool.nothing`", "teola_plugin.EnginePool.nothing"),
        (
            "```text\nfrom teola_plugin.engines import (\n    VllmEngine,\n    NoEngine,\n)\n```",
            "teola_plugin.engines.NoEngine",
        ),
        ("`NoSuchEngineAnywhere`", "NoSuchEngineAnywhere"),
        ("`pool.nothing_of_it()`", "pool.nothing_of_it"),
        ("`accelerate(app, nothing_like_that=3)`", "nothing_like_that="),
    ],
)
def test_unknown_names_are_found(text: str, wrong: str) -> None:
    assert list(wrong_names(text)) == [wrong]


@pytest.mark.parametrize(
    "setting", ["server: {nothing: 1}", "apps: {a: {object: 'x:y', nothing: 1}}", "engines: {a: {}}"]
)
def test_unknown_settings_are_found(setting: str) -> None:
    assert len(list(wrong_settings(f"```yaml\n{setting}\n```"))) == 1


def test_existing_names_pass() -> None:
    text = """`make demo`, `teola up pool.yaml --address 10.0.0.1:6379`, `EnginePool.from_yaml("pool.yaml")`,
`--address`, `RunnableParallel`, `teola_plugin.observe.emit`, `speculate="all"`, `pool.traces`

```yaml
server: {port: 8001}
```
"""

    assert [*wrong_commands(text), *wrong_names(text), *wrong_settings(text)] == []
