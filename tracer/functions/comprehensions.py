"""Comprehensions: pure ones become expressions, and those that use an engine for each item become MAPs."""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any

from teola_plugin.graph import ITEM, Ref
from teola_plugin.tracer.functions.bodies import map_items
from teola_plugin.tracer.functions.frames import to_plain_function, unwrap_partial
from teola_plugin.tracer.functions.interpreter import FunctionInterpreter
from teola_plugin.tracer.functions.lookup import is_framework_code
from teola_plugin.tracer.functions.mutations import assigned_names
from teola_plugin.tracer.functions.operations import (
    assign_names,
    compose,
    evaluate_iterable,
    items_of,
    known_items,
)
from teola_plugin.tracer.functions.pruning import uses_engine
from teola_plugin.tracer.functions.pure_expressions import NAME_PREFIX, compile_pure, copy_code, is_small
from teola_plugin.tracer.functions.symbols import (
    RUN_METHODS,
    UNKNOWN_VALUE,
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
    is_constant,
    is_known_in_parts,
    known_value,
)
from teola_plugin.tracer.functions.texts import is_text
from teola_plugin.tracer.purity.calls import METHODS
from teola_plugin.tracer.purity.purity import cached_purity
from teola_plugin.tracer.symbols import NotUnderstood

_ListComprehension = ast.ListComp | ast.GeneratorExp
_MAX_FIELDS = 64
"""Fields of a class over which a comprehension is evaluated one by one."""


def may_use_engine(interpreter: FunctionInterpreter, *nodes: ast.AST, targets: Sequence[ast.expr] = ()) -> bool:
    """Return True if the code awaits something, runs a Runnable, or calls a function of the user's that uses an engine.

    The text of the code counts by the names of attributes alone (`RUN_METHODS`), so it may be True for code that uses
    no engine. `targets`: the variables of the comprehension that the code belongs to.
    """
    parts = [part for node in nodes for part in ast.walk(node)]
    if any(isinstance(p, ast.Await) or (isinstance(p, ast.Attribute) and p.attr in RUN_METHODS) for p in parts):
        return True
    if not any(isinstance(part, ast.Call) and _runs_own_code(interpreter, part.func) for part in parts):
        return False
    trial = _try_each(interpreter, nodes, targets)
    return any(map(uses_engine, trial.draft.components.values()))


def skip_code(interpreter: FunctionInterpreter, *nodes: ast.AST, targets: Sequence[ast.expr] = ()) -> Symbol:
    """Note what code changes that may run or not, and whose calls keep their place. Return an unknown value."""
    trial = _try_each(interpreter, nodes, targets)
    interpreter.mutations.update(trial.mutations)
    if trial.runs_user_code:
        interpreter.add_user_code()
    return UNKNOWN_VALUE


def _runs_own_code(interpreter: FunctionInterpreter, func: ast.expr) -> bool:
    """Return True if a call of `func` runs a function of the user's that is not certain to be pure."""
    root = func
    while isinstance(root, ast.Attribute):
        root = root.value
    owner = interpreter.frame.read(root.id) if isinstance(root, ast.Name) else UNKNOWN_VALUE
    if isinstance(owner, (LocalFunction, DataObject)):
        return True
    symbol = interpreter.evaluate(func) if isinstance(owner, KnownValue) else UNKNOWN_VALUE
    if not isinstance(symbol, KnownValue):
        return False
    function, _ = to_plain_function(unwrap_partial(symbol.value, (), {})[0], ())
    return function is not None and not is_framework_code(function) and cached_purity(function) is None


def _try_each(
    interpreter: FunctionInterpreter, nodes: Sequence[ast.AST], targets: Sequence[ast.expr]
) -> FunctionInterpreter:
    """Return an interpreter that has evaluated the code for one item, as a trial that changes nothing here."""
    trial = interpreter.fork(set(interpreter.draft.names))
    for target in targets:
        assign_names(trial, target, Ref(ITEM))
    for node in nodes:
        if isinstance(node, ast.expr):
            trial.evaluate(node)
    return trial


