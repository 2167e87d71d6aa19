"""The client's functions that a graph's primitives name, and the objects that they are of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class LeftToPlain(Exception):
    """Raised by a client's function on purpose: the plain object does this part alone. Nothing is wrong."""


class UnfitValue(LeftToPlain, TypeError):
    """What came is for the plain object alone to look at: user code may run in it, or it is too large."""


class MissingValue(LeftToPlain, KeyError):
    """What came lacks a key: the plain object will tell."""


class ClientCalls(Mapping[str, Callable[..., Any]]):
    """Functions by the name of their component. Never changes."""

    __slots__ = ("_calls", "_objects")

    def __init__(self, calls: Mapping[str, Callable[..., Any]], objects: Mapping[str, str]) -> None:
        """`objects`: what a component is of, in words, for as many components as are known."""
        self._calls, self._objects = dict(calls), dict(objects)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._calls[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def object_of(self, name: str) -> str:
        """Of a component, or of what it is named after: `a.b` belongs to what `a` belongs to. Empty if unknown."""
        while name:
            if name in self._objects:
                return self._objects[name]
            name = name.rpartition(".")[0]
        return ""
