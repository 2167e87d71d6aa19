"""Calls of functions: the function that a call runs, its source, and the local names with which it begins."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from langchain_core.tools import StructuredTool, Tool

from teola_plugin.tracer.functions.lookup import NO_FREE_NAMES, FreeNames, is_framework_code
from teola_plugin.tracer.functions.symbols import UNKNOWN_VALUE, Fields, ItemList, KnownValue, LocalFunction, Symbol
from teola_plugin.tracer.source import Definition, source_of


@dataclass(slots=True)
class CallFrame:
    """The local names of one call of a function, or of one iteration or branch in it."""

    free_names: FreeNames
    local_names: frozenset[str] = frozenset()
    """Names that belong to the function, whether they have a value yet or not."""
    names: dict[str, Symbol] = field(default_factory=dict)
    return_value: Symbol = UNKNOWN_VALUE
    read_outer: Callable[[str], Symbol] | None = None
    """Reads the names around it, for the body of a loop or branch, and for a function inside a function."""
    code: CodeType | None = None
    assigned_by_inner_functions: set[str] = field(default_factory=set)
    declared_names: set[str] = field(default_factory=set)
    """Names that `global` and `nonlocal` statements declare: what is assigned to them is read by other functions."""
    assigned_elsewhere: dict[tuple[int, str], Symbol] = field(default_factory=dict)
    """What functions so far have assigned to such names, by the id of the globals or the cell that hold the value."""

    def read(self, name: str) -> Symbol:
        """Return what a name stands for now."""
        if name in self.assigned_by_inner_functions:
            return UNKNOWN_VALUE
        if name in self.names:
            return self.names[name]
        if self.assigned_elsewhere and (assigned := self._read_assigned_elsewhere(name)) is not None:
            return assigned
        if self.read_outer is not None and name not in self.local_names:
            return self.read_outer(name)
        return UNKNOWN_VALUE if name in self.local_names else self.free_names.read(name)

    def _read_assigned_elsewhere(self, name: str) -> Symbol | None:
        """Return what was assigned to a name of the function's closure or globals; None if nothing was."""
        if self.code is not None and name in (*self.code.co_varnames, *self.code.co_cellvars):
            return None
        return self.assigned_elsewhere.get((id(self.free_names.owner_of(name)), name))

    def publish_names(self) -> list[Symbol]:
        """Let other functions read what was assigned to names that are theirs, too. Return the assigned values."""
        published = {name: self.names[name] for name in self.declared_names & self.names.keys()}
        for name, value in published.items():
            owner = self.free_names.owner_of(name)
            if owner is not None:
                self.assigned_elsewhere[id(owner), name] = value
                del self.names[name]
        return list(published.values())


def to_plain_function(func: Any, arguments: Sequence[Symbol]) -> tuple[FunctionType | None, list[Symbol]]:
    """Return the function that a call of `func` runs, and its positional arguments, `self` included.

    Takes functions, bound methods, callable objects, and tools made of functions. The function is None for any other
    callable, such as one that is not written in Python.
    """
    if type(func) in (StructuredTool, Tool):
        func = func.func if func.func is not None else func.coroutine
    call_method = next((vars(cls)["__call__"] for cls in type(func).__mro__ if "__call__" in vars(cls)), None)
    if type(call_method) is FunctionType:
        func = MethodType(call_method, func)
    if type(func) is MethodType:
        func, arguments = func.__func__, [KnownValue(func.__self__), *arguments]
    return (func if type(func) is FunctionType else None), list(arguments)


def unwrap_partial(
    func: Any, arguments: Sequence[Symbol], keywords: Mapping[str, Symbol]
) -> tuple[Any, list[Symbol], dict[str, Symbol]]:
    """Return the function that a `functools.partial` calls, or `func` itself, and all arguments of the call."""
    arguments, keywords = list(arguments), dict(keywords)
    while type(func) is partial:
        arguments = [*map(KnownValue, func.args), *arguments]
        keywords = {key: KnownValue(argument) for key, argument in func.keywords.items()} | keywords
        func = func.func
    return func, arguments, keywords


def enter_call(
    func: Any, arguments: Sequence[Symbol], keywords: Mapping[str, Symbol]
) -> tuple[Definition, CallFrame] | None:
    """Return the source of a function of the user's, and the frame with which this call of it begins.

    Return None for functions of the framework, and those without source.
    """
    if isinstance(func, LocalFunction):
        frame = _make_frame(func.code, func.defaults, arguments, keywords, NO_FREE_NAMES, func.read_outer)
        return func.definition, frame
    func, arguments, keywords = unwrap_partial(func, arguments, keywords)
    plain_function, arguments = to_plain_function(func, arguments)
    if plain_function is None or is_framework_code(plain_function):
        return None
    return enter_function(plain_function, arguments, keywords)


def enter_function(
    func: FunctionType, arguments: Sequence[Symbol], keywords: Mapping[str, Symbol], *, may_have_others: bool = False
) -> tuple[Definition, CallFrame] | None:
    """Return the source of a plain function and the frame with which a call of it begins.

    For the function that is traced itself, which may be the framework's, and which `may_have_others` than these
    arguments. Calls that it makes are entered by `enter_call`, which leaves the framework's functions alone. Return
    None for functions without source, and for those that may collect other arguments.
    """
    code = func.__code__
    parameters = code.co_varnames[: code.co_argcount]
    defaults: dict[str, Any] = dict(zip(parameters[::-1], (func.__defaults__ or ())[::-1], strict=False))
    defaults |= func.__kwdefaults__ or {}
    symbols: dict[str, Symbol] = {name: KnownValue(value) for name, value in defaults.items()}
    frame = _make_frame(code, symbols, arguments, keywords, FreeNames.of_function(func))
    is_known = not may_have_others or not _collecting_parameters(code)
    definition = source_of(code) if is_known else None
    return None if definition is None else (definition, frame)


def _collecting_parameters(code: CodeType) -> tuple[str, ...]:
    """Return the names of `*args` and `**kwargs` of a function that has them."""
    first = code.co_argcount + code.co_kwonlyargcount
    count = sum(bool(code.co_flags & flag) for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS))
    return code.co_varnames[first : first + count]


def _make_frame(
    code: CodeType,
    defaults: Mapping[str, Symbol],
    arguments: Sequence[Symbol],
    keywords: Mapping[str, Symbol],
    free_names: FreeNames,
    read_outer: Callable[[str], Symbol] | None = None,
) -> CallFrame:
    """Return the frame with which a call with these arguments begins."""
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    names: dict[str, Symbol] = {name: UNKNOWN_VALUE for name in parameters} | dict(defaults)
    names |= dict(zip(parameters[: code.co_argcount], arguments, strict=False))
    keyword_parameters = parameters[code.co_posonlyargcount :]
    names |= {name: value for name, value in keywords.items() if name in keyword_parameters}
    other_arguments: dict[int, Symbol] = {
        inspect.CO_VARARGS: ItemList(tuple(arguments[code.co_argcount :]), tuple),
        inspect.CO_VARKEYWORDS: Fields(
            {name: value for name, value in keywords.items() if name not in keyword_parameters}
        ),
    }
    collected = [symbol for flag, symbol in other_arguments.items() if code.co_flags & flag]
    names |= zip(_collecting_parameters(code), collected, strict=True)
    local_names = frozenset((*code.co_varnames, *code.co_cellvars))
    return CallFrame(free_names, local_names, names, read_outer=read_outer, code=code)
