"""Facts about a primitive that tracers, passes and drivers pass to each other: one field per fact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Literal

GAP = "\ue000"
"""A gap in a draft text, to be filled by the model."""
_MAX_PRINTED = 60
"""Maximum number of characters of a literal that are printed."""


@dataclass(frozen=True, slots=True)
class DraftText:
    """A text that an answer may repeat: the value of an input, or a literal, which may have gaps.

    A text with gaps is a form of the answer, maybe one of several: it applies from the answer's first token, or, if it
    begins with a gap, from where its text appears. A text without gaps applies wherever the answer agrees with it.
    """

    description: str
    """In words, e.g. `an earlier answer`."""
    variable: str = ""
    """Name of the input whose text it is; empty for a literal."""
    text: str = ""
    in_request: bool = False
    """True if it follows from the request alone, so that it is drafted even without a plan: `requests.draft_texts`."""

    def __str__(self) -> str:
        literal = json.dumps(self.text.replace(GAP, "…"), ensure_ascii=False)
        return self.variable or (literal if len(literal) <= _MAX_PRINTED else f'{literal[: _MAX_PRINTED - 2]}…"')


@dataclass(frozen=True, slots=True)
class Attributes:
    """Facts about one component, and about the primitives that it is decomposed into. A default means "not known".

    Facts that only your own passes use go into `options` instead.
    """

    # Parameters of requests.
    role: Literal["", "query", "document"] = ""
    """EMBEDDING: `query` or `document`; empty means `query`."""
    collection: str = ""
    """SEARCHING, INGESTION: name of the collection."""
    k: int | None = None
    """SEARCHING: maximum number of hits; None means 4."""
    filter: tuple[Any, ...] = ()
    """SEARCHING: conditions on metadata, as `SearchVector` takes them."""
    wrapped: str = ""
    """Key of the call site in the chain, if the user's own model or retriever is called."""
    items: str = ""
    """Decodings: how the text writes a list (`json`, `lines`, ...); empty means `json`."""

    # Facts that the tracer found in the original.
    slow: bool = False
    """OPAQUE: a retriever, model or tool of the user's own, expected to take as long as a tool."""
    beside: bool = False
    """MAP, BRANCH: the original processes the items, or tries the arms, one after the other; the graph at once."""
    lookahead: bool | None = None
    """Requests for a subplan before the original reaches it: True if it is certain to, False if it may not; None for
    all other requests."""
    early_arms: tuple[str, ...] = ()
    """BRANCH: arms (`then`, `else`) that only search, and may begin before the condition is known."""

    form: Literal["", "whole", "unknown"] = ""
    """Generations whose requests differ for complete and streamed answers: the form that the original uses. `whole`:
    complete, unless a caller makes it stream; `unknown`: it may stream by itself, or send no request."""
    forms: tuple[DraftText, ...] = ()
    """Generations: literals that the answer may be or begin with: labels that its parser accepts, keys of its JSON."""

    # Facts that passes added.
    stream_items: tuple[str, ...] = ()
    """DECODING: ids of the MAPs that get each item as soon as it is complete."""
    grow: bool = False
    """MAP: its width is known at run time only; instances are added item by item (see `stream_items`)."""
    grows_with: str = ""
    """Prefillings: the id of a MAP. While its list grows, the known part of the prompt may be prefilled."""
    drafts: tuple[DraftText, ...] = ()
    """Prefillings: texts that the answer may repeat, likeliest first."""
    when: Literal["", "idle"] = ""
    """PARTIAL_PREFILLING: `idle` for a warm-up that waits until its engine is idle."""

    def with_(self, **changes: Any) -> Attributes:
        """Return a copy with some fields changed. (`dataclasses.replace` takes three times as long.)"""
        values = list(_values(self))
        for name, value in changes.items():
            values[_POSITIONS[name]] = value
        return Attributes(*values)

    def non_default_items(self) -> Iterator[tuple[str, Any]]:
        """Yield name and value of each known fact, in the order above; for a tuple of ids or texts, one pair each."""
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                if name == "forms":  # these are listed among the drafts of the prefilling
                    continue
                if name in ("stream_items", "drafts", "early_arms"):
                    yield from ((name, entry) for entry in value)
                else:
                    yield name, value


_DEFAULTS = {field.name: field.default for field in fields(Attributes)}
_POSITIONS = {name: position for position, name in enumerate(_DEFAULTS)}
_values = attrgetter(*_DEFAULTS)
ATTRIBUTES = frozenset(_DEFAULTS)
"""Names of the fields; options may not use them."""
NOTHING_SAID = Attributes()
