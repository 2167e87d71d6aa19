"""Calls in a function's source: of Runnables, of the framework, of what is pure, of the user's own functions."""

from __future__ import annotations

import ast
import asyncio
import logging
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from teola_plugin.graph import Ref
from teola_plugin.tracer.functions import texts
from teola_plugin.tracer.functions.arguments import Arguments
from teola_plugin.tracer.functions.building import built
from teola_plugin.tracer.functions.composing import composed, read_attribute, read_key, series, spread
from teola_plugin.tracer.functions.in_place import CHANGES, changed
from teola_plugin.tracer.functions.machine import Walker
from teola_plugin.tracer.functions.pure import proven
from teola_plugin.tracer.functions.reading import is_a
from teola_plugin.tracer.functions.running import of_framework_object
from teola_plugin.tracer.functions.values import (
    UNKNOWN_VALUE,
    Coming,
    Computed,
    Defined,
    Fields,
    Known,
    Series,
    Spread,
    Symbol,
    Unknown,
    is_constant,
    known_object,
    words,
)
from teola_plugin.tracer.purity.calls import CALLABLES, METHODS
from teola_plugin.tracer.purity.purity import cached_purity
from teola_plugin.tracer.symbols import NotUnderstood

_HARMLESS = words(
    "base64 builtins collections copy datetime hashlib html itertools json logging math operator pprint random re",
    "statistics string textwrap time uuid",
    "ray.experimental.tqdm_ray ray.serve._private.logging_utils ray.train.v2._internal.logging.patch_print",
)
"""Modules whose functions write nothing that an engine reads.

They are modules of the standard library, and those of Ray that replace `builtins.print` by a print of their own.
"""


def call(walk: Walker, node: ast.expr) -> Symbol:
    """What a call gives."""
    assert isinstance(node, ast.Call)
    if isinstance(node.func, ast.Attribute):
        owner = walk.evaluate(node.func.value)
        if not isinstance(owner, (Known, Unknown)) or (isinstance(owner, Known) and _is_data(owner.value)):
            made = _method(walk, node, node.func, owner)
            if node.func.attr in CHANGES:
                walk.in_place.add(owner)
            return made
        if isinstance(owner, Unknown) and node.func.attr in (*METHODS, *CHANGES):
            Arguments.of(walk, node)
            return UNKNOWN_VALUE
        what = read_attribute(walk, owner, node.func.attr)
    else:
        what = walk.evaluate(node.func)
    arguments = Arguments.of(walk, node)
    _may_change(walk, what, arguments)
    return _called(walk, what, arguments)


def _may_change(walk: Walker, what: Symbol, arguments: Arguments) -> None:
    """What is not looked into may change an argument in place, or call a function that does."""
    if isinstance(what, Known) and getattr(what.value, "__name__", "") in _CHANGE_THEIR_FIRST:
        for one in arguments.given[:1]:
            walk.in_place.add(one.of if isinstance(one, Spread) else one)
    for one in (*arguments.given, *arguments.named.values()):
        if isinstance(one, Defined):
            for name in changed([one.definition]):
                walk.in_place.add(one.read(name))


def _is_data(value: object) -> bool:
    return is_constant(value) or type(value) in (dict, list, tuple, set)


def _called(walk: Walker, what: Symbol, arguments: Arguments) -> Symbol:
    if not isinstance(what, Known):
        return _users_own(walk, what, what, arguments)
    func = what.value
    if (made := of_framework_object(walk, func, arguments)) is not None:
        return made
    if func is isinstance and (made := _is_message(walk, arguments)) is not None:
        return made
    if any(func is one for one in CALLABLES):
        return _pure(walk, what, arguments)
    if (made := _of_asyncio(walk, func, arguments)) is not None:
        return made
    if arguments.whole and (made := built(func, arguments.given, arguments.named)) is not None:
        return made
    if _is_harmless(func):
        return UNKNOWN_VALUE
    return _users_own(walk, what, func, arguments)


def _is_message(walk: Walker, arguments: Arguments) -> Symbol | None:
    """`isinstance(value, AIMessage)`, by the type that a message tells of itself; None for any other class."""
    given = arguments.single or []
    kind = given[1].value if len(given) == 2 and isinstance(given[1], Known) else None
    types = next((found for known, found in _TYPES if known is kind), None)
    if types is None or not isinstance(given[0], (Ref, Computed)):
        return None
    shape = ast.Compare(ast.Constant(0), [ast.In()], [])
    return composed(walk, shape, {"left": read_attribute(walk, given[0], "type"), "comparators": [Known(types)]})


