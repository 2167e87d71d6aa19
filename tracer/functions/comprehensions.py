"""Comprehensions: pure ones are computed, those that ask engines for each item become MAPs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from teola_plugin.graph import Ref
from teola_plugin.tracer.functions.composing import bind
from teola_plugin.tracer.functions.loops import mapped
from teola_plugin.tracer.functions.machine import Walker
from teola_plugin.tracer.functions.pure import is_small, proven
from teola_plugin.tracer.functions.values import (
    RUNS,
    UNKNOWN_VALUE,
    Computed,
    Item,
    Series,
    Spread,
    Symbol,
    in_pieces,
)
from teola_plugin.tracer.symbols import NotUnderstood


def asks_inside(node: ast.AST) -> bool:
    """Whether something in it waits for a result, or runs a Runnable, as far as its text tells."""
    return any(
        isinstance(one, ast.Await) or (isinstance(one, ast.Attribute) and one.attr in RUNS) for one in ast.walk(node)
    )


def comprehension(walk: Walker, node: ast.expr) -> Symbol:
    """What a comprehension gives."""
    assert isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp))
    first, *others = node.generators
    found, name = walk.evaluate(first.iter), f"<items {node.lineno}:{node.col_offset}>"
    walk.frame.names[name] = found
    first = ast.comprehension(first.target, ast.Name(name, ast.Load()), first.ifs, first.is_async)
    fields = {key: value for key, value in ast.iter_fields(node) if key != "generators"}
    node = ast.copy_location(type(node)(**fields, generators=[first, *others]), node)
    if not asks_inside(node):
        if in_pieces(found) and isinstance(node, (ast.ListComp, ast.GeneratorExp)) and not others:
            parts = _piecewise(walk, node, found)
            if parts is not None:
                return parts
            walk.frame.names[name] = found
        made = scoped(walk, node)
        if made is not None:
            return made
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)) and not others:
        return _each(walk, first, found, node.elt)
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)) and not asks_inside(node.elt):
        return _flattened(walk, node, first, found, others)
    walk.user_code()
    return UNKNOWN_VALUE


def _each(walk: Walker, items: ast.comprehension, found: Symbol, element: ast.expr) -> Symbol:
    if items.ifs:
        chosen = _chosen(walk, items)
        if chosen is None:
            walk.user_code()
            return UNKNOWN_VALUE
        found = chosen

    def each(body: Walker, item: Symbol) -> Symbol:
        bind(body, items.target, item)
        return body.evaluate(element)

    return mapped(walk, found, each)


def _flattened(
    walk: Walker,
    node: ast.ListComp | ast.GeneratorExp,
    first: ast.comprehension,
    found: Symbol,
    others: list[ast.comprehension],
) -> Symbol:
    """`[d for q in queries for d in search(q)]`: the lists are made side by side, then put together."""
    inner = ast.ListComp(node.elt, others)
    lists = _each(walk, first, found, ast.copy_location(inner, node))
    if isinstance(lists, Series):
        return Series(tuple(Spread(one) for one in lists.items if not isinstance(one, Spread)))
    if not isinstance(lists, Ref):
        return UNKNOWN_VALUE
    name = walk.name_for(lists, is_ref=True)
    one, item = ast.Name("one", ast.Store()), ast.Name("item", ast.Store())
    every = ast.comprehension(one, ast.Name(name, ast.Load()), [], 0)
    each = ast.comprehension(item, ast.Name("one", ast.Load()), [], 0)
    return Computed(ast.ListComp(ast.Name("item", ast.Load()), [every, each]), {name: lists})


def _piecewise(walk: Walker, node: ast.ListComp | ast.GeneratorExp, found: Series) -> Series | None:
    """Of a list whose beginning may be known before its end: what is made of each of its parts.

    None where not even that of the first is known.
    """
    (items,) = node.generators
    assert isinstance(items.iter, ast.Name)
    made: list[Item] = []
    for item in found.items:
        walk.frame.names[items.iter.id] = item.of if isinstance(item, Spread) else Series((item,))
        part = scoped(walk, ast.ListComp(node.elt, [items]))
        if part is None and not made:
            return None
        made.append(Spread(UNKNOWN_VALUE if part is None else part))
    return Series(tuple(made))


def _chosen(walk: Walker, items: ast.comprehension) -> Symbol | None:
    """The items that a condition lets through; None for a condition that is not certain to be pure."""
    if any(asks_inside(one) for one in items.ifs):
        return None
    element = ast.parse(ast.unparse(items.target), mode="eval").body
    return scoped(walk, ast.ListComp(element, [items]))


# ------------------------------------------------------------ pure ones


def scoped(walk: Walker, node: ast.expr) -> Computed | None:
    """An expression with names of its own, to be computed; None unless it is certainly pure."""
    scope = _Scope(walk)
    try:
        made = Computed(scope.code(node, frozenset()), scope.refs, scope.objects)
        if not is_small(made.code):
            return None
        proven(made)
    except NotUnderstood:
        return None
    return made


class _Scope:
    """Rewrites an expression: values of the walk in place of what does not depend on its own names."""

    def __init__(self, walk: Walker) -> None:
        self._walk = walk
        self.refs: dict[str, Ref] = {}
        self.objects: dict[str, object] = {}

    def code(self, node: ast.expr, own: frozenset[str]) -> ast.expr:
        """Raises `NotUnderstood` for what is not known."""
        if isinstance(node, ast.Name) and node.id in own:
            return node
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
            made, inner = self._generators(node.generators, own)
            return type(node)(self.code(node.elt, inner), made)
        if isinstance(node, ast.DictComp):
            made, inner = self._generators(node.generators, own)
            return ast.DictComp(self.code(node.key, inner), self.code(node.value, inner), made)
        if isinstance(node, ast.Lambda):
            return ast.Lambda(node.args, self.code(node.body, own | {one.arg for one in node.args.args}))
        if own.isdisjoint(_names(node)):
            return self._value(node)
        return self._rewritten(node, own)

    def _value(self, node: ast.expr) -> ast.expr:
        found = self._walk.code(self._walk.evaluate(node))
        if found is None:
            raise NotUnderstood("a value that is not known")
        self.refs |= found.refs
        self.objects |= found.objects
        return found.code

    def _generators(
        self, generators: list[ast.comprehension], own: frozenset[str]
    ) -> tuple[list[ast.comprehension], frozenset[str]]:
        made = []
        for one in generators:
            if one.is_async:
                raise NotUnderstood("an asynchronous comprehension")
            items = self.code(one.iter, own)
            own |= frozenset(_names(one.target))
            made.append(ast.comprehension(one.target, items, [self.code(test, own) for test in one.ifs], 0))
        return made, own

    def _rewritten(self, node: ast.AST, own: frozenset[str]) -> ast.expr:
        """The node with its parts rewritten."""
        if isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
            raise NotUnderstood("an expression that does more than give a value")
        fields = {name: self._part(value, own) for name, value in ast.iter_fields(node)}
        return type(node)(**fields)  # type: ignore[return-value]

    def _part(self, value: object, own: frozenset[str]) -> object:
        if isinstance(value, list):
            return [self._part(one, own) for one in value]
        if isinstance(value, (ast.keyword, ast.Slice, ast.FormattedValue, ast.Starred)):
            return self._rewritten(value, own)
        if isinstance(value, ast.JoinedStr) and own.isdisjoint(_names(value)):
            return value if not list(_names(value)) else self.code(value, own)
        return self.code(value, own) if isinstance(value, ast.expr) else value


def _names(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            yield one.id
