"""What tracers, passes and drivers tell each other about a primitive: one field per fact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Literal

GAP = "\ue000"
"""In a text that may be drafted: whatever the model writes there."""
_SHOWN = 60
"""Characters of a literal that are printed."""


@dataclass(frozen=True, slots=True)
class DraftText:
    """A text that an answer may repeat: the value of an input, or a literal, which may have gaps.

    One with gaps is a form of the answer, maybe one of several: it holds from the answer's first token, or from where
    its text comes if it begins with a gap. One without is a text that is followed wherever the answer agrees with it.
    """

    what: str
    """In words, e.g. `an earlier answer`."""
    variable: str = ""
    """The input whose text it is; empty for a literal."""
    text: str = ""
    told: bool = False
    """Whether it goes along with the request anyway, which tells it: see `requests.draft_texts`."""

    def __str__(self) -> str:
        shown = json.dumps(self.text.replace(GAP, "…"), ensure_ascii=False)
        return self.variable or (shown if len(shown) <= _SHOWN else f'{shown[: _SHOWN - 2]}…"')


@dataclass(frozen=True, slots=True)
class Attributes:
    """Facts about one component, and about the primitives that are made of it. A default means "not said".

    What is nobody else's business, such as a mark of a pass of your own, goes into `options`.
    """

    # What an engine is asked for.
    role: Literal["", "query", "document"] = ""
    """EMBEDDING: `query` or `document`; not said: `query`."""
    collection: str = ""
    """SEARCHING, INGESTION: where the rows are."""
    k: int | None = None
    """SEARCHING: hits wanted; not said: 4."""
    filter: tuple[Any, ...] = ()
    """SEARCHING: conditions on metadata, as `SearchVector` takes them."""
    wrapped: str = ""
    """The user's own model or retriever is called: the key of its place in the chain."""
    items: str = ""
    """Decodings: how the text spells a list (`json`, `lines`, ...); not said: `json`."""

    # What the tracer knows of the plain object.
    slow: bool = False
    """OPAQUE: a retriever, a model or a tool of the user's own, which takes as long as a tool does."""
    beside: bool = False
    """Holders: plain code takes the items, or the arms, one after the other, and the graph side by side."""
    lookahead: bool | None = None
    """Work for a part that the plain object has yet to choose: whether it is sure to choose it."""
    early_arms: tuple[str, ...] = ()
    """BRANCH: arms, `then` or `else`, that only search, and may begin before it is known which one is taken."""

    form: Literal["", "whole", "unknown"] = ""
    """Generations whose requests differ for whole and for streamed answers: how the original asks. `whole`: whole, if
    nobody makes it stream; `unknown`: it may stream by itself, or not ask at all."""
    forms: tuple[DraftText, ...] = ()
    """Generations: literals that the answer may be, or begin with: labels that its reader takes, keys of its JSON."""

    # What the passes have found.
    stream_items: tuple[str, ...] = ()
    """DECODING: ids of the MAPs that get each item as it closes."""
    grow: bool = False
    """MAP: only the run knows its width; it grows item by item, as the decoding's `stream_items` say."""
    grows_with: str = ""
    """Prefillings: the id of a MAP. While its list is being made, the prompt so far may be prefilled."""
    drafts: tuple[DraftText, ...] = ()
    """Prefillings: what the answer may repeat, likeliest first."""
    when: Literal["", "idle"] = ""
    """PARTIAL_PREFILLING: `idle` for a warm-up that waits for a pause of its engine."""

    def with_(self, **changes: Any) -> Attributes:
        """A copy with other values for some fields. (`dataclasses.replace` takes three times as long.)"""
        values = list(_values(self))
        for name, value in changes.items():
            values[_PLACES[name]] = value
        return Attributes(*values)

    def said(self) -> Iterator[tuple[str, Any]]:
        """Name and value of each fact that is said, in the order above; once per id where there are several."""
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                if name == "forms":  # they are seen where they are used, among the drafts
                    continue
                if name in ("stream_items", "drafts", "early_arms"):
                    yield from ((name, holder) for holder in value)
                else:
                    yield name, value


_DEFAULTS = {known.name: known.default for known in fields(Attributes)}
_PLACES = {name: place for place, name in enumerate(_DEFAULTS)}
_values = attrgetter(*_DEFAULTS)
ATTRIBUTES = frozenset(_DEFAULTS)
"""Names of the facts, which options may not have."""
NOTHING_SAID = Attributes()
