"""Which versions of vLLM are known, and which names the installed one lacks."""

from __future__ import annotations

import re
from importlib import import_module
from types import FunctionType
from typing import Any

OLDEST, BEYOND = (0, 26), (0, 33)
"""Versions (major, minor) that are served: from the first, below the second."""


def number(version: str) -> tuple[int, int] | None:
    """Major and minor number of `0.32.1.dev3+cpu`; None where there is none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def known(version: str) -> bool:
    """Whether that version is served. One without a number, built from source, is let try."""
    found = number(version)
    return found is None or OLDEST <= found < BEYOND


def missing(*names: str) -> tuple[str, ...]:
    """Those of the names, each `module:name` or `module:class.attribute`, that the installed vLLM lacks."""
    return tuple(name for name in names if not _is_there(name))


def _is_there(name: str) -> bool:
    path, _, attributes = name.partition(":")
    try:
        found: Any = import_module(path)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError):
        return False
    return True


def unset(cls: type, *attributes: str) -> tuple[str, ...]:
    """Those of the attributes that instances of the class do not get when they are made: no class shows them."""
    made: set[str] = set()
    for base in cls.__mro__:
        if isinstance(init := vars(base).get("__init__"), FunctionType):
            made.update(init.__code__.co_names)
    return tuple(f"{cls.__module__}:{cls.__qualname__}().{name}" for name in attributes if name not in made)
