"""Which versions of vLLM are known, and which names the installed one lacks."""

from __future__ import annotations

import re
from importlib import import_module
from types import FunctionType
from typing import Any

OLDEST, BEYOND = (0, 26), (0, 33)
"""Versions (major, minor) that are served: from the first, below the second."""


def number(version: str) -> tuple[int, int] | None:
    """Return the major and minor number of a version such as `0.32.1.dev3+cpu`; None if it begins with no such pair."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def is_supported(version: str) -> bool:
    """Return True if that version is served, or has no number because it was built from source."""
    major_minor = number(version)
    return major_minor is None or OLDEST <= major_minor < BEYOND


def missing(*names: str) -> tuple[str, ...]:
    """Return those of the names, each `module:name` or `module:class.attribute`, that the installed vLLM lacks."""
    return tuple(name for name in names if not _is_there(name))


def _is_there(name: str) -> bool:
    """Return True if the installed vLLM has a name, `module:name` or `module:class.attribute`. Imports the module."""
    path, _, attributes = name.partition(":")
    try:
        member: Any = import_module(path)
        for attribute in attributes.split("."):
            member = getattr(member, attribute)
    except (ImportError, AttributeError):
        return False
    return True


def unset(cls: type, *attributes: str) -> tuple[str, ...]:
    """Return the attributes that the `__init__` of a class does not set on its instances: no class shows them."""
    assigned: set[str] = set()
    for base in cls.__mro__:
        if isinstance(init := vars(base).get("__init__"), FunctionType):
            assigned.update(init.__code__.co_names)
    return tuple(f"{cls.__module__}:{cls.__qualname__}().{name}" for name in attributes if name not in assigned)
