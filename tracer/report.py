"""The trace report: what became of every node of the user's object, and why. It is made before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Level = Literal["lowered", "joined", "original"]
"""Planned as a whole / user code whose pool-backed parts join the query when called / called as it always was."""
WORDS: dict[Level, str] = {"lowered": "optimized", "joined": "shared", "original": "unchanged"}
"""The words for the levels in the report (the glossary of ARCHITECTURE.md)."""


@dataclass(frozen=True, slots=True)
class TraceNode:
    """A row of the report: one node of the user's object."""

    path: str
    """For example `chain.steps[2].steps__["context"]`."""
    class_name: str
    level: Level
    components: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TraceReport:
    """The leaves of the user's object in the order of the chain. Sequences, parallels and bindings have no row."""

    nodes: tuple[TraceNode, ...]

    def __iter__(self) -> Iterator[TraceNode]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def at(self, level: Level) -> tuple[TraceNode, ...]:
        return tuple(node for node in self.nodes if node.level == level)

    def __str__(self) -> str:
        """Return the report as a table for the user: level, path, class, components and reason of each part."""
        rows = []
        for node in self.nodes:
            reasons = [f"({node.reason})"] if node.reason else []
            rows.append((WORDS[node.level], node.path, node.class_name, " ".join([*node.components, *reasons])))
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            lines.append("  ".join([*cells, row[3]]).rstrip())
        return "\n".join(lines)
