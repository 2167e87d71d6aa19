"""Statements of a function's source: what they assign, and how far the walk goes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from teola_plugin.graph import ITEM, Ref
from teola_plugin.tracer.functions.calls import CHANGES, may_write
from teola_plugin.tracer.functions.composing import bind, spread, truth
from teola_plugin.tracer.functions.conditions import both_ways
from teola_plugin.tracer.functions.defining import defined
from teola_plugin.tracer.functions.loops import UNROLLED, Items
from teola_plugin.tracer.functions.machine import Flow, Walker
from teola_plugin.tracer.functions.reading import attribute
from teola_plugin.tracer.functions.values import (
    UNKNOWN_VALUE,
    Computed,
    Fields,
    Known,
    Series,
    Spread,
    Symbol,
    known_object,
)

Rule = Callable[[Walker, ast.stmt], Flow]
_JUMPS = (ast.Return, ast.Raise, ast.Break, ast.Continue)
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


def assigned(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that statements assign to, or whose values they may change."""
    found: set[str] = set()
    for one in (inner for node in nodes for inner in ast.walk(node)):
        if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load):
            found.add(one.id)
        elif isinstance(one, (ast.Subscript, ast.Attribute)) and not isinstance(one.ctx, ast.Load):
            found |= _root(one)
        elif isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in CHANGES:
            found |= _root(one.func)
    return found


def _root(node: ast.expr) -> set[str]:
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def _forget(walk: Walker, nodes: Sequence[ast.AST]) -> None:
    for name in assigned(nodes):
        walk.frame.names[name] = UNKNOWN_VALUE


def _inside(nodes: Sequence[ast.stmt], kinds: tuple[type, ...]) -> Iterator[ast.AST]:
    """Statements of these kinds, but for those of functions that are defined there."""
    for node in nodes:
        if isinstance(node, kinds):
            yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _inside(list(ast.iter_child_nodes(node)), kinds)  # type: ignore[arg-type]


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
        before = ast.Name(node.target.id, ast.Load())
        made = walk.evaluate(ast.BinOp(before, node.op, node.value))
    else:
        made = UNKNOWN_VALUE
        walk.evaluate(node.value)
    _set(walk, node.target, made)
    return Flow.NEXT


def _set(walk: Walker, target: ast.expr, value: Symbol) -> None:
    if isinstance(target, (ast.Name, ast.Tuple, ast.List)):
        bind(walk, target, value)
    elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
        _set_key(walk, target, target.value.id, value)
    elif isinstance(target, ast.Attribute):
        owner = walk.evaluate(target.value)
        if isinstance(owner, Known):
            walk.changed[id(owner.value), target.attr] = value
        for name in _root(target) if not isinstance(owner, Known) else ():
            walk.frame.names[name] = UNKNOWN_VALUE


def _set_key(walk: Walker, target: ast.Subscript, name: str, value: Symbol) -> None:
    of, (known, key) = walk.frame.read(name), known_object(walk.evaluate(target.slice))
    if isinstance(of, Fields) and known and type(key) is str:
        walk.frame.names[name] = replace(of, items={**of.items, key: value})
    else:
        walk.frame.names[name] = UNKNOWN_VALUE


def _delete(walk: Walker, node: ast.stmt) -> Flow:
    _forget(walk, [node])
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
    walk.frame.names[node.name] = UNKNOWN_VALUE if isinstance(node, ast.ClassDef) else defined(walk, node)
    return Flow.NEXT


# ------------------------------------------------------------ what may happen, or not


def _if(walk: Walker, node: ast.If, rest: Sequence[ast.stmt]) -> tuple[Flow, bool]:
    """How it ends, and whether that is the end of the block: what comes after one that may end it belongs to it."""
    walk.line = node.lineno
    test = walk.evaluate(node.test)
    decided = truth(test)
    if decided is not None:
        return walk.block(node.body if decided else node.orelse), False
    if any(isinstance(one, ast.Raise) for one in node.body):
        return walk.block(node.orelse), False  # as if nothing went wrong
    arms = [*node.body, *node.orelse]
    ends = any(True for _ in _inside(arms, _ENDS))
    ways: tuple[Sequence[ast.stmt], Sequence[ast.stmt]] = (node.body, node.orelse)
    if ends:
        ways = ([*node.body, *rest], [*node.orelse, *rest])
    if any(True for _ in _inside(arms, (ast.Break,))) or not walk.may_try():
        return _left(walk, arms, ends), False
    flow = both_ways(walk, test, ways, assigned(ways[0]) | assigned(ways[1]))
    return flow, ends


