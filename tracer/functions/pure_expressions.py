"""Pure expressions of a function's source: compiled into functions of their values, and proven to be pure."""

from __future__ import annotations

import ast
import datetime
import os
import random
import re
import string
import uuid
import zoneinfo
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType, MemberDescriptorType
from typing import Any

from langchain_core.messages import BaseMessage

from teola_plugin.graph import INPUT, Ref, UnfitValue, read_path
from teola_plugin.tracer.functions.lookup import MAX_ITEMS, MAX_NESTING, is_framework_code, is_subclass
from teola_plugin.tracer.functions.symbols import (
    RUN_TIME_VALUE,
    UNKNOWN_VALUE,
    Expression,
    Fields,
    Instance,
    Item,
    ItemList,
    KnownValue,
    Spread,
    Symbol,
    Text,
    Unknown,
    is_constant,
    merge_inputs,
    word_set,
)
from teola_plugin.tracer.purity.calls import BUILTINS, CALLABLES, FIELDS, METHODS, FieldGetter
from teola_plugin.tracer.purity.data_classes import writes_itself
from teola_plugin.tracer.purity.purity import (
    Purity,
    cached_purity,
    call_on_containers,
    call_on_plain,
    is_plain,
    read_property,
)
from teola_plugin.tracer.symbols import NotUnderstood, Prompted

NAME_PREFIX = "teola_"
"""Beginning of the names that stand for refs and objects in an expression."""
_MAX_NODES = 400
"""Nodes of an expression that is put together of several."""
_MAX_CONSTANT_LENGTH = 10_000
_MAX_SETTING_LENGTH = 10_000
"""Characters of the longest setting that plans are made for, such as a prompt."""
STATE, ABSENT = "state", "absent"
"""Keys of a template's input: the values of a graph's state by channel; the names of the channels without a value."""
CONFIG, CONTEXT, ENVIRONMENT = "config", "context", "environment"
"""Keys of a template's input: the configuration of a call, the fields of its context, the environment variables."""


@dataclass(frozen=True, slots=True)
class PureFunction:
    """A function that computes a pure expression: `func({name: value})`."""

    func: FunctionType
    purity: Purity
    inputs: Mapping[str, Ref]
    """The refs whose values it takes, by name."""
    touches_no_items: bool = False
    """True if it looks at no item of the lists among its inputs, such as `enumerate(documents[:3])`."""
    reads_fields: bool = False
    """True if it reads other fields than those of the framework's classes."""

    def __call__(self, **values: Any) -> Any:
        """Return the value of the expression for these values of its inputs."""
        if self.touches_no_items:
            return call_on_containers(self.func, values)
        return call_on_plain(self.func, values, self.purity.degree)


def compile_pure(expression: Expression) -> PureFunction:
    """Compile an expression. Raise `NotUnderstood` if it is not certain to be pure."""
    renamer, reads = _Renamer(), _FieldReads(expression.objects)
    try:
        code = reads.visit(copy_code(expression.code))
        text = ast.unparse(ast.fix_missing_locations(renamer.visit(code)))
    except Exception:  # too deep, or quotes inside quotes
        raise NotUnderstood("an expression that cannot be written down") from None
    names = renamer.new_names
    inputs = {names[name]: ref for name, ref in expression.refs.items() if name in names}
    all_objects = {**expression.objects, **reads.getters}
    objects = {names[name]: value for name, value in all_objects.items() if name in names}
    func, definition = _compile(text, tuple(inputs), tuple(objects))
    for value in objects.values():
        func = func(value)
    purity = cached_purity(func, definition)
    if purity is None:
        raise NotUnderstood("an expression that is not certain to be pure")
    return PureFunction(func, purity, inputs, _touches_no_items(expression.code), bool(reads.getters))


_STRUCTURAL_BUILTINS = word_set("bool enumerate len list reversed tuple zip")
"""Builtins that look at no item of their arguments, which are lists."""


def _touches_no_items(node: ast.expr) -> bool:
    """Return True for code that puts together and measures the lists that its names stand for, whatever they hold."""
    match node:
        case ast.Name() | ast.Constant():
            return True
        case ast.Call(ast.Name(name), args, keywords) if name in _STRUCTURAL_BUILTINS:
            return all(map(_touches_no_items, (*args, *(keyword.value for keyword in keywords))))
        case ast.Subscript(value, ast.Slice(lower, upper, step)):
            bounds = [bound for bound in (lower, upper, step) if bound is not None]
            return _touches_no_items(value) and all(map(_is_number, bounds))
        case ast.List(items) | ast.Tuple(items):
            return all(isinstance(item, ast.Starred) and _touches_no_items(item.value) for item in items)
        case ast.UnaryOp(ast.Not(), operand):
            return _touches_no_items(operand)
        case ast.Compare(left, _, comparators):
            return all(map(_is_number, (left, *comparators)))
        case ast.BoolOp(_, operands):
            return all(map(_touches_no_items, operands))
        case ast.IfExp(test, body, orelse):
            return all(map(_touches_no_items, (test, body, orelse)))
    return False


