"""Public names that are imported when they are first used: `__getattr__, __dir__ = lazy(__name__, HOMES)` (PEP 562)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def later(home: str, name: str) -> Any:
    """A name of another module, imported now: also of a layer above, for which a lower one is a door."""
    return getattr(import_module(home), name)


def lazy(module: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a module whose public names live in other modules, by their full names."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return later(homes[name], name)

    return get, lambda: sorted(homes)
