"""Reading of containers without running the user's code, none of which runs on the pool's loop."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from teola_plugin.graph.refs import Path, Slice

_BUILTIN = frozenset((dict, list, tuple, str))
_TRUSTED_PACKAGES = {"teola_plugin"}
"""Packages whose classes can be looked into without a change; `trust_package` adds frameworks."""


def trust_package(name: str) -> None:
    """Declare that looking into objects of a package's classes changes nothing."""
    _TRUSTED_PACKAGES.add(name)


def read_path(value: Any, path: Path) -> Any:
    """Return what lies under `path` in `value`.

    Raises the container's own KeyError, IndexError or TypeError; TypeError also for a container of a class whose
    look-ups are the user's own code, KeyError where a look-up would add the key.
    """
    for key in path:
        if type(value) not in _BUILTIN:
            _check(value, key)
        value = value[key.start : key.stop] if isinstance(key, Slice) else value[key]
    return value


def items_of(value: Any) -> list[Any]:
    """Return the items of a container.

    Raise `TypeError` for one that is used up by being read, and for a class whose iteration is the user's own code.
    """
    kind: Any = type(value)
    if kind in _BUILTIN:
        return list(value)
    if hasattr(kind, "__next__"):
        raise TypeError(f"a {kind.__name__} can be read once only")
    for name in ("__iter__", "__len__"):
        if _own_code(kind, name):
            raise TypeError(f"{kind.__name__}.{name} is code of the user's")
    return list(value)


def holds(condition: Any) -> bool:
    """Return the truth of a condition. Raise `TypeError` for a class in which that is the user's own code."""
    kind: Any = type(condition)
    for name in ("__bool__", "__len__"):
        if kind not in _BUILTIN and _own_code(kind, name):
            raise TypeError(f"{kind.__name__}.{name} is code of the user's")
    return bool(condition)


def _check(value: Any, key: object) -> None:
    """Raise an error if looking up `key` would run the user's code (TypeError) or add the key (KeyError)."""
    kind: Any = type(value)
    if _own_code(kind, "__getitem__"):
        raise TypeError(f"{kind.__name__}.__getitem__ is code of the user's")
    if hasattr(kind, "__missing__") and not dict.__contains__(value, key):
        raise KeyError(key)


def _own_code(kind: type, name: str) -> bool:
    """Return True for a method that is the user's function: neither C code nor a framework's."""
    method = getattr(kind, name, None)
    if method is None:
        return name == "__iter__"  # read by `__getitem__`, item by item
    return type(method) is FunctionType and method.__module__.partition(".")[0] not in _TRUSTED_PACKAGES