_TYPES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (AIMessage, ("ai", "AIMessageChunk")),
    (HumanMessage, ("human", "HumanMessageChunk")),
    (SystemMessage, ("system", "SystemMessageChunk")),
    (ToolMessage, ("tool", "ToolMessageChunk")),
)


def may_write(walk: Walker, nodes: Sequence[ast.AST]) -> bool:
    """Whether code that was not looked into may write what an engine reads."""
    calls = (one for node in nodes for one in ast.walk(node) if isinstance(one, (ast.Call, ast.Await)))
    return not all(isinstance(one, ast.Call) and _only_reads(walk, one.func) for one in calls)


def _only_reads(walk: Walker, func: ast.expr) -> bool:
    if isinstance(func, ast.Attribute) and func.attr in (*METHODS, *CHANGES):
        return True
    inner = func
    while isinstance(inner, ast.Attribute):
        inner = inner.value
    what = walk.evaluate(func) if isinstance(inner, ast.Name) else UNKNOWN_VALUE
    return isinstance(what, Known) and (_is_harmless(what.value) or any(what.value is one for one in CALLABLES))


_CHANGE_THEIR_FIRST = words("delattr delitem iadd iconcat imul ior setattr setitem shuffle")
"""Functions of the standard library that change what they are given first."""


def _is_harmless(func: Any) -> bool:
    if type(func) is MethodType:
        func = func.__func__ if is_a(func.__self__, logging.Logger) else None
    if type(func) not in (FunctionType, BuiltinFunctionType):
        return False
    of = getattr(func, "__self__", None)
    module = func.__module__ or (of.__module__ if isinstance(of, type) else "")
    return module in _HARMLESS


# ------------------------------------------------------------ asyncio


def _of_asyncio(walk: Walker, func: Any, arguments: Arguments) -> Symbol | None:
    if func is asyncio.gather:
        if any(isinstance(one, Unknown) for one in arguments.given):
            walk.user_code()
        return Coming(series([_awaited(one) for one in arguments.given]))
    first = arguments.given[0] if arguments.given else None
    if any(func is one for one in (asyncio.create_task, asyncio.ensure_future, asyncio.wait_for)):
        return first if isinstance(first, Coming) else UNKNOWN_VALUE
    if func is asyncio.to_thread and isinstance(first, Known):
        rest = Arguments(arguments.given[1:], arguments.named, arguments.whole)
        return Coming(_called(walk, first, rest))
    return Coming(Known(None)) if func is asyncio.sleep else None


def _awaited(item: Symbol | Spread) -> Symbol | Spread:
    if isinstance(item, Spread):
        return Spread(item.of.value if isinstance(item.of, Coming) else item.of)
    return item.value if isinstance(item, Coming) else UNKNOWN_VALUE


# ------------------------------------------------------------ pure functions, methods of values


def _length(walk: Walker, of: Series) -> Symbol:
    """`len(...)`, also of a list with items that are not known."""
    made: Symbol = Known(sum(not isinstance(item, Spread) for item in of.items))
    for item in of.items:
        if isinstance(item, Spread):
            shape = ast.Call(ast.Name("len", ast.Load()), [], [])
            one = composed(walk, shape, {"args": [item.of]})
            added = ast.BinOp(ast.Constant(0), ast.Add(), ast.Constant(0))
            made = UNKNOWN_VALUE if isinstance(one, Unknown) else composed(walk, added, {"left": made, "right": one})
    return made


def _pure(walk: Walker, what: Symbol, arguments: Arguments) -> Symbol:
    """A call of a pure function, to be computed when it is needed."""
    given = arguments.single
    if not arguments.whole or given is None:
        return UNKNOWN_VALUE
    if isinstance(what, Known) and what.value is len and len(given) == 1 and isinstance(given[0], Series):
        return _length(walk, given[0])
    shape = ast.Call(ast.Constant(0), [], [ast.keyword(name, ast.Constant(0)) for name in arguments.named])
    made = composed(walk, shape, {"func": what, "args": given})
    if not isinstance(made, Computed):
        return made
    assert isinstance(made.code, ast.Call)
    refs, objects = dict(made.refs), dict(made.objects)
    keywords = []
    for name, one in arguments.named.items():
        code = walk.code(one)
        if code is None:
            return UNKNOWN_VALUE
        keywords.append(ast.keyword(name, code.code))
        refs |= code.refs
        objects |= code.objects
    return Computed(ast.Call(made.code.func, made.code.args, keywords), refs, objects)


