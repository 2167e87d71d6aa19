"""`for` and `while`: what is asked for in every round, all at once where no round needs the one before it."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from teola_plugin.graph import CARRY, ITEM, Component, Ref, Role
from teola_plugin.tracer.draft import DERIVED, Span
from teola_plugin.tracer.functions.assigning import assigned, carried, forget, inside
from teola_plugin.tracer.functions.calls import may_write
from teola_plugin.tracer.functions.capturing import Captures
from teola_plugin.tracer.functions.composing import bind, read_key, spread, truth
from teola_plugin.tracer.functions.growing import Growing, taken, written_out
from teola_plugin.tracer.functions.live import asks
from teola_plugin.tracer.functions.loops import UNROLLED, Items, listed
from teola_plugin.tracer.functions.machine import Flow, Walker
from teola_plugin.tracer.functions.pure import value_of
from teola_plugin.tracer.functions.values import (
    UNKNOWN_VALUE,
    Computed,
    Known,
    Spread,
    Symbol,
)
from teola_plugin.tracer.symbols import NotUnderstood


def for_each(walk: Walker, node: ast.stmt) -> Flow:
    """A `for` loop."""
    assert isinstance(node, (ast.For, ast.AsyncFor))
    items = _at_hand(walk.evaluate(node.iter))
    known = spread(items)
    fixed = [one for one in known if not isinstance(one, Spread)] if len(known) <= UNROLLED else []
    whole = len(fixed) == len(known)
    if node.orelse or any(True for _ in inside(node.body, (ast.Return, ast.Raise, ast.Break))):
        first = fixed[0] if whole and fixed else read_key(walk, items, Known(0))
        return _first_round(walk, node, UNKNOWN_VALUE if first is None else first)
    if whole:
        return _unrolled(walk, node, fixed)
    before = dict(walk.frame.names)
    if not _mapped(walk, node, items) and not _folded(walk, node, items, before):
        walk.left_out = True
    return Flow.NEXT


def while_true(walk: Walker, node: ast.stmt) -> Flow:
    """A `while` loop: no more is sure than its first round, if that is."""
    assert isinstance(node, ast.While)
    begins = truth(walk.evaluate(node.test))
    if begins is False:
        return walk.block(node.orelse)
    flow = walk.block(node.body) if begins else Flow.STOPPED
    return _left(walk, node, flow)


def _at_hand(items: Symbol) -> Symbol:
    """`range(3)` and the like, as a list."""
    found = listed(items)
    if isinstance(found, Computed) and not found.refs:
        try:
            return Known(value_of(found))
        except Exception:  # not pure, or the plain code will tell
            return items
    return items


# ------------------------------------------------------------ loops that may end before their end


def _first_round(walk: Walker, node: ast.For | ast.AsyncFor, first: Symbol) -> Flow:
    """Nobody knows how many rounds there will be; if any, then this one."""
    bind(walk, node.target, first)
    return _left(walk, node, walk.block(node.body))


def _left(walk: Walker, node: ast.For | ast.AsyncFor | ast.While, flow: Flow) -> Flow:
    """After a first round that ended so."""
    body = [*node.body, *node.orelse]
    leaves = any(True for _ in inside(body, (ast.Return, ast.Raise)))
    again = any(True for _ in inside(node.body, (ast.Break, ast.Continue)))
    if flow is Flow.ENDED and not again:
        return flow
    walk.left_out = True
    forget(walk, body if isinstance(node, ast.While) else [node.target, *body])
    if may_write(walk, body):
        walk.user_code()
    return Flow.STOPPED if leaves or node.orelse or isinstance(node, ast.While) else Flow.NEXT


# ------------------------------------------------------------ loops over all items


def _unrolled(walk: Walker, node: ast.For | ast.AsyncFor, items: Sequence[Symbol]) -> Flow:
    for item in items:
        bind(walk, node.target, item)
        if walk.block(node.body) is Flow.STOPPED:
            forget(walk, [node.target, *node.body])
            return Flow.NEXT
    return Flow.NEXT


def _mapped(walk: Walker, node: ast.For | ast.AsyncFor, items: Symbol) -> bool:
    """What is asked for with each item is asked for at once; the plain loop comes one by one. Whether that is any."""
    found = Items(walk, items)
    growing = Growing.of(walk, node.body)
    body, asked = found.body, len(walk.draft.components)
    body.frame.names |= dict.fromkeys(assigned(node.body), UNKNOWN_VALUE) | growing.begun
    bind(body, node.target, Ref(ITEM))
    flow = body.block(growing.statements)
    walk.left_out = walk.left_out or body.left_out or flow is Flow.STOPPED
    added = {} if flow is Flow.STOPPED else growing.added(body.frame.names)  # no more ends it than `continue`
    pure = written_out(found, added)
    made = found.holder(growing.output(added), beside=True)
    forget(walk, [node.target, *node.body])
    asks_early = any(asks(c) for c in list(walk.draft.components.values())[asked:])
    if isinstance(made, Ref) and asks_early:
        lists = {name: taken(walk, made, name if len(added) > 1 else "") for name in added}
        walk.frame.names |= growing.grown(walk, added, lists)
    elif not asks_early:
        walk.frame.names |= growing.grown(walk, added, pure)
    return asks_early or len(pure) > 0


def _folded(walk: Walker, node: ast.For | ast.AsyncFor, items: Symbol, before: Mapping[str, Symbol]) -> bool:
    """Each round needs what the one before it made of one name. Whether it is so, and that is understood.

    `before`: what the names stood for when the loop began.
    """
    names = carried(node.body)
    if len(names) != 1:
        return False
    (name,) = names
    captures = Captures(walk)
    body = captures.body()
    body.frame.names |= dict.fromkeys(assigned(node.body), UNKNOWN_VALUE) | {name: Ref(CARRY)}
    bind(body, node.target, Ref(ITEM))
    flow = body.block(node.body)
    if captures.changed_in(body):
        walk.in_place.add(items)
    try:
        made = body.ref(body.frame.names[name])
        inputs = {"items": walk.ref(listed(items)), "init": walk.ref(before.get(name, UNKNOWN_VALUE))}
    except NotUnderstood:
        return False
    if flow is not Flow.NEXT or body.finished(made) != (made, True):
        return False
    fold = walk.draft.name(f"{walk.name}.each", *DERIVED)
    template = body.draft.template(made, fold)
    walk.draft.absorb(body.draft)
    every = (*inputs.items(), *captures.inputs.items())
    ref = walk.draft.add(Component(fold, Role.FOLD, every, body=template))
    walk.emitted(Span((fold,), (fold,)))
    walk.frame.names[name] = ref
    return True
