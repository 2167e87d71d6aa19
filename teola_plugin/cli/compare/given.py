"""What the user gives to `teola compare`: an object by name, and inputs for it."""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teola_plugin.errors import RegistrationError

if TYPE_CHECKING:
    from langchain_core.runnables import Runnable


@dataclass(frozen=True, slots=True)
class Given:
    """One input, and the line that it comes from."""

    line: int
    value: Any


def load(name: str) -> Runnable[Any, Any]:
    """The Runnable `module:object`; modules of the current folder are found, a factory is called without arguments.

    An object that is accelerated already gives its original. Raises `RegistrationError`.
    """
    from langchain_core.runnables import Runnable

    found = _attribute(name)
    if not isinstance(found, Runnable) and callable(found):
        try:
            found = found()
        except Exception as error:
            raise RegistrationError(
                f"the factory {name} raised {_told(error)}", hint="it is called without arguments; run it by itself"
            ) from error
    if not isinstance(found, Runnable):
        raise RegistrationError(
            f"{name} is a {type(found).__qualname__}, not a LangChain Runnable.",
            hint="name a chain, or a function without arguments that returns one",
        )
    original: Runnable[Any, Any] = found.bound if getattr(type(found), "__teola_accelerated__", False) else found  # type: ignore[attr-defined]
    return original


def _attribute(name: str) -> Any:
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


def _parsed(path: str, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise RegistrationError(
            f"{path}, line {number}, column {error.colno}: no JSON value: {error.msg}.",
            hint='one JSON value a line; a text needs quotes: "What do lambs eat?"',
        ) from error