def _is_number(node: ast.expr) -> bool:
    """Return True for numbers in the code, and for the lengths of lists."""
    match node:
        case ast.Constant(value):
            return isinstance(value, (int, float))
        case ast.UnaryOp(ast.USub(), operand):
            return _is_number(operand)
        case ast.Call(ast.Name("len"), [argument], []):
            return _touches_no_items(argument)
    return False


def evaluate_constant(expression: Expression) -> Any:
    """Return the value of an expression without refs.

    Raises `NotUnderstood` for one that has some or is not certain to be pure, and whatever the expression raises.
    """
    if expression.refs:
        raise NotUnderstood("an expression of values that are not there yet")
    return compile_pure(expression)()


def is_small(code: ast.expr) -> bool:
    """Return True if the expression is small enough to become part of another."""
    return sum(1 for _ in ast.walk(code)) <= _MAX_NODES


def constant_node(value: object, nesting: int = MAX_NESTING) -> ast.expr | None:
    """Return source code for a constant, or for a list or dictionary of constants; None for other and for large values.

    Guards compare such a list or dictionary as a whole.
    """
    if type(value) in (list, tuple, dict) and (nesting == 0 or len(value) > MAX_ITEMS):  # type: ignore[arg-type]
        return None
    if type(value) is dict:
        keys = [constant_node(key, nesting - 1) for key in value]
        values = [constant_node(item, nesting - 1) for item in value.values()]
        known_values = [node for node in values if node is not None]
        return ast.Dict(keys, known_values) if None not in keys and len(known_values) == len(values) else None
    if type(value) in (list, tuple):
        items = [constant_node(item, nesting - 1) for item in value]  # type: ignore[attr-defined]
        known_items = [item for item in items if item is not None]
        kind = ast.List if type(value) is list else ast.Tuple
        return kind(known_items, ast.Load()) if len(known_items) == len(items) else None
    if is_constant(value) and (not isinstance(value, (str, bytes)) or len(value) <= _MAX_CONSTANT_LENGTH):
        return ast.Constant(value)  # type: ignore[arg-type]
    return None


class _Renamer(ast.NodeTransformer):
    """Replaces the names of refs and objects by others that depend on the expression alone, for the cache."""

    def __init__(self) -> None:
        self.new_names: dict[str, str] = {}

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Replace a name that the tracer has made by a number in the order of first use. Other names stay."""
        if not node.id.startswith(NAME_PREFIX):
            return node
        new_name = self.new_names.setdefault(node.id, f"{NAME_PREFIX}{len(self.new_names)}")
        return ast.Name(new_name, node.ctx)


class _FieldReads(ast.NodeTransformer):
    """Replaces `value.name` by a call of a `FieldGetter`, but for methods and the framework's fields."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        """`objects`: the existing objects in the expression, by name."""
        self._objects = objects
        self.getters: dict[str, FieldGetter] = {}

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Keep the name of a method that is called, and visit all other parts."""
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in METHODS:
            return self.generic_visit(node)  # type: ignore[return-value]
        func = ast.Attribute(self.visit(node.func.value), node.func.attr, ast.Load())
        keywords = [ast.keyword(one.arg, self.visit(one.value)) for one in node.keywords]
        return ast.Call(func, list(map(self.visit, node.args)), keywords)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Replace the reading of a field, unless the object is made by the expression itself."""
        owner = self.visit(node.value)
        is_made = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and self._is_class(owner.func.id)
        is_text_type = isinstance(owner, ast.Name) and owner.id in ("str", "dict")
        if is_made or is_text_type or node.attr in FIELDS or node.attr.startswith("_"):
            return ast.Attribute(owner, node.attr, ast.Load())
        name = f"{NAME_PREFIX}field_{node.attr}"
        self.getters[name] = FieldGetter(node.attr, read_field)
        return ast.Call(ast.Name(name, ast.Load()), [owner], [])

    def _is_class(self, name: str) -> bool:
        return isinstance(self._objects.get(name), type)


_STANDARD_TYPES: tuple[type, ...] = (
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone, zoneinfo.ZoneInfo),
    *(random.Random, random.SystemRandom, re.Pattern, string.Template, uuid.UUID),
)
"""Classes of the standard library whose methods have no side effects, but for the state of random numbers, and give
plain data, if their arguments are plain data."""


def is_standard_object(value: object) -> bool:
    """Return True for an object of the standard library whose methods only compute and read."""
    return any(type(value) is kind for kind in _STANDARD_TYPES)


