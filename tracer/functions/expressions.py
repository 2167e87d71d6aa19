"""The values of expressions, as symbols. The rules for calls are in `calls`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

from teola_plugin.graph import Ref
from teola_plugin.tracer.functions.bodies import map_items
from teola_plugin.tracer.functions.calls import evaluate_call
from teola_plugin.tracer.functions.framework_calls import pipe
from teola_plugin.tracer.functions.interpreter import FunctionInterpreter
from teola_plugin.tracer.functions.mutations import assigned_names
from teola_plugin.tracer.functions.operations import (
    assign_names,
    compose,
    format_f_string,
    format_percent,
    is_text,
    items_of,
    make_list,
    make_text,
    read_attribute,
    read_key,
)
from teola_plugin.tracer.functions.pure_expressions import compile_pure, copy_code, is_small
from teola_plugin.tracer.functions.symbols import (
    RUN_METHODS,
    UNKNOWN_VALUE,
    AwaitableValue,
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
    merge_inputs,
)
from teola_plugin.tracer.source import Definition, location_of
from teola_plugin.tracer.symbols import NotUnderstood

_ListComprehension = ast.ListComp | ast.GeneratorExp


def evaluate(interpreter: FunctionInterpreter, node: ast.expr) -> Symbol:
    """Return the value of an expression; unknown if no rule understands it."""
    rule = _RULES.get(type(node))
    return UNKNOWN_VALUE if rule is None else rule(interpreter, node)


# ------------------------------------------------------------ containers


def _evaluate_list(interpreter: FunctionInterpreter, node: ast.List | ast.Tuple) -> Symbol:
    items: list[Item] = []
    for element in node.elts:
        if isinstance(element, ast.Starred):
            items += items_of(interpreter.evaluate(element.value))
        else:
            items.append(interpreter.evaluate(element))
    return make_list(items, tuple if isinstance(node, ast.Tuple) else list)


def _evaluate_dictionary(interpreter: FunctionInterpreter, node: ast.Dict) -> Symbol:
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
    if isinstance(symbol, Ref):
        return Fields({}, symbol)
    if isinstance(symbol, KnownValue) and type(symbol.value) is dict and all(type(key) is str for key in symbol.value):
        return Fields({key: KnownValue(value) for key, value in symbol.value.items()})
    return symbol if isinstance(symbol, Fields) else None


def _evaluate_subscript(interpreter: FunctionInterpreter, node: ast.Subscript) -> Symbol:
    owner = interpreter.evaluate(node.value)
    if isinstance(owner, Unknown):
        return owner
    if isinstance(node.slice, ast.Slice):
        return _evaluate_slice(interpreter, node, owner, node.slice)
    key = interpreter.evaluate(node.slice)
    value = read_key(owner, key)
    return compose(interpreter, node, {"value": owner, "slice": key}) if value is None else value


def _evaluate_slice(
    interpreter: FunctionInterpreter, node: ast.Subscript, owner: Symbol, slice_node: ast.Slice
) -> Symbol:
    bound_nodes = {name: getattr(slice_node, name) for name in ("lower", "upper", "step")}
    bounds = {name: interpreter.evaluate(bound) for name, bound in bound_nodes.items() if bound is not None}
    slice_symbol = compose(interpreter, slice_node, bounds)
    if not isinstance(slice_symbol, Expression):
        return UNKNOWN_VALUE
    first_item = compose(interpreter, node, {"value": owner, "slice": Expression(ast.Constant(0))})
    if not isinstance(first_item, Expression):
        return first_item
    code = ast.Subscript(first_item.code.value, slice_symbol.code, ast.Load())  # type: ignore[attr-defined]
    return Expression(code, *merge_inputs((first_item, slice_symbol)))


# ------------------------------------------------------------ operators and conditions


def _evaluate_operator(interpreter: FunctionInterpreter, node: ast.BinOp) -> Symbol:
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


def _is_list(symbol: Symbol) -> bool:
    return isinstance(symbol, ItemList) or (isinstance(symbol, KnownValue) and type(symbol.value) is list)


def _evaluate_comparison(interpreter: FunctionInterpreter, node: ast.Compare) -> Symbol:
    left = interpreter.evaluate(node.left)
    comparators = [interpreter.evaluate(comparator) for comparator in node.comparators]
    if len(comparators) == 1 and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
        right = comparators[0]
        if isinstance(left, KnownValue) and isinstance(right, KnownValue):
            return KnownValue((left.value is right.value) == isinstance(node.ops[0], ast.Is))
        if not isinstance(left, KnownValue) and not isinstance(right, KnownValue):
            return UNKNOWN_VALUE  # nobody can tell whether two values that are computed are one object
    return compose(interpreter, node, {"left": left, "comparators": comparators})


def _evaluate_and_or(interpreter: FunctionInterpreter, node: ast.BoolOp) -> Symbol:
    """Evaluate `and` and `or`, of which only the first operand is certain to be evaluated."""
    first, *rest = node.values
    value = interpreter.evaluate(first)
    truth = interpreter.decide_condition(value)
    if truth is not None:
        if truth == isinstance(node.op, ast.Or) or not rest:
            return value
        return interpreter.evaluate(rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
    if any(map(_may_use_engine, rest)):
        return UNKNOWN_VALUE
    return compose(interpreter, node, {"values": [value, *map(interpreter.evaluate, rest)]})


def _evaluate_conditional(interpreter: FunctionInterpreter, node: ast.IfExp) -> Symbol:
    """Evaluate `body if test else orelse`."""
    test = interpreter.evaluate(node.test)
    truth = interpreter.decide_condition(test)
    if truth is not None:
        return interpreter.evaluate(node.body if truth else node.orelse)
    if _may_use_engine(node.body) or _may_use_engine(node.orelse):
        return UNKNOWN_VALUE
    body, orelse = interpreter.evaluate(node.body), interpreter.evaluate(node.orelse)
    return compose(interpreter, node, {"test": test, "body": body, "orelse": orelse})


def _may_use_engine(node: ast.AST) -> bool:
    """Return True if the text of the code awaits something, or runs a Runnable."""
    return any(
        isinstance(part, ast.Await) or (isinstance(part, ast.Attribute) and part.attr in RUN_METHODS)
        for part in ast.walk(node)
    )


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
    values = {name: symbol.value for name, symbol in (free | defaults).items() if isinstance(symbol, KnownValue)}
    positional = [name for name in code.co_varnames[: code.co_argcount] if name in defaults]
    closure = tuple(CellType(values[name]) for name in code.co_freevars)
    module_globals = interpreter.frame.free_names.globals
    positional_defaults = tuple(values[name] for name in positional)
    func = FunctionType(code, module_globals, code.co_name, positional_defaults, closure)  # type: ignore[arg-type]
    func.__kwdefaults__ = {name: values[name] for name in defaults if name not in positional} or None  # type: ignore[assignment]
    return func


# ------------------------------------------------------------ comprehensions


def _evaluate_comprehension(
    interpreter: FunctionInterpreter, node: _ListComprehension | ast.SetComp | ast.DictComp
) -> Symbol:
    """Evaluate a comprehension: as an expression if it is pure, as a MAP if it uses an engine for each item."""
    first, *inner_generators = node.generators
    items, name = interpreter.evaluate(first.iter), f"<items {node.lineno}:{node.col_offset}>"
    interpreter.frame.names[name] = items
    first = ast.comprehension(first.target, ast.Name(name, ast.Load()), first.ifs, first.is_async)
    fields = {key: value for key, value in ast.iter_fields(node) if key != "generators"}
    node = ast.copy_location(type(node)(**fields, generators=[first, *inner_generators]), node)
    if not _may_use_engine(node):
        if is_known_in_parts(items) and isinstance(node, _ListComprehension) and not inner_generators:
            parts = _evaluate_in_parts(interpreter, node, items)
            if parts is not None:
                return parts
            interpreter.frame.names[name] = items
        expression = _to_pure_expression(interpreter, node)
        if expression is not None:
            return expression
    if isinstance(node, _ListComprehension) and not inner_generators:
        if any(map(_may_use_engine, first.ifs)):
            return _evaluate_as_loop(interpreter, node, first)
        return _evaluate_each(interpreter, first, items, node.elt)
    if isinstance(node, ast.DictComp) and not inner_generators and not any(map(_may_use_engine, first.ifs)):
        pairs = _evaluate_each(interpreter, first, items, ast.Tuple([node.key, node.value], ast.Load()))
        return compose(interpreter, ast.Call(ast.Name("dict", ast.Load()), [], []), {"args": [pairs]})
    if isinstance(node, _ListComprehension) and not _may_use_engine(node.elt):
        return _evaluate_nested(interpreter, node, first, items, inner_generators)
    interpreter.add_user_code()
    return UNKNOWN_VALUE


def _evaluate_each(
    interpreter: FunctionInterpreter, generator: ast.comprehension, items: Symbol, element: ast.expr
) -> Symbol:
    """Evaluate `[element for target in items if test]`, with a MAP unless the items are known."""
    if generator.ifs:
        selected = _to_pure_expression(interpreter, ast.ListComp(copy_code(generator.target), [generator]))
        if selected is None:  # a condition that is not certain to be pure
            interpreter.add_user_code()
            return UNKNOWN_VALUE
        items = selected

    def evaluate_element(body: FunctionInterpreter, item: Symbol) -> Symbol:
        assign_names(body, generator.target, item)
        return body.evaluate(element)

    return map_items(interpreter, items, evaluate_element)


def _evaluate_as_loop(
    interpreter: FunctionInterpreter, node: _ListComprehension, generator: ast.comprehension
) -> Symbol:
    """Evaluate `[element for target in items if test]` as the loop that appends to a list, whose tests use engines."""
    result = f"<list {node.lineno}:{node.col_offset}>"
    append = ast.Attribute(ast.Name(result, ast.Load()), "append", ast.Load())
    test = generator.ifs[0] if len(generator.ifs) == 1 else ast.BoolOp(ast.And(), generator.ifs)
    body = ast.If(test, [ast.Expr(ast.Call(append, [node.elt], []))], [])
    loop = ast.For(generator.target, generator.iter, [body], [])
    names_outside = {name: interpreter.frame.read(name) for name in assigned_names([loop])}
    interpreter.frame.names[result] = ItemList(())
    interpreter.run_block([ast.fix_missing_locations(ast.copy_location(loop, node))])
    interpreter.frame.names |= names_outside  # a comprehension has variables of its own
    return interpreter.frame.names.pop(result, UNKNOWN_VALUE)


def _evaluate_nested(
    interpreter: FunctionInterpreter,
    node: _ListComprehension,
    first: ast.comprehension,
    items: Symbol,
    inner_generators: list[ast.comprehension],
) -> Symbol:
    """Evaluate `[d for q in queries for d in search(q)]`: the inner lists are made at once, then put together."""
    inner = ast.copy_location(ast.ListComp(node.elt, inner_generators), node)
    lists = _evaluate_each(interpreter, first, items, inner)
    if isinstance(lists, ItemList):
        return ItemList(tuple(Spread(inner_list) for inner_list in lists.items if not isinstance(inner_list, Spread)))
    if not isinstance(lists, Ref):
        return UNKNOWN_VALUE
    name = interpreter.name_for(lists, is_ref=True)
    one, item = ast.Name("one", ast.Store()), ast.Name("item", ast.Store())
    outer_loop = ast.comprehension(one, ast.Name(name, ast.Load()), [], 0)
    inner_loop = ast.comprehension(item, ast.Name("one", ast.Load()), [], 0)
    return Expression(ast.ListComp(ast.Name("item", ast.Load()), [outer_loop, inner_loop]), {name: lists})


def _evaluate_in_parts(interpreter: FunctionInterpreter, node: _ListComprehension, items: ItemList) -> ItemList | None:
    """Evaluate a pure comprehension over each part of a list whose beginning may be known before its end.

    Return None if even the first part is not understood.
    """
    (generator,) = node.generators
    assert isinstance(generator.iter, ast.Name)
    parts: list[Item] = []
    for item in items.items:
        part_items = item.iterable if isinstance(item, Spread) else ItemList((item,))
        interpreter.frame.names[generator.iter.id] = part_items
        part = _to_pure_expression(interpreter, ast.ListComp(node.elt, [generator]))
        if part is None and not parts:
            return None
        parts.append(Spread(UNKNOWN_VALUE if part is None else part))
    return ItemList(tuple(parts))


def _to_pure_expression(interpreter: FunctionInterpreter, node: ast.expr) -> Expression | None:
    """Return an expression that has variables of its own; None unless it is certainly pure."""
    rewriter = _ExpressionRewriter(interpreter)
    try:
        expression = Expression(rewriter.rewrite(node, frozenset()), rewriter.refs, rewriter.objects)
        if not is_small(expression.code):
            return None
        compile_pure(expression)
    except NotUnderstood:
        return None
    return expression


class _ExpressionRewriter:
    """Replaces the parts of an expression that do not depend on its own variables by their values."""

    def __init__(self, interpreter: FunctionInterpreter) -> None:
        self._interpreter = interpreter
        self.refs: dict[str, Ref] = {}
        self.objects: dict[str, object] = {}

    def rewrite(self, node: ast.expr, variables: frozenset[str]) -> ast.expr:
        """Return the rewritten code. `variables` are those of the comprehensions and lambdas around the node.

        Raises `NotUnderstood` for a value that is not known, and for an expression that does more than give a value.
        """
        if isinstance(node, ast.Name) and node.id in variables:
            return node
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
            generators, inner = self._rewrite_generators(node.generators, variables)
            return type(node)(self.rewrite(node.elt, inner), generators)
        if isinstance(node, ast.DictComp):
            generators, inner = self._rewrite_generators(node.generators, variables)
            return ast.DictComp(self.rewrite(node.key, inner), self.rewrite(node.value, inner), generators)
        if isinstance(node, ast.Lambda):
            parameters = {parameter.arg for parameter in node.args.args}
            return ast.Lambda(node.args, self.rewrite(node.body, variables | parameters))
        if variables.isdisjoint(_names(node)):
            return self._replace_by_value(node)
        return self._rewrite_parts(node, variables)

    def _replace_by_value(self, node: ast.expr) -> ast.expr:
        expression = self._interpreter.to_expression(self._interpreter.evaluate(node))
        if expression is None:
            raise NotUnderstood("a value that is not known")
        self.refs |= expression.refs
        self.objects |= expression.objects
        return expression.code

    def _rewrite_generators(
        self, generators: list[ast.comprehension], variables: frozenset[str]
    ) -> tuple[list[ast.comprehension], frozenset[str]]:
        """Return the rewritten generators, and all variables inside them."""
        rewritten = []
        for generator in generators:
            if generator.is_async:
                raise NotUnderstood("an asynchronous comprehension")
            items = self.rewrite(generator.iter, variables)
            variables |= frozenset(_names(generator.target))
            tests = [self.rewrite(test, variables) for test in generator.ifs]
            rewritten.append(ast.comprehension(generator.target, items, tests, 0))
        return rewritten, variables

    def _rewrite_parts(self, node: ast.AST, variables: frozenset[str]) -> ast.expr:
        if isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
            raise NotUnderstood("an expression that does more than give a value")
        fields = {name: self._rewrite_part(value, variables) for name, value in ast.iter_fields(node)}
        return type(node)(**fields)  # type: ignore[return-value]

    def _rewrite_part(self, value: object, variables: frozenset[str]) -> object:
        if isinstance(value, list):
            return [self._rewrite_part(item, variables) for item in value]
        if isinstance(value, (ast.keyword, ast.Slice, ast.FormattedValue, ast.Starred)):
            return self._rewrite_parts(value, variables)
        if isinstance(value, ast.JoinedStr) and variables.isdisjoint(_names(value)):
            return value if not list(_names(value)) else self.rewrite(value, variables)
        return self.rewrite(value, variables) if isinstance(value, ast.expr) else value


def _names(node: ast.AST) -> Iterator[str]:
    return (part.id for part in ast.walk(node) if isinstance(part, ast.Name))


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
    ast.UnaryOp: lambda interpreter, node: compose(interpreter, node, {"operand": interpreter.evaluate(node.operand)}),
    ast.Compare: _evaluate_comparison,
    ast.BoolOp: _evaluate_and_or,
    ast.IfExp: _evaluate_conditional,
    ast.Await: _evaluate_await,
    ast.NamedExpr: _evaluate_assignment,
    ast.Lambda: define_function,
    ast.Call: evaluate_call,
    ast.ListComp: _evaluate_comprehension,
    ast.GeneratorExp: _evaluate_comprehension,
    ast.SetComp: _evaluate_comprehension,
    ast.DictComp: _evaluate_comprehension,
}
"""What an interpreter does with each kind of expression."""
