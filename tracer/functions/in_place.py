"""Values that code changes in place: what anybody else holds of them is not what it was."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from teola_plugin.graph import Path, Ref
from teola_plugin.tracer.functions.values import Computed, Fields, Known, Series, Symbol, Unknown, words

CHANGES = words("add append clear extend insert pop popitem remove reverse setdefault sort update")
"""Methods that change a list, a dictionary or a set."""
_KINDS = (dict, list, set)
_ONE_OF_ITS_PARTS = (ast.Attribute, ast.BoolOp, ast.IfExp, ast.Name, ast.NamedExpr, ast.Subscript)
"""Expressions that give an object that was there before, not a new one."""
_GIVES_A_PART = ("get", "pop", "setdefault")


@dataclass(slots=True)
class InPlace:
    """What has been changed so far, by the walk of one function and of those that it calls."""

    refs: set[Ref] = field(default_factory=set)
    held: dict[int, object] = field(default_factory=dict)
    """Symbols, and objects at hand, by id."""

    def add(self, symbol: Symbol) -> None:
        """Its value was changed, or may have been."""
        if isinstance(symbol, Ref):
            self.refs.add(symbol)
        elif isinstance(symbol, Known):
            if type(symbol.value) in _KINDS:
                self.held[id(symbol.value)] = symbol.value
        elif not isinstance(symbol, Unknown):
            self.held[id(symbol)] = symbol
            if isinstance(symbol, Computed) and _is_a_part(symbol.code):
                self.refs.update(symbol.refs.values())

    def has(self, symbol: Symbol) -> bool:
        """Whether it stands for what was there before."""
        if not (self.refs or self.held):
            return False
        if isinstance(symbol, Ref):
            return any(_overlap(symbol, one) for one in self.refs)
        return id(symbol.value if isinstance(symbol, Known) else symbol) in self.held

    def inside(self, symbol: Symbol) -> bool:
        """Whether it has been changed, or something that it holds."""
        if self.has(symbol):
            return True
        if isinstance(symbol, Fields):
            return (symbol.base is not None and self.has(symbol.base)) or any(map(self.inside, symbol.items.values()))
        return isinstance(symbol, Computed) and any(map(self.has, symbol.refs.values()))

    def copy(self) -> InPlace:
        return InPlace(set(self.refs), dict(self.held))

    def update(self, other: InPlace) -> None:
        self.refs |= other.refs
        self.held |= other.held

    def of_body(self, body: InPlace, inputs: dict[str, Ref]) -> Iterator[Path]:
        """What a body changes of what it captures, by the names of its `inputs`, was changed here. Yields where it
        changes its item."""
        self.held |= body.held
        for ref in body.refs:
            if ref.producer == "$item":
                yield ref.path
            elif (captured := inputs.get(ref.producer.removeprefix("$"))) is not None:
                self.refs.add(captured.at(*ref.path))


def grows(value: Symbol) -> bool:
    """Whether `+=` and the like with it changes a list, a dictionary or a set, as far as is known."""
    if isinstance(value, Known):
        return type(value.value) in _KINDS
    return isinstance(value, Fields) or (isinstance(value, Series) and value.kind is list)


def changed(nodes: Sequence[ast.AST]) -> set[str]:
    """Names whose values code may change in place."""
    return {name for node in nodes for one in ast.walk(node) for name in targets(one)}


def targets(node: ast.AST) -> set[str]:
    """`changed` of a node by itself."""
    if isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
        return root(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        return root(node.func)
    return set()


def root(node: ast.expr) -> set[str]:
    """The name in `name.a[0].b`."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def _overlap(one: Ref, other: Ref) -> bool:
    shorter = min(len(one.path), len(other.path))
    return one.producer == other.producer and one.path[:shorter] == other.path[:shorter]


def _is_a_part(code: ast.expr) -> bool:
    if isinstance(code, ast.Call):
        return isinstance(code.func, ast.Attribute) and code.func.attr in _GIVES_A_PART
    return isinstance(code, _ONE_OF_ITS_PARTS)
