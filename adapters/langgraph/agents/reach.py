"""A search for what code may use: names, closures and helpers of functions are looked at, and nothing is run.

The user's own helpers are searched; installed functions are known by their names only. A tool or a model is not
searched: a tool that asks a human says so itself.
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

_CONFIG_MODULE = "langchain_core.runnables.config"
_MAX_OBJECTS = 2000
"""Objects that are looked at in one search. Code that holds more may use anything."""


@dataclass(slots=True)
class Reach:
    """Things that some code may use, and that keep a tool from being called before its place."""

    asks_human: bool = False
    """It names `interrupt`."""
    needs_place: bool = False
    """It uses what a graph lends to a node: the stream, the store, the config."""
    has_events: bool = False
    """It uses objects that listeners hear of: Runnables, callbacks."""


def reach(obj: Any) -> Reach:
    """Search a function, or any object that holds functions."""
    result, pending, seen = Reach(), [obj], dict[int, Any]()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        if len(seen) >= _MAX_OBJECTS:
            return Reach(True, result.needs_place, True)
        seen[id(value)] = value  # kept, so that no other object gets the same id
        _note(result, value)
        pending += _parts(value)
    return result


def _note(result: Reach, value: Any) -> None:
    module = str(getattr(value, "__module__", "")) if isinstance(value, FunctionType) else ""
    if isinstance(value, ModuleType):
        module = value.__name__
    is_lent = module.startswith("langgraph.config")
    result.needs_place |= is_lent or module in ("langgraph.types", "langgraph.runtime", _CONFIG_MODULE)
    cls = value if isinstance(value, type) else type(value)
    result.has_events |= issubclass(cls, (Runnable, BaseCallbackManager)) or module.startswith(
        "langchain_core.callbacks"
    )
    if isinstance(value, FunctionType):
        names = set(_names(value.__code__)) - {KeyboardInterrupt.__name__}
        result.asks_human |= any("interrupt" in name.lower() for name in names)
        for used in (value.__globals__.get(name) for name in names):
            home = getattr(used, "__module__", ""), getattr(used, "__name__", "")
            result.asks_human |= home == ("langgraph.types", "interrupt")


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _parts(value: Any) -> Iterable[Any]:
    """Return what is to be looked at in a value."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, BaseTool | BaseLanguageModel | type | ModuleType):
        return ()
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        code = getattr(value.__func__, "__code__", None)
        return [value.__func__, *_attributes(value.__self__, set() if code is None else set(_names(code)))]
    if isinstance(value, FunctionType):
        return _referenced(value)
    if isinstance(value, Runnable):
        return list(vars(value).values())
    call = vars(type(value)).get("__call__")
    return [MethodType(call, value)] if isinstance(call, FunctionType) else ()


def _referenced(function: FunctionType) -> Iterator[Any]:
    """Yield the objects that a function refers to: closure, globals, defaults, and attributes of these.

    Globals of installed code are left out: it is known by its name alone.
    """
    names = set(_names(function.__code__))
    values = list(function.__defaults__ or ())
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has no value yet
            values.append(cell.cell_contents)
    if _is_users(function):
        values += (function.__globals__[name] for name in names & function.__globals__.keys())
    for value in values:
        yield value
        yield from _attributes(value, names)
    yield vars(function).get("__wrapped__")


def _attributes(value: Any, names: set[str]) -> Iterator[Any]:
    """Yield attributes of a module, or of an object of the user's class, that code with these names may use."""
    attributes = getattr(value, "__dict__", None)
    if isinstance(value, FunctionType | type | Runnable) or not isinstance(attributes, dict):
        return
    yield from (attributes[name] for name in names & attributes.keys())
    for cls in type(value).__mro__ if not isinstance(value, ModuleType) else ():
        methods = (vars(cls).get(name) for name in names)
        yield from (MethodType(one, value) for one in methods if isinstance(one, FunctionType) and _is_users(one))


_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def _is_users(function: FunctionType) -> bool:
    """Return True for a function of the user's: neither Python's, nor installed, nor ours."""
    is_ours = str(function.__module__).startswith("teola_plugin.")
    return not is_ours and not function.__code__.co_filename.startswith(_INSTALLED)
