"""What a function's walk in `bounded` carries: sizes in place of values, and where it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

from teola_plugin.tracer.purity.size_bounds import Size, constant, either, measured, scaled

REPR = 12
"""Characters that one of a text may become where it is quoted."""
_PLAIN = (str, int, float, bool, type(None), bytes)


class Unbounded(Exception):
    """Why a function has no bound."""


@dataclass(frozen=True, slots=True)
class Data:
    """Any plain value, as large as that."""

    size: Size
    text: bool = False
    """Whether it is known to be a text."""
    count: bool = False
    """Whether it is a number no larger than `size`."""
    level: int = 0
    """Open loops where it was made."""


@dataclass(frozen=True, slots=True)
class Known:
    """A constant, a builtin, a function, a module."""

    value: Any


@dataclass(frozen=True, slots=True)
class Inner:
    """A function that is made by the function."""

    code: CodeType
    cells: Mapping[str, Value]
    names: Mapping[str, Any]
    """Globals."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a plain value, still to be called; `of` is None for one of a class (`str.strip`)."""

    of: Value | None
    name: str


Value = Data | Known | Inner | Method
NULL = Known(object())
SMALL = Data(constant(30))
"""A number, a truth value."""


def size_of(value: Value) -> Size:
    """Raises `Unbounded` for what is no plain value."""
    if isinstance(value, Data):
        return value.size
    if isinstance(value, Known) and is_plain(value.value):
        return constant(measured([value.value]))
    raise Unbounded("a function is used as a value")


def is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(is_plain, value)))


def merged(one: Value, other: Value) -> Value:
    """Of two ways, whichever is taken."""
    if one == other:
        return one
    text = all(isinstance(v, Data) and v.text for v in (one, other))
    return Data(either(size_of(one), size_of(other)), text)


@dataclass(slots=True)
class State:
    """Before an instruction."""

    stack: list[Value]
    local: dict[str, Value]

    def copy(self) -> State:
        return State(list(self.stack), dict(self.local))

    def join(self, other: State) -> State:
        stack = [merged(a, b) for a, b in zip(self.stack, other.stack, strict=True)]
        local = {**self.local, **other.local}
        for name in self.local.keys() & other.local.keys():
            local[name] = merged(self.local[name], other.local[name])
        return State(stack, local)

    def mapped(self, change: Callable[[Value], Value]) -> State:
        return State([change(v) for v in self.stack], {name: change(v) for name, v in self.local.items()})


class Loop(NamedTuple):
    start: int
    end: int
    bound: frozenset[str]
    """Names that were there before it: setting one of them inside carries it from round to round."""


@dataclass(slots=True)
class Frame:
    """One call under way."""

    code: CodeType
    names: Mapping[str, Any]
    cells: Mapping[str, Value]
    base: int
    """Loops that were open when it began."""
    coming: dict[int, State] = field(default_factory=dict)
    """By the offset of an instruction that is jumped to."""
    loops: list[Loop] = field(default_factory=list)
    given: list[Value] = field(default_factory=list)
    """What it returns, on each way."""
    yielded: Size | None = None
    keywords: tuple[str, ...] = ()
    ended: int | None = None
    """Offset of the end of a loop."""


def quoted(value: Value) -> Size:
    """As it is where it is printed."""
    if isinstance(value, Data) and value.text:
        return value.size
    if isinstance(value, Known) and isinstance(value.value, str):
        return size_of(value)
    return scaled(size_of(value), REPR)


def pops(state: State, count: int) -> list[Value]:
    """Taken off the stack. Raises `Unbounded`."""
    if count > len(state.stack):
        raise Unbounded("a stack that is not understood")
    at = len(state.stack) - count
    found, state.stack[at:] = state.stack[at:], []
    return found
