"""What code may come to: looked up in its names, its closure and its helpers, without running it.

The user's own helpers are looked into, installed functions are known by their names only. A tool that asks a human asks
about itself, so tools and models are not looked into.
"""

from __future__ import annotations

import contextlib
import functools
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool

_CONFIG = "langchain_core.runnables.config"
_LOOKED_AT = 2000
"""Objects that are looked at for one answer; where there are more, nobody knows."""


@dataclass(slots=True)
class Reach:
    """What some code may come to."""

    asks: bool = False
    """A human: it speaks of `interrupt`."""
    places: bool = False
    """What only its place in a graph has: the graph's stream, store, config."""
    tells: bool = False
    """What tells listeners of itself: Runnables, callbacks."""


def reach(obj: Any) -> Reach:
    """Of a function, or of anything that holds functions. Runs nothing of it."""
    found, todo, seen = Reach(), [obj], dict[int, Any]()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        if len(seen) >= _LOOKED_AT:
            return Reach(True, found.places, True)
        seen[id(one)] = one  # kept: the id stays its own
        _note(found, one)
        todo += _inside(one)
    return found


def _note(found: Reach, one: Any) -> None:
    where = str(getattr(one, "__module__", "")) if isinstance(one, FunctionType) else ""
    if isinstance(one, ModuleType):
        where = one.__name__
    found.places |= where.startswith("langgraph.config") or where in ("langgraph.types", "langgraph.runtime", _CONFIG)
    found.tells |= where.startswith("langchain_core.callbacks") or isinstance(one, Runnable | BaseCallbackManager)
    found.tells |= isinstance(one, type) and issubclass(one, Runnable | BaseCallbackManager)
    if isinstance(one, FunctionType):
        found.asks |= _speaks(one)


def _speaks(function: FunctionType) -> bool:
    names = set(_names(function.__code__)) - {KeyboardInterrupt.__name__}
    return any("interrupt" in name.lower() or _is_interrupt(function.__globals__.get(name)) for name in names)


def _is_interrupt(value: Any) -> bool:
    return getattr(value, "__module__", "") == "langgraph.types" and getattr(value, "__name__", "") == "interrupt"


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _inside(one: Any) -> Iterable[Any]:
    if isinstance(one, list | tuple):
        return one
    if isinstance(one, dict):
        return one.values()
    if isinstance(one, BaseTool | BaseLanguageModel | type | ModuleType):
        return ()
    if isinstance(one, functools.partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, MethodType):
        code = getattr(one.__func__, "__code__", None)
        return [one.__func__, *_used(one.__self__, set() if code is None else set(_names(code)))]
    if isinstance(one, FunctionType):
        return _of_function(one)
    if isinstance(one, Runnable):
        return list(vars(one).values())
    call = vars(type(one)).get("__call__")
    return [MethodType(call, one)] if isinstance(call, FunctionType) else ()


def _of_function(function: FunctionType) -> Iterator[Any]:
    names = set(_names(function.__code__))
    for value in (*_cells(function), *_globals(function, names), *(function.__defaults__ or ())):
        yield value
        yield from _used(value, names)
    yield vars(function).get("__wrapped__")


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has no value yet
            yield cell.cell_contents


def _globals(function: FunctionType, names: set[str]) -> Iterator[Any]:
    """What its names stand for; nothing of installed code, which is known by its name alone."""
    if _is_own(function):
        yield from (function.__globals__[name] for name in names & function.__globals__.keys())


def _used(value: Any, names: set[str]) -> Iterator[Any]:
    """Attributes and methods of a module, or of an object of the user's own, that code with these names may use."""
    held = getattr(value, "__dict__", None)
    if isinstance(value, FunctionType | type | Runnable) or not isinstance(held, dict):
        return
    yield from (held[name] for name in names & held.keys())
    for cls in type(value).__mro__ if not isinstance(value, ModuleType) else ():
        methods = (vars(cls).get(name) for name in names)
        yield from (MethodType(one, value) for one in methods if isinstance(one, FunctionType) and _is_own(one))


_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def _is_own(function: FunctionType) -> bool:
    """Whether it is the user's: neither Python's, nor installed, nor ours."""
    ours = str(function.__module__).startswith("teola_plugin.")
    return not ours and not function.__code__.co_filename.startswith(_INSTALLED)
