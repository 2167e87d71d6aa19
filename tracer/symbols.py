"""Symbolic values: what flows through a chain while it is walked and nothing runs.

A value is a `Ref` (somebody makes it, or the query brings it), a `Record` (a dictionary whose keys are values of their
own, so that data edges are key-level), or `Prompted` (a formatted prompt, not yet needed as a value by anybody).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.graph import LeftToPlain, PromptPart, Ref

BASE = "**"
"""Input name of a record's base, as in `{**base, "key": ...}`."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """`{**base, **items}`; without a base, exactly the keys of `items`."""

    items: Mapping[str, Value] = field(default_factory=dict)
    base: Ref | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Prompted:
    """A prompt template and the values of its variables; formatted only where somebody needs the result."""

    inputs: tuple[tuple[str, Value], ...]
    parts: tuple[PromptPart, ...]
    render: Callable[[Mapping[str, Any]], Any]
    """Values by input name -> the framework's prompt value; missing ones are `UNKNOWN`, cut off after the first."""
    is_text: bool = False
    """Whether it is rendered as a text, which may be a variable of another prompt: its beginning may be known first."""


Value = Ref | Record | Prompted


class NotUnderstood(LeftToPlain):
    """Why a node is not lowered, in words for the report. No error: the node runs as it always did."""


def simplest(value: Value) -> Value:
    """A record that only stands for its base is that ref."""
    return value.base if isinstance(value, Record) and value.base is not None and not value.items else value


def read_key(value: Value, key: str | int) -> Value:
    """`value[key]`. Raises `NotUnderstood` where the plain object would fail, or where that is not known."""
    if isinstance(value, Ref):
        return value.at(key)
    if isinstance(value, Record):
        if key in value.items:
            return value.items[key]  # type: ignore[index]
        if value.base is not None:
            return value.base.at(key)
        raise NotUnderstood(f"reads the key {key!r}, which the dictionary before it does not have")
    raise NotUnderstood("reads a key of a prompt")


def merged(value: Value, items: Mapping[str, Value]) -> Record:
    """`{**value, **items}`."""
    if isinstance(value, Record):
        return Record({**value.items, **items}, value.base)
    if isinstance(value, Ref):
        return Record(items, value)
    raise NotUnderstood("adds keys to a prompt")


def leaves(value: Value, name: str = "input") -> Iterator[tuple[str, Ref]]:
    """Every ref that a reader of the whole value depends on, with a readable name."""
    value = simplest(value)
    if isinstance(value, Ref):
        yield name, value
        return
    inside = "" if name == "input" else f"{name}."
    if isinstance(value, Record) and value.base is not None:
        yield inside + BASE, value.base
    for key, inner in value.items.items() if isinstance(value, Record) else value.inputs:
        yield from leaves(inner, inside + key)


def unique(pairs: Iterator[tuple[str, Ref]]) -> tuple[tuple[str, Ref], ...]:
    """The same pairs with every name once (a later namesake gets a number)."""
    found: dict[str, Ref] = {}
    for name, ref in pairs:
        again, count = name, 2
        while again in found:
            again, count = f"{name}#{count}", count + 1
        found[again] = ref
    return tuple(found.items())


def packer(value: Record) -> tuple[tuple[tuple[str, Ref], ...], Callable[..., dict[str, Any]]]:
    """The inputs of a CALL that builds the dictionary for real, and its callable."""
    plan: list[tuple[tuple[str, ...], Ref]] = list(_places(value, ()))
    inputs = unique((".".join(place) or BASE, ref) for place, ref in plan)
    places = [(name, place) for (name, _), (place, _) in zip(inputs, plan, strict=True)]

    def pack(**inputs: Any) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, place in places:
            *outer, last = place
            inside = made
            for key in outer:
                inside = inside.setdefault(key, {})
            if last == BASE:
                inside.update(inputs[name])
            else:
                inside[last] = inputs[name]
        return made

    return inputs, pack


def _places(value: Record, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Ref]]:
    if value.base is not None:
        yield (*above, BASE), value.base
    for key, inner in value.items.items():
        if isinstance(inner, Record):
            yield from _places(inner, (*above, key))
        elif isinstance(inner, Ref):
            yield (*above, key), inner
        else:
            raise NotUnderstood("passes a dictionary with an unformatted prompt on")