def _left(walk: Walker, arms: Sequence[ast.stmt], ends: bool) -> Flow:
    """Neither way is looked into."""
    walk.left_out = True
    _forget(walk, arms)
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


# ------------------------------------------------------------ loops


def _for(walk: Walker, node: ast.stmt) -> Flow:
    assert isinstance(node, ast.For)
    items = walk.evaluate(node.iter)
    ends = [one for one in _inside(node.body, _JUMPS) if not isinstance(one, ast.Continue)]
    if ends or node.orelse:
        walk.left_out = True
        _forget(walk, [node.target, *node.body, *node.orelse])
        if may_write(walk, [*node.body, *node.orelse]):
            walk.user_code()
        leaves = any(isinstance(one, (ast.Return, ast.Raise)) for one in ends)
        return Flow.STOPPED if leaves or node.orelse else Flow.NEXT
    known = spread(items)
    if len(known) <= UNROLLED and not any(isinstance(one, Spread) for one in known):
        return _unrolled(walk, node, [one for one in known if not isinstance(one, Spread)])
    _mapped(walk, node, items)
    return Flow.NEXT


def _unrolled(walk: Walker, node: ast.For, items: Sequence[Symbol]) -> Flow:
    for item in items:
        bind(walk, node.target, item)
        if walk.block(node.body) is Flow.STOPPED:
            _forget(walk, [node.target, *node.body])
            return Flow.NEXT
    return Flow.NEXT


def _mapped(walk: Walker, node: ast.For, items: Symbol) -> None:
    """What is asked for with each item is asked for at once; the plain loop comes one by one."""
    found = Items(walk, items)
    body = found.body
    names = assigned(node.body)
    grown = _grown(node.body)
    for name in names - grown.keys():
        body.frame.names[name] = UNKNOWN_VALUE
    for name in grown:
        body.frame.names[name] = Series(())
    bind(body, node.target, Ref(ITEM))
    flow = body.block(node.body)
    lists = {name: body.frame.names.get(name, UNKNOWN_VALUE) for name in grown}
    walk.left_out = walk.left_out or body.left_out or flow is Flow.STOPPED
    before = {name: walk.frame.read(name) for name in grown}
    made = found.holder(_output(lists), beside=True)
    _forget(walk, [node.target, *node.body])
    if flow is Flow.NEXT and isinstance(made, Ref):
        for name, was in before.items():
            walk.frame.names[name] = _longer(was, made, name if len(lists) > 1 else "")


def _grown(body: Sequence[ast.stmt]) -> dict[str, None]:
    """Lists to which each round adds one item, and of which nothing else is known to happen."""
    found: dict[str, None] = {}
    others: set[str] = set()
    for node in body:
        name = _appended(node)
        if name and name not in found:
            found[name] = None
            others |= assigned([node.value.args[0]]) | _read([node.value.args[0]])  # type: ignore[attr-defined]
        else:
            others |= assigned([node]) | _read([node])
    return {name: None for name in found if name not in others}


def _appended(node: ast.stmt) -> str:
    """The name in `name.append(item)`."""
    call = node.value if isinstance(node, ast.Expr) else None
    func = call.func if isinstance(call, ast.Call) and len(call.args) == 1 else None
    is_append = isinstance(func, ast.Attribute) and func.attr == "append" and isinstance(func.value, ast.Name)
    return func.value.id if is_append else ""  # type: ignore[union-attr]


def _read(nodes: Sequence[ast.AST]) -> set[str]:
    return {one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)}


def _output(lists: Mapping[str, Symbol]) -> Symbol:
    """What is added to the lists in one round."""
    added = {name: one.items[0] for name, one in lists.items() if isinstance(one, Series) and len(one.items) == 1}
    plain = {name: one for name, one in added.items() if not isinstance(one, Spread)}
    if len(plain) < len(lists) or not plain:
        return UNKNOWN_VALUE
    return next(iter(plain.values())) if len(plain) == 1 else Fields(plain)


def _longer(before: Symbol, made: Ref, key: str) -> Symbol:
    if not isinstance(before, (Series, Ref)) and not (isinstance(before, Known) and type(before.value) is list):
        return UNKNOWN_VALUE
    added: Symbol = made
    if key:
        one = ast.comprehension(ast.Name("one", ast.Store()), ast.Name("teola_made", ast.Load()), [], 0)
        element = ast.Subscript(ast.Name("one", ast.Load()), ast.Constant(key), ast.Load())
        added = Computed(ast.ListComp(element, [one]), {"teola_made": made})
    items = spread(before)
    return Series((*items, Spread(added))) if items else added


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
    ast.For: _for,
}
