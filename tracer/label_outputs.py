"""Which generations are answers of which only a few are understood: what a reader of the text takes says so."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from teola_plugin.graph import Component, DraftText, Role
from teola_plugin.requests.draft_texts import forms_of_labels

Labels = tuple[str, ...]


def label_forms(labels: Labels) -> tuple[DraftText, ...]:
    """What an answer may be that is one of these labels, or begins with one."""
    return tuple(DraftText("the labels that are understood", text=form) for form in forms_of_labels(labels))


def with_labels(
    components: tuple[Component, ...], labels: Mapping[str, Labels], passing: Collection[str]
) -> tuple[Component, ...]:
    """The components, each GENERATION with the labels that its reader takes, unless its schema says more.

    `labels`: by the component whose value the reader gets; `passing`: components that hand a model's text on.
    """
    known = {c.name: c for c in components}
    changed: dict[str, Component] = {}
    for read, words in labels.items():
        made = _generation(read, known, passing)
        if made is not None and not made.attributes.forms:
            changed[made.name] = replace(made, attributes=made.attributes.with_(forms=label_forms(words)))
    return tuple(changed.get(c.name, c) for c in components) if changed else components


def _generation(name: str, known: Mapping[str, Component], passing: Collection[str]) -> Component | None:
    """The one whose text is handed on under this name."""
    found = known.get(name)
    while found is not None and found.name in passing and len(found.inputs) == 1:
        found = known.get(found.inputs[0][1].producer)
    return found if found is not None and found.role is Role.GENERATION else None
