"""Public names that are imported when they are first used: `__getattr__, __dir__ = lazy(__name__, HOMES)` (PEP 562)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from teola_plugin.errors import MissingPackage, missing_package


def later(home: str, name: str) -> Any:
    """A name of another module, imported now: also of a layer above, for which a lower one is a door."""
    return getattr(import_module(home), name)


def lazy(module: str, homes: Mapping[str, str], *extras: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a module whose public names live in other modules, by their full names.

    `extras` bring the packages that these modules import: where one is missing, the first use of a name raises
    `MissingPackage`.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        try:
            return later(homes[name], name)
        except ModuleNotFoundError as error:
            if not extras or isinstance(error, MissingPackage) or error.name is None:
                raise
            raise missing_package(f"{module}.{name}", error.name, *extras) from error

    return get, lambda: sorted(homes)
