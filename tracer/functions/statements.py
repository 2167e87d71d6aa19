"""Statements of a function's source: what they assign, and how far the walk goes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from teola_plugin.tracer.functions.assigning import assigned, assigned_around, forget, inside
from teola_plugin.tracer.functions.calls import may_write
from teola_plugin.tracer.functions.composing import bind
from teola_plugin.tracer.functions.conditions import both_ways
from teola_plugin.tracer.functions.defining import defined
from teola_plugin.tracer.functions.in_place import grows, root
from teola_plugin.tracer.functions.machine import Flow, Walker
from teola_plugin.tracer.functions.reading import attribute
from teola_plugin.tracer.functions.rounds import for_each, while_true
from teola_plugin.tracer.functions.values import (
    UNKNOWN_VALUE,
    Fields,
    Known,
    Symbol,
    known_object,
)

Rule = Callable[[Walker, ast.stmt], Flow]
_ENDS = (ast.Return, ast.Raise, ast.Continue)
"""What ends a function, or a round of a loop."""


def statement(walk: Walker, node: ast.stmt) -> Flow:
    """Walks through one statement."""
    rule = _RULES.get(type(node))
    if rule is None:
        return Flow.STOPPED
    walk.line = node.lineno
    return rule(walk, node)


def block(walk: Walker, statements: Sequence[ast.stmt]) -> Flow:
    """Walks through statements, one after the other."""
    for place, one in enumerate(statements):
        if isinstance(one, ast.If):
            flow, ended = _if(walk, one, statements[place + 1 :])
        else:
            flow, ended = statement(walk, one), False
        if ended or flow is not Flow.NEXT:
            return flow
    return Flow.NEXT


# ------------------------------------------------------------ simple statements


def _expression(walk: Walker, node: ast.stmt) -> Flow:
    assert isinstance(node, ast.Expr)
    walk.evaluate(node.value)
    return Flow.NEXT


def _assign(walk: Walker, node: ast.stmt) -> Flow:
    assert isinstance(node, ast.Assign)
    value = walk.evaluate(node.value)
    for target in node.targets:
        _set(walk, target, value)
    return Flow.NEXT


def _annotated(walk: Walker, node: ast.stmt) -> Flow:
    assert isinstance(node, ast.AnnAssign)
    if node.value is not None:
        _set(walk, node.target, walk.evaluate(node.value))
    return Flow.NEXT


def _augmented(walk: Walker, node: ast.stmt) -> Flow:
    assert isinstance(node, ast.AugAssign)
    if isinstance(node.target, ast.Name):
        name = ast.Name(node.target.id, ast.Load())
        before = walk.evaluate(name)
        made = walk.evaluate(ast.BinOp(name, node.op, node.value))
        if grows(before) or grows(made):
            walk.in_place.add(before)
    else:
        made = UNKNOWN_VALUE
        walk.evaluate(node.value)
        walk.in_place.add(walk.evaluate(_loaded(node.target)))
    _set(walk, node.target, made)
    return Flow.NEXT


def _set(walk: Walker, target: ast.expr, value: Symbol) -> None:
    if isinstance(target, (ast.Name, ast.Tuple, ast.List)):
        bind(walk, target, value)
        for one in ast.walk(target):
            if isinstance(one, (ast.Subscript, ast.Attribute)) and not isinstance(one.ctx, ast.Load):
                _set(walk, one, UNKNOWN_VALUE)
    elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
        _set_key(walk, target, target.value.id, value)
    elif isinstance(target, ast.Subscript):
        walk.in_place.add(walk.evaluate(target.value))
    elif isinstance(target, ast.Attribute):
        owner = walk.evaluate(target.value)
        walk.in_place.add(owner)
        if isinstance(owner, Known):
            walk.changed[id(owner.value), target.attr] = value
        for name in root(target) if not isinstance(owner, Known) else ():
            walk.frame.names[name] = UNKNOWN_VALUE


def _set_key(walk: Walker, target: ast.Subscript, name: str, value: Symbol) -> None:
    of, (known, key) = walk.evaluate(target.value), known_object(walk.evaluate(target.slice))
    walk.in_place.add(of)
    if isinstance(of, Fields) and known and type(key) is str:
        walk.frame.names[name] = replace(of, items={**of.items, key: value})
    else:
        walk.frame.names[name] = UNKNOWN_VALUE


def _loaded(target: ast.expr) -> ast.expr:
    """What is there before it is assigned to."""
    return ast.fix_missing_locations(ast.parse(ast.unparse(target), mode="eval").body)


def _delete(walk: Walker, node: ast.stmt) -> Flow:
    assert isinstance(node, ast.Delete)
    for target in node.targets:
        if isinstance(target, (ast.Subscript, ast.Attribute)):
            walk.in_place.add(walk.evaluate(target.value))
    forget(walk, [node])
    return Flow.NEXT


def _return(walk: Walker, node: ast.stmt) -> Flow:
    assert isinstance(node, ast.Return)
    walk.frame.returned = Known(None) if node.value is None else walk.evaluate(node.value)
    return Flow.ENDED


def _continue(walk: Walker, node: ast.stmt) -> Flow:
    return Flow.ENDED


def _raise(walk: Walker, node: ast.stmt) -> Flow:
    return Flow.ENDED


def _pass(walk: Walker, node: ast.stmt) -> Flow:
    return Flow.NEXT


def _assert(walk: Walker, node: ast.stmt) -> Flow:
    assert isinstance(node, ast.Assert)
    walk.evaluate(node.test)
    return Flow.NEXT


def _import(walk: Walker, node: ast.stmt) -> Flow:
    """What is imported already is at hand."""
    assert isinstance(node, (ast.Import, ast.ImportFrom))
    for one in node.names:
        name = one.asname or one.name.split(".", 1)[0]
        if isinstance(node, ast.Import):
            module = sys.modules.get(one.name if one.asname else name)
            found: Symbol = UNKNOWN_VALUE if module is None else Known(module)
        else:
            module = sys.modules.get(node.module or "") if not node.level else None
            found = UNKNOWN_VALUE if module is None else attribute(module, one.name)
        walk.frame.names[name] = found
        if isinstance(found, type(UNKNOWN_VALUE)):
            walk.user_code()
    return Flow.NEXT


def _define(walk: Walker, node: ast.stmt) -> Flow:
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    walk.frame.elsewhere |= assigned_around(node)
    walk.frame.names[node.name] = UNKNOWN_VALUE if isinstance(node, ast.ClassDef) else defined(walk, node)
    return Flow.NEXT


# ------------------------------------------------------------ what may happen, or not


def _if(walk: Walker, node: ast.If, rest: Sequence[ast.stmt]) -> tuple[Flow, bool]:
    """How it ends, and whether that is the end of the block: what comes after one that may end it belongs to it."""
    walk.line = node.lineno
    test = walk.evaluate(node.test)
    decided = walk.truth(test)
    if decided is not None:
        return walk.block(node.body if decided else node.orelse), False
    if any(isinstance(one, ast.Raise) for one in node.body):
        return walk.block(node.orelse), False  # as if nothing went wrong
    arms = [*node.body, *node.orelse]
    ends = any(True for _ in inside(arms, _ENDS))
    ways: tuple[Sequence[ast.stmt], Sequence[ast.stmt]] = (node.body, node.orelse)
    if ends:
        ways = ([*node.body, *rest], [*node.orelse, *rest])
    breaks = any(True for _ in inside(arms, (ast.Break,)))
    if breaks or not walk.may_try():
        return _left(walk, arms, ends or breaks), False
    flow = both_ways(walk, test, ways, assigned(ways[0]) | assigned(ways[1]))
    return flow, ends


def _left(walk: Walker, arms: Sequence[ast.stmt], ends: bool) -> Flow:
    """Neither way is looked into."""
    walk.left_out = True
    forget(walk, arms)
    if may_write(walk, arms):
        walk.user_code()
    return Flow.STOPPED if ends else Flow.NEXT


def _try(walk: Walker, node: ast.stmt) -> Flow:
    """As if nothing went wrong."""
    assert isinstance(node, ast.Try)
    flow = walk.block(node.body)
    if flow is Flow.NEXT:
        flow = walk.block(node.orelse)
    if flow is not Flow.STOPPED and node.finalbody:
        last = walk.block(node.finalbody)
        flow = flow if last is Flow.NEXT else last
    return flow


_RULES: Mapping[type[ast.stmt], Rule] = {
    ast.Expr: _expression,
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented,
    ast.Delete: _delete,
    ast.Return: _return,
    ast.Raise: _raise,
    ast.Continue: _continue,
    ast.Pass: _pass,
    ast.Assert: _assert,
    ast.Import: _import,
    ast.ImportFrom: _import,
    ast.FunctionDef: _define,
    ast.AsyncFunctionDef: _define,
    ast.ClassDef: _define,
    ast.Try: _try,
    ast.For: for_each,
    ast.AsyncFor: for_each,
    ast.While: while_true,
}
