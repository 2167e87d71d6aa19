"""Values that code changes in place, and names that it assigns: by what was interpreted, and by its text alone."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from teola_plugin.graph import Path, Ref
from teola_plugin.tracer.functions.lookup import is_instance
from teola_plugin.tracer.functions.symbols import Expression, Fields, ItemList, KnownValue, Symbol, Unknown, word_set

MUTATING_METHODS = word_set("add append clear extend insert pop popitem remove reverse setdefault sort update")
"""Methods that change a list, a dictionary or a set."""
_WRITING_METHODS = word_set("add insert")
"""Those of them whose names are also methods of stores and indexes."""
_MUTABLE_TYPES = (dict, list, set)
_ALIASING_NODES = (ast.Attribute, ast.BoolOp, ast.IfExp, ast.Name, ast.NamedExpr, ast.Subscript)
"""Expressions that return an object that was there before, not a new one."""
_ALIASING_METHODS = ("get", "pop", "setdefault")


@dataclass(slots=True)
class Mutations:
    """The values that a function, and those that it calls, have changed in place so far.

    No symbol stands for such a value any more: whoever reads it must treat it as unknown.
    """

    refs: set[Ref] = field(default_factory=set)
    objects: dict[int, object] = field(default_factory=dict)
    """Changed symbols, and changed objects that exist already, by id."""

    def add(self, symbol: Symbol) -> None:
        """Record that the value of a symbol was changed, or may have been."""
        if isinstance(symbol, Ref):
            self.refs.add(symbol)
        elif isinstance(symbol, KnownValue):
            if _is_mutable(symbol.value):
                self.objects[id(symbol.value)] = symbol.value
        elif not isinstance(symbol, Unknown):
            self.objects[id(symbol)] = symbol
            if isinstance(symbol, Expression) and _is_alias(symbol.code):
                self.refs.update(symbol.refs.values())
                for value in symbol.objects.values():
                    self.add(KnownValue(value))

    def add_items(self, symbol: Symbol) -> None:
        """Record that the items of a list were changed: a new list, too, may hold objects that were there before."""
        self.add(symbol)
        if isinstance(symbol, Expression):
            self.refs.update(symbol.refs.values())

    def has(self, symbol: Symbol) -> bool:
        """Return True if the symbol stands for a value that has changed since."""
        if not (self.refs or self.objects):
            return False
        if isinstance(symbol, Ref):
            return any(_overlap(symbol, ref) for ref in self.refs)
        return id(symbol.value if isinstance(symbol, KnownValue) else symbol) in self.objects

    def has_inside(self, symbol: Symbol) -> bool:
        """Return True if the value of the symbol, or a value that it consists of, has changed since."""
        if self.has(symbol):
            return True
        if isinstance(symbol, Fields):
            base_changed = symbol.base is not None and self.has(symbol.base)
            return base_changed or any(map(self.has_inside, symbol.items.values()))
        return isinstance(symbol, Expression) and any(map(self.has, symbol.refs.values()))

    @property
    def change_objects(self) -> bool:
        """True if a container or a model that exists already, or the environment, may have been changed."""
        return any(map(_is_mutable, self.objects.values()))

    def copy(self) -> Mutations:
        """Return a copy, to which more can be added."""
        return Mutations(set(self.refs), dict(self.objects))

    def update(self, other: Mutations) -> None:
        """Add all that `other` has."""
        self.refs |= other.refs
        self.objects |= other.objects

    def add_from_body(self, body: Mutations, captures: Mapping[str, Ref]) -> list[Path]:
        """Add what the body of a loop or a branch changes of the values that it captures.

        `captures` are the refs outside the body by the names that they have in it. Returns the paths in its own item
        that the body changes.
        """
        self.objects |= body.objects
        item_paths: list[Path] = []
        for ref in body.refs:
            if ref.producer == "$item":
                item_paths.append(ref.path)
            elif (captured := captures.get(ref.producer.removeprefix("$"))) is not None:
                self.refs.add(captured.at(*ref.path))
        return item_paths


def _is_mutable(value: object) -> bool:
    """Return True for containers, for what new models read, and for objects of Pydantic's classes, as models are."""
    reads_of_models = (os.environ, sys.modules.get("openai"))
    return (
        type(value) in _MUTABLE_TYPES or any(value is one for one in reads_of_models) or is_instance(value, BaseModel)
    )


def is_mutable_container(symbol: Symbol) -> bool:
    """Return True if the symbol is known to be a list, a dictionary or a set, which `+=` and `|=` change in place."""
    if isinstance(symbol, KnownValue):
        return type(symbol.value) in _MUTABLE_TYPES
    return isinstance(symbol, Fields) or (isinstance(symbol, ItemList) and symbol.kind is list)


def _overlap(left: Ref, right: Ref) -> bool:
    """Return True if one of the refs is the other, or a part of it."""
    depth = min(len(left.path), len(right.path))
    return left.producer == right.producer and left.path[:depth] == right.path[:depth]


def _is_alias(code: ast.expr) -> bool:
    if isinstance(code, ast.Call):
        return isinstance(code.func, ast.Attribute) and code.func.attr in _ALIASING_METHODS
    return isinstance(code, _ALIASING_NODES)


# ------------------------------------------------------------ names in the text of code


def changes_container(call: ast.Call) -> bool:
    """Return True for a call of a method by which lists, dictionaries and sets are changed, as far as its code shows.

    `index.insert(document)` and `collection.add(ids=...)` of a store are none: a list's `insert` takes two arguments.
    """
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name in _WRITING_METHODS and (call.keywords or len(call.args) != (2 if name == "insert" else 1)):
        return False
    return name in MUTATING_METHODS


def mutated_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names whose values the code may change in place."""
    return {name for node in nodes for part in ast.walk(node) for name in _names_mutated_by(part)}


def assigned_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names that the code assigns, or whose values it may change in place."""
    names: set[str] = set()
    for part in (part for node in nodes for part in ast.walk(node)):
        if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
            names.add(part.id)
        else:
            names |= _names_mutated_by(part)
    return names


def _names_mutated_by(node: ast.AST) -> set[str]:
    """Return the names whose values the node may change in place by itself, without the nodes inside it."""
    if isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
        return root_name(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING_METHODS:
        return root_name(node.func)
    return set()


def root_name(node: ast.expr) -> set[str]:
    """Return the name in `name.a[0].b`; an empty set if another expression stands there."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def nonlocal_names(node: ast.AST) -> set[str]:
    """Return the names of enclosing functions that code in a function or class assigns."""
    return {name for part in ast.walk(node) if isinstance(part, ast.Nonlocal) for name in part.names}


def names_in(nodes: Sequence[ast.AST]) -> set[str]:
    """Return all names that occur in the code."""
    return {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}


def loop_carried_names(body: Sequence[ast.stmt]) -> list[str]:
    """Return the names that an iteration of a loop reads as the iteration before has left them."""
    carried: dict[str, None] = {}
    assigned_in_body, assigned_so_far = assigned_names(body), set[str]()
    for node in body:
        read = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
        if isinstance(node, ast.AugAssign):
            read |= root_name(node.target)
        carried |= dict.fromkeys(sorted(read & assigned_in_body - assigned_so_far))
        assigned_so_far |= assigned_names([node])
    return list(carried)


def has_statement(nodes: Iterable[ast.AST], kinds: tuple[type, ...]) -> bool:
    """Return True if there is a statement of these kinds, outside the functions and classes that are defined there."""
    for node in nodes:
        if isinstance(node, kinds):
            return True
        is_scope = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda))
        if not is_scope and has_statement(ast.iter_child_nodes(node), kinds):
            return True
    return False
