"""What a walk found out, for whoever goes on with it: without what waits for user code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from teola_plugin.graph import Ref
from teola_plugin.tracer.draft import Draft
from teola_plugin.tracer.functions.values import (
    UNKNOWN_VALUE,
    Built,
    Coming,
    Computed,
    Defined,
    Fields,
    Sent,
    Series,
    Spread,
    Symbol,
    Text,
    Unknown,
    symbol_of,
)
from teola_plugin.tracer.symbols import Prompted


def exported(symbol: Symbol, lost: set[str], before: Draft, draft: Draft) -> Symbol:
    """The symbol, whose components went from one draft to another; what waits for a lost one is unknown."""

    def inner(one: Symbol) -> Symbol:
        return exported(one, lost, before, draft)

    if isinstance(symbol, Ref):
        return UNKNOWN_VALUE if symbol.producer in lost else symbol
    if isinstance(symbol, Computed):
        made = symbol.ref_in(before)
        if any(ref.producer in lost for ref in (*symbol.refs.values(), *([made] if made else []))):
            return UNKNOWN_VALUE
        return replace(symbol, made=[(draft, made)] if made else [])
    if isinstance(symbol, Prompted):
        unknown = any(isinstance(inner(symbol_of(one)), Unknown) for _, one in symbol.inputs)
        return UNKNOWN_VALUE if unknown else symbol
    if isinstance(symbol, Fields) and symbol.base is not None and symbol.base.producer in lost:
        return UNKNOWN_VALUE
    if isinstance(symbol, Sent):
        items = inner(symbol.items)
        unknown = isinstance(items, Unknown) or any(ref.producer in lost for ref in symbol.captured.values())
        return UNKNOWN_VALUE if unknown else replace(symbol, items=items)
    if isinstance(symbol, Defined):
        return UNKNOWN_VALUE
    return inner(symbol.value) if isinstance(symbol, Coming) else _each(symbol, inner)


def producers(symbol: Symbol) -> set[str]:
    """Whose values it is made of."""
    found: set[str] = set()

    def note(one: Symbol) -> Symbol:
        if isinstance(one, Ref):
            found.add(one.producer)
        elif isinstance(one, Computed):
            found.update(ref.producer for ref in (*one.refs.values(), *(ref for _, ref in one.made)))
        elif isinstance(one, Prompted):
            for _, inner in one.inputs:
                note(symbol_of(inner))
        elif isinstance(one, Fields) and one.base is not None:
            found.add(one.base.producer)
        elif isinstance(one, Sent):
            note(one.items)
            found.update(ref.producer for ref in one.captured.values())
        return note(one.value) if isinstance(one, Coming) else _each(one, note)

    note(symbol)
    return found


def _each(symbol: Symbol, inner: Callable[[Symbol], Symbol]) -> Symbol:
    """The symbol with its parts changed."""
    if isinstance(symbol, Text):
        return Text(tuple(piece if isinstance(piece, str) else inner(piece) for piece in symbol.pieces))
    if isinstance(symbol, Series):
        items = (Spread(inner(one.of)) if isinstance(one, Spread) else inner(one) for one in symbol.items)
        return Series(tuple(items), symbol.kind)
    if isinstance(symbol, Fields):
        return replace(symbol, items={key: inner(one) for key, one in symbol.items.items()})
    if isinstance(symbol, Built):
        return Built(symbol.kind, {key: inner(one) for key, one in symbol.fields.items()})
    return symbol
