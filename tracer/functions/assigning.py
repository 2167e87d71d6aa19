"""What statements may assign, change, or jump to, as far as their text tells."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from teola_plugin.tracer.functions.in_place import changed, root, targets
from teola_plugin.tracer.functions.machine import Walker
from teola_plugin.tracer.functions.values import UNKNOWN_VALUE


def assigned(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that statements assign to, or whose values they may change."""
    found: set[str] = set()
    for one in (inner for node in nodes for inner in ast.walk(node)):
        if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load):
            found.add(one.id)
        else:
            found |= targets(one)
    return found


def assigned_around(node: ast.AST) -> set[str]:
    """Names of the functions around it that code in a function or class assigns to."""
    return {name for one in ast.walk(node) if isinstance(one, ast.Nonlocal) for name in one.names}


def names_read(nodes: Sequence[ast.AST]) -> set[str]:
    return {one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)}


def carried(body: Sequence[ast.stmt]) -> list[str]:
    """Names that a round of a loop reads as the round before has left them."""
    found: dict[str, None] = {}
    ours, so_far = assigned(body), set[str]()
    for node in body:
        read = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
        if isinstance(node, ast.AugAssign):
            read |= root(node.target)
        found |= dict.fromkeys(sorted(read & ours - so_far))
        so_far |= assigned([node])
    return list(found)


def forget(walk: Walker, nodes: Sequence[ast.AST]) -> None:
    """What they assign is not known any more."""
    for name in changed(nodes):
        walk.in_place.add(walk.frame.read(name))
    for name in assigned(nodes):
        walk.frame.names[name] = UNKNOWN_VALUE


def inside(nodes: Sequence[ast.stmt], kinds: tuple[type, ...]) -> Iterator[ast.AST]:
    """Statements of these kinds, but for those of functions that are defined there."""
    for node in nodes:
        if isinstance(node, kinds):
            yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from inside(list(ast.iter_child_nodes(node)), kinds)  # type: ignore[arg-type]
