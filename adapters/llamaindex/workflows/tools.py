"""Tools of agents whose engines and retrievers are accelerated: copies that say of themselves what the others say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.tools import QueryEngineTool, RetrieverTool

from teola_plugin.adapters.llamaindex.substitution import Accelerate
from teola_plugin.shims.llamaindex.copies import with_attributes
from teola_plugin.shims.llamaindex.records import Unreadable
from teola_plugin.shims.llamaindex.workflows import QueryEngineToolParts, RetrieverToolParts
from teola_plugin.tracer.llamaindex.classes import find_override

Parts = type[QueryEngineToolParts] | type[RetrieverToolParts]
_PARTS: dict[type, Parts] = {QueryEngineTool: QueryEngineToolParts, RetrieverTool: RetrieverToolParts}
KEPT = 64
"""Copies that are remembered; a tool retriever may make tools anew for each call."""


def part_of(tool: Any) -> Any | None:
    """The engine or retriever that a tool calls; None for tools that may do anything else."""
    kind = _PARTS.get(type(tool))
    if kind is None or find_override(tool, type(tool)):
        return None
    try:
        return kind.of(tool).part
    except Unreadable:
        return None


class ToolParts:
    """Makes the copies, each once."""

    def __init__(self, accelerate: Accelerate) -> None:
        self._accelerate = accelerate
        self._made: dict[int, tuple[Any, Any, Any]] = {}

    def __call__(self, tools: Sequence[Any]) -> list[Any]:
        """The tools, those that call engines and retrievers as copies with accelerated ones."""
        return [self._one(tool) for tool in tools]

    def _one(self, tool: Any) -> Any:
        part = part_of(tool)
        if part is None:
            return tool
        known = self._made.get(id(tool))
        if known is None or known[0] is not tool or known[1] is not part:
            fast = self._accelerate(part)
            made = tool if fast is part else with_attributes(tool, _PARTS[type(tool)].as_attributes(part=fast))
            known = self._made[id(tool)] = (tool, part, made)
            if len(self._made) > KEPT:
                self._made.pop(next(iter(self._made), 0), None)
        return known[2]
