"""Symbolic values that flow through a chain while it is traced and nothing runs.

A value is a `Ref` (a component makes it, or the query brings it), a `Record` (a dictionary whose keys are values of
their own, so that data edges are key-level), or `Prompted` (a formatted prompt that nothing reads as a value yet).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.graph import LeftToOriginal, PromptPart, Ref

BASE = "**"
"""Input name of a record's base, as in `{**base, "key": ...}`."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """The dictionary `{**base, **items}`; without a base, it has exactly the keys of `items`."""

    items: Mapping[str, Value] = field(default_factory=dict)
    base: Ref | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Prompted:
    """A prompt template and the values of its variables; formatted only where something needs the result."""

    inputs: tuple[tuple[str, Value], ...]
    parts: tuple[PromptPart, ...]
    render: Callable[[Mapping[str, Any]], Any]
    """Values by input name -> the framework's prompt value; missing ones are `UNKNOWN`, cut off after the first."""
    is_text: bool = False
    """True if it is rendered as a text, which may be a variable of another prompt: its beginning may be known first."""


Value = Ref | Record | Prompted


class NotUnderstood(LeftToOriginal):
    """The reason why a node is not lowered, in words for the report. No error: the node runs as it always did."""


def simplify(value: Value) -> Value:
    """Return the base of a record that adds no keys to it, any other value as it is."""
    return value.base if isinstance(value, Record) and value.base is not None and not value.items else value


def read_key(value: Value, key: str | int) -> Value:
    """Return `value[key]`. Raise `NotUnderstood` where the original would fail, or might fail."""
    if isinstance(value, Ref):
        return value.at(key)
    if isinstance(value, Record):
        if key in value.items:
            return value.items[key]  # type: ignore[index]
        if value.base is not None:
            return value.base.at(key)
        raise NotUnderstood(f"reads the key {key!r}, which the dictionary before it does not have")
    raise NotUnderstood("reads a key of a prompt")


def merge(value: Value, items: Mapping[str, Value]) -> Record:
    """Return `{**value, **items}`. Raise `NotUnderstood` for a prompt."""
    if isinstance(value, Record):
        return Record({**value.items, **items}, value.base)
    if isinstance(value, Ref):
        return Record(items, value)
    raise NotUnderstood("adds keys to a prompt")


def refs_of(value: Value, name: str = "input") -> Iterator[tuple[str, Ref]]:
    """Yield every reference that a reader of the whole value depends on, with a readable name."""
    value = simplify(value)
    if isinstance(value, Ref):
        yield name, value
        return
    prefix = "" if name == "input" else f"{name}."
    if isinstance(value, Record) and value.base is not None:
        yield prefix + BASE, value.base
    for key, item in value.items.items() if isinstance(value, Record) else value.inputs:
        yield from refs_of(item, prefix + key)


def with_unique_names(pairs: Iterator[tuple[str, Ref]]) -> tuple[tuple[str, Ref], ...]:
    """Return the pairs with every name once: a later namesake gets a number."""
    refs: dict[str, Ref] = {}
    for name, ref in pairs:
        unique_name, count = name, 2
        while unique_name in refs:
            unique_name, count = f"{name}#{count}", count + 1
        refs[unique_name] = ref
    return tuple(refs.items())


def packer(value: Record) -> tuple[tuple[tuple[str, Ref], ...], Callable[..., dict[str, Any]]]:
    """Return the inputs of a CALL that builds the dictionary at run time, and the function it calls.

    An input is named after its path of keys (`a.b`); `BASE` names a dictionary whose items come before the others.
    `Draft.materialize` adds the CALL for a reader of the whole. Raise `NotUnderstood` for a prompt inside.
    """
    path_refs: list[tuple[tuple[str, ...], Ref]] = list(_paths(value, ()))
    inputs = with_unique_names((".".join(path) or BASE, ref) for path, ref in path_refs)
    paths = {name: path for (name, _), (path, _) in zip(inputs, path_refs, strict=True)}

    def pack(**values: Any) -> dict[str, Any]:
        """Return the dictionary with these values of the inputs, nested as the record was."""
        packed: dict[str, Any] = {}
        for name, (*outer_keys, last_key) in paths.items():
            inner = packed
            for key in outer_keys:
                inner = inner.setdefault(key, {})
            if last_key == BASE:
                inner.update(values[name])
            else:
                inner[last_key] = values[name]
        return packed

    return inputs, pack


def _paths(value: Record, prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Ref]]:
    """Yield the key path of every reference in nested records. Raise `NotUnderstood` for a prompt in them."""
    if value.base is not None:
        yield (*prefix, BASE), value.base
    for key, item in value.items.items():
        if isinstance(item, Record):
            yield from _paths(item, (*prefix, key))
        elif isinstance(item, Ref):
            yield (*prefix, key), item
        else:
            raise NotUnderstood("passes a dictionary with an unformatted prompt on")
