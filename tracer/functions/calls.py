"""Calls in a function's source: of the framework, of pure functions, of methods of values, of the user's functions."""

from __future__ import annotations

import ast
import asyncio
import collections
import datetime
import logging
import os
import re
import string
import uuid
import zoneinfo
from collections.abc import Sequence
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from teola_plugin.graph import INPUT, Ref
from teola_plugin.tracer.draft import CreatedModel
from teola_plugin.tracer.functions.bodies import uncaptured_items
from teola_plugin.tracer.functions.comprehensions import is_data, with_calls_for_each, with_lists
from teola_plugin.tracer.functions.created_objects import build, build_plain_model, is_model_creator
from teola_plugin.tracer.functions.frames import MethodRule
from teola_plugin.tracer.functions.framework_calls import Arguments, call_framework_method
from teola_plugin.tracer.functions.interpreter import FunctionInterpreter
from teola_plugin.tracer.functions.lookup import CACHED_FUNCTION, cached_result, is_instance
from teola_plugin.tracer.functions.mutations import MUTATING_METHODS, changes_container, mutated_names
from teola_plugin.tracer.functions.operations import (
    call_without_requests,
    compose,
    dump_model,
    fields_of_class,
    items_of,
    iterated,
    length_of_list,
    make_data_object,
    make_list,
    method_of,
    read_attribute,
    read_key,
    view_of,
)
from teola_plugin.tracer.functions.pure_expressions import (
    ABSENT,
    NAME_PREFIX,
    STATE,
    compile_pure,
    computed_at_run_time,
    is_setting,
    is_standard_object,
)
from teola_plugin.tracer.functions.symbols import (
    UNKNOWN_VALUE,
    AwaitableValue,
    DataObject,
    Expression,
    Fields,
    Item,
    ItemList,
    KnownValue,
    LocalFunction,
    Spread,
    Symbol,
    Unknown,
    is_known_in_parts,
    known_value,
    merge_inputs,
    word_set,
)
from teola_plugin.tracer.functions.texts import call_text_method, substitute, written_value
from teola_plugin.tracer.purity.calls import BUILTINS, CALLABLES, METHODS
from teola_plugin.tracer.purity.interpreter import free_names
from teola_plugin.tracer.purity.purity import cached_purity
from teola_plugin.tracer.source import source_of
from teola_plugin.tracer.symbols import NotUnderstood

_HARMLESS_MODULES = word_set(
    "_hashlib base64 builtins collections copy datetime genericpath hashlib html itertools json logging math operator",
    "posixpath pprint random re secrets statistics string textwrap time uuid",
    "ray.experimental.tqdm_ray ray.serve._private.logging_utils ray.train.v2._internal.logging.patch_print",
)
"""Modules whose functions write nothing that an engine reads.

They are modules of the standard library, and those of Ray that replace `builtins.print` by a print of their own.
"""
_DATA_MODULES = word_set(
    "_hashlib base64 copy datetime genericpath html json math posixpath random re secrets statistics string textwrap",
    "time uuid",
)
"""Modules of the standard library whose functions give plain data if their arguments are plain data."""
_DATA_BUILTINS = (ascii, bin, chr, divmod, format, hash, hex, oct, ord, pow, repr)
_DATA_CLASSES = (
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, zoneinfo.ZoneInfo, uuid.UUID),
    *(collections.Counter, string.Template),
)
"""Classes whose objects are as plain as what they are made of."""
_METHOD_TYPES = (MethodType, BuiltinFunctionType, type(re.compile("").sub))
_NO_OWNER = KnownValue(None)
_MUTATING_FUNCTIONS = word_set("delattr delitem iadd iconcat imul ior setattr setitem shuffle")
"""Functions of the standard library that change their first argument."""
_ITERATING = (enumerate, frozenset, len, list, max, min, reversed, set, sorted, tuple, zip)
"""Builtins that see nothing of a dictionary but its keys."""
_DUMP_METHODS = ("model_dump", "model_dump_json")


