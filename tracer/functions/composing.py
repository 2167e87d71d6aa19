"""Values made of values: what is known of them is read off, the rest is computed when it is needed."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from teola_plugin.graph import Ref
from teola_plugin.tracer.functions.machine import Walker
from teola_plugin.tracer.functions.pure import is_small, value_of
from teola_plugin.tracer.functions.reading import attribute
from teola_plugin.tracer.functions.values import (
    UNKNOWN_VALUE,
    Built,
    Computed,
    Fields,
    Item,
    Known,
    Series,
    Spread,
    Symbol,
    Text,
    is_constant,
    known_object,
)
from teola_plugin.tracer.purity.calls import FIELDS
from teola_plugin.tracer.symbols import NotUnderstood


def composed(walk: Walker, node: ast.expr, parts: Mapping[str, Symbol | list[Symbol]]) -> Symbol:
    """The expression with its parts in their places, to be computed when it is needed."""
    refs: dict[str, Ref] = {}
    objects: dict[str, object] = {}
    fields = {name: getattr(node, name, None) for name in node._fields}
    for name, part in parts.items():
        made = [walk.code(one) for one in (part if isinstance(part, list) else [part])]
        known = [one for one in made if one is not None]
        if len(known) < len(made):
            return UNKNOWN_VALUE
        for one in known:
            refs |= one.refs
            objects |= one.objects
        codes = [one.code for one in known]
        fields[name] = codes if isinstance(part, list) else codes[0]
    made_of: Any = fields
    code = type(node)(**made_of)
    if not is_small(code):
        return UNKNOWN_VALUE
    whole = Computed(code, refs, objects)
    return whole if refs else _folded(whole)


def read_key(walk: Walker, of: Symbol, key: Symbol) -> Symbol | None:
    """`of[key]`; None where nothing is known of it beyond its code."""
    found, name = known_object(key)
    if not found or type(name) not in (str, int):
        return None
    if isinstance(of, Ref):
        return of.at(name)
    if isinstance(of, Fields):
        if name in of.items:
            return of.items[name]
        return of.base.at(name) if of.base is not None else UNKNOWN_VALUE
    if isinstance(of, Series) and type(name) is int:
        return _item(of, name)
    if isinstance(of, Known) and type(of.value) in (dict, list, tuple):
        try:
            return Known(of.value[name])
        except (LookupError, TypeError):
            return UNKNOWN_VALUE
    return None


def _item(of: Series, place: int) -> Symbol | None:
    """The item there, if no list of unknown length stands before it."""
    items = of.items if place >= 0 else of.items[::-1]
    place = place if place >= 0 else -1 - place
    before = items[: place + 1]
    if len(before) <= place:
        return None if any(isinstance(item, Spread) for item in items) else UNKNOWN_VALUE
    if any(isinstance(item, Spread) for item in before):
        return None
    found = before[place]
    assert not isinstance(found, Spread)
    return found


def read_attribute(walk: Walker, of: Symbol, name: str) -> Symbol:
    """`of.name`, where that is a field."""
    if isinstance(of, Known):
        return walk.changed.get((id(of.value), name)) or attribute(of.value, name)
    if isinstance(of, Built):
        return of.fields.get(name, UNKNOWN_VALUE)
    if isinstance(of, Fields):
        if not of.attributes:
            return UNKNOWN_VALUE
        return of.items.get(name) or (of.base.at(name) if of.base is not None else UNKNOWN_VALUE)
    if isinstance(of, (Ref, Computed)):
        made = composed(walk, ast.Attribute(ast.Constant(0), name, ast.Load()), {"value": of})
        return made if name in FIELDS or not isinstance(of, Ref) else _read(walk, made)
    return UNKNOWN_VALUE


def _folded(computed: Computed) -> Symbol:
    """An expression of constants is one."""
    try:
        value = value_of(computed)
    except Exception:  # not pure, or the plain code will tell
        return computed
    return Known(value) if is_constant(value) else computed


def _read(walk: Walker, field: Symbol) -> Symbol:
    """A field of an object of the user's own, which no expression can read, so that a CALL does."""
    try:
        return walk.ref(field)
    except NotUnderstood:
        return UNKNOWN_VALUE


def series(items: Sequence[Item], kind: type = list) -> Symbol:
    """A list of the items."""
    only = items[0] if len(items) == 1 else None
    return only.of if isinstance(only, Spread) and kind is list else Series(tuple(items), kind)


def spread(symbol: Symbol) -> list[Symbol | Spread]:
    """The items of a list, one by one where they are known."""
    if isinstance(symbol, Series):
        return list(symbol.items)
    if isinstance(symbol, Known) and type(symbol.value) in (list, tuple):
        return [Known(one) for one in symbol.value]
    return [Spread(symbol)]


def truth(symbol: Symbol) -> bool | None:
    """Whether a condition holds; None where that is not known yet."""
    if isinstance(symbol, Known):
        return _truth_of(symbol.value)
    if isinstance(symbol, Computed) and not symbol.refs:
        try:
            return bool(value_of(symbol))
        except Exception:  # the plain code will tell
            return None
    if isinstance(symbol, Series) and not any(isinstance(item, Spread) for item in symbol.items):
        return bool(symbol.items)
    if isinstance(symbol, Fields) and not symbol.attributes and (symbol.items or symbol.base is None):
        return bool(symbol.items)
    if isinstance(symbol, Text) and any(isinstance(piece, str) and piece for piece in symbol.pieces):
        return True
    return None


def _truth_of(value: object) -> bool | None:
    if value is None or type(value) in (bool, int, float, str, list, tuple, dict):
        return bool(value)
    plain = not any("__bool__" in vars(one) or "__len__" in vars(one) for one in type(value).__mro__)
    return True if plain else None


def bind(walk: Walker, target: ast.expr, value: Symbol) -> None:
    """Assigns to a name, or to several."""
    if isinstance(target, ast.Name):
        walk.frame.names[target.id] = value
    elif isinstance(target, (ast.Tuple, ast.List)):
        starred = any(isinstance(one, ast.Starred) for one in target.elts)
        for place, one in enumerate(target.elts):
            found = None if starred else read_key(walk, value, Known(place))
            inner = one.value if isinstance(one, ast.Starred) else one
            bind(walk, inner, UNKNOWN_VALUE if found is None else found)