def evaluate_comprehension(
    interpreter: FunctionInterpreter, node: _ListComprehension | ast.SetComp | ast.DictComp
) -> Symbol:
    """Evaluate a comprehension: as an expression if it is pure, as a MAP if it uses an engine for each item."""
    first, *inner_generators = node.generators
    items, name = evaluate_iterable(interpreter, first.iter), f"<items {node.lineno}:{node.col_offset}>"
    interpreter.frame.names[name] = items
    first = ast.comprehension(first.target, ast.Name(name, ast.Load()), first.ifs, first.is_async)
    fields = {key: value for key, value in ast.iter_fields(node) if key != "generators"}
    node = ast.copy_location(type(node)(**fields, generators=[first, *inner_generators]), node)
    targets = [generator.target for generator in node.generators]
    parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    tests = [test for generator in node.generators for test in generator.ifs]
    inner_iters = [generator.iter for generator in inner_generators]
    tests_use_engine = may_use_engine(interpreter, *tests, targets=targets)
    if not tests_use_engine and not may_use_engine(interpreter, *parts, *inner_iters, targets=targets):
        item_list = items_of(items)
        if not inner_generators and 0 < len(item_list) <= _MAX_FIELDS and all(map(_is_field, item_list)):
            result = _evaluate_for_fields(interpreter, node, first, item_list)
            if result is not None:
                return result
        if is_known_in_parts(items) and isinstance(node, _ListComprehension) and not inner_generators:
            known_parts = _evaluate_in_parts(interpreter, node, items)
            if known_parts is not None:
                return known_parts
            interpreter.frame.names[name] = items
        is_simple = isinstance(node, _ListComprehension) and not inner_generators
        expression = _to_pure_expression(interpreter, node, may_read_fields=not is_simple)
        if expression is not None:
            return expression
    elif isinstance(node, ast.GeneratorExp):  # its reader may stop early; `evaluate_call` knows those that never do
        interpreter.is_incomplete = True
        return skip_code(interpreter, *tests, *parts, targets=targets)
    if isinstance(node, _ListComprehension) and not inner_generators:
        if tests_use_engine:
            return _evaluate_as_loop(interpreter, node, first)
        return _evaluate_each(interpreter, first, items, node.elt)
    if isinstance(node, ast.DictComp) and not inner_generators and not tests_use_engine:
        pairs = _evaluate_each(interpreter, first, items, ast.Tuple([node.key, node.value], ast.Load()))
        return compose(interpreter, ast.Call(ast.Name("dict", ast.Load()), [], []), {"args": [pairs]})
    if isinstance(node, _ListComprehension) and not may_use_engine(interpreter, node.elt, targets=targets):
        return _evaluate_nested(interpreter, node, first, items, inner_generators)
    interpreter.add_user_code()
    return UNKNOWN_VALUE


def _is_field(item: Item) -> bool:
    """Return True for a field of a dataclass, and for the name and the description of a field of a model."""
    if isinstance(item, ItemList) and len(item.items) == 2:
        is_known, name = known_value(item.items[0]) if not isinstance(item.items[0], Spread) else (False, None)
        return is_known and type(name) is str and isinstance(item.items[1], Unknown)
    return isinstance(item, KnownValue) and type(item.value) is dataclasses.Field


def _evaluate_for_fields(
    interpreter: FunctionInterpreter,
    node: _ListComprehension | ast.SetComp | ast.DictComp,
    generator: ast.comprehension,
    items: Sequence[Item],
) -> Symbol | None:
    """Evaluate a comprehension over the fields of a class, field by field. Return None unless all of it is known."""
    names_outside = {name: interpreter.frame.read(name) for name in _names(generator.target)}
    results: list[list[Symbol]] = []
    try:
        for item in items:
            assert not isinstance(item, Spread)
            assign_names(interpreter, generator.target, item)
            truths = [interpreter.decide_condition(interpreter.evaluate(test)) for test in generator.ifs]
            if None in truths:
                return None
            if all(truths):
                parts = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
                results.append([interpreter.evaluate(part) for part in parts])
    finally:
        interpreter.frame.names |= names_outside  # a comprehension has variables of its own
    return _collect(interpreter, node, results)


def _collect(
    interpreter: FunctionInterpreter,
    node: _ListComprehension | ast.SetComp | ast.DictComp,
    results: Sequence[Sequence[Symbol]],
) -> Symbol | None:
    """Return the list, set or dictionary of the results of a comprehension; None if a key, or an item, is not known."""
    if isinstance(node, ast.DictComp):
        keys = [known_value(key) for key, _ in results]
        if not all(is_known and type(key) is str for is_known, key in keys):
            return None
        return Fields({key: value for (_, key), (_, value) in zip(keys, results, strict=True)})
    elements = ItemList(tuple(element for (element,) in results))
    if any(isinstance(element, Unknown) for element in elements.items):
        return None
    if not isinstance(node, ast.SetComp):
        return elements
    return compose(interpreter, ast.Call(ast.Name("set", ast.Load()), [], []), {"args": [elements]})


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


