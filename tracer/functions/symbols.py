"""Symbols: what the names and expressions of a function stand for while its source is interpreted.

A `Ref` is a value that a component makes at run time. Every other symbol is built of refs and of objects that exist
already. Nothing is computed before a component needs it as a value.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, TypeGuard

from teola_plugin.graph import Ref
from teola_plugin.tracer.draft import Draft
from teola_plugin.tracer.source import Definition
from teola_plugin.tracer.symbols import Prompted, Record, Value


@dataclass(frozen=True, slots=True, eq=False)
class KnownValue:
    """An object that exists while the source is read: a constant, a model, a class, `self`."""

    value: Any


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value of which nothing is known, such as what user code returns."""

    is_plain: bool = False
    """True for data that code without side effects computes, such as the date: only the run can tell its value, but
    writing it as a text, or comparing it, runs no code of the user's."""


@dataclass(slots=True, eq=False)
class Expression:
    """A Python expression on refs and objects. A CALL computes it once a component needs its value."""

    code: ast.expr
    """Its free names are the keys of `refs` and `objects`, and builtins."""
    refs: Mapping[str, Ref] = field(default_factory=dict)
    objects: Mapping[str, object] = field(default_factory=dict)
    calls: list[tuple[Draft, Ref]] = field(default_factory=list)
    """The drafts that have a CALL of it, each with the CALL's ref."""

    def ref_in(self, draft: Draft) -> Ref | None:
        """Return the ref of its CALL in a draft; None if the draft has none."""
        return next((ref for owner, ref in self.calls if owner is draft), None)

    def at(self, *keys: Hashable) -> Expression:
        """Return `value[key][key]...` of this value."""
        code = self.code
        for key in keys:
            code = ast.Subscript(code, ast.Constant(key), ast.Load())  # type: ignore[arg-type]
        return Expression(code, self.refs, self.objects)


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A text made of constants and values, one after the other, such as an f-string."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """The part `*iterable` of an `ItemList`: all items of an iterable whose length is not known."""

    iterable: Symbol


@dataclass(frozen=True, slots=True, eq=False)
class ItemList:
    """A list, or a tuple, of which some items are known."""

    items: tuple[Item, ...]
    kind: type = list


@dataclass(frozen=True, slots=True, eq=False)
class Fields:
    """The dictionary `{**base, **items}`; with `attributes`, an object with these fields, such as a graph's state."""

    items: Mapping[str, Symbol] = field(default_factory=dict)
    base: Ref | None = None
    attributes: bool = False
    fields_only: bool = False
    """True if nothing but its fields is known: not how the object is written, compared or iterated over."""


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object of one of the framework's data classes, such as a message."""

    kind: type
    fields: Mapping[str, Symbol]


@dataclass(frozen=True, slots=True, eq=False)
class DataObject:
    """An object of a data class of the user's, such as settings. Nothing but its fields is known of it."""

    kind: type
    fields: Mapping[str, Symbol]


@dataclass(frozen=True, slots=True, eq=False)
class InstancePerItem:
    """A list with one `Send` or `RemoveMessage` for each of some items, as routers and nodes of a graph return it."""

    items: Symbol
    instance: Instance
    """The object for one item. It reads the item, and the values in `captures`."""
    captures: Mapping[str, Ref]


@dataclass(frozen=True, slots=True, eq=False)
class AwaitableValue:
    """A coroutine that returns `value` when it is awaited."""

    value: Symbol


@dataclass(frozen=True, slots=True, eq=False)
class LocalFunction:
    """A function that is defined in the interpreted function and reads values of it."""

    definition: Definition
    code: CodeType
    defaults: Mapping[str, Symbol]
    read_outer: Callable[[str], Symbol]
    """Reads a name of the function around it."""


Symbol = (
    Ref
    | Prompted
    | KnownValue
    | Unknown
    | Expression
    | Text
    | ItemList
    | Fields
    | Instance
    | DataObject
    | InstancePerItem
    | AwaitableValue
    | LocalFunction
)
Piece = str | Symbol
Item = Spread | Symbol

UNKNOWN_VALUE = Unknown()
RUN_TIME_VALUE = Unknown(is_plain=True)
RUN_METHODS = ("invoke", "ainvoke", "batch", "abatch", "stream", "astream")
"""Methods of a Runnable that run it."""
_CONSTANT_TYPES = (str, int, float, bool, type(None), bytes)


def is_constant(value: object) -> bool:
    """Return True for a value that source code can write as a constant."""
    return type(value) in _CONSTANT_TYPES or (type(value) is tuple and all(map(is_constant, value)))


def is_known_in_parts(symbol: Item) -> TypeGuard[ItemList]:
    """Return True for a list whose beginning may be known before its end."""
    return (
        isinstance(symbol, ItemList)
        and len(symbol.items) > 1
        and any(isinstance(item, Spread) for item in symbol.items)
    )


def symbol_of_item(item: Item) -> Symbol:
    """Return the item, or the iterable whose items it stands for."""
    return item.iterable if isinstance(item, Spread) else item


def to_symbol(value: Value | Symbol) -> Symbol:
    """Return the symbol for a value of the tracer."""
    if isinstance(value, Record):
        return Fields({key: to_symbol(item) for key, item in value.items.items()}, value.base)
    return value


def with_attributes(symbol: Symbol) -> Symbol:
    """Return the same dictionary as an object whose keys may also be read as attributes."""
    if isinstance(symbol, Ref):
        return Fields({}, symbol, attributes=True)
    return Fields(symbol.items, symbol.base, attributes=True) if isinstance(symbol, Fields) else symbol


