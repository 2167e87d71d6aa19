"""Results that an engine sends for a request: pieces of a streamed value, and exactly one end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.errors import EngineError
from teola_plugin.requests.payloads import Version


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a streamed value, in order. The first piece ends the prefilling."""

    request_id: str
    text: str
    tokens: int = 1


@dataclass(frozen=True, slots=True)
class Done:
    """The value of a request; exactly one `Done` or `Failed` ends it."""

    request_id: str
    value: Any
    stats: Mapping[str, float] = field(default_factory=dict)
    version: Version | None = None
    """SEARCHING: version of the collection, read in the search's own snapshot; None if the store has none."""
    cuts: tuple[int, ...] = ()
    """Lengths, in characters, of the pieces in which the text of a generation without a reader would have arrived, for
    a reader that comes later. Empty if the engine does not know them."""


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: str
    error: EngineError


Result = Piece | Done | Failed
