"""Operations on symbols: items, attributes, texts put together of constants and values, objects of data classes.

What is known of a result is read off its operands. The rest becomes an expression, to be computed when it is needed.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from teola_plugin.graph import Ref
from teola_plugin.tracer.functions.interpreter import FunctionInterpreter
from teola_plugin.tracer.functions.lookup import getter_of, is_framework_code, read_object_attribute
from teola_plugin.tracer.functions.pure_expressions import (
    ModelDump,
    compile_pure,
    computed_at_run_time,
    evaluate_constant,
    is_small,
)
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
    Spread,
    Symbol,
    Unknown,
    is_constant,
    known_value,
    merge_inputs,
    word_set,
)
from teola_plugin.tracer.purity.calls import FIELDS, FieldGetter
from teola_plugin.tracer.purity.data_classes import DataClass, data_class_of
from teola_plugin.tracer.symbols import NotUnderstood

_ITERATORS = word_set("enumerate filter iter map reversed zip")
"""Builtins whose results can be gone through once."""


def compose(interpreter: FunctionInterpreter, node: ast.expr, operands: Mapping[str, Symbol | list[Symbol]]) -> Symbol:
    """Return the expression `node` with its operands in place of the fields of these names.

    The result is unknown if an operand is, or if the expression becomes too large; a constant if it has no refs.
    """
    all_operands = [
        one for operand in operands.values() for one in (operand if isinstance(operand, list) else [operand])
    ]
    expressions: list[Expression] = []
    fields: dict[str, Any] = {name: getattr(node, name, None) for name in node._fields}
    for name, operand in operands.items():
        symbols = operand if isinstance(operand, list) else [operand]
        parts = [interpreter.to_expression(symbol) for symbol in symbols]
        known_parts = [part for part in parts if part is not None]
        if len(known_parts) < len(parts):
            return computed_at_run_time(all_operands)
        expressions += known_parts
        codes = [part.code for part in known_parts]
        fields[name] = codes if isinstance(operand, list) else codes[0]
    code = type(node)(**fields)
    if not is_small(code):
        return computed_at_run_time(all_operands)
    expression = Expression(code, *merge_inputs(expressions))
    if expression.refs:
        return expression
    try:
        value = evaluate_constant(expression)
    except Exception:  # not pure, or the original will tell
        return expression
    return KnownValue(value) if is_constant(value) else expression


# ------------------------------------------------------------ items, keys and attributes


def read_key(owner: Symbol, key: Symbol) -> Symbol | None:
    """Return `owner[key]`; None if an expression is all that can be said of it."""
    is_known, name = known_value(key)
    if not is_known or type(name) not in (str, int):
        return None
    if isinstance(owner, Ref):
        return owner.at(name)
    if isinstance(owner, Fields):
        if name in owner.items:
            return owner.items[name]
        return owner.base.at(name) if owner.base is not None else UNKNOWN_VALUE
    if isinstance(owner, ItemList) and type(name) is int:
        return _read_item(owner, name)
    if isinstance(owner, KnownValue) and type(owner.value) in (dict, list, tuple):
        try:
            return KnownValue(owner.value[name])
        except (LookupError, TypeError):
            return UNKNOWN_VALUE
    return None


def _read_item(item_list: ItemList, index: int) -> Symbol | None:
    """Return the item at an index; None if a list of unknown length stands before it."""
    items = item_list.items if index >= 0 else item_list.items[::-1]
    index = index if index >= 0 else -1 - index
    items_before = items[: index + 1]
    if len(items_before) <= index:
        return None if any(isinstance(item, Spread) for item in items) else UNKNOWN_VALUE
    if any(isinstance(item, Spread) for item in items_before):
        return None
    item = items_before[index]
    assert not isinstance(item, Spread)
    return item


def read_attribute(interpreter: FunctionInterpreter, owner: Symbol, name: str) -> Symbol:
    """Return `owner.name`, unknown unless that is a field."""
    if isinstance(owner, DataObject):
        return read_data_attribute(interpreter, owner, name)
    if isinstance(owner, KnownValue):
        if (attribute := read_class_attribute(owner.value, name)) is not None:
            return attribute
        return _read_attribute_of_object(interpreter, owner, name)
    if isinstance(owner, Instance):
        return owner.fields.get(name, UNKNOWN_VALUE)
    if isinstance(owner, Fields):
        if not owner.attributes:
            return UNKNOWN_VALUE
        return owner.items.get(name) or (owner.base.at(name) if owner.base is not None else UNKNOWN_VALUE)
    if isinstance(owner, (Ref, Expression)):
        field = compose(interpreter, ast.Attribute(ast.Constant(0), name, ast.Load()), {"value": owner})
        if name in FIELDS or not isinstance(owner, Ref):
            return field
        try:
            return interpreter.to_ref(field)  # a CALL can read a field of the user's own class, an expression cannot
        except NotUnderstood:
            return UNKNOWN_VALUE
    return computed_at_run_time((owner,)) if isinstance(owner, Unknown) else UNKNOWN_VALUE


def _read_attribute_of_object(interpreter: FunctionInterpreter, owner: KnownValue, name: str) -> Symbol:
    """Return `owner.name` of an existing object: what was assigned to it, what is there, or what a property returns."""
    assigned = interpreter.attribute_values.get((id(owner.value), name))
    value = read_object_attribute(owner.value, name) if assigned is None else assigned
    if assigned is not None or not isinstance(value, Unknown):
        return value
    getter = getter_of(owner.value, name)
    computed = None if getter is None else call_without_requests(interpreter, getter, (owner,), {})
    return value if computed is None else computed


def call_without_requests(
    interpreter: FunctionInterpreter, func: Any, arguments: Sequence[Symbol], keywords: Mapping[str, Symbol]
) -> Symbol | None:
    """Return what a function returns that does no more than make and assign objects; None for any other function.

    For code that runs once and whose result is kept, or that readers take for an attribute.
    """
    trial = interpreter.fork(set(interpreter.draft.names))
    value = trial.call_function(func, arguments, keywords)
    does_more = trial.is_incomplete or trial.runs_user_code or trial.draft.components
    if value is None or isinstance(value, (Unknown, AwaitableValue)) or does_more:
        return None
    interpreter.attribute_values.update(trial.attribute_values)
    interpreter.mutations.update(trial.mutations)
    return value


def make_list(items: Sequence[Item], kind: type = list) -> Symbol:
    """Return a list, or a tuple, of these items.

    `[*items]` with nothing else in it is the value that is spread, so that a list of unknown length stays one value.
    """
    only_item = items[0] if len(items) == 1 else None
    if isinstance(only_item, Spread) and kind is list:
        return only_item.iterable
    return ItemList(tuple(items), kind)


def items_of(symbol: Symbol) -> list[Item]:
    """Return the items of a list: one by one as far as they are known."""
    if isinstance(symbol, ItemList):
        return list(symbol.items)
    if isinstance(symbol, KnownValue) and type(symbol.value) in (list, tuple):
        return [KnownValue(item) for item in symbol.value]
    return [Spread(symbol)]


def as_list(items: Symbol) -> Symbol:
    """Return the items as a list: an expression may give an iterator."""
    if not isinstance(items, Expression) or isinstance(items.code, (ast.Name, ast.ListComp)):
        return items
    code = ast.Call(ast.Name("list", ast.Load()), [items.code], [])
    return Expression(code, items.refs, items.objects)


def assign_names(interpreter: FunctionInterpreter, target: ast.expr, value: Symbol) -> None:
    """Assign a value to a name, or its items to several names."""
    if isinstance(target, ast.Name):
        interpreter.frame.names[target.id] = value
    elif isinstance(target, (ast.Tuple, ast.List)):
        value = evaluate_known(value)
        has_starred = any(isinstance(element, ast.Starred) for element in target.elts)
        for index, element in enumerate(target.elts):
            item = None if has_starred else read_key(value, KnownValue(index))
            if item is None and not has_starred and isinstance(value, (Expression, Ref)):
                template = ast.Subscript(ast.Constant(0), ast.Constant(0), ast.Load())
                item = compose(interpreter, template, {"value": value, "slice": KnownValue(index)})
            if item is None and isinstance(value, Unknown):
                item = value
            inner_target = element.value if isinstance(element, ast.Starred) else element
            assign_names(interpreter, inner_target, UNKNOWN_VALUE if item is None else item)


def evaluate_known(symbol: Symbol) -> Symbol:
    """Return the value of an expression that is pure and consists of constants, any other symbol as it is."""
    if isinstance(symbol, Expression) and not symbol.refs:
        try:
            return KnownValue(evaluate_constant(symbol))
        except Exception:  # not pure, or the original will tell
            return symbol
    return symbol


# ------------------------------------------------------------ texts


# ------------------------------------------------------------ objects of data classes


def make_data_object(
    interpreter: FunctionInterpreter,
    kind: Any,
    arguments: Sequence[Symbol],
    keywords: Mapping[str, Symbol],
    unpacked: Sequence[Symbol],
) -> Symbol | None:
    """Return the object that a class of the user's makes; None for any class but a data class, and for functions.

    `unpacked`: dictionaries with further keywords, which are not known one by one.
    """
    data_class = None if is_framework_code(kind) else data_class_of(kind)
    if data_class is None:
        return None
    if not unpacked and not data_class.converts:
        return _object_of_symbols(interpreter, data_class, arguments, keywords)
    keyword_symbols: list[tuple[str | None, Symbol]] = [*keywords.items(), *((None, one) for one in unpacked)]
    constructor = _constructor(interpreter, data_class.kind, arguments, keyword_symbols)
    if constructor is None:
        return UNKNOWN_VALUE if _has_known_factories(interpreter, data_class) else None
    fields = {name: _field_of(constructor, name) for name in data_class.default_sizes}
    if not _is_pure(next(iter(fields.values()), None)):
        return None
    return DataObject(data_class.kind, fields)


def _object_of_symbols(
    interpreter: FunctionInterpreter,
    data_class: DataClass,
    arguments: Sequence[Symbol],
    keywords: Mapping[str, Symbol],
) -> Symbol | None:
    """Return the object of a dataclass whose arguments are known one by one, and are its fields as they are."""
    parameters = [name for name, one in data_class.fields.items() if one.is_positional]
    if len(arguments) > len(parameters):
        return UNKNOWN_VALUE
    symbols_by_name = dict(zip(parameters, arguments, strict=False)) | dict(keywords)
    fields: dict[str, Symbol] = {}
    for name, one in data_class.fields.items():
        if name in symbols_by_name and one.is_argument:
            fields[name] = symbols_by_name.pop(name)
        elif one.factory is not None:
            factory_result = _call_factory(interpreter, one.factory)
            if factory_result is None:
                return None
            fields[name] = factory_result
        elif one.default is not dataclasses.MISSING:
            fields[name] = KnownValue(one.default)
        else:
            return UNKNOWN_VALUE  # the original will raise
    return UNKNOWN_VALUE if symbols_by_name else DataObject(data_class.kind, fields)


def _call_factory(interpreter: FunctionInterpreter, factory: Any) -> Symbol | None:
    """Return what a factory of a field makes; None if it may do anything else."""
    if factory is list or factory is tuple:
        return ItemList((), factory)
    if factory is dict:
        return Fields({})
    name = interpreter.name_for(factory, is_ref=False)
    call = Expression(ast.Call(ast.Name(name, ast.Load()), [], []), {}, {name: factory})
    return call if _is_pure(call) else None


def _has_known_factories(interpreter: FunctionInterpreter, data_class: DataClass) -> bool:
    factories = [one.factory for one in data_class.fields.values() if one.factory is not None]
    return all(_call_factory(interpreter, factory) is not None for factory in factories)


def _constructor(
    interpreter: FunctionInterpreter,
    kind: type,
    arguments: Sequence[Symbol],
    keywords: Sequence[tuple[str | None, Symbol]],
) -> Expression | None:
    """Return the call of the class as an expression; None if an argument is not known."""
    expressions = [interpreter.to_expression(one) for one in (*arguments, *(value for _, value in keywords))]
    known_expressions = [expression for expression in expressions if expression is not None]
    if len(known_expressions) < len(expressions):
        return None
    refs, objects = merge_inputs(known_expressions)
    class_name = interpreter.name_for(kind, is_ref=False)
    codes = [expression.code for expression in known_expressions]
    names = [name for name, _ in keywords]
    keyword_nodes = [ast.keyword(name, code) for name, code in zip(names, codes[len(arguments) :], strict=True)]
    call = ast.Call(ast.Name(class_name, ast.Load()), codes[: len(arguments)], keyword_nodes)
    return Expression(call, refs, {**objects, class_name: kind}) if is_small(call) else None


def _field_of(constructor: Expression, name: str) -> Expression:
    return Expression(ast.Attribute(constructor.code, name, ast.Load()), constructor.refs, constructor.objects)


def _is_pure(expression: Expression | None) -> bool:
    """Return True if the expression is certainly pure; False also for None."""
    try:
        return expression is not None and bool(compile_pure(expression))
    except NotUnderstood:
        return False


# ------------------------------------------------------------ what is read of an object, and of a class


def read_data_attribute(interpreter: FunctionInterpreter, owner: DataObject, name: str) -> Symbol:
    """Return a field of the object, or what a property or a method of its class is; unknown for anything else."""
    if name in owner.fields:
        return owner.fields[name]
    attribute = next((vars(cls)[name] for cls in owner.kind.__mro__ if name in vars(cls)), None)
    if type(attribute) is property and type(attribute.fget) is FunctionType and not is_framework_code(attribute.fget):
        result = interpreter.call_function(attribute.fget, (owner,), {})
        return UNKNOWN_VALUE if result is None else result
    return UNKNOWN_VALUE


def method_of(owner: DataObject, name: str) -> FunctionType | None:
    """Return the function that a method call on the object runs with the object as its first argument.

    None for a method of the framework's, for static methods, class methods and other descriptors, and where a field of
    the same name hides the method.
    """
    attribute = next((vars(cls)[name] for cls in owner.kind.__mro__ if name in vars(cls)), None)
    is_own = type(attribute) is FunctionType and not is_framework_code(attribute)
    return attribute if is_own and name not in owner.fields else None


def fields_of_class(func: Any, arguments: Sequence[Symbol]) -> Symbol | None:
    """Return `dataclasses.fields(cls)`; None for any other function."""
    if func is not dataclasses.fields or len(arguments) != 1:
        return None
    (owner,) = arguments
    kind = owner.kind if isinstance(owner, DataObject) else owner.value if isinstance(owner, KnownValue) else None
    data_class = data_class_of(kind)
    if data_class is None or data_class.converts:
        return None
    return ItemList(tuple(KnownValue(one) for one in dataclasses.fields(data_class.kind)), tuple)


def read_class_attribute(owner: Any, name: str) -> Symbol | None:
    """Return `Model.model_fields` of a data class of pydantic; None for any other attribute."""
    if name != "model_fields":
        return None
    data_class = data_class_of(owner)
    return Fields({key: UNKNOWN_VALUE for key in owner.model_fields}) if data_class and data_class.converts else None


# ------------------------------------------------------------ dictionaries whose keys are known


def view_of(owner: Symbol, method: str) -> Symbol | None:
    """Return the keys, values or items of a dictionary whose keys are known; None for any other."""
    symbols = known_items(owner)
    if symbols is None:
        return None
    if method == "keys":
        return ItemList(tuple(map(KnownValue, symbols)))
    if method == "values":
        return ItemList(tuple(symbols.values()))
    return ItemList(tuple(ItemList((KnownValue(key), value), tuple) for key, value in symbols.items()))


def iterated(symbol: Symbol) -> Symbol:
    """Return what a loop goes through: the keys of a known dictionary, `range(3)` and the like as a known list.

    Any other symbol is returned as it is.
    """
    if isinstance(symbol, Expression):
        known_list = evaluate_known(as_list(symbol))
        return known_list if isinstance(known_list, KnownValue) else symbol
    return view_of(symbol, "keys") or symbol


def evaluate_iterable(interpreter: FunctionInterpreter, node: ast.expr) -> Symbol:
    """Return what a loop over an expression goes through. A variable that holds an iterator is unknown from then on."""
    symbol = interpreter.evaluate(node)
    code = symbol.code if isinstance(node, ast.Name) and isinstance(symbol, Expression) else None
    if isinstance(code, ast.Call) and isinstance(code.func, ast.Name) and code.func.id in _ITERATORS:
        interpreter.frame.names[node.id] = UNKNOWN_VALUE  # type: ignore[attr-defined]
    return iterated(symbol)


def known_items(symbol: Symbol) -> Mapping[str, Symbol] | None:
    """Return the items of a dictionary whose keys are known; None for any other value.

    None also for keys that are no texts, and for a dictionary that adds items to one that is not known.
    """
    if isinstance(symbol, KnownValue) and type(symbol.value) is dict and all(type(key) is str for key in symbol.value):
        return {key: KnownValue(value) for key, value in symbol.value.items()}
    return symbol.items if isinstance(symbol, Fields) and symbol.base is None and not symbol.attributes else None


_DUMP_OPTIONS = word_set("by_alias exclude_defaults exclude_none exclude_unset indent mode")


_MAX_INDENT = 8


def dump_model(interpreter: FunctionInterpreter, owner: Symbol, name: str, arguments: Any) -> Symbol | None:
    """Return what `model_dump` or `model_dump_json` gives of a model; None unless all options are known."""
    expression = interpreter.to_expression(owner)
    options = {key: symbol.value for key, symbol in arguments.keywords.items() if isinstance(symbol, KnownValue)}
    are_known = arguments.complete and not arguments.positional and len(options) == len(arguments.keywords)
    if expression is None or not are_known or not all(map(is_constant, options.values())):
        return None
    indent = options.get("indent") or 0
    if not options.keys() <= _DUMP_OPTIONS or type(indent) is not int or indent > _MAX_INDENT:
        return None
    dump = FieldGetter(name, ModelDump(tuple(options.items())))
    dump_name = interpreter.name_for(dump, is_ref=False)
    call = ast.Call(ast.Name(dump_name, ast.Load()), [expression.code], [])
    return Expression(call, expression.refs, {**expression.objects, dump_name: dump}) if is_small(call) else None


def length_of_list(interpreter: FunctionInterpreter, item_list: ItemList) -> Symbol:
    """Return the length of a list: the number of its known items, and the lengths of the lists among them."""
    length: Symbol = KnownValue(sum(not isinstance(item, Spread) for item in item_list.items))
    for item in item_list.items:
        if not isinstance(item, Spread):
            continue
        template = ast.Call(ast.Name("len", ast.Load()), [], [])
        inner_length = compose(interpreter, template, {"args": [item.iterable]})
        if isinstance(inner_length, Unknown):
            length = UNKNOWN_VALUE
        else:
            addition = ast.BinOp(ast.Constant(0), ast.Add(), ast.Constant(0))
            length = compose(interpreter, addition, {"left": length, "right": inner_length})
    return length
