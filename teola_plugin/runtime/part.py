"""A part of a live query that begins later than the query, with an e-graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from teola_plugin.graph import Graph
from teola_plugin.runtime.works.identities import EarlyGraph


@dataclass(frozen=True, slots=True)
class Part:
    """What begins, and where it stands in the whole query."""

    name: str
    """It leads the ids of the part's primitives."""
    graph: Graph
    calls: Mapping[str, Callable[..., Any]]
    value: Any
    """Its input."""
    depth: int = 0
    """How far its end is from the end of the query, in primitives."""
    gang: str = ""
    """Parts of one gang run side by side, and are done with the last of them."""
    lookahead: bool = False
    """Whether later parts adopt what it asks for."""

    @property
    def stored(self) -> str:
        """Where its input lies."""
        return f"${self.name}"

    def asks(self, since: int) -> EarlyGraph:
        """As a party to works, from the plain object's call of that number on."""
        return EarlyGraph(self.name, self.gang or self.name, self.lookahead, since)