def _method(walk: Walker, node: ast.Call, func: ast.Attribute, owner: Symbol) -> Symbol:
    """A method of a text, a list, a dictionary, or of something that is made at run time."""
    arguments = Arguments.of(walk, node)
    name = func.attr
    given = [one for one in arguments.given if not isinstance(one, Spread)]
    if (
        made := texts.method(walk, owner, name, given if len(given) == len(arguments.given) else [], arguments.named)
    ) is not None:
        return made
    if name in ("append", "extend") and len(given) == 1 and isinstance(func.value, ast.Name):
        _extended(walk, func.value.id, owner, [*given] if name == "append" else spread(given[0]))
        return Known(None)
    if name == "get" and given and (found := _got(walk, owner, given)) is not None:
        return found
    if name in METHODS:
        code = walk.code(owner)
        if code is not None:
            attributed = Computed(ast.Attribute(code.code, name, ast.Load()), code.refs, code.objects)
            return _pure(walk, attributed, arguments)
        return UNKNOWN_VALUE
    if isinstance(func.value, ast.Name):
        walk.frame.names[func.value.id] = UNKNOWN_VALUE  # it may have been changed
    if isinstance(owner, Fields | Series):
        walk.in_place.add(owner)
    walk.user_code()
    return UNKNOWN_VALUE


def _got(walk: Walker, owner: Symbol, given: Sequence[Symbol]) -> Symbol | None:
    """`owner.get(key, default)` of a dictionary whose keys are known."""
    known, key = known_object(given[0])
    default = given[1] if len(given) > 1 else Known(None)
    if isinstance(owner, Fields):
        lacks = known and owner.base is None and key not in owner.items
        return default if lacks else read_key(walk, owner, given[0])
    if isinstance(owner, Known) and type(owner.value) is dict and known and type(key) in (str, int):
        return Known(owner.value[key]) if key in owner.value else default
    return None


def _extended(walk: Walker, name: str, owner: Symbol, items: Sequence[Symbol | Spread]) -> None:
    """A list grows; what is not known of it stays so."""
    if isinstance(owner, (Series, Ref)) and not (isinstance(owner, Series) and owner.kind is tuple):
        walk.frame.names[name] = Series((*spread(owner), *items))
    else:
        walk.frame.names[name] = UNKNOWN_VALUE


# ------------------------------------------------------------ the user's own functions


def _read_in_part(walk: Walker, func: FunctionType, arguments: Arguments) -> Symbol | None:
    """What a pure function makes of a record whose values come one by one, such as the state of a graph ahead of nodes.

    Computed as a whole it would wait for all of them, also for those that it does not read. None where it is handed
    none, or not all of it is understood.
    """
    given = arguments.single if arguments.whole else None
    if given is None or not any(_is_record(one) for one in (*given, *arguments.named.values())):
        return None
    if cached_purity(func) is None:
        return walk.call_function(func, given, arguments.named)  # no expression holds a call of it
    trial = walk.trial(set(walk.draft.names))
    made = trial.call_function(func, given, arguments.named)
    if made is None or isinstance(made, Unknown | Coming) or trial.left_out or trial.runs_user_code:
        return None
    return walk.call_function(func, given, arguments.named)


def _is_record(symbol: Symbol) -> bool:
    return isinstance(symbol, Fields) and symbol.base is None and len(symbol.items) > 1


def _users_own(walk: Walker, what: Symbol, func: Any, arguments: Arguments) -> Symbol:
    if type(func) is FunctionType:
        if (read := _read_in_part(walk, func, arguments)) is not None:
            return read
        made = _pure(walk, what, arguments)
        if isinstance(made, Computed):
            try:
                proven(made)
                return made
            except NotUnderstood:
                pass
    given = arguments.single if arguments.whole else None
    if given is not None and (returned := walk.call_function(func, given, arguments.named)) is not None:
        return returned
    walk.user_code()
    for one in (*arguments.given, *arguments.named.values()):
        if isinstance(one, Fields | Series):  # it may do anything with them
            walk.in_place.add(one)
    return UNKNOWN_VALUE
