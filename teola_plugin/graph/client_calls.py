"""The client's functions that a graph's primitives call by name, and the objects that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar


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


# ------------------------------------------------------------ functions on the pool's loop
#
# Functions run in threads, so that they never hold up other queries (the user's functions, parsers, packing, splitting,
# anything on long texts), unless they are marked: small ones of our own, and simple ones on short values.

_Call = TypeVar("_Call", bound=Callable[..., Any])
Measure = Callable[[Any, int], int]
"""`(value, limit)` -> number of characters and items of plain data; more than `limit` for anything else."""
SHORT = 16_384
"""Number of characters and items that a simple callable processes in well under a millisecond."""


def on_loop(call: _Call) -> _Call:
    """Mark a function that is quick for any argument and runs no code but ours.

    The runtime calls a function with this mark on the pool's loop, which must never block, rather than on a thread.
    """
    call.teola_on_loop = True  # type: ignore[attr-defined]
    return call


def simple(measure: Measure) -> Callable[[_Call], _Call]:
    """Mark a function whose time is proportional to the size of its argument, such as filling in a prompt.

    For short arguments a thread would cost more than the call itself.
    """

    def mark(call: _Call) -> _Call:
        call.teola_measure = measure  # type: ignore[attr-defined]
        return call

    return mark


def own_thread(call: _Call) -> _Call:
    """Mark a function of the user's that may take long, and that no other code of its query waits for.

    The runtime gives it one of the query's further threads, so that functions of one workflow can run at the same time.
    """
    call.teola_own_thread = True  # type: ignore[attr-defined]
    return call


def has_own_thread(call: object) -> bool:
    """Return True if the function was marked by `own_thread`."""
    return bool(getattr(call, "teola_own_thread", False))


def runs_on_loop(call: object, argument: object = None) -> bool:
    """Return True if the function may run on the loop with this argument; without one, with any argument.

    A function may do so if `on_loop` marks it, or if its own measure finds at most 16,384 (`SHORT`) characters and
    items of plain data in the argument.
    """
    if getattr(call, "teola_on_loop", False):
        return True
    measure: Measure | None = getattr(call, "teola_measure", None)
    return measure is not None and argument is not None and measure(argument, SHORT) <= SHORT
