"""Purity of the user's small functions, and what they read of their argument, from bytecode alone.

A function is certainly pure if it is made of the instructions, builtins and methods that `interpreter` knows, on values
of the builtin types and the framework's own data classes (`is_plain`). It changes nothing, and the time that it takes
is bounded by the size of its argument. Everything else is user code: it runs once, in its place.
"""

from __future__ import annotations

import dis
import json
import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from teola_plugin.graph import UnfitValue
from teola_plugin.tracer.purity.interpreter import step_bound

_FRAMEWORKS = ("langchain_core",)
_MAX_SIZE = 1_000_000
"""Items and characters of a value that a function may be computed on ahead of its place."""
_MAX_STEPS = 10**9
"""`n ** degree` for a function whose time grows with more than the size `n` of the value."""
_MAX_BITS = 4096
"""Bits of an integer: larger ones are slow to print, to multiply, ..."""
_CONTAINERS = frozenset((list, tuple, set, frozenset))
_SINGLE = frozenset((float, bool, type(None)))


@dataclass(frozen=True, slots=True)
class Purity:
    """A pure function's use of its one argument."""

    keys: tuple[str, ...] | None
    """The keys of a dictionary if it reads nothing else of it; None for the whole value."""
    path: tuple[str | int, ...] | None = None
    """The path of keys and indices if it only returns what lies there."""
    degree: int = field(default=1, compare=False)
    """Power of the argument's size that bounds its time."""


@dataclass(frozen=True, slots=True)
class ItemGetter:
    """An `itemgetter(*keys)`: one key gives its value, several give a tuple."""

    keys: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class AttributeGetter:
    """An `attrgetter(...)`, which runs as it is."""

    get: Callable[[Any], Any]


# ------------------------------------------------------------ values


def is_plain(value: Any) -> bool:
    """Return True if a value's methods are the builtin types' and the framework's own, and it is not too large."""
    return plain_size(value, _MAX_SIZE) <= _MAX_SIZE


def call_on_plain(func: Callable[[Any], Any], value: Any, degree: int = 1) -> Any:
    """Return `func(value)`. Raise `UnfitValue` for a value on which it might not be pure, or might take long."""
    size = plain_size(value, _MAX_SIZE)
    if size > _MAX_SIZE:
        raise UnfitValue("the value holds objects whose methods are not known, or very many")
    if degree > 1 and size**degree > _MAX_STEPS:
        raise UnfitValue("the value is too large for a function that takes more than one look at it")
    return func(value)


def plain_size(value: Any, limit: int) -> int:
    """Return the items, characters and digits of a plain value; `limit + 1` if there are more, or it is not plain."""
    total, pending = 0, [value]
    while pending and total <= limit:
        item = pending.pop()
        kind = type(item)
        if kind is str or kind is bytes:
            total += 1 + len(item)
        elif kind is dict:
            total += 1 + len(item)
            if total <= limit:
                pending += (*item, *item.values())
        elif kind in _CONTAINERS:
            total += 1 + len(item)
            pending += item if total <= limit else ()
        elif kind is int:
            total += 1 + item.bit_length() if item.bit_length() <= _MAX_BITS else limit + 1
        elif kind in _SINGLE:
            total += 2
        elif _is_from_framework(kind) and isinstance(item, _data_classes()):
            pending += (vars(item), item.__pydantic_extra__)
        elif issubclass(kind, str) and _is_from_framework(kind):
            total += 1 + len(item)
        else:
            return limit + 1
    return min(total, limit + 1)


def _is_from_framework(kind: type[Any]) -> bool:
    return kind.__module__.split(".", 1)[0] in _FRAMEWORKS


@lru_cache(maxsize=1)
def _data_classes() -> tuple[type[Any], ...]:
    """Return LangChain's data classes. An app with LlamaIndex alone has no value for which this is called."""
    from langchain_core.documents import Document
    from langchain_core.messages import BaseMessage
    from langchain_core.prompt_values import PromptValue

    return BaseMessage, Document, PromptValue


# ------------------------------------------------------------ functions


