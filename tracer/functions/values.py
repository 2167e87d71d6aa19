"""What a name stands for while a function's source is walked: symbols of the tracer, and what is known of the rest.

A `Ref` is made by somebody at run time; everything else is built of refs and of objects that are at hand. Nothing is
computed before a component needs it as a value.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, TypeGuard

from teola_plugin.graph import Ref
from teola_plugin.tracer.functions.source import Definition
from teola_plugin.tracer.symbols import Prompted, Record, Value


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """An object that is at hand: a constant, a model, a class, `self`."""

    value: Any


@dataclass(frozen=True, slots=True)
class Unknown:
    """Whatever user code makes of it."""


@dataclass(slots=True, eq=False)
class Computed:
    """What a pure expression gives; a CALL computes it once somebody needs it."""

    code: ast.expr
    """Its free names are those of `refs` and `objects`, and builtins."""
    refs: Mapping[str, Ref] = field(default_factory=dict)
    objects: Mapping[str, object] = field(default_factory=dict)
    made: list[tuple[object, Ref]] = field(default_factory=list)
    """Drafts that have a CALL of it."""

    def ref_in(self, draft: object) -> Ref | None:
        """Of its CALL in a draft."""
        return next((ref for known, ref in self.made if known is draft), None)


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """Texts and values, one after the other: an f-string."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """All items of a list, in a `Series`."""

    of: Symbol


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """A list, or a tuple, of which something is known."""

    items: tuple[Item, ...]
    kind: type = list


@dataclass(frozen=True, slots=True, eq=False)
class Fields:
    """`{**base, **items}`; with `attributes`, an object of which these are fields, such as a state."""

    items: Mapping[str, Symbol] = field(default_factory=dict)
    base: Ref | None = None
    attributes: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """An object of one of the framework's data classes, such as a message."""

    kind: type
    fields: Mapping[str, Symbol]


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A `Send` for each of some items: what a router returns."""

    items: Symbol
    one: Built
    """The `Send` for an item; it reads the item, and what is captured."""
    captured: Mapping[str, Ref]


@dataclass(frozen=True, slots=True, eq=False)
class Coming:
    """A coroutine that gives this when it is awaited."""

    value: Symbol


@dataclass(frozen=True, slots=True, eq=False)
class Defined:
    """A function that is defined in the function, and reads values of it."""

    definition: Definition
    code: CodeType
    defaults: Mapping[str, Symbol]
    read: Callable[[str], Symbol]
    """Names of the function around it."""


Symbol = Ref | Prompted | Known | Unknown | Computed | Text | Series | Fields | Built | Sent | Coming | Defined
Piece = str | Symbol
Item = Spread | Symbol

UNKNOWN_VALUE = Unknown()
RUNS = ("invoke", "ainvoke", "batch", "abatch", "stream", "astream")
"""Methods of a Runnable that run it."""
_PLAIN = (str, int, float, bool, type(None), bytes)


def is_constant(value: object) -> bool:
    """Whether it is a constant as source code has them."""
    return type(value) in _PLAIN or (type(value) is tuple and all(map(is_constant, value)))


def in_pieces(symbol: Item) -> TypeGuard[Series]:
    """Whether it is a list whose beginning may be known before its end."""
    return isinstance(symbol, Series) and len(symbol.items) > 1 and any(isinstance(i, Spread) for i in symbol.items)


def symbol_of(value: Value | Symbol) -> Symbol:
    """A tracer's value as a symbol of a walk."""
    if isinstance(value, Record):
        return Fields({key: symbol_of(inner) for key, inner in value.items.items()}, value.base)
    return value


def as_state(symbol: Symbol) -> Symbol:
    """The same value; its keys may also be read as attributes."""
    if isinstance(symbol, Ref):
        return Fields({}, symbol, attributes=True)
    return Fields(symbol.items, symbol.base, attributes=True) if isinstance(symbol, Fields) else symbol


def known_object(symbol: Symbol) -> tuple[bool, Any]:
    """Whether all of it is at hand, and it."""
    if isinstance(symbol, Known):
        return True, symbol.value
    if isinstance(symbol, Text):
        return all(isinstance(piece, str) for piece in symbol.pieces), "".join(map(str, symbol.pieces))
    if isinstance(symbol, Series) and not any(isinstance(item, Spread) for item in symbol.items):
        found = [known_object(item) for item in symbol.items if not isinstance(item, Spread)]
        return all(known for known, _ in found), symbol.kind(value for _, value in found)
    if isinstance(symbol, Fields) and symbol.base is None and not symbol.attributes:
        pairs = {key: known_object(inner) for key, inner in symbol.items.items()}
        return all(known for known, _ in pairs.values()), {key: value for key, (_, value) in pairs.items()}
    return False, None


def words(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())
