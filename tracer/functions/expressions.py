"""What expressions give, in symbols. Calls are in `calls`, what is done item by item in `loops`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from teola_plugin.graph import Ref
from teola_plugin.tracer.functions import texts
from teola_plugin.tracer.functions.building import piped
from teola_plugin.tracer.functions.calls import call
from teola_plugin.tracer.functions.composing import composed, read_attribute, read_key, series, spread
from teola_plugin.tracer.functions.comprehensions import asks_inside, comprehension
from teola_plugin.tracer.functions.defining import defined
from teola_plugin.tracer.functions.machine import Walker
from teola_plugin.tracer.functions.values import (
    UNKNOWN_VALUE,
    Coming,
    Computed,
    Fields,
    Item,
    Known,
    Series,
    Symbol,
    Unknown,
)

Rule = Callable[[Walker, ast.expr], Symbol]


def evaluate(walk: Walker, node: ast.expr) -> Symbol:
    """What the expression gives; unknown for what no rule understands."""
    rule = _RULES.get(type(node))
    return UNKNOWN_VALUE if rule is None else rule(walk, node)


# ------------------------------------------------------------ containers


def _list(walk: Walker, node: ast.expr) -> Symbol:
    assert isinstance(node, (ast.List, ast.Tuple))
    items: list[Item] = []
    for part in node.elts:
        if isinstance(part, ast.Starred):
            items += spread(walk.evaluate(part.value))
        else:
            items.append(walk.evaluate(part))
    return series(items, tuple if isinstance(node, ast.Tuple) else list)


def _dictionary(walk: Walker, node: ast.expr) -> Symbol:
    assert isinstance(node, ast.Dict)
    items: dict[str, Symbol] = {}
    base: Ref | None = None
    understood = True
    for key, value in zip(node.keys, node.values, strict=True):
        made = walk.evaluate(value)
        if key is None:
            fields = _as_fields(made)
            if fields is None or (fields.base is not None and (base is not None or items)):
                understood = False
                continue
            base = fields.base or base
            items |= fields.items
            continue
        name = walk.evaluate(key)
        if isinstance(name, Known) and type(name.value) is str:
            items[name.value] = made
        else:
            understood = False
    return Fields(items, base) if understood else UNKNOWN_VALUE


def _as_fields(symbol: Symbol) -> Fields | None:
    if isinstance(symbol, Ref):
        return Fields({}, symbol)
    if isinstance(symbol, Known) and type(symbol.value) is dict and all(type(key) is str for key in symbol.value):
        return Fields({key: Known(value) for key, value in symbol.value.items()})
    return symbol if isinstance(symbol, Fields) else None


# ------------------------------------------------------------ values of values


def _subscript(walk: Walker, node: ast.expr) -> Symbol:
    assert isinstance(node, ast.Subscript)
    of = walk.evaluate(node.value)
    if isinstance(of, Unknown):
        return of
    if isinstance(node.slice, ast.Slice):
        return _sliced(walk, node, of, node.slice)
    key = walk.evaluate(node.slice)
    found = read_key(walk, of, key)
    return composed(walk, node, {"value": of, "slice": key}) if found is None else found


def _sliced(walk: Walker, node: ast.Subscript, of: Symbol, ends: ast.Slice) -> Symbol:
    given = {
        name: walk.evaluate(end) for name in ("lower", "upper", "step") if (end := getattr(ends, name)) is not None
    }
    between = composed(walk, ends, given)
    if not isinstance(between, Computed):
        return UNKNOWN_VALUE
    made = composed(walk, node, {"value": of, "slice": Computed(ast.Constant(0))})
    if not isinstance(made, Computed):
        return made
    code = ast.Subscript(made.code.value, between.code, ast.Load())  # type: ignore[attr-defined]
    return Computed(code, {**made.refs, **between.refs}, {**made.objects, **between.objects})


def _attribute(walk: Walker, node: ast.expr) -> Symbol:
    assert isinstance(node, ast.Attribute)
    return read_attribute(walk, walk.evaluate(node.value), node.attr)


def _operation(walk: Walker, node: ast.expr) -> Symbol:
    assert isinstance(node, ast.BinOp)
    left, right = walk.evaluate(node.left), walk.evaluate(node.right)
    made: Symbol | None = None
    if isinstance(node.op, ast.Add):
        made = texts.added(left, right) or _concatenated(left, right)
    elif isinstance(node.op, ast.Mod):
        made = texts.percent(left, right)
    elif isinstance(node.op, ast.BitOr):
        made = piped(left, right)
    return composed(walk, node, {"left": left, "right": right}) if made is None else made


def _concatenated(left: Symbol, right: Symbol) -> Symbol | None:
    """Two lists, where anything is known of one of them."""
    both = [isinstance(one, Series) or (isinstance(one, Known) and type(one.value) is list) for one in (left, right)]
    if not any(both):
        return None
    return series([*spread(left), *spread(right)])


def _compared(walk: Walker, node: ast.expr) -> Symbol:
    assert isinstance(node, ast.Compare)
    left, others = walk.evaluate(node.left), [walk.evaluate(one) for one in node.comparators]
    if len(others) == 1 and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
        other = others[0]
        if isinstance(left, Known) and isinstance(other, Known):
            return Known((left.value is other.value) == isinstance(node.ops[0], ast.Is))
        if not isinstance(left, Known) and not isinstance(other, Known):
            return UNKNOWN_VALUE  # of two that are made anew nobody can tell whether they are one object
    return composed(walk, node, {"left": left, "comparators": others})


def _either(walk: Walker, node: ast.expr) -> Symbol:
    """`and`, `or`: only the first is sure to be evaluated."""
    assert isinstance(node, ast.BoolOp)
    first, *rest = node.values
    value = walk.evaluate(first)
    decided = walk.truth(value)
    if decided is not None:
        if decided == isinstance(node.op, ast.Or) or not rest:
            return value
        return walk.evaluate(rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
    if any(asks_inside(one) for one in rest):
        return UNKNOWN_VALUE
    return composed(walk, node, {"values": [value, *map(walk.evaluate, rest)]})


def _chosen(walk: Walker, node: ast.expr) -> Symbol:
    assert isinstance(node, ast.IfExp)
    test = walk.evaluate(node.test)
    decided = walk.truth(test)
    if decided is not None:
        return walk.evaluate(node.body if decided else node.orelse)
    if asks_inside(node.body) or asks_inside(node.orelse):
        return UNKNOWN_VALUE
    return composed(walk, node, {"test": test, "body": walk.evaluate(node.body), "orelse": walk.evaluate(node.orelse)})


def _awaited(walk: Walker, node: ast.expr) -> Symbol:
    assert isinstance(node, ast.Await)
    made = walk.evaluate(node.value)
    return made.value if isinstance(made, Coming) else UNKNOWN_VALUE


def _named(walk: Walker, node: ast.expr) -> Symbol:
    assert isinstance(node, ast.NamedExpr)
    made = walk.evaluate(node.value)
    walk.frame.names[node.target.id] = made
    return made


_RULES: Mapping[type[ast.expr], Rule] = {
    ast.Constant: lambda walk, node: Known(node.value),  # type: ignore[attr-defined]
    ast.Name: lambda walk, node: walk.frame.read(node.id),  # type: ignore[attr-defined]
    ast.JoinedStr: texts.f_string,  # type: ignore[dict-item]
    ast.List: _list,
    ast.Tuple: _list,
    ast.Dict: _dictionary,
    ast.Subscript: _subscript,
    ast.Attribute: _attribute,
    ast.BinOp: _operation,
    ast.UnaryOp: lambda walk, node: composed(walk, node, {"operand": walk.evaluate(node.operand)}),  # type: ignore[attr-defined]
    ast.Compare: _compared,
    ast.BoolOp: _either,
    ast.IfExp: _chosen,
    ast.Await: _awaited,
    ast.NamedExpr: _named,
    ast.Lambda: defined,  # type: ignore[dict-item]
    ast.Call: call,  # type: ignore[dict-item]
    ast.ListComp: comprehension,
    ast.GeneratorExp: comprehension,
    ast.SetComp: comprehension,
    ast.DictComp: comprehension,
}
