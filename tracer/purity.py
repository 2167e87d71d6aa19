"""Which of the user's small functions are certainly pure, from their bytecode alone.

Certainly pure: made of the instructions, builtins and methods listed here, on values of the builtin types and the
framework's own data classes (`plain`). Everything else, and every instruction of a Python that is not known here, is
user code: it runs once, in its place.
"""

from __future__ import annotations

import builtins
import dis
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any


def _words(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


_INSTRUCTIONS = _words(
    "BINARY_OP BINARY_SLICE BINARY_SUBSCR BUILD_CONST_KEY_MAP BUILD_LIST BUILD_MAP BUILD_SET BUILD_SLICE BUILD_STRING",
    "BUILD_TUPLE CACHE CALL CALL_INTRINSIC_1 CALL_KW COMPARE_OP CONTAINS_OP CONVERT_VALUE COPY COPY_FREE_VARS",
    "DICT_MERGE DICT_UPDATE END_FOR EXTENDED_ARG FORMAT_SIMPLE FORMAT_VALUE FORMAT_WITH_SPEC FOR_ITER GET_ITER IS_OP",
    "JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT JUMP_FORWARD JUMP_IF_FALSE_OR_POP JUMP_IF_TRUE_OR_POP KW_NAMES",
    "LIST_APPEND LIST_EXTEND LIST_TO_TUPLE LOAD_ATTR LOAD_CLOSURE LOAD_CONST LOAD_DEREF LOAD_FAST LOAD_FAST_AND_CLEAR",
    "LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST LOAD_GLOBAL LOAD_METHOD MAKE_CELL MAKE_FUNCTION MAP_ADD NOP",
    "POP_JUMP_BACKWARD_IF_FALSE POP_JUMP_BACKWARD_IF_TRUE POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_NONE",
    "POP_JUMP_FORWARD_IF_NOT_NONE POP_JUMP_FORWARD_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE",
    "POP_JUMP_IF_TRUE POP_TOP PRECALL PUSH_NULL RERAISE RESUME RETURN_CONST RETURN_GENERATOR RETURN_VALUE SET_ADD",
    "SET_FUNCTION_ATTRIBUTE SET_UPDATE STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST SWAP TO_BOOL",
    "UNARY_INVERT UNARY_NEGATIVE UNARY_NOT UNPACK_SEQUENCE YIELD_VALUE",
)
_BUILTINS = _words(
    "abs all any bool dict enumerate filter float frozenset int isinstance len list map max min range repr reversed",
    "round set sorted str sum tuple zip",
)
_TEXT = _words(
    "capitalize casefold count endswith find format index isalpha isdigit isspace isupper join lower lstrip partition",
    "removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip title",
    "upper zfill",
)
_CONTAINERS = _words("copy get items keys values")
_DATA = _words("additional_kwargs content id metadata name page_content role tool_calls type")
"""Fields of the framework's documents and messages."""
_OF_MODULES = _words("dumps escape findall fullmatch loads match search sub group groups ceil floor sqrt")
_METHODS = _TEXT | _CONTAINERS | _DATA | _OF_MODULES
_MODULES = (json, re, math)
_KNOWN = (json.loads, json.dumps)
_FRAMEWORKS = ("langchain_core",)
_PLAIN = (str, int, float, bool, type(None), bytes)
_VARARGS, _COROUTINE, _GENERATORS = 0x04 | 0x08, 0x80, 0x20 | 0x200
_AUGMENTED = ("=",)
"""Ends the name of an operator that may change its left side in place."""


@dataclass(frozen=True, slots=True)
class Purity:
    """What a pure function reads of its one argument."""

    keys: tuple[str, ...] | None
    """The keys of a dictionary, when it reads nothing else of it; None for the whole value."""
    path: tuple[str | int, ...] | None = None
    """When all it does is to give back what lies there."""


def purity(func: object) -> Purity | None:
    """What `func(value)` reads, or None unless it is certainly pure. Runs nothing."""
    if func in _KNOWN:
        return Purity(None)
    if type(func) is not FunctionType or func.__defaults__ or func.__kwdefaults__:
        return None
    code = func.__code__
    if code.co_argcount != 1 or code.co_kwonlyargcount or code.co_flags & (_VARARGS | _COROUTINE | _GENERATORS):
        return None
    if not _harmless(func, ()):
        return None
    steps = [i for i in dis.get_instructions(code) if i.opname not in ("RESUME", "CACHE", "NOP")]
    return Purity(_keys(code, steps), _path(steps))


def plain(value: Any) -> bool:
    """Whether methods of the value do what the builtin types' and the framework's own do."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind in (list, tuple, set, frozenset):
        return all(map(plain, value))
    if kind is dict:
        return all(map(plain, value)) and all(map(plain, value.values()))
    return kind.__module__.split(".", 1)[0] in _FRAMEWORKS


def on_plain(func: Callable[[Any], Any], value: Any) -> Any:
    """`func(value)`. Raises `TypeError` for a value on which it might not be pure."""
    if not plain(value):
        raise TypeError("the value holds objects whose methods are not known")
    return func(value)


def _harmless(func: FunctionType, above: tuple[FunctionType, ...]) -> bool:
    if func in above:
        return False  # recursion may not end on a predicted value
    cells = dict(zip(func.__code__.co_freevars, func.__closure__ or (), strict=True))
    return _code_harmless(func.__code__, func.__globals__, cells, (*above, func))


def _code_harmless(
    code: CodeType, names: Mapping[str, Any], cells: Mapping[str, CellType], above: tuple[FunctionType, ...]
) -> bool:
    own = set(code.co_cellvars) | set(code.co_varnames)
    for step in dis.get_instructions(code):
        if step.opname not in _INSTRUCTIONS:
            return False
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval not in _METHODS:
            return False
        if step.opname == "BINARY_OP" and step.argrepr.endswith(_AUGMENTED):
            return False
        if step.opname == "LOAD_GLOBAL" and not _global_harmless(step.argval, names, above):
            return False
        if step.opname == "LOAD_DEREF" and step.argval not in own and not _cell_harmless(cells.get(step.argval), above):
            return False
        if isinstance(step.argval, CodeType):
            # what an inner function reads of the outer ones is local to them, or was looked at above
            inner = {name: cell for name, cell in cells.items() if name in step.argval.co_freevars}
            local = {name: CellType(0) for name in step.argval.co_freevars if name in own}
            if not _code_harmless(step.argval, names, {**inner, **local}, above):
                return False
    return True


def _global_harmless(name: str, names: Mapping[str, Any], above: tuple[FunctionType, ...]) -> bool:
    if name in names:
        return _value_harmless(names[name], above)
    return name in _BUILTINS and hasattr(builtins, name)


def _cell_harmless(cell: CellType | None, above: tuple[FunctionType, ...]) -> bool:
    try:
        return cell is not None and _value_harmless(cell.cell_contents, above)
    except ValueError:  # still empty
        return False


def _value_harmless(value: Any, above: tuple[FunctionType, ...]) -> bool:
    if type(value) is FunctionType:
        return not value.__code__.co_flags & (_COROUTINE | 0x200) and _harmless(value, above)
    if type(value) in (operator.itemgetter, operator.attrgetter):
        return type(value) is operator.itemgetter or value.__reduce__()[1][0] in _METHODS
    return value in _MODULES if isinstance(value, type(json)) else type(value) in (*_PLAIN, tuple) and plain(value)


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