_MESSAGE_TYPES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (AIMessage, ("ai", "AIMessageChunk")),
    (HumanMessage, ("human", "HumanMessageChunk")),
    (SystemMessage, ("system", "SystemMessageChunk")),
    (ToolMessage, ("tool", "ToolMessageChunk")),
)
"""Classes of messages, and the values that the field `type` of their instances has."""


def evaluate_call(interpreter: FunctionInterpreter, node: ast.Call) -> Symbol:
    """Return what a call returns."""
    node = with_lists(interpreter, with_calls_for_each(interpreter, node))
    if isinstance(node.func, ast.Attribute):
        owner, method = interpreter.evaluate(node.func.value), node.func.attr
        find_method = interpreter.shared.find_method
        if find_method is not None and (rule := find_method(owner, method)) is not None:
            return rule(interpreter, Arguments.evaluate(interpreter, node))
        if isinstance(owner, DataObject) and (result := _call_own_method(interpreter, node, owner, method)) is not None:
            return result
        if not isinstance(owner, (KnownValue, Unknown)) or (isinstance(owner, KnownValue) and is_data(owner.value)):
            result = _call_method(interpreter, node, node.func, owner)
            if method in MUTATING_METHODS:
                interpreter.mutations.add(owner)
            return result
        if isinstance(owner, Unknown) and (owner.is_plain or method in METHODS or changes_container(node)):
            return _call_unknown_method(interpreter, node, node.func, owner)
        func = read_attribute(interpreter, owner, method)
    else:
        func = interpreter.evaluate(node.func)
    arguments = Arguments.evaluate(interpreter, node)
    _record_mutations(interpreter, func, arguments)
    return _call(interpreter, func, arguments)


def _call_unknown_method(
    interpreter: FunctionInterpreter, node: ast.Call, func: ast.Attribute, owner: Unknown
) -> Symbol:
    """Return what a method of a value gives that is known only at run time."""
    arguments = Arguments.evaluate(interpreter, node)
    result = _call_at_run_time(arguments, owner)
    if result.is_plain or func.attr in METHODS:
        return result
    if isinstance(func.value, ast.Name):  # it may hold an object of another kind now
        interpreter.frame.names[func.value.id] = UNKNOWN_VALUE
    if changes_container(node):
        return UNKNOWN_VALUE
    _record_mutations(interpreter, UNKNOWN_VALUE, arguments)
    return call_user_function(interpreter, UNKNOWN_VALUE, UNKNOWN_VALUE, arguments)


def _call_own_method(interpreter: FunctionInterpreter, node: ast.Call, owner: DataObject, name: str) -> Symbol | None:
    """Interpret a method of the object's class; return None if it has none, or one that cannot be read."""
    func = method_of(owner, name)
    arguments = None if func is None else Arguments.evaluate(interpreter, node)
    if arguments is None or arguments.symbols is None or not arguments.complete:
        return None
    return interpreter.call_function(func, (owner, *arguments.symbols), arguments.keywords)


def _record_mutations(interpreter: FunctionInterpreter, func: Symbol, arguments: Arguments) -> None:
    """Record what a function that is not interpreted may change: its first argument, what a local function changes."""
    if isinstance(func, KnownValue) and getattr(func.value, "__name__", "") in _MUTATING_FUNCTIONS:
        for item in arguments.positional[:1]:
            interpreter.mutations.add(item.iterable if isinstance(item, Spread) else item)
    for item in arguments.all_items():
        if isinstance(item, LocalFunction):
            for name in mutated_names([item.definition]):
                interpreter.mutations.add(item.read_outer(name))


