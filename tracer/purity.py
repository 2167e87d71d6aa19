"""Which of the user's small functions are certainly pure, and soon done, from their bytecode alone.

Certainly pure: made of the instructions, builtins and methods that `bounded` knows, on values of the builtin types and
the framework's own data classes (`plain`). They change nothing, and how long they take is bounded by the size of what
they are given. Everything else is user code: it runs once, in its place.
"""

from __future__ import annotations

import dis
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.prompt_values import PromptValue

from teola_plugin.tracer.bounded import bound

_FRAMEWORKS = ("langchain_core",)
_DATA_CLASSES = (BaseMessage, Document, PromptValue)
_LARGEST = 1_000_000
"""Items and characters of a value that a function may be computed on ahead of its place."""
_STEPS = 10**9
"""`n ** degree` for a function whose time grows with more than the size `n` of the value."""
_DIGITS = 4096
"""Bits of a number: larger ones are slow to print, to multiply, ..."""


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
    return _size(value, _LARGEST) <= _LARGEST


def on_plain(func: Callable[[Any], Any], value: Any, degree: int = 1) -> Any:
    """`func(value)`. Raises `TypeError` for a value on which it might not be pure, or might take long."""
    size = _size(value, _LARGEST)
    if size > _LARGEST:
        raise TypeError("the value holds objects whose methods are not known, or very many")
    if degree > 1 and size**degree > _STEPS:
        raise TypeError("the value is too large for a function that takes more than one look at it")
    return func(value)


def _size(value: Any, most: int) -> int:
    """Items, characters and digits of a plain value; more than `most` for any other, and as soon as there are more."""
    kind = type(value)
    if kind in (str, bytes):
        return 1 + len(value)
    if kind is int:
        return 1 + value.bit_length() if value.bit_length() <= _DIGITS else most + 1
    if kind in (float, bool, type(None)):
        return 1
    if kind in (list, tuple, set, frozenset):
        return _sum(value, most)
    if kind is dict:
        return _sum((part for pair in value.items() for part in pair), most)
    if isinstance(value, str) and _of_framework(kind):
        return 1 + len(value)
    if isinstance(value, _DATA_CLASSES) and _of_framework(kind):
        return _sum((vars(value), value.__pydantic_extra__), most)
    return most + 1


def _sum(values: Iterable[Any], most: int) -> int:
    total = 1
    for value in values:
        total += _size(value, most - total)
        if total > most:
            break
    return total


def _of_framework(kind: type[Any]) -> bool:
    return kind.__module__.split(".", 1)[0] in _FRAMEWORKS


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


known_purity = lru_cache(maxsize=1024)(purity)