def _to_pure_expression(
    interpreter: FunctionInterpreter, node: ast.expr, *, may_read_fields: bool = True
) -> Expression | None:
    """Return an expression that has variables of its own; None unless it is certainly pure.

    `may_read_fields`: it may read other fields than those of the framework's classes. A MAP reads those of more classes
    than an expression can.
    """
    rewriter = _ExpressionRewriter(interpreter)
    try:
        expression = Expression(rewriter.rewrite(node, frozenset()), rewriter.refs, rewriter.objects)
        if not is_small(expression.code):
            return None
        reads_fields = compile_pure(expression).reads_fields
    except NotUnderstood:
        return None
    return None if reads_fields and not may_read_fields else expression


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
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            return self._rewrite_membership(node, variables)
        if isinstance(node, ast.Call) and variables.isdisjoint(_names(node.func)):
            method = self._method_of_data(node.func)
            if method is not None:
                arguments = [self.rewrite(argument, variables) for argument in node.args]
                keywords = [ast.keyword(one.arg, self.rewrite(one.value, variables)) for one in node.keywords]
                return ast.Call(method, arguments, keywords)
        return self._rewrite_parts(node, variables)

    def _method_of_data(self, func: ast.expr) -> ast.expr | None:
        """Return a method of a value that is known at run time, such as the environment; None for any other function.

        The value of a method cannot stand for it: nobody could tell what it does.
        """
        if isinstance(func, ast.Attribute) and func.attr in METHODS:
            owner = self._interpreter.evaluate(func.value)
            is_data = not isinstance(owner, (KnownValue, Unknown)) or _is_environment(owner)
            return ast.Attribute(self._code_of(owner), func.attr, ast.Load()) if is_data else None
        called = self._interpreter.evaluate(func)
        is_getenv = isinstance(called, KnownValue) and called.value is os.getenv
        return ast.Attribute(self._code_of(KnownValue(os.environ)), "get", ast.Load()) if is_getenv else None

    def _rewrite_membership(self, node: ast.Compare, variables: frozenset[str]) -> ast.expr:
        """Rewrite `key in dictionary`, which does not look at the values of the dictionary."""
        (container,) = node.comparators
        is_fixed = variables.isdisjoint(_names(container))
        items = known_items(self._interpreter.evaluate(container)) if is_fixed else None
        if items is None:
            return self._rewrite_parts(node, variables)
        keys = ast.Tuple(list(map(ast.Constant, items)), ast.Load())
        return ast.Compare(self.rewrite(node.left, variables), node.ops, [keys])

    def _replace_by_value(self, node: ast.expr) -> ast.expr:
        return self._code_of(self._interpreter.evaluate(node))

    def _code_of(self, symbol: Symbol) -> ast.expr:
        """Return code that stands for a symbol, and collect the refs and objects that it reads.

        Raise `NotUnderstood` for a value that is not known.
        """
        expression = self._interpreter.to_expression(symbol)
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
        """Return a node with all its fields rewritten. Raise `NotUnderstood` for one that assigns, awaits or yields."""
        if isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
            raise NotUnderstood("an expression that does more than give a value")
        fields = {name: self._rewrite_part(value, variables) for name, value in ast.iter_fields(node)}
        rewritten = type(node)(**fields)
        if isinstance(rewritten, ast.Compare) and _compares_copy(rewritten):
            raise NotUnderstood("a copy is not the object itself")
        return rewritten  # type: ignore[return-value]

    def _rewrite_part(self, value: object, variables: frozenset[str]) -> object:
        """Return one field of a node, rewritten: an expression, a list of them, or any other value as it is."""
        if isinstance(value, list):
            return [self._rewrite_part(item, variables) for item in value]
        if isinstance(value, (ast.keyword, ast.Slice, ast.FormattedValue, ast.Starred)):
            return self._rewrite_parts(value, variables)
        if isinstance(value, ast.JoinedStr) and variables.isdisjoint(_names(value)):
            return value if not list(_names(value)) else self.rewrite(value, variables)
        return self.rewrite(value, variables) if isinstance(value, ast.expr) else value


