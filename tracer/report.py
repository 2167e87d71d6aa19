"""What became of every node of the user's object, and why; made before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Level = Literal["lowered", "joined", "original"]
"""Understood / user code whose pool-backed parts join the query as they are called / called as it always was."""
WORDS: dict[Level, str] = {"lowered": "optimized", "joined": "shared", "original": "unchanged"}
"""What users read instead (the glossary of ARCHITECTURE.md)."""


@dataclass(frozen=True, slots=True)
class TraceNode:
    path: str
    """Where it is, e.g. `chain.steps[2].steps__["context"]`."""
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
        rows = [
            (WORDS[n.level], n.path, n.class_name, " ".join([*n.components, *([f"({n.reason})"] if n.reason else [])]))
            for n in self.nodes
        ]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
        ]
        return "\n".join(line.rstrip() for line in lines)
