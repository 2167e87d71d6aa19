"""Calls of functions: the function that a call runs, its source, its local names, and what its interpreters share."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import Runnable
from langchain_core.tools import StructuredTool, Tool

from teola_plugin.graph import Ref
from teola_plugin.tracer.functions.lookup import NO_FREE_NAMES, FreeNames, is_framework_code
from teola_plugin.tracer.functions.pure_expressions import Decide
from teola_plugin.tracer.functions.symbols import UNKNOWN_VALUE, Fields, ItemList, KnownValue, LocalFunction, Symbol
from teola_plugin.tracer.langchain.trace import FindLeaf
from teola_plugin.tracer.source import Definition, source_of

if TYPE_CHECKING:
    from teola_plugin.tracer.functions.interpreter import FunctionInterpreter


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


# ------------------------------------------------------------ what the interpreters of one function share

FindLeaves = Callable[[Runnable[Any, Any], str, Mapping[str, Any], bool | None], FindLeaf]
"""(Runnable, location of its call, bound arguments, True for a coroutine method) -> finds the leaves in it that are
models and retrievers of the user's own. None instead of True or False: in whichever way the graph is called."""


LowerGraph = Callable[["FunctionInterpreter", Runnable[Any, Any], Symbol, bool], Symbol | None]
"""(interpreter, Runnable, its input, True for a coroutine method) -> what it returns, if it is a graph whose nodes are
read; their requests become components."""


MethodRule = Callable[["FunctionInterpreter", Any], Symbol]  # interprets a call with these `Arguments`


FindMethod = Callable[[Symbol, str], MethodRule | None]
"""(owner, name of a method, or `__call__`) -> the framework's rule for it, if there is one."""


def find_leaves_called(find_leaves: FindLeaves | None, is_async: bool) -> FindLeaves | None:
    """Return what finds leaves in code that a coroutine method calls, or a sync one; `find_leaves` may be told neither.

    That is the code of a graph which a function calls: its nodes run as the graph was called.
    """
    if find_leaves is None:
        return None

    def find(runnable: Runnable[Any, Any], location: str, kwargs: Mapping[str, Any], form: bool | None) -> FindLeaf:
        return find_leaves(runnable, location, kwargs, is_async if form is None else form)

    return find


class OutOfFuel(Exception):
    """Signals that as many expressions were evaluated as one function may have."""


class BlockExit(Enum):
    """The way in which control leaves a block of statements."""

    FALLS_THROUGH = auto()
    """The next statement runs."""
    LEAVES = auto()
    """It returned, raised, or went on with the next iteration of a loop."""
    UNKNOWN = auto()
    """Nobody knows what runs next."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The functions by which an interpreter evaluates an expression and runs a block of statements."""

    evaluate: Callable[[FunctionInterpreter, ast.expr], Symbol]
    run_block: Callable[[FunctionInterpreter, Sequence[ast.stmt]], BlockExit]


MAX_EXPRESSIONS = 5_000
"""Expressions that are evaluated for one function, with all that it calls."""


@dataclass(slots=True)
class SharedContext:
    """The state that the interpreter of a function shares with those of its loops' and branches' bodies."""

    rules: Rules
    decide: Decide | None = None
    """Decides conditions on the template's input."""
    find_leaves: FindLeaves | None = None
    """Finds the models and retrievers of the user's own whose calls are components; without it none are."""
    find_method: FindMethod | None = None
    """Finds the rules of methods of another framework's objects."""
    lower_graph: LowerGraph | None = None
    """Reads the nodes of graphs that the function calls; without it they are not understood."""
    environment: Ref | None = None
    """The environment variables, if they are in the template's input and nothing has changed them since."""
    fuel: int = MAX_EXPRESSIONS
    """Expressions that may still be evaluated."""
    ref_names: dict[Ref, str] = field(default_factory=dict)
    object_names: dict[int, tuple[str, object]] = field(default_factory=dict)
    """Names of objects in expressions, by the object's id; the object is kept, so that its id stays its own."""
    helpers: set[str] = field(default_factory=set)
    """Components that compute values for others, and are of no use by themselves."""
    sets_attributes: bool = False
    """True once an attribute of an existing object was assigned."""
    catching_blocks: int = 0
    """Number of `try` statements with handlers around the code that is interpreted now, in its callers, too."""
