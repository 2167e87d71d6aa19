"""Tests that what a hint names exists: commands, flags, extras, functions, arguments, settings, files."""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from teola_plugin.adapters.langchain.runnable import AcceleratedRunnable
from teola_plugin.cli.main import parser
from teola_plugin.errors import extra

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for folder in ("teola_plugin", "adapters", "tracer", "server")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not any(part.is_symlink() for part in path.parents)
]
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = set(METADATA["project"]["optional-dependencies"])
HOMES = (
    "teola_plugin.workflow",
    "teola_plugin",
    "teola_plugin.langchain",
    "teola_plugin.llamaindex",
    "teola_plugin.engines.vllm",
    "teola_plugin.engines.openai",
    "teola_plugin.engines.sentence_transformers",
    "teola_plugin.engines.pgvector",
    "teola_plugin.engines.vector_store",
    "teola_plugin.engines.conformance",
    "teola_plugin.adapters.langchain.tools",
)
"""Where what users call is found."""
OTHERS: Mapping[str, frozenset[str]] = {
    "ray": frozenset({"start", "status"}),
    "make": frozenset({"model", "setup", "demo", "test"}),
}
"""Commands that are not ours, and what of them is told to run."""
ENTRY_POINTS = frozenset({"ainvoke", "aembed_query"})


@dataclass(frozen=True)
class Hint:
    where: str
    text: str


# ------------------------------------------------------------ finding them


