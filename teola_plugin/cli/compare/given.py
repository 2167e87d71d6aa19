"""What the user gives to `teola compare`: an object by name, what `accelerate` is to do with it, inputs for it."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teola_plugin.errors import RegistrationError

if TYPE_CHECKING:
    from teola_plugin.cli.compare.entries import Entries


@dataclass(frozen=True, slots=True)
class Given:
    """One input, and the line that it comes from."""

    line: int
    value: Any


@dataclass(frozen=True, slots=True)
class Target:
    """The object that the user named."""

    plain: Any
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of `accelerate`."""
    fast: Any = None
    """The object itself, where it is accelerated already; `plain` is its original then."""


def load(name: str) -> Target:
    """The object `module:object`; modules of the current folder are found, a factory is called without arguments.

    A pair is an object, and the arguments of `accelerate`. Raises `RegistrationError`.
    """
    found = named(name)
    if _is_factory(found):
        found = made_by(found, name)
    arguments: Any = {}
    if isinstance(found, tuple):
        if len(found) != 2 or not isinstance(found[1], Mapping):
            raise RegistrationError(
                f"{name} is a tuple that is no pair of an object and the arguments of accelerate().",
                hint='e.g. return chain, {"pool": pool, "bind": [(model, "llm")]}',
            )
        found, arguments = found
    if not getattr(type(found), "__teola_accelerated__", False):
        return Target(found, arguments)
    if arguments:
        raise RegistrationError(
            f"{name} is accelerated already, and comes with arguments for accelerate().", hint="give one of both"
        )
    return Target(found.__teola_of__()[0], {}, found)


def _is_factory(found: Any) -> bool:
    """Whether it is a function, or a class: objects of frameworks may be callable, too."""
    asked = any(hasattr(found, name) for name in ("invoke", "query", "retrieve", "run", "chat"))
    return isinstance(found, type) or (callable(found) and not asked)


def made_by(factory: Any, name: str) -> Any:
    """What a function of the user's returns. Raises `RegistrationError`."""
    try:
        return factory()
    except Exception as error:
        raise RegistrationError(
            f"the factory {name} raised {_told(error)}", hint="it is called without arguments; run it by itself"
        ) from error


def named(name: str) -> Any:
    """What `module:object` names. Raises `RegistrationError`."""
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise RegistrationError(f"{name!r} is not of the form module:object.", hint="e.g. my_app.chains:rag")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise RegistrationError(
            f"importing {module_name} raised {_told(error)}",
            hint=f"python -c 'import {module_name}' in {folder} must work",
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise RegistrationError(f"{module_name} has no {path!r}.", hint="name a variable or a function of it")
        found = getattr(found, part)
    return found


def _told(error: Exception) -> str:
    return f"{type(error).__qualname__}: {error}"


# ------------------------------------------------------------ inputs


def read(path: str, limit: int | None = None) -> list[Given]:
    """The inputs in a file with one JSON value a line; blank lines are left out. Raises `RegistrationError`."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RegistrationError(
            f"cannot read {path}: {error.strerror}.", hint="check the path after --inputs"
        ) from error
    except UnicodeDecodeError as error:
        raise RegistrationError(f"{path} is not UTF-8: {error.reason}.", hint="save it as UTF-8") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise RegistrationError(f"{path} holds no inputs.", hint='one JSON value a line, e.g. {"question": "..."}')
    return [Given(number, _parsed(path, number, line)) for number, line in lines[:limit]]


def check(inputs: Sequence[Given], entries: Entries, path: str) -> None:
    """Raises `RegistrationError` for an input that the object cannot take."""
    for given in inputs:
        if wrong := entries.wrong(given.value):
            raise RegistrationError(
                f"{path}, line {given.line}: no input of a {entries.kind}.", hint=f"{wrong}, one JSON value a line"
            )


def _parsed(path: str, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise RegistrationError(
            f"{path}, line {number}, column {error.colno}: no JSON value: {error.msg}.",
            hint='one JSON value a line; a text needs quotes: "What do lambs eat?"',
        ) from error
