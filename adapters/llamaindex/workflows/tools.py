"""Copies of an agent's tools that call accelerated engines and retrievers, with the same names and descriptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.tools import QueryEngineTool, RetrieverTool

from teola_plugin.adapters.llamaindex.substitution import Accelerate
from teola_plugin.shims.llamaindex.copies import with_attributes
from teola_plugin.shims.llamaindex.records import Unreadable
from teola_plugin.shims.llamaindex.workflows import QueryEngineToolParts, RetrieverToolParts
from teola_plugin.tracer.llamaindex.classes import find_override

PartsClass = type[QueryEngineToolParts] | type[RetrieverToolParts]
_PARTS_OF_TOOLS: dict[type, PartsClass] = {QueryEngineTool: QueryEngineToolParts, RetrieverTool: RetrieverToolParts}
MAX_TOOLS = 64
"""Copies that are remembered; a tool retriever may make new tools for each call."""


def called_part(tool: Any) -> Any | None:
    """Return the engine or retriever that a tool calls; None for a tool that may do anything else."""
    kind = _PARTS_OF_TOOLS.get(type(tool))
    if kind is None or find_override(tool, type(tool)):
        return None
    try:
        return kind.of(tool).part
    except Unreadable:
        return None


class ToolAccelerator:
    """Makes the accelerated copies of tools, each once."""

    def __init__(self, accelerate: Accelerate) -> None:
        self._accelerate_part = accelerate
        self._copies: dict[int, tuple[Any, Any, Any]] = {}

    def __call__(self, tools: Sequence[Any]) -> list[Any]:
        """Return the tools; those that call an engine or a retriever are copies that call an accelerated one."""
        return [self._accelerate_tool(tool) for tool in tools]

    def _accelerate_tool(self, tool: Any) -> Any:
        part = called_part(tool)
        if part is None:
            return tool
        remembered = self._copies.get(id(tool))
        if remembered is None or remembered[0] is not tool or remembered[1] is not part:
            fast = self._accelerate_part(part)
            fast_tool = (
                tool if fast is part else with_attributes(tool, _PARTS_OF_TOOLS[type(tool)].as_attributes(part=fast))
            )
            remembered = self._copies[id(tool)] = (tool, part, fast_tool)
            if len(self._copies) > MAX_TOOLS:
                self._copies.pop(next(iter(self._copies), 0), None)
        return remembered[2]