def is_plain_data(symbol: Item) -> bool:
    """Return True for data whose methods run no code of the user's, as far as they can be known before they are there.

    Values that come at run time count as such data: those that are not are left to the original.
    """
    if isinstance(symbol, Unknown):
        return symbol.is_plain
    if isinstance(symbol, Spread):
        return is_plain_data(symbol.iterable)
    if isinstance(symbol, KnownValue):
        return symbol.value is os.environ or is_standard_object(symbol.value) or is_plain(symbol.value)
    if isinstance(symbol, Text):
        return all(isinstance(piece, str) or is_plain_data(piece) for piece in symbol.pieces)
    if isinstance(symbol, ItemList):
        return all(map(is_plain_data, symbol.items))
    if isinstance(symbol, Fields):
        return not symbol.fields_only and all(map(is_plain_data, symbol.items.values()))
    if isinstance(symbol, Instance):
        return is_framework_code(symbol.kind) and all(map(is_plain_data, symbol.fields.values()))
    if isinstance(symbol, Expression):
        return _calls_only_builtins(symbol) or _is_pure(symbol)
    return isinstance(symbol, (Ref, Prompted))


def _calls_only_builtins(expression: Expression) -> bool:
    """Return True for operations and builtins on data, which may take long, but run no code of the user's."""
    names, own_names = set[str](), {*expression.refs, *expression.objects}
    for node in ast.walk(expression.code):
        if isinstance(node, ast.arg):
            own_names.add(node.arg)
        elif isinstance(node, ast.Name):
            (names if isinstance(node.ctx, ast.Load) else own_names).add(node.id)
    are_known = all(any(one is pure for pure in CALLABLES) or is_plain(one) for one in expression.objects.values())
    return are_known and names - own_names <= BUILTINS


def _is_pure(expression: Expression) -> bool:
    try:
        return bool(compile_pure(expression))
    except NotUnderstood:
        return False


def computed_at_run_time(operands: Iterable[Item]) -> Unknown:
    """Return what an operation without side effects of its own makes of operands that are not all known."""
    return RUN_TIME_VALUE if all(map(is_plain_data, operands)) else UNKNOWN_VALUE


def copy_code(code: ast.expr) -> ast.expr:
    """Return a copy, which reads what the original may assign: transformers change the tree that they visit."""
    return ast.parse(ast.unparse(ast.fix_missing_locations(code)), mode="eval").body


def substitute(expression: Expression, values: Mapping[str, Expression]) -> Expression | None:
    """Return the expression with values in place of all its refs, by their names; None if it becomes too large."""
    code = _Substitution(values).visit(copy_code(expression.code))
    refs, objects = merge_inputs(values.values())
    return Expression(code, refs, {**objects, **expression.objects}) if is_small(code) else None


class _Substitution(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, Expression]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._values[node.id].code if node.id in self._values else node


@lru_cache(maxsize=1024)
def _compile(text: str, inputs: tuple[str, ...], objects: tuple[str, ...]) -> tuple[Any, ast.Lambda]:
    """Compile `lambda object: lambda object: ... lambda values: text`. Return it, and the innermost function in it."""
    body: Any = _ReadInputs(frozenset(inputs)).visit(ast.parse(text, mode="eval").body)
    definition = code = _lambda(_ReadInputs.parameter, body)
    for name in reversed(objects):
        code = _lambda(name, code)
    return eval(compile(ast.fix_missing_locations(ast.Expression(code)), "<pure>", "eval"), {}), definition


