"""Which of the user's small functions are certainly pure, and soon done, from their bytecode alone.

Certainly pure: made of the instructions, builtins and methods that `bounded` knows, on values of the builtin types and
the framework's own data classes (`plain`). They change nothing, and how long they take is bounded by the size of what
they are given. Everything else is user code: it runs once, in its place.
"""

from __future__ import annotations

import dis
import json
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from teola_plugin.graph import UnfitValue
from teola_plugin.tracer.purity.bounded import bound

_FRAMEWORKS = ("langchain_core",)
_LARGEST = 1_000_000
"""Items and characters of a value that a function may be computed on ahead of its place."""
_STEPS = 10**9
"""`n ** degree` for a function whose time grows with more than the size `n` of the value."""
_BITS = 4096
"""Of a number: larger ones are slow to print, to multiply, ..."""
_CONTAINERS = frozenset((list, tuple, set, frozenset))
_SINGLE = frozenset((float, bool, type(None)))


@dataclass(frozen=True, slots=True)
class Purity:
    """What a pure function reads of its one argument."""

    keys: tuple[str, ...] | None
    """The keys of a dictionary, when it reads nothing else of it; None for the whole value."""
    path: tuple[str | int, ...] | None = None
    """When all it does is to give back what lies there."""
    degree: int = field(default=1, compare=False)
    """How its time grows with the size of what it is given: as this power of it, at most."""


def purity(func: object) -> Purity | None:
    """What `func(value)` reads, or None unless it is certainly pure. Runs nothing."""
    if func in (json.loads, json.dumps):
        return Purity(None)
    if type(func) is not FunctionType or func.__defaults__ or func.__kwdefaults__:
        return None
    code = func.__code__
    cost = bound(func) if code.co_argcount == 1 and not code.co_kwonlyargcount else None
    if cost is None:
        return None
    steps = [i for i in dis.get_instructions(code) if i.opname not in ("RESUME", "CACHE", "NOP")]
    return Purity(_keys(code, steps), _path(steps), cost.degree)


def plain(value: Any) -> bool:
    """Whether methods of the value do what the builtin types' and the framework's own do; and it is not too large."""
    return size(value, _LARGEST) <= _LARGEST


def on_plain(func: Callable[[Any], Any], value: Any, degree: int = 1) -> Any:
    """`func(value)`. Raises `TypeError` for a value on which it might not be pure, or might take long."""
    large = size(value, _LARGEST)
    if large > _LARGEST:
        raise UnfitValue("the value holds objects whose methods are not known, or very many")
    if degree > 1 and large**degree > _STEPS:
        raise UnfitValue("the value is too large for a function that takes more than one look at it")
    return func(value)


def size(value: Any, most: int) -> int:
    """Items, characters and digits of a plain value; more than `most` for any other, and as soon as there are more."""
    total, left = 0, [value]
    while left and total <= most:
        one = left.pop()
        kind = type(one)
        if kind is str or kind is bytes:
            total += 1 + len(one)
        elif kind is dict:
            total += 1 + len(one)
            left += one if total <= most else ()
            left += one.values() if total <= most else ()
        elif kind in _CONTAINERS:
            total += 1 + len(one)
            left += one if total <= most else ()
        elif kind is int:
            total += 1 + one.bit_length() if one.bit_length() <= _BITS else most + 1
        elif kind in _SINGLE:
            total += 2
        elif _of_framework(kind) and isinstance(one, _data_classes()):
            left += (vars(one), one.__pydantic_extra__)
        elif issubclass(kind, str) and _of_framework(kind):
            total += 1 + len(one)
        else:
            return most + 1
    return min(total, most + 1)


def _of_framework(kind: type[Any]) -> bool:
    return kind.__module__.split(".", 1)[0] in _FRAMEWORKS


@lru_cache(maxsize=1)
def _data_classes() -> tuple[type[Any], ...]:
    """LangChain's. Who has only LlamaIndex has no value that asks for them."""
    from langchain_core.documents import Document
    from langchain_core.messages import BaseMessage
    from langchain_core.prompt_values import PromptValue

    return BaseMessage, Document, PromptValue


def _keys(code: CodeType, steps: list[dis.Instruction]) -> tuple[str, ...] | None:
    """Keys of the argument, when every use of it is followed by a constant key."""
    name = code.co_varnames[0]
    found: dict[str, None] = {}
    for at, step in enumerate(steps):
        if name in _names(step) or (step.opname == "MAKE_CELL" and step.argval == name):
            key = _key_at(steps, at)
            if step.opname != "LOAD_FAST" or not isinstance(key, str):
                return None
            found[key] = None
    return tuple(found)


def _names(step: dis.Instruction) -> tuple[str, ...]:
    """Local names that an instruction uses."""
    if "FAST" in step.opname or "DEREF" in step.opname or "CLOSURE" in step.opname:
        return step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return ()


def _key_at(steps: list[dis.Instruction], at: int) -> object:
    """The constant key that is read of what step `at` loads; None without one."""
    following = steps[at + 1 : at + 3]
    if [step.opname for step in following] == ["LOAD_CONST", "BINARY_SUBSCR"]:
        return following[0].argval
    return None


def _path(steps: list[dis.Instruction]) -> tuple[str | int, ...] | None:
    """`lambda x: x["a"][0]` and the like: the keys, one after the other."""
    if len(steps) < 2 or steps[0].opname != "LOAD_FAST" or steps[-1].opname != "RETURN_VALUE":
        return None
    keys = list(_constant_keys(steps[1:-1]))
    return tuple(keys) if None not in keys else None  # type: ignore[arg-type]


def _constant_keys(steps: list[dis.Instruction]) -> Iterator[str | int | None]:
    if len(steps) % 2:
        yield None
    for load, read in zip(steps[::2], steps[1::2], strict=False):
        known = load.opname == "LOAD_CONST" and read.opname == "BINARY_SUBSCR" and type(load.argval) in (str, int)
        yield load.argval if known else None


def known_purity(func: FunctionType) -> Purity | None:
    """`purity`, remembered, also for functions that are made anew again and again by the same code."""
    try:
        held = tuple(_held(cell.cell_contents) for cell in func.__closure__ or ())
    except (ValueError, TypeError):  # a cell that is still empty; a value that cannot be told from others
        return purity(func)
    defaults = func.__defaults__ is not None or func.__kwdefaults__ is not None
    return _known(_Made(func, (func.__code__, id(func.__globals__), held, defaults)))


def _held(value: Any) -> Hashable:
    """What tells values apart that a function closes over."""
    if type(value) in (str, int, bool, bytes, type(None)):
        return type(value), value
    if type(value) is FunctionType:
        return value
    raise TypeError("any other")


@dataclass(frozen=True, slots=True)
class _Made:
    func: FunctionType = field(compare=False)
    key: tuple[Hashable, ...]


@lru_cache(maxsize=1024)
def _known(made: _Made) -> Purity | None:
    return purity(made.func)