def known_value(symbol: Symbol) -> tuple[bool, Any]:
    """Return whether the whole value of the symbol is known, and that value."""
    if isinstance(symbol, KnownValue):
        return True, symbol.value
    if isinstance(symbol, Text):
        return all(isinstance(piece, str) for piece in symbol.pieces), "".join(map(str, symbol.pieces))
    if isinstance(symbol, ItemList) and not any(isinstance(item, Spread) for item in symbol.items):
        items = [known_value(item) for item in symbol.items if not isinstance(item, Spread)]
        return all(is_known for is_known, _ in items), symbol.kind(value for _, value in items)
    if isinstance(symbol, Fields) and symbol.base is None and not symbol.attributes:
        fields = {key: known_value(item) for key, item in symbol.items.items()}
        return all(is_known for is_known, _ in fields.values()), {key: value for key, (_, value) in fields.items()}
    return False, None


def word_set(*lines: str) -> frozenset[str]:
    """Return the words of some lines."""
    return frozenset(word for line in lines for word in line.split())


# ------------------------------------------------------------ symbols made of symbols


def add_input(inputs: dict[str, Ref], ref: Ref, make_name: Callable[[str], str]) -> str:
    """Return the name under which a component takes a ref as input. It is added to `inputs` if it is new.

    `make_name` makes a name of the ref's last key, or of its producer; a later namesake gets a number.
    """
    for name, input_ref in inputs.items():
        if input_ref == ref:
            return name
    base = make_name(next((key for key in reversed(ref.path) if isinstance(key, str)), ref.producer.strip("$")))
    name, count = base, 1
    while name in inputs:
        count += 1
        name = f"{base}{count}"
    inputs[name] = ref
    return name


def merge_inputs(expressions: Iterable[Expression]) -> tuple[dict[str, Ref], dict[str, object]]:
    """Return the refs and the objects of all these expressions, for an expression that is made of them."""
    refs: dict[str, Ref] = {}
    objects: dict[str, object] = {}
    for expression in expressions:
        refs |= expression.refs
        objects |= expression.objects
    return refs, objects


def map_parts(symbol: Symbol, change: Callable[[Symbol], Symbol]) -> Symbol:
    """Return the symbol with `change` applied to each symbol that it directly consists of."""
    if isinstance(symbol, Text):
        return Text(tuple(piece if isinstance(piece, str) else change(piece) for piece in symbol.pieces))
    if isinstance(symbol, ItemList):
        items = (Spread(change(i.iterable)) if isinstance(i, Spread) else change(i) for i in symbol.items)
        return ItemList(tuple(items), symbol.kind)
    if isinstance(symbol, Fields):
        return replace(symbol, items={key: change(item) for key, item in symbol.items.items()})
    if isinstance(symbol, Instance):
        return Instance(symbol.kind, {key: change(item) for key, item in symbol.fields.items()})
    if isinstance(symbol, DataObject):
        return DataObject(symbol.kind, {key: change(item) for key, item in symbol.fields.items()})
    return symbol


def producers(symbol: Symbol) -> set[str]:
    """Return the names of all components whose values the symbol is made of."""
    names: set[str] = set()

    def collect(part: Symbol) -> Symbol:
        """Add the components that a part is made of to `names`. Return the part, as `map_parts` expects."""
        if isinstance(part, Ref):
            names.add(part.producer)
        elif isinstance(part, Expression):
            names.update(ref.producer for ref in (*part.refs.values(), *(ref for _, ref in part.calls)))
        elif isinstance(part, Prompted):
            for _, value in part.inputs:
                collect(to_symbol(value))
        elif isinstance(part, Fields) and part.base is not None:
            names.add(part.base.producer)
        elif isinstance(part, InstancePerItem):
            collect(part.items)
            names.update(ref.producer for ref in part.captures.values())
        return collect(part.value) if isinstance(part, AwaitableValue) else map_parts(part, collect)

    collect(symbol)
    return names


def move_to_draft(symbol: Symbol, removed: set[str], source: Draft, target: Draft) -> Symbol:
    """Return the symbol after its components went from the draft `source` to `target`, but for those in `removed`.

    Whatever depends on a removed component becomes unknown, and so do functions, which no other reader can call.
    """

    def move(part: Symbol) -> Symbol:
        return move_to_draft(part, removed, source, target)

    if isinstance(symbol, Ref):
        return UNKNOWN_VALUE if symbol.producer in removed else symbol
    if isinstance(symbol, Expression):
        call = symbol.ref_in(source)
        if any(ref.producer in removed for ref in (*symbol.refs.values(), *([call] if call else []))):
            return UNKNOWN_VALUE
        return replace(symbol, calls=[(target, call)] if call else [])
    if isinstance(symbol, Prompted):
        is_unknown = any(isinstance(move(to_symbol(value)), Unknown) for _, value in symbol.inputs)
        return UNKNOWN_VALUE if is_unknown else symbol
    if isinstance(symbol, Fields) and symbol.base is not None and symbol.base.producer in removed:
        return UNKNOWN_VALUE
    if isinstance(symbol, InstancePerItem):
        items = move(symbol.items)
        is_unknown = isinstance(items, Unknown) or any(ref.producer in removed for ref in symbol.captures.values())
        return UNKNOWN_VALUE if is_unknown else replace(symbol, items=items)
    if isinstance(symbol, LocalFunction):
        return UNKNOWN_VALUE
    return move(symbol.value) if isinstance(symbol, AwaitableValue) else map_parts(symbol, move)