def _call(interpreter: FunctionInterpreter, func: Symbol, arguments: Arguments) -> Symbol:
    """Return what a function returns, by the first rule that understands it."""
    if not isinstance(func, KnownValue):
        return call_user_function(interpreter, func, func, arguments)
    value = func.value
    find_method = interpreter.shared.find_method
    if find_method is not None and (rule := find_method(func, "__call__")) is not None:
        return rule(interpreter, arguments)
    if (result := call_framework_method(interpreter, value, arguments)) is not None:
        return result
    if CACHED_FUNCTION in (type(value), type(value.__func__) if type(value) is MethodType else None):
        return _call_cached_function(interpreter, func, arguments)
    if value is os.getenv:
        environment = interpreter.to_expression(KnownValue(os.environ))
        if environment is None:
            return _call_at_run_time(arguments)
        method = ast.Attribute(environment.code, "get", ast.Load())
        return _call_pure(interpreter, Expression(method, environment.refs), arguments)
    if (result := fields_of_class(value, arguments.symbols or ())) is not None:
        return result
    if (rule := _rule_for_object(interpreter, value, arguments)) is not None:
        return rule(interpreter, arguments)
    if value is isinstance and (result := _test_message_class(interpreter, arguments)) is not None:
        return result
    if value is str and (symbols := arguments.symbols) is not None and len(symbols) == 1:
        arguments = replace(arguments, positional=(written_value(interpreter, symbols[0]),))
    if (value is list or value is tuple) and (copied := _copy_list(value, arguments)) is not None:
        return copied
    if any(value is pure for pure in CALLABLES):
        return _call_pure(interpreter, func, arguments)
    if (result := _call_asyncio(interpreter, value, arguments)) is not None:
        return result
    built = build(interpreter, value, arguments.positional, arguments.keywords) if arguments.complete else None
    if is_model_creator(value):
        _note_created_model(interpreter, value, arguments, built)
    if built is not None:
        return built
    if (symbols := arguments.symbols) is not None:
        result = make_data_object(interpreter, value, symbols, arguments.keywords, arguments.unpacked)
        if result is not None:
            return result
    if (text := _substitute_template(value, arguments)) is not None:
        return text
    if _is_harmless(value) or _is_standard(value):
        result = _call_at_run_time(arguments) if _gives_plain_data(value) else UNKNOWN_VALUE
        if result.is_plain or not _is_standard(value):  # else it may call what it is given
            return result
    return call_user_function(interpreter, func, value, arguments)


def _substitute_template(func: Any, arguments: Arguments) -> Symbol | None:
    """Return `template.substitute(name=value)` of a known `string.Template`; None for any other call."""
    template: Any = func.__self__ if type(func) is MethodType else None
    is_known = type(template) is string.Template and func.__func__ is string.Template.substitute
    is_known = is_known and arguments.complete and not arguments.positional
    return substitute(template.template, arguments.keywords) if is_known else None


def call_model_class(
    interpreter: FunctionInterpreter, cls: type, arguments: Arguments, *, is_plain: bool = False
) -> Symbol:
    """Interpret the creation of a model of another framework as an equal model if it can be read, else as user code.

    `is_plain`: creating one only reads its arguments, the module `openai`, and environment variables of OpenAI's.
    """
    model = build_plain_model(interpreter, cls, arguments) if is_plain else None
    _note_created_model(interpreter, cls, arguments, model)
    return call_user_function(interpreter, KnownValue(cls), cls, arguments) if model is None else model


def _note_created_model(
    interpreter: FunctionInterpreter, creator: Any, arguments: Arguments, model: Symbol | None
) -> None:
    """Note a model that the function creates. `model`: what is known of it before the function runs."""
    location, created_models = f"{interpreter.name}:{interpreter.line}", interpreter.draft.created_models
    if isinstance(model, KnownValue):
        created_models.pop(location, None)
        return
    interpreter.note_source(location)
    has_settings = any(is_setting(item) for item in arguments.all_items() if not isinstance(item, Spread))
    created_models[location] = CreatedModel(creator.__name__, has_settings)


def _rule_for_object(interpreter: FunctionInterpreter, func: Any, arguments: Arguments) -> MethodRule | None:
    """Return the framework's rule for `isinstance`, `hasattr` or `getattr` of one of its objects, if there is one."""
    find_method, symbols = interpreter.shared.find_method, arguments.symbols
    if find_method is None or not symbols or not any(func is one for one in (isinstance, hasattr, getattr)):
        return None
    return find_method(symbols[0], f"{func.__name__}()")