def analyze_callable(func: object) -> ItemGetter | AttributeGetter | Purity | None:
    """Return what `func` reads of its argument, or None for user code. Run nothing."""
    if type(func) is FunctionType:
        return cached_purity(func)
    if type(func) is operator.attrgetter:
        return AttributeGetter(func)
    if type(func) is operator.itemgetter:
        keys: tuple[object, ...] = func.__reduce__()[1]  # type: ignore[assignment]
        plain_keys = tuple(key for key in keys if isinstance(key, (str, int)))
        if len(plain_keys) == len(keys):
            return ItemGetter(plain_keys)
    return None


def analyze_purity(func: object) -> Purity | None:
    """Return what `func(value)` reads, or None unless it is certainly pure. Run nothing."""
    if func in (json.loads, json.dumps):
        return Purity(None)
    if type(func) is not FunctionType or func.__defaults__ or func.__kwdefaults__:
        return None
    code = func.__code__
    cost = step_bound(func) if code.co_argcount == 1 and not code.co_kwonlyargcount else None
    if cost is None:
        return None
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("RESUME", "CACHE", "NOP")]
    return Purity(_keys(code, instructions), _path(instructions), cost.degree)


def cached_purity(func: FunctionType) -> Purity | None:
    """Return `analyze_purity(func)`, remembered also for functions that the same code defines again and again."""
    try:
        closure = tuple(_closure_key(cell.cell_contents) for cell in func.__closure__ or ())
    except (ValueError, TypeError):  # a cell that is still empty; a value that cannot be compared
        return analyze_purity(func)
    has_defaults = func.__defaults__ is not None or func.__kwdefaults__ is not None
    return _purity_by_key(_FunctionKey(func, (func.__code__, id(func.__globals__), closure, has_defaults)))


def _closure_key(value: Any) -> Hashable:
    """Return a key that is equal for equal values of a closure. Raise `TypeError` for values without one."""
    if type(value) in (str, int, bool, bytes, type(None)):
        return type(value), value
    if type(value) is FunctionType:
        return value
    raise TypeError("any other")


@dataclass(frozen=True, slots=True)
class _FunctionKey:
    """A function that compares equal to others of the same code, globals and closure."""

    func: FunctionType = field(compare=False)
    key: tuple[Hashable, ...]


@lru_cache(maxsize=1024)
def _purity_by_key(key: _FunctionKey) -> Purity | None:
    return analyze_purity(key.func)


def _keys(code: CodeType, instructions: list[dis.Instruction]) -> tuple[str, ...] | None:
    """Return the keys that are read of the argument, None unless every use of it reads a constant key."""
    argument = code.co_varnames[0]
    keys: dict[str, None] = {}
    for i, instruction in enumerate(instructions):
        makes_cell = instruction.opname == "MAKE_CELL" and instruction.argval == argument
        if makes_cell or argument in _variables(instruction):
            key = _constant_key(instructions[i + 1 : i + 3])
            if instruction.opname != "LOAD_FAST" or not isinstance(key, str):
                return None
            keys[key] = None
    return tuple(keys)


def _variables(instruction: dis.Instruction) -> tuple[str, ...]:
    """Return the local variables that an instruction uses."""
    if any(kind in instruction.opname for kind in ("FAST", "DEREF", "CLOSURE")):
        return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    return ()


def _path(instructions: list[dis.Instruction]) -> tuple[str | int, ...] | None:
    """Return the keys of `lambda x: x["a"][0]` and the like, None for a function that does anything else."""
    if len(instructions) < 2 or instructions[0].opname != "LOAD_FAST" or instructions[-1].opname != "RETURN_VALUE":
        return None
    subscripts = instructions[1:-1]
    keys = [_constant_key(subscripts[i : i + 2]) for i in range(0, len(subscripts), 2)]
    return tuple(keys) if all(type(key) in (str, int) for key in keys) else None  # type: ignore[arg-type]


def _constant_key(instructions: list[dis.Instruction]) -> object:
    """Return the key of `[key]` if the two instructions subscript by a constant, None otherwise."""
    if [instruction.opname for instruction in instructions] == ["LOAD_CONST", "BINARY_SUBSCR"]:
        return instructions[0].argval
    return None