def _lambda(parameter: str, body: ast.expr) -> ast.Lambda:
    arguments = ast.arguments(posonlyargs=[], args=[ast.arg(parameter)], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Lambda(arguments, body)


class _ReadInputs(ast.NodeTransformer):
    """Replaces the names of inputs by items of the dictionary that has their values."""

    parameter = "teola_values"

    def __init__(self, inputs: frozenset[str]) -> None:
        self._inputs = inputs

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self._inputs:
            return node
        return ast.Subscript(ast.Name(self.parameter, ast.Load()), ast.Constant(node.id), ast.Load())


def read_field(value: Any, name: str) -> Any:
    """Return `value.name` where that is a field or a pure property of a data class, or a framework's property.

    Data classes are pydantic's and those of the standard library. Raises `UnfitValue` for anything else.
    """
    kind = type(value)
    if name == "text" and is_subclass(kind, BaseMessage) and is_framework_code(kind):
        return str(value.text)
    getattribute: Any = kind.__getattribute__
    if getattribute is object.__getattribute__:
        attribute = next((vars(cls)[name] for cls in kind.__mro__ if name in vars(cls)), None)
        if type(attribute) is MemberDescriptorType:  # of `slots=True`
            return attribute.__get__(value, kind)
        if type(attribute) is property and is_framework_code(attribute.fget):
            return attribute.__get__(value, kind)
        if type(attribute) is property and type(attribute.fget) is FunctionType:
            return read_property(value, attribute.fget)
        if not hasattr(type(attribute), "__set__") and name in getattr(value, "__dict__", {}):
            return value.__dict__[name]
    raise UnfitValue(f"{name} is no field of {kind.__name__}")


@dataclass(frozen=True, slots=True)
class ModelDump:
    """Calls `model_dump` or `model_dump_json` of an object, with constant options."""

    options: tuple[tuple[str, Any], ...]

    def __call__(self, value: Any, name: str) -> Any:
        """Return what the method gives. Raise `UnfitValue` for an object whose class may run any other code."""
        if not writes_itself(type(value)) or not is_plain(value):  # type: ignore[arg-type]
            raise UnfitValue(f"{name} of a {type(value).__name__} may do anything")
        return getattr(value, name)(**dict(self.options))


# ------------------------------------------------------------ conditions


def truth_of(symbol: Symbol) -> bool | None:
    """Return whether a condition holds, by what is known of its value; None if that does not tell."""
    if isinstance(symbol, KnownValue):
        return _truth_of_object(symbol.value)
    if isinstance(symbol, Expression) and not symbol.refs:
        try:
            return bool(evaluate_constant(symbol))
        except Exception:  # the original will tell
            return None
    if isinstance(symbol, ItemList) and not any(isinstance(item, Spread) for item in symbol.items):
        return bool(symbol.items)
    if isinstance(symbol, Fields) and not symbol.attributes and (symbol.items or symbol.base is None):
        return bool(symbol.items)
    if isinstance(symbol, Text) and any(isinstance(piece, str) and piece for piece in symbol.pieces):
        return True
    return None


def _truth_of_object(value: object) -> bool | None:
    """Return the truth of an object; None if its class decides that itself, since its code must not run."""
    if value is None or type(value) in (bool, int, float, str, list, tuple, dict):
        return bool(value)
    has_own_truth = any("__bool__" in vars(cls) or "__len__" in vars(cls) for cls in type(value).__mro__)
    return None if has_own_truth else True


Answer = bool | tuple[str, Any] | None
"""The answer to a condition, or the value of a setting behind its text, which tells `1` from `True`; None if both paths
stay open, or if the value is not known."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A pure condition on the input of a template alone, such as the state of a graph."""

    test: PureFunction
    is_setting: bool = False
    """True for a setting, of which the value is wanted: a constant that depends on the configuration of the call and on
    the environment alone."""

    def answer(self, value: Any) -> Answer:
        """Return the answer for this input; None if there is none, as when evaluating the condition raises."""
        try:
            result = self.test(**{name: read_path(value, ref.path) for name, ref in self.test.inputs.items()})
            if not self.is_setting:
                return bool(result)
        except Exception:
            return None
        text = repr(result) if is_constant(result) else ""
        return (text, result) if 0 < len(text) <= _MAX_SETTING_LENGTH else None


Decide = Callable[[Condition], Answer]
"""Answers a condition by the input that is there."""


def decide_on_input(test: Symbol, decide: Decide | None) -> bool | None:
    """Return what `decide` says to a condition; None if the condition depends on more than the input."""
    expression = _on_input(test)
    if decide is None or expression is None:
        return None
    truth = Expression(
        ast.Call(ast.Name("bool", ast.Load()), [expression.code], []), expression.refs, expression.objects
    )
    try:
        answer = decide(Condition(compile_pure(truth)))
    except NotUnderstood:
        return None
    return answer if isinstance(answer, bool) else None


def read_setting(symbol: Symbol, decide: Decide | None) -> Symbol:
    """Return the value of a setting in the calls that are planned; any other symbol as it is."""
    expression = _on_input(symbol)
    if decide is None or expression is None or not is_setting(symbol):
        return symbol
    try:
        answer = decide(Condition(compile_pure(expression), is_setting=True))
    except NotUnderstood:
        return symbol
    return KnownValue(answer[1]) if isinstance(answer, tuple) else symbol


def is_setting(symbol: Symbol) -> bool:
    """Return True for a value that depends on settings of the call alone."""
    expression = _on_input(symbol)
    return expression is not None and all(
        bool(ref.path) and ref.path[0] in (CONFIG, CONTEXT, ENVIRONMENT) for ref in expression.refs.values()
    )


def _on_input(symbol: Symbol) -> Expression | None:
    """Return the expression of a symbol that depends on the input of the template alone; None for any other."""
    if isinstance(symbol, Ref):
        name = f"{NAME_PREFIX}v"
        symbol = Expression(ast.Name(name, ast.Load()), {name: symbol})
    if not isinstance(symbol, Expression) or not symbol.refs:
        return None
    return symbol if all(ref.producer == INPUT for ref in symbol.refs.values()) else None
