"""The client's functions that a graph's primitives call by name, and the objects that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class LeftToOriginal(Exception):
    """A signal from a client's function that the original should do this part alone. It is not a failure."""


class UnfitValue(LeftToOriginal, TypeError):
    """A signal that a value cannot be read by us: reading it may run user code, or it is too large."""


class MissingValue(LeftToOriginal, KeyError):
    """A signal that a value lacks a key: the original will raise its own error."""


class ClientCalls(Mapping[str, Callable[..., Any]]):
    """An immutable mapping from names of components to functions."""

    __slots__ = ("_calls", "_objects")

    def __init__(self, calls: Mapping[str, Callable[..., Any]], objects: Mapping[str, str]) -> None:
        """Take functions by component, and for components that belong to a known object, its description in words."""
        self._calls, self._objects = dict(calls), dict(objects)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._calls[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def object_of(self, name: str) -> str:
        """Return the description of a component's object, "" if unknown. `a.b` belongs to the object of `a`."""
        while name:
            if name in self._objects:
                return self._objects[name]
            name = name.rpartition(".")[0]
        return ""
