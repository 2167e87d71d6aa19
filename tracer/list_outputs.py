"""Which generations are lists that something maps over, and how the lists are spelled (for Pass 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from teola_plugin.graph import Component, Role

_GUESS = "lines"
"""How a list is taken to be spelled when user code splits it; only a prediction, verified later."""


def with_splits(components: tuple[Component, ...], lists: Mapping[str, str]) -> tuple[Component, ...]:
    """The components, with every GENERATION that becomes a list marked splittable, with `("items", kind)`.

    `lists` names the components that hand a model's text on (message, parser, key access, user code) and the spelling
    they stand for, empty where they say nothing. A MAP's expected width is that of the generation it maps over.
    """
    readers: dict[str, list[Component]] = {}
    for c in components:
        for producer in dict.fromkeys(ref.producer for _, ref in c.inputs):
            readers.setdefault(producer, []).append(c)
    ways = {c.name: _list_readers(c, readers, lists) for c in components if c.role is Role.GENERATION}
    told = {reader.name for way in ways.values() for reader, kind in way if kind}
    changed: dict[str, Component] = {}
    for c in components:
        # user code reads more than it needs: a generation that is known to be the list leaves no room for guesses
        found = [(reader, kind) for reader, kind in ways.get(c.name, ()) if kind or reader.name not in told]
        if found:
            changed |= _marked(c, found)
    return tuple(changed.get(c.name, c) for c in components) if changed else components


def _marked(c: Component, found: list[tuple[Component, str]]) -> dict[str, Component]:
    items = c.attributes.items or found[0][1] or _GUESS  # the model's own schema knows best
    made = {c.name: replace(c, splittable=True, attributes=replace(c.attributes, items=items))}
    for reader, _ in found:
        if reader.role is Role.MAP and reader.expected is None:
            made[reader.name] = replace(reader, expected=c.expected)
    return made


def _list_readers(
    c: Component, readers: Mapping[str, list[Component]], lists: Mapping[str, str]
) -> list[tuple[Component, str]]:
    """MAPs and batchable components that work on each item of `c`'s text, with the spelling found on the way."""
    found: list[tuple[Component, str]] = []
    ways, seen = [(c.name, c.attributes.items)], {c.name}
    while ways:
        name, kind = ways.pop(0)
        for reader in readers.get(name, ()):
            first = reader.inputs[0][1].producer
            if reader.role is Role.MAP or (reader.batchable and first == name):
                found.append((reader, kind))
            elif reader.name in lists and reader.name not in seen:
                seen.add(reader.name)
                ways.append((reader.name, kind or lists[reader.name]))
    return found