def _compares_copy(node: ast.Compare) -> bool:
    """Return True for `value is existing_list`, where the code of the list stands for the list."""
    by_identity = any(isinstance(operator, (ast.Is, ast.IsNot)) for operator in node.ops)
    return by_identity and any(isinstance(operand, (ast.List, ast.Dict)) for operand in (node.left, *node.comparators))


def _is_environment(symbol: Symbol) -> bool:
    return isinstance(symbol, KnownValue) and symbol.value is os.environ


def _names(node: ast.AST) -> Iterator[str]:
    return (part.id for part in ast.walk(node) if isinstance(part, ast.Name))


# ------------------------------------------------------------ generators and maps as comprehensions


_READERS_TO_THE_END = (list, tuple, set, frozenset, dict, sorted, sum, min, max)
"""Functions that take all items of a generator."""


def with_lists(interpreter: FunctionInterpreter, node: ast.Call) -> ast.Call:
    """Return the call with lists in place of generators, where the call certainly takes all items."""
    if not any(
        isinstance(part, ast.GeneratorExp)
        for argument in node.args
        for part in (argument, *ast.iter_child_nodes(argument))
    ):
        return node
    func = interpreter.evaluate(node.func) if isinstance(node.func, ast.Name) else UNKNOWN_VALUE
    is_reader = isinstance(func, KnownValue) and any(func.value is reader for reader in _READERS_TO_THE_END)
    reads_all = is_reader or (isinstance(node.func, ast.Attribute) and node.func.attr == "join")
    arguments: list[ast.expr] = []
    for argument in node.args:
        if isinstance(argument, ast.Starred):
            argument = ast.Starred(_as_list_display(argument.value), argument.ctx)
        arguments.append(_as_list_display(argument) if reads_all else argument)
    return ast.copy_location(ast.Call(node.func, arguments, node.keywords), node)


def _as_list_display(node: ast.expr) -> ast.expr:
    """Return a generator expression as a list comprehension, any other expression as it is."""
    return (
        ast.copy_location(ast.ListComp(node.elt, node.generators), node) if isinstance(node, ast.GeneratorExp) else node
    )


def with_calls_for_each(interpreter: FunctionInterpreter, node: ast.Call) -> ast.Call:
    """Return `list([func(item) for item in items])` for `list(map(func, items))`, and the like for `join` and `tuple`.

    Any other call is returned as it is, and so is the `map` of a function that is pure.
    """
    inner = node.args[0] if len(node.args) == 1 and not node.keywords else None
    if not isinstance(inner, ast.Call) or not isinstance(inner.func, ast.Name):
        return node
    if not _reads_whole_argument(interpreter, node.func):
        return node
    called, func = interpreter.frame.read(inner.func.id), inner.args[0] if len(inner.args) == 2 else None
    if inner.keywords or func is None or not isinstance(called, KnownValue) or called.value is not map:
        return node
    value = interpreter.evaluate(func) if isinstance(func, (ast.Name, ast.Attribute, ast.Lambda)) else UNKNOWN_VALUE
    is_function = isinstance(value, LocalFunction) or (
        isinstance(value, KnownValue) and type(value.value) in (FunctionType, MethodType)
    )
    if not is_function or (isinstance(value, KnownValue) and _is_certainly_pure(value.value)):
        return node
    name = f"{NAME_PREFIX}item{inner.lineno}_{inner.col_offset}"
    call = ast.Call(func, [ast.Name(name, ast.Load())], [])
    generator = ast.comprehension(ast.Name(name, ast.Store()), inner.args[1], [], 0)
    comprehension = ast.ListComp(ast.copy_location(call, inner), [generator])
    changed = ast.copy_location(ast.Call(node.func, [ast.copy_location(comprehension, inner)], []), node)
    return ast.fix_missing_locations(changed)


def _reads_whole_argument(interpreter: FunctionInterpreter, func: ast.expr) -> bool:
    """Return True for `list`, `tuple`, and the `join` of a text, which read an iterable to its end."""
    if isinstance(func, ast.Attribute) and func.attr == "join" and isinstance(func.value, (ast.Constant, ast.Name)):
        return is_text(interpreter.evaluate(func.value))
    called = interpreter.frame.read(func.id) if isinstance(func, ast.Name) else UNKNOWN_VALUE
    return isinstance(called, KnownValue) and (called.value is list or called.value is tuple)


def _is_certainly_pure(func: Any) -> bool:
    return type(func) is FunctionType and cached_purity(func) is not None


def is_data(value: object) -> bool:
    return is_constant(value) or type(value) in (dict, list, tuple, set) or value is os.environ
