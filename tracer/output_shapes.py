"""Generations whose output has a known shape: a list that something maps over, or one of a few labels."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from teola_plugin.graph import Component, DraftText, Role
from teola_plugin.requests.draft_texts import forms_of_labels

Labels = tuple[str, ...]
_DEFAULT_SPELLING = "lines"
"""How a list is assumed to be spelled when user code splits it; only a prediction, verified later."""


def label_forms(labels: Labels) -> tuple[DraftText, ...]:
    """Return the forms of an answer that is one of these labels, or begins with one."""
    return tuple(DraftText("the labels that are understood", text=form) for form in forms_of_labels(labels))


def with_labels(
    components: tuple[Component, ...], labels: Mapping[str, Labels], pass_through: Collection[str]
) -> tuple[Component, ...]:
    """Return the components, each GENERATION with the labels that its reader takes, unless its schema says more.

    `labels` is keyed by the component whose value the reader gets; `pass_through` names components that hand a model's
    text on.
    """
    by_name = {c.name: c for c in components}
    changed: dict[str, Component] = {}
    for name, words in labels.items():
        source = by_name.get(name)
        while source is not None and source.name in pass_through and len(source.inputs) == 1:
            source = by_name.get(source.inputs[0][1].producer)
        if source is not None and source.role is Role.GENERATION and not source.attributes.forms:
            changed[source.name] = replace(source, attributes=source.attributes.with_(forms=label_forms(words)))
    return tuple(changed.get(c.name, c) for c in components) if changed else components


def with_splits(components: tuple[Component, ...], spellings: Mapping[str, str]) -> tuple[Component, ...]:
    """Return the components, each GENERATION that becomes a list marked splittable, with `("items", spelling)`.

    `spellings` names the components that hand a model's text on (message, parser, key access, user code) and how they
    expect a list to be spelled, empty where they do not say. A MAP is expected to be as wide as the generation that it
    maps over.
    """
    readers: dict[str, list[Component]] = {}
    for c in components:
        for producer in dict.fromkeys(ref.producer for _, ref in c.inputs):
            readers.setdefault(producer, []).append(c)
    item_readers = {c.name: _item_readers(c, readers, spellings) for c in components if c.role is Role.GENERATION}
    certain = {reader.name for pairs in item_readers.values() for reader, spelling in pairs if spelling}
    changed: dict[str, Component] = {}
    for c in components:
        # User code reads more than it needs. If one generation is known to be the list, no other is assumed to be.
        pairs = [pair for pair in item_readers.get(c.name, ()) if pair[1] or pair[0].name not in certain]
        if not pairs:
            continue
        items = c.attributes.items or pairs[0][1] or _DEFAULT_SPELLING  # the model's own schema knows best
        changed[c.name] = replace(c, splittable=True, attributes=c.attributes.with_(items=items))
        for reader, _ in pairs:
            if reader.role is Role.MAP and reader.expected is None:
                changed[reader.name] = replace(reader, expected=c.expected)
    return tuple(changed.get(c.name, c) for c in components) if changed else components


def _item_readers(
    generation: Component, readers: Mapping[str, list[Component]], spellings: Mapping[str, str]
) -> list[tuple[Component, str]]:
    """Return the MAPs and batchable components that work on each item of a text, with the list's spelling if known."""
    pairs: list[tuple[Component, str]] = []
    pending, seen = [(generation.name, generation.attributes.items)], {generation.name}
    while pending:
        name, spelling = pending.pop(0)
        for reader in readers.get(name, ()):
            first_input = reader.inputs[0][1].producer
            if reader.role is Role.MAP or (reader.batchable and first_input == name):
                pairs.append((reader, spelling))
            elif reader.name in spellings and reader.name not in seen:
                seen.add(reader.name)
                pending.append((reader.name, spelling or spellings[reader.name]))
    return pairs