def _test_message_class(interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol | None:
    """Return `isinstance(value, AIMessage)`, by the type that a message says it has; None for any other class."""
    symbols = arguments.symbols or []
    kind = symbols[1].value if len(symbols) == 2 and isinstance(symbols[1], KnownValue) else None
    types = next((types for message_class, types in _MESSAGE_TYPES if message_class is kind), None)
    if types is None or not isinstance(symbols[0], (Ref, Expression)):
        return None
    template = ast.Compare(ast.Constant(0), [ast.In()], [])
    message_type = read_attribute(interpreter, symbols[0], "type")
    return compose(interpreter, template, {"left": message_type, "comparators": [KnownValue(types)]})


def _call_asyncio(interpreter: FunctionInterpreter, func: Any, arguments: Arguments) -> Symbol | None:
    """Interpret a call of `asyncio` that runs coroutines or functions; None for any other function."""
    if func is asyncio.gather:
        if any(isinstance(item, Unknown) for item in arguments.positional):
            interpreter.add_user_code()
        return AwaitableValue(make_list([_await_item(item) for item in arguments.positional]))
    first = arguments.positional[0] if arguments.positional else None
    if any(func is one for one in (asyncio.create_task, asyncio.ensure_future, asyncio.wait_for)):
        return first if isinstance(first, AwaitableValue) else UNKNOWN_VALUE
    if func is asyncio.to_thread and isinstance(first, KnownValue):
        rest = replace(arguments, positional=arguments.positional[1:])
        return AwaitableValue(_call(interpreter, first, rest))
    return AwaitableValue(KnownValue(None)) if func is asyncio.sleep else None


def _await_item(item: Item) -> Item:
    """Return the value that awaiting an argument of `asyncio.gather` gives; unknown for what is no known coroutine."""
    if isinstance(item, Spread):
        coroutines = item.iterable
        return Spread(coroutines.value if isinstance(coroutines, AwaitableValue) else coroutines)
    return item.value if isinstance(item, AwaitableValue) else UNKNOWN_VALUE


# ------------------------------------------------------------ code that is not interpreted


def may_write(interpreter: FunctionInterpreter, nodes: Sequence[ast.AST]) -> bool:
    """Return True if code that is not interpreted may write what an engine reads.

    What its calls may change in place counts as changed.
    """
    parts = [part for node in nodes for part in ast.walk(node)]
    awaits_others = any(isinstance(part, ast.Await) and not isinstance(part.value, ast.Call) for part in parts)
    return awaits_others or not all(_only_reads(interpreter, part) for part in parts if isinstance(part, ast.Call))


def _only_reads(interpreter: FunctionInterpreter, call: ast.Call) -> bool:
    """Return True if a call, given by its code, certainly writes nothing that an engine reads."""
    func = call.func
    if changes_container(call) or (isinstance(func, ast.Attribute) and func.attr in METHODS):
        return True
    root = func
    while isinstance(root, ast.Attribute):
        root = root.value
    symbol = interpreter.evaluate(func) if isinstance(root, ast.Name) else UNKNOWN_VALUE
    if not isinstance(symbol, (KnownValue, LocalFunction)):
        return False
    value = symbol.value if isinstance(symbol, KnownValue) else None
    is_pure = any(value is pure for pure in CALLABLES)
    return is_pure or _is_harmless(value) or _is_standard(value) or _only_asks(interpreter, symbol, call)


def _only_asks(interpreter: FunctionInterpreter, func: KnownValue | LocalFunction, call: ast.Call) -> bool:
    """Return True if a function runs no user code, whatever its arguments: it only asks models and retrievers."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    for argument in arguments:
        if isinstance(argument, ast.Name):
            interpreter.mutations.add(interpreter.evaluate(argument))
    if any(isinstance(argument, ast.Starred) for argument in arguments) or None in [one.arg for one in call.keywords]:
        return False
    keywords = {keyword.arg: UNKNOWN_VALUE for keyword in call.keywords if keyword.arg is not None}
    trial = interpreter.fork(set(interpreter.draft.names))
    trial.draft.created_models, trial.is_body = {}, True
    _call(trial, func, Arguments((UNKNOWN_VALUE,) * len(call.args), keywords))
    interpreter.mutations.update(trial.mutations)
    interpreter.forget_attributes(trial)
    return not trial.runs_user_code


def _is_harmless(func: Any) -> bool:
    """Return True for a function that writes nothing that an engine reads."""
    if type(func) is MethodType:
        func = func.__func__ if is_instance(func.__self__, logging.Logger) else None
    if type(func) not in (FunctionType, BuiltinFunctionType) or any(func is one for one in (exec, eval)):
        return False
    return _module_of(func) in _HARMLESS_MODULES


def _is_standard(func: Any) -> bool:
    """Return True for a class of data of the standard library, and for a method of such an object."""
    is_method = type(func) in _METHOD_TYPES and is_standard_object(func.__self__)
    return is_method or any(func is one for one in _DATA_CLASSES)


def _module_of(func: Any) -> str:
    """Return the name of the module that defines a function, or the class that a builtin class method belongs to."""
    owner = getattr(func, "__self__", None)
    return func.__module__ or (owner.__module__ if isinstance(owner, type) else "")


def _gives_plain_data(func: Any) -> bool:
    """Return True for a function without side effects that gives plain data if its arguments are plain data."""
    return _is_standard(func) or _module_of(func) in _DATA_MODULES or any(func is one for one in _DATA_BUILTINS)


# ------------------------------------------------------------ pure functions, methods of values


def _call_pure(
    interpreter: FunctionInterpreter, func: Symbol, arguments: Arguments, owner: Symbol = _NO_OWNER
) -> Symbol:
    """Return the call of a pure function as an expression. `owner`: the value whose method it is, if it is one."""
    symbols = arguments.symbols
    if not arguments.complete or symbols is None:
        return _call_at_run_time(arguments, owner)
    if isinstance(func, KnownValue) and any(func.value is one for one in _ITERATING):
        symbols = list(map(iterated, symbols))
    if isinstance(func, KnownValue) and func.value is len and len(symbols) == 1 and isinstance(symbols[0], ItemList):
        return length_of_list(interpreter, symbols[0])
    template = ast.Call(ast.Constant(0), [], [ast.keyword(name, ast.Constant(0)) for name in arguments.keywords])
    call = compose(interpreter, template, {"func": func, "args": list(map(_code_of_lambda, symbols))})
    if not isinstance(call, Expression):
        return _call_at_run_time(arguments, owner) if isinstance(call, Unknown) else call
    assert isinstance(call.code, ast.Call)
    expressions, keywords = [call], []
    for name, symbol in arguments.keywords.items():
        expression = interpreter.to_expression(_code_of_lambda(symbol))
        if expression is None:
            return _call_at_run_time(arguments, owner)
        keywords.append(ast.keyword(name, expression.code))
        expressions.append(expression)
    return Expression(ast.Call(call.code.func, call.code.args, keywords), *merge_inputs(expressions))


def _code_of_lambda(symbol: Symbol) -> Symbol:
    """Return a lambda that reads fields of the user's classes as an expression, and any other symbol as it is.

    As an expression, it reads each field by a function that refuses to run code of the user's.
    """
    func = symbol.value if isinstance(symbol, KnownValue) else None
    if type(func) is not FunctionType or func.__defaults__ or func.__kwdefaults__ or cached_purity(func) is not None:
        return symbol
    definition = source_of(func.__code__)
    if not isinstance(definition, ast.Lambda):
        return symbol
    names = free_names([definition])
    is_closed = names <= BUILTINS and names.isdisjoint(func.__globals__) and not func.__code__.co_freevars
    return Expression(definition) if is_closed else symbol


def _call_at_run_time(arguments: Arguments, owner: Symbol = _NO_OWNER) -> Unknown:
    """Return the result of a call without side effects of its own that is no expression."""
    return computed_at_run_time((owner, *arguments.all_items())) if arguments.complete else UNKNOWN_VALUE


def _copy_list(kind: type, arguments: Arguments) -> Symbol | None:
    """Return `list(items)` or `tuple(items)` of items that are known one by one; None for any other argument."""
    symbols = list(map(iterated, arguments.symbols or []))
    items = symbols[0].items if len(symbols) == 1 and isinstance(symbols[0], ItemList) else ()
    are_known = items and not arguments.keywords and not any(isinstance(item, Spread) for item in items)
    return ItemList(items, kind) if are_known else None


def find_assignment(interpreter: FunctionInterpreter, target: ast.expr) -> MethodRule | None:
    """Return the framework's rule for an assignment to a key or an attribute of an object that has a name."""
    find_method = interpreter.shared.find_method
    if find_method is None or not isinstance(target, (ast.Subscript, ast.Attribute)):
        return None
    if not isinstance(target.value, ast.Name):
        return None
    owner = interpreter.evaluate(target.value)
    return find_method(owner, "__setattr__" if isinstance(target, ast.Attribute) else "__setitem__")


def _call_method(interpreter: FunctionInterpreter, node: ast.Call, func: ast.Attribute, owner: Symbol) -> Symbol:
    """Call a method of a text, a list, a dictionary, or of a value that is known at run time."""
    arguments = Arguments.evaluate(interpreter, node)
    name, symbols = func.attr, [item for item in arguments.positional if not isinstance(item, Spread)]
    if name == "format":
        owner = interpreter.read_setting(owner)
    text_arguments = arguments.symbols or []
    if (text := call_text_method(interpreter, owner, name, text_arguments, arguments.keywords)) is not None:
        return text
    if name in ("append", "extend") and len(symbols) == 1 and isinstance(func.value, ast.Name):
        new_items: list[Item] = [*symbols] if name == "append" else items_of(symbols[0])
        is_tuple = isinstance(owner, ItemList) and owner.kind is tuple
        longer: Symbol = UNKNOWN_VALUE
        if isinstance(owner, (ItemList, Ref)) and not is_tuple:
            longer = ItemList((*items_of(owner), *new_items))
        interpreter.frame.names[func.value.id] = longer
        return KnownValue(None)
    if name in ("keys", "values", "items") and not symbols and (view := view_of(owner, name)) is not None:
        return view
    if name == "get" and symbols and (value := _get_key(interpreter, owner, symbols)) is not None:
        return value
    if name in METHODS:
        expression = interpreter.to_expression(owner)
        if expression is None:
            return _call_at_run_time(arguments, owner)
        method = ast.Attribute(expression.code, name, ast.Load())
        return _call_pure(interpreter, Expression(method, expression.refs, expression.objects), arguments, owner)
    if name in _DUMP_METHODS and (dump := dump_model(interpreter, owner, name, arguments)) is not None:
        return dump
    if name in ("append", "extend", "insert") and isinstance(owner, Ref) and find_assignment(interpreter, func.value):
        return KnownValue(None)  # the caller notes that it changes
    if isinstance(func.value, ast.Name):
        interpreter.frame.names[func.value.id] = UNKNOWN_VALUE  # it may have been changed
    if isinstance(owner, Fields | ItemList | DataObject) or (
        isinstance(owner, KnownValue) and owner.value is os.environ
    ):
        interpreter.mutations.add(owner)
    interpreter.add_user_code()
    return UNKNOWN_VALUE


def is_absent(interpreter: FunctionInterpreter, fields: Fields, key: str) -> bool:
    """Return True if the state of a graph has no value for a key in the calls that are planned."""
    if uncaptured_items(fields).get(key) != Ref(INPUT).at(STATE).at(key):
        return False
    name = f"{NAME_PREFIX}absent"
    test = ast.Compare(ast.Constant(key), [ast.In()], [ast.Name(name, ast.Load())])
    return interpreter.decide_condition(Expression(test, {name: Ref(INPUT).at(ABSENT)})) is True


def _get_key(interpreter: FunctionInterpreter, owner: Symbol, arguments: Sequence[Symbol]) -> Symbol | None:
    """Return `owner.get(key, default)` of a dictionary whose keys are known; None for any other."""
    is_known, key = known_value(arguments[0])
    default = arguments[1] if len(arguments) > 1 else KnownValue(None)
    if isinstance(owner, Fields):
        is_missing = is_known and owner.base is None and key not in owner.items
        if is_missing or (is_known and type(key) is str and is_absent(interpreter, owner, key)):
            return default
        return read_key(owner, arguments[0])
    if isinstance(owner, KnownValue) and type(owner.value) is dict and is_known and type(key) in (str, int):
        return KnownValue(owner.value[key]) if key in owner.value else default
    return None


# ------------------------------------------------------------ the user's own functions


def _call_cached_function(interpreter: FunctionInterpreter, func: KnownValue, arguments: Arguments) -> Symbol:
    """Call a function under `functools.lru_cache`: it returns what it has cached, else the object that it makes now.

    It is user code if it does anything else, or if its arguments are not known.
    """
    owner = (func.value.__self__,) if type(func.value) is MethodType else ()
    function = func.value.__func__ if owner else func.value
    symbols = arguments.symbols if arguments.complete else None
    known_arguments = [known_value(interpreter.read_setting(symbol)) for symbol in symbols or ()]
    known_options = {key: known_value(interpreter.read_setting(one)) for key, one in arguments.keywords.items()}
    result: Symbol | None = None
    if symbols is not None and all(is_known for is_known, _ in (*known_arguments, *known_options.values())):
        values = [*owner, *(value for _, value in known_arguments)]
        options = {key: value for key, (_, value) in known_options.items()}
        cached = cached_result(function, values, options)
        if cached:
            return KnownValue(cached[0])
        if cached is not None:
            keywords = {key: KnownValue(value) for key, value in options.items()}
            result = call_without_requests(interpreter, function.__wrapped__, [*map(KnownValue, values)], keywords)
    return result if isinstance(result, KnownValue) else call_user_function(interpreter, func, func.value, arguments)


def call_user_function(interpreter: FunctionInterpreter, func: Symbol, value: Any, arguments: Arguments) -> Symbol:
    """Call a function of the user's: as a pure expression if it is one, else by its source, else as user code.

    `func` is the symbol of the function, `value` the function if it is known. Of user code nothing is known but that it
    may change its arguments.
    """
    if type(value) is FunctionType:
        if (result := _interpret_pure_function(interpreter, value, arguments)) is not None:
            return result
        call = _call_pure(interpreter, func, arguments)
        if isinstance(call, Expression):
            try:
                compile_pure(call)
                return call
            except NotUnderstood:
                pass
    symbols = arguments.symbols if arguments.complete else None
    if symbols is not None:
        result = interpreter.call_function(value, symbols, arguments.keywords)
        if result is not None:
            return result
    interpreter.add_user_code()
    for item in arguments.all_items():
        if isinstance(item, Fields | ItemList | DataObject):  # it may do anything with them
            interpreter.mutations.add(item)
    return UNKNOWN_VALUE


def _interpret_pure_function(
    interpreter: FunctionInterpreter, func: FunctionType, arguments: Arguments
) -> Symbol | None:
    """Return what a pure function makes of values that come one by one: the state of a graph, parts of a list.

    Computed as a whole, it would wait for all of them, also for those that it does not read, and the beginning of a
    text that it makes would be known no earlier than the end. Return None if no argument is such a record or list, or
    if not all of the function is understood.
    """
    symbols = arguments.symbols if arguments.complete else None
    if symbols is None or not any(map(_is_known_one_by_one, arguments.all_items())):
        return None
    if cached_purity(func) is not None:  # else no expression can hold a call of it
        trial = interpreter.fork(set(interpreter.draft.names))
        result = trial.call_function(func, symbols, arguments.keywords)
        is_understood = result is not None and not isinstance(result, Unknown | AwaitableValue)
        if not is_understood or trial.is_incomplete or trial.runs_user_code:
            return None
    return interpreter.call_function(func, symbols, arguments.keywords)


def _is_known_one_by_one(item: Item) -> bool:
    """Return True for a record of several values, and for a list whose beginning may be known before its end."""
    if isinstance(item, Fields):
        return item.base is None and len(item.items) > 1
    return is_known_in_parts(item)
