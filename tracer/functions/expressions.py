"""The values of expressions, as symbols. The rules for calls are in `calls`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

from teola_plugin.graph import Ref
from teola_plugin.tracer.functions.calls import evaluate_call, is_absent
from teola_plugin.tracer.functions.comprehensions import evaluate_comprehension, may_use_engine, skip_code
from teola_plugin.tracer.functions.framework_calls import pipe
from teola_plugin.tracer.functions.interpreter import FunctionInterpreter
from teola_plugin.tracer.functions.mutations import is_mutable_container
from teola_plugin.tracer.functions.operations import (
    compose,
    evaluate_known,
    items_of,
    make_list,
    read_attribute,
    read_key,
)
from teola_plugin.tracer.functions.pure_expressions import computed_at_run_time, is_small, truth_of
from teola_plugin.tracer.functions.symbols import (
    UNKNOWN_VALUE,
    AwaitableValue,
    DataObject,
    Expression,
    Fields,
    Instance,
    Item,
    ItemList,
    KnownValue,
    LocalFunction,
    Spread,
    Symbol,
    Text,
    Unknown,
    known_value,
    merge_inputs,
)
from teola_plugin.tracer.functions.texts import format_f_string, format_percent, is_text, make_text
from teola_plugin.tracer.source import Definition, location_of


def evaluate(interpreter: FunctionInterpreter, node: ast.expr) -> Symbol:
    """Return the value of an expression; unknown if no rule understands it."""
    rule = _RULES.get(type(node))
    return UNKNOWN_VALUE if rule is None else rule(interpreter, node)


# ------------------------------------------------------------ containers


def _evaluate_list(interpreter: FunctionInterpreter, node: ast.List | ast.Tuple) -> Symbol:
    """Evaluate a list or tuple display. The items of a starred element are known one by one only if their list is."""
    items: list[Item] = []
    for element in node.elts:
        if isinstance(element, ast.Starred):
            items += items_of(interpreter.evaluate(element.value))
        else:
            items.append(interpreter.evaluate(element))
    return make_list(items, tuple if isinstance(node, ast.Tuple) else list)


def _evaluate_dictionary(interpreter: FunctionInterpreter, node: ast.Dict) -> Symbol:
    """Evaluate a dictionary display; unknown unless its keys are known texts, but for one leading `**value`."""
    items: dict[str, Symbol] = {}
    base: Ref | None = None
    understood = True
    for key_node, value_node in zip(node.keys, node.values, strict=True):
        value = interpreter.evaluate(value_node)
        if key_node is None:  # `**value`
            fields = _to_fields(value)
            if fields is None or (fields.base is not None and (base is not None or items)):
                understood = False
                continue
            base = fields.base or base
            items |= fields.items
            continue
        key = interpreter.evaluate(key_node)
        if isinstance(key, KnownValue) and type(key.value) is str:
            items[key.value] = value
        else:
            understood = False
    return Fields(items, base) if understood else UNKNOWN_VALUE


def _to_fields(symbol: Symbol) -> Fields | None:
    """Return what `**value` unpacks: known items, or a base that is known at run time. None for any other value."""
    if isinstance(symbol, Ref):
        return Fields({}, symbol)
    if isinstance(symbol, KnownValue) and type(symbol.value) is dict and all(type(key) is str for key in symbol.value):
        return Fields({key: KnownValue(value) for key, value in symbol.value.items()})
    return symbol if isinstance(symbol, Fields) and not symbol.fields_only else None


def _evaluate_subscript(interpreter: FunctionInterpreter, node: ast.Subscript) -> Symbol:
    """Evaluate `owner[key]` and `owner[start:stop]`: what is known of the item, else an expression."""
    owner = interpreter.evaluate(node.value)
    if isinstance(owner, Unknown):
        bounds = [node.slice.lower, node.slice.upper, node.slice.step] if isinstance(node.slice, ast.Slice) else None
        parts = [node.slice] if bounds is None else [bound for bound in bounds if bound is not None]
        return computed_at_run_time((owner, *map(interpreter.evaluate, parts)))
    if isinstance(node.slice, ast.Slice):
        return _evaluate_slice(interpreter, node, owner, node.slice)
    key = interpreter.evaluate(node.slice)
    value = read_key(owner, key)
    return compose(interpreter, node, {"value": owner, "slice": key}) if value is None else value


def _evaluate_slice(
    interpreter: FunctionInterpreter, node: ast.Subscript, owner: Symbol, slice_node: ast.Slice
) -> Symbol:
    """Evaluate `owner[start:stop:step]`: item by item if they are known, else as an expression."""
    bound_nodes = {name: getattr(slice_node, name) for name in ("lower", "upper", "step")}
    bounds = {name: interpreter.evaluate(bound) for name, bound in bound_nodes.items() if bound is not None}
    items = items_of(owner)
    are_items_known = not any(isinstance(item, Spread) for item in items)
    if are_items_known and all(isinstance(bound, KnownValue) for bound in bounds.values()):
        key = slice(*(known_value(bounds[name])[1] if name in bounds else None for name in bound_nodes))
        kind = owner.kind if isinstance(owner, ItemList) else type(owner.value)  # type: ignore[union-attr]
        try:
            return ItemList(tuple(items[key]), kind)
        except (TypeError, ValueError):  # the original raises it as well
            return UNKNOWN_VALUE
    expression, slice_symbol = interpreter.to_expression(owner), compose(interpreter, slice_node, bounds)
    if expression is None or not isinstance(slice_symbol, Expression):
        return computed_at_run_time((owner, *bounds.values()))
    code = ast.Subscript(expression.code, slice_symbol.code, ast.Load())
    part = Expression(code, *merge_inputs((expression, slice_symbol)))
    return evaluate_known(part) if is_small(code) else UNKNOWN_VALUE


# ------------------------------------------------------------ operators and conditions


def _evaluate_operator(interpreter: FunctionInterpreter, node: ast.BinOp) -> Symbol:
    """Evaluate a binary operator. Joined texts and lists, `%` formatting and `|` of Runnables have rules of their own.

    Any other operation becomes an expression.
    """
    left, right = interpreter.evaluate(node.left), interpreter.evaluate(node.right)
    value: Symbol | None = None
    if isinstance(node.op, ast.Add):
        if is_text(left) or is_text(right):
            value = make_text((left, right))
        elif _is_list(left) or _is_list(right):
            value = make_list([*items_of(left), *items_of(right)])
    elif isinstance(node.op, ast.Mod):
        value = format_percent(left, right)
    elif isinstance(node.op, ast.BitOr):
        value = pipe(left, right)
    return compose(interpreter, node, {"left": left, "right": right}) if value is None else value


def _evaluate_unary_operator(interpreter: FunctionInterpreter, node: ast.UnaryOp) -> Symbol:
    operand = interpreter.evaluate(node.operand)
    truth = truth_of(operand) if isinstance(node.op, ast.Not) else None
    return compose(interpreter, node, {"operand": operand}) if truth is None else KnownValue(not truth)


def _is_list(symbol: Symbol) -> bool:
    return isinstance(symbol, ItemList) or (isinstance(symbol, KnownValue) and type(symbol.value) is list)


def _evaluate_comparison(interpreter: FunctionInterpreter, node: ast.Compare) -> Symbol:
    """Evaluate a comparison, to True or False where that is known already, else as an expression.

    `is` between two values that are computed later is unknown.
    """
    left = interpreter.evaluate(node.left)
    comparators = [interpreter.evaluate(comparator) for comparator in node.comparators]
    if len(comparators) == 1 and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        is_in = _is_key(interpreter, left, comparators[0])
        if is_in is not None:
            return KnownValue(is_in == isinstance(node.ops[0], ast.In))
    if len(comparators) == 1 and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
        right = comparators[0]
        if isinstance(left, KnownValue) and isinstance(right, KnownValue):
            return KnownValue((left.value is right.value) == isinstance(node.ops[0], ast.Is))
        if any(isinstance(one, _NEVER_NONE) for one in (left, right)) and any(map(_is_none, (left, right))):
            return KnownValue(isinstance(node.ops[0], ast.IsNot))
        if not any(isinstance(one, KnownValue) and not is_mutable_container(one) for one in (left, right)):
            return UNKNOWN_VALUE  # nobody can tell whether two values that are computed, or a copy, are one object
    return compose(interpreter, node, {"left": left, "comparators": comparators})


_NEVER_NONE = (Fields, ItemList, Text, DataObject, Instance, LocalFunction, AwaitableValue)
"""Symbols of values that are certainly not None."""


def _is_none(symbol: Symbol) -> bool:
    return isinstance(symbol, KnownValue) and symbol.value is None


def _is_key(interpreter: FunctionInterpreter, key: Symbol, dictionary: Symbol) -> bool | None:
    """Return whether a dictionary has a key; None if that is not known."""
    is_known, name = known_value(key)
    if not is_known or type(name) is not str or not isinstance(dictionary, Fields):
        return None
    if name in dictionary.items:  # of the config of a node, items that may be missing are unknown
        return None if isinstance(dictionary.items[name], Unknown) else not is_absent(interpreter, dictionary, name)
    return False if dictionary.base is None and not dictionary.attributes else None


def _evaluate_and_or(interpreter: FunctionInterpreter, node: ast.BoolOp) -> Symbol:
    """Evaluate `and` and `or`, of which only the first operand is certain to be evaluated."""
    first, *rest = node.values
    value = interpreter.evaluate(first)
    truth = interpreter.decide_condition(value)
    if truth is not None:
        if truth == isinstance(node.op, ast.Or) or not rest:
            return value
        return interpreter.evaluate(rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
    if may_use_engine(interpreter, *rest):
        return skip_code(interpreter, *rest)
    return compose(interpreter, node, {"values": [value, *map(interpreter.evaluate, rest)]})


def _evaluate_conditional(interpreter: FunctionInterpreter, node: ast.IfExp) -> Symbol:
    """Evaluate `body if test else orelse`."""
    test = interpreter.evaluate(node.test)
    truth = interpreter.decide_condition(test)
    if truth is not None:
        return interpreter.evaluate(node.body if truth else node.orelse)
    if may_use_engine(interpreter, node.body, node.orelse):
        return skip_code(interpreter, node.body, node.orelse)
    body, orelse = interpreter.evaluate(node.body), interpreter.evaluate(node.orelse)
    return compose(interpreter, node, {"test": test, "body": body, "orelse": orelse})


# ------------------------------------------------------------ names, attributes, functions


def _evaluate_attribute(interpreter: FunctionInterpreter, node: ast.Attribute) -> Symbol:
    return read_attribute(interpreter, interpreter.evaluate(node.value), node.attr)


def _evaluate_await(interpreter: FunctionInterpreter, node: ast.Await) -> Symbol:
    awaitable = interpreter.evaluate(node.value)
    return awaitable.value if isinstance(awaitable, AwaitableValue) else UNKNOWN_VALUE


def _evaluate_assignment(interpreter: FunctionInterpreter, node: ast.NamedExpr) -> Symbol:
    """Evaluate `(name := value)`."""
    value = interpreter.evaluate(node.value)
    interpreter.frame.names[node.target.id] = value
    return value


def define_function(interpreter: FunctionInterpreter, node: Definition) -> Symbol:
    """Return the function that is defined here: a real one if all that it reads exists already."""
    code = _code_of(interpreter.frame.code, node)
    decorated = not isinstance(node, ast.Lambda) and node.decorator_list
    if code is None or decorated:
        return UNKNOWN_VALUE
    last_parameters = code.co_varnames[: code.co_argcount][::-1]
    default_values = [interpreter.evaluate(default) for default in node.args.defaults[::-1]]
    defaults = dict(zip(last_parameters, default_values, strict=False))
    defaults |= {
        parameter.arg: interpreter.evaluate(default)
        for parameter, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if default is not None
    }
    free = {name: interpreter.frame.read(name) for name in code.co_freevars}
    if all(isinstance(symbol, KnownValue) for symbol in (*free.values(), *defaults.values())):
        return KnownValue(_make_function(interpreter, code, free, defaults))
    return LocalFunction(node, code, defaults, interpreter.frame.read)


def _code_of(outer: CodeType | None, node: Definition) -> CodeType | None:
    """Return the code of a function, which is among the constants of the code around it."""
    if outer is None:
        return None
    codes = [constant for constant in outer.co_consts if isinstance(constant, CodeType)]
    matching = [code for code in codes if (code.co_firstlineno, code.co_name) == location_of(node)]
    return matching[0] if len(matching) == 1 else None


def _make_function(
    interpreter: FunctionInterpreter, code: CodeType, free: dict[str, Symbol], defaults: dict[str, Symbol]
) -> FunctionType:
    """Make the function that a definition would make, without running the definition.

    `free`: values of its closure. `defaults`: values of parameters. All of them are known objects.
    """
    values = {name: symbol.value for name, symbol in (free | defaults).items() if isinstance(symbol, KnownValue)}
    positional = [name for name in code.co_varnames[: code.co_argcount] if name in defaults]
    closure = tuple(CellType(values[name]) for name in code.co_freevars)
    module_globals = interpreter.frame.free_names.globals
    positional_defaults = tuple(values[name] for name in positional)
    func = FunctionType(code, module_globals, code.co_name, positional_defaults, closure)  # type: ignore[arg-type]
    func.__kwdefaults__ = {name: values[name] for name in defaults if name not in positional} or None  # type: ignore[assignment]
    return func


_RULES: Mapping[type[ast.expr], Callable[[FunctionInterpreter, Any], Symbol]] = {
    ast.Constant: lambda interpreter, node: KnownValue(node.value),
    ast.Name: lambda interpreter, node: interpreter.frame.read(node.id),
    ast.JoinedStr: format_f_string,
    ast.List: _evaluate_list,
    ast.Tuple: _evaluate_list,
    ast.Dict: _evaluate_dictionary,
    ast.Subscript: _evaluate_subscript,
    ast.Attribute: _evaluate_attribute,
    ast.BinOp: _evaluate_operator,
    ast.UnaryOp: _evaluate_unary_operator,
    ast.Compare: _evaluate_comparison,
    ast.BoolOp: _evaluate_and_or,
    ast.IfExp: _evaluate_conditional,
    ast.Await: _evaluate_await,
    ast.NamedExpr: _evaluate_assignment,
    ast.Lambda: define_function,
    ast.Call: evaluate_call,
    ast.ListComp: evaluate_comprehension,
    ast.GeneratorExp: evaluate_comprehension,
    ast.SetComp: evaluate_comprehension,
    ast.DictComp: evaluate_comprehension,
}
"""What an interpreter does with each kind of expression."""