def _text(node: ast.AST, known: Mapping[str, ast.AST]) -> str:
    """Return a literal as text. Values known at run time become `…`, and alternatives are joined by ` | `."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, known) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, known)
    if isinstance(node, ast.BinOp):
        return _text(node.left, known) + _text(node.right, known)
    if isinstance(node, ast.IfExp | ast.BoolOp):
        parts = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
        return " | ".join(_text(part, known) for part in parts)
    if isinstance(node, ast.Name) and node.id in known:
        return _text(known[node.id], known)
    if isinstance(node, ast.Dict):
        return " | ".join(_text(part, known) for part in node.values)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "extra":
        return extra(*(_text(argument, known) for argument in node.args))
    return "…"


def _hints(path: Path) -> Iterator[Hint]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and ("hint" in target.id.lower() or target.id.isupper())
    }
    place = str(path.relative_to(ROOT))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "hint":
            yield Hint(f"{place}:{node.value.lineno}", _text(node.value, known))
        if isinstance(node, ast.FunctionDef):
            named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            defaults = [*node.args.defaults, *node.args.kw_defaults]
            for argument, default in zip(reversed(named), reversed(defaults), strict=False):
                if argument.arg == "hint" and default is not None:
                    yield Hint(f"{place}:{node.lineno}", _text(default, known))
    for name, value in known.items():
        if "hint" in name.lower():
            yield Hint(f"{place}: {name}", _text(value, known))


@cache
def all_hints() -> tuple[Hint, ...]:
    return tuple(hint for path in SOURCES for hint in _hints(path) if re.search(r"\w", hint.text))


# ------------------------------------------------------------ what there is


@cache
def _commands() -> dict[str, argparse.ArgumentParser]:
    [subs] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(subs.choices)


@cache
def _flags() -> frozenset[str]:
    return frozenset(flag for one in _commands().values() for flag in one._option_string_actions)


@cache
def _callables() -> dict[str, list[Any]]:
    """Return everything that users may call, by its name. Methods have no class in their name."""
    found: dict[str, list[Any]] = {}
    for home in HOMES:
        module = importlib.import_module(home)
        for name in getattr(module, "__all__", None) or vars(module):
            one = getattr(module, name)
            if not callable(one):
                continue
            found.setdefault(name, []).append(one)
            if home in ("teola_plugin", "teola_plugin.langchain", "teola_plugin.llamaindex") and inspect.isclass(one):
                for method, value in inspect.getmembers(one, callable):
                    if not method.startswith("_"):
                        found.setdefault(method, []).append(value)
    return found | {name: [getattr(AcceleratedRunnable, name)] for name in ("explain", "invoke")}


@cache
def _names() -> frozenset[str]:
    """Return the names of parameters, fields and settings anywhere in the package."""
    found: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return frozenset(found)


def _takes(name: str, argument: str) -> bool:
    for one in _callables().get(name, ()):
        if "model_fields" in dir(one) and argument in one.model_fields:
            return True
        try:
            given = inspect.signature(one).parameters
        except (TypeError, ValueError):
            continue
        if argument in given or any(p.kind is p.VAR_KEYWORD for p in given.values()):
            return True
    return False


# ------------------------------------------------------------ looking at one


def _wrong(text: str) -> Iterator[str]:
    for command, more in re.findall(r"\b(teola|ray|make) ((?:[a-z]+)(?: [^`;,]*)?)(?=`)", text):
        word = more.split()[0]
        if word not in (_commands() if command == "teola" else OTHERS[command]):
            yield f"there is no command `{command} {word}`"
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text):
        if flag not in _flags() and not re.search(rf"(ray start|useradd) [^`]*{flag}", text):
            yield f"no command takes {flag}"
    for wanted in re.findall(r"pip install ('[^']*'|\S+)", text):
        yield from _wrong_package(wanted.strip("'"))
    for called, given in re.findall(r"(?<![\w.\[])([A-Za-z_][\w.]*)\(([^()]*)", text):
        yield from _wrong_call(called, given)
    for word in re.findall(r"\bTEOLA_\w+", text):
        if not any(f'"{word}"' in path.read_text() for path in SOURCES):
            yield f"nobody reads {word}"
    for named in re.findall(r"(?<![\w./])((?:[\w-]+/)+[\w-]+\.(?:py|md|yaml))", text):
        if not any((ROOT / folder / named).exists() for folder in ("", "teola_plugin")):
            yield f"there is no file {named}"
    for argument in re.findall(r"(?<![\w(.])([a-z_]+)=(?=[^=])", text):
        if argument not in _names() and not re.search(rf"vllm|pip|{argument}=\.\.\.", text.lower()):
            yield f"nothing takes {argument}="


def _wrong_package(wanted: str) -> Iterator[str]:
    if found := re.fullmatch(r"\.\[([\w-]+)\]", wanted):
        if found[1] not in EXTRAS:
            yield f"there is no extra {found[1]}"
    elif wanted.startswith(("teola", ".")):
        yield f"{wanted} is at no registry"


def _wrong_call(called: str, given: str) -> Iterator[str]:
    name = called.rpartition(".")[2]
    if called == "ray.shutdown" or hasattr(builtins, called) or called in ENTRY_POINTS:
        return
    if name in ("install", "create", "or") or re.fullmatch(r"[A-Z]+", name):
        return
    if called.startswith("copy."):
        assert hasattr(importlib.import_module("copy"), name)
        return
    if name not in _callables() and name not in ("GraphEdit", "freeze", "run", "RunnableLambda", "post_fork"):
        yield f"users cannot call {called}()"
        return
    for argument in re.findall(r"(\w+)=", given):
        if name in _callables() and not _takes(name, argument):
            yield f"{called} does not take {argument}="


@pytest.mark.parametrize("hint", all_hints(), ids=lambda hint: hint.where)
def test_names_in_hints_exist(hint: Hint) -> None:
    assert not list(_wrong(hint.text)), hint.text


def test_hints_of_the_sources_are_collected() -> None:
    assert len(all_hints()) > 150
    assert any("teola up" in hint.text for hint in all_hints())
    assert any("pip install '.[ray]'" in hint.text for hint in all_hints())


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("see the log; then restart()", "restart"),
        ("pip install 'teola-plugin[vllm]'", "registry"),
        ("pip install '.[gpu]'", "extra gpu"),
        ("start it with `teola launch pool.yaml`", "teola launch"),
        ("check --doc", "--doc"),
        ("EnginePool.attach(address)", "attach"),
        ("EmbeddingEngine(modell=...)", "modell"),
        ("set TEOLA_NOTHING", "TEOLA_NOTHING"),
        ("see docs/nothing.md", "docs/nothing.md"),
        ("pass nothing_like_it=3", "nothing_like_it"),
    ],
)
def test_unknown_name_in_a_hint_is_found(text: str, wrong: str) -> None:
    assert any(wrong in found for found in _wrong(text)), text


def test_no_text_installs_the_package_by_name() -> None:
    found = [path for path in SOURCES if re.search(r"pip install '?teola", path.read_text())]
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert not found and not [path for path in documents if re.search(r"pip install '?teola", path.read_text())]
