"""Pure expressions of a function's source: made into functions of one argument, and proven by their bytecode."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType, MemberDescriptorType
from typing import Any

from langchain_core.messages import BaseMessage

from teola_plugin.graph import Ref, UnfitValue
from teola_plugin.tracer.functions.reading import derives_from, of_framework
from teola_plugin.tracer.functions.values import Computed, is_constant
from teola_plugin.tracer.purity.purity import Purity, cached_purity, call_on_plain
from teola_plugin.tracer.symbols import NotUnderstood

_LARGEST = 400
"""Nodes of an expression that is put together of several."""


@dataclass(frozen=True, slots=True)
class Proven:
    """`func({name: value})`, certainly pure."""

    func: FunctionType
    reads: Purity
    inputs: Mapping[str, Ref]

    def __call__(self, **given: Any) -> Any:
        return call_on_plain(self.func, given, self.reads.degree)


def proven(computed: Computed) -> Proven:
    """Raises `NotUnderstood` for an expression that is not certain to be pure."""
    order = _Order()
    try:
        text = ast.unparse(ast.fix_missing_locations(order.visit(_copy(computed.code))))
    except Exception:  # too deep, or quotes inside quotes
        raise NotUnderstood("an expression that cannot be written down") from None
    inputs = {order.names[name]: ref for name, ref in computed.refs.items() if name in order.names}
    objects = {order.names[name]: one for name, one in computed.objects.items() if name in order.names}
    func = _maker(text, tuple(inputs), tuple(objects))(*objects.values())
    reads = cached_purity(func)
    if reads is None:
        raise NotUnderstood("an expression that is not certain to be pure")
    return Proven(func, reads, inputs)


def value_of(computed: Computed) -> Any:
    """Of an expression of constants. Raises `NotUnderstood`, or what the expression raises."""
    if computed.refs:
        raise NotUnderstood("an expression of values that are not there yet")
    return proven(computed)()


def is_small(code: ast.expr) -> bool:
    """Whether more may be put around it."""
    return sum(1 for _ in ast.walk(code)) <= _LARGEST


def constant(value: object) -> ast.expr | None:
    """Source code of a constant."""
    if type(value) is tuple and is_constant(value):
        parts = [constant(one) for one in value]
        return ast.Tuple([part for part in parts if part is not None], ast.Load())
    if is_constant(value) and (not isinstance(value, (str, bytes)) or len(value) <= 10_000):
        return ast.Constant(value)  # type: ignore[arg-type]
    return None


class _Order(ast.NodeTransformer):
    """Gives names that were made for a walk others that depend on the expression alone."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if not node.id.startswith(MADE):
            return node
        name = self.names.setdefault(node.id, f"{MADE}{len(self.names)}")
        return ast.Name(name, node.ctx)


MADE = "teola_"
"""Beginning of the names that stand for values and objects in an expression."""


def _copy(code: ast.expr) -> ast.expr:
    """Transformers change what they are given."""
    return ast.parse(ast.unparse(ast.fix_missing_locations(code)), mode="eval").body


@lru_cache(maxsize=1024)
def _maker(text: str, inputs: tuple[str, ...], objects: tuple[str, ...]) -> Any:
    """A function of the objects that makes the function of the values; both are of expressions alone."""
    body: Any = _Given(frozenset(inputs)).visit(ast.parse(text, mode="eval").body)
    inner = _function("teola_given", body)
    for name in reversed(objects):
        inner = _function(name, inner)
    made = eval(compile(ast.fix_missing_locations(ast.Expression(inner)), "<pure>", "eval"), {})
    return lambda *given: _applied(made, given)


def _applied(made: Any, given: tuple[Any, ...]) -> Any:
    for one in given:
        made = made(one)
    return made


def _function(name: str, body: ast.expr) -> ast.Lambda:
    arguments = ast.arguments(posonlyargs=[], args=[ast.arg(name)], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Lambda(arguments, body)


class _Given(ast.NodeTransformer):
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self._names:
            return node
        return ast.Subscript(ast.Name("teola_given", ast.Load()), ast.Constant(node.id), ast.Load())


def field_of(value: Any, name: str) -> Any:
    """`value.name`, where that runs no code: a field of a data class, pydantic's or of the standard library.

    And the text of a message. Raises `TypeError` for anything else.
    """
    kind = type(value)
    if name == "text" and derives_from(kind, BaseMessage) and of_framework(kind):
        return str(value.text)
    own: Any = kind.__getattribute__
    if own is object.__getattribute__:
        held = next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), None)
        if type(held) is MemberDescriptorType:  # of `slots=True`
            return held.__get__(value, kind)
        if not hasattr(type(held), "__set__") and name in getattr(value, "__dict__", {}):
            return value.__dict__[name]
    raise UnfitValue(f"{name} is no field of {kind.__name__}")
