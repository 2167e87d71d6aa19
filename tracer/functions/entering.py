"""How a call of a user's function begins: its source, and the frame with its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

from langchain_core.tools import StructuredTool, Tool

from teola_plugin.tracer.functions.machine import Frame
from teola_plugin.tracer.functions.reading import NOWHERE, Surroundings, of_framework
from teola_plugin.tracer.functions.source import Definition, source_of
from teola_plugin.tracer.functions.values import UNKNOWN_VALUE, Defined, Known, Symbol


def unbound(func: Any, given: Sequence[Symbol]) -> tuple[FunctionType | None, list[Symbol]]:
    """The function of a bound method, and its arguments with `self`; None for anything but a function in Python.

    Also of an object that is called, and of a tool.
    """
    if type(func) in (StructuredTool, Tool):
        func = func.func if func.func is not None else func.coroutine
    own = next((vars(one)["__call__"] for one in type(func).__mro__ if "__call__" in vars(one)), None)
    if type(own) is FunctionType:
        func = MethodType(own, func)
    if type(func) is MethodType:
        func, given = func.__func__, [Known(func.__self__), *given]
    return (func if type(func) is FunctionType else None), list(given)


def called(func: Any, given: Sequence[Symbol], named: Mapping[str, Symbol]) -> tuple[Definition, Frame] | None:
    """As a call that stands in a function begins: also of one that is defined there, and of no framework's own."""
    if isinstance(func, Defined):
        names = arguments(func.code, func.defaults, given, named)
        return None if names is None else (func.definition, _frame(func.code, names, NOWHERE, func.read))
    plainly, given = unbound(func, given)
    return None if plainly is None or of_framework(plainly) else entered(plainly, given, named)


def entered(
    func: FunctionType, given: Sequence[Symbol], named: Mapping[str, Symbol]
) -> tuple[Definition, Frame] | None:
    """As a call with these arguments begins."""
    code = func.__code__
    places = code.co_varnames[: code.co_argcount]
    defaults: dict[str, Any] = dict(zip(places[::-1], (func.__defaults__ or ())[::-1], strict=False))
    defaults |= func.__kwdefaults__ or {}
    names = arguments(code, {name: Known(one) for name, one in defaults.items()}, given, named)
    definition = None if names is None else source_of(code)
    if names is None or definition is None:
        return None
    return definition, _frame(code, names, Surroundings.of(func), None)


def arguments(
    code: CodeType, defaults: Mapping[str, Symbol], given: Sequence[Symbol], named: Mapping[str, Symbol]
) -> dict[str, Symbol] | None:
    """The function's names as it begins; None for one that takes any arguments."""
    if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return None
    wanted = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found: dict[str, Symbol] = {name: UNKNOWN_VALUE for name in wanted} | dict(defaults)
    found |= dict(zip(wanted[: code.co_argcount], given, strict=False))
    return found | {name: one for name, one in named.items() if name in wanted}


def _frame(
    code: CodeType, names: dict[str, Symbol], around: Surroundings, outer: Callable[[str], Symbol] | None
) -> Frame:
    return Frame(around, frozenset((*code.co_varnames, *code.co_cellvars)), names, outer=outer, code=code)
