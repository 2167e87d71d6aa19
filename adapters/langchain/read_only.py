"""Tools whose author declares that they change nothing."""

from __future__ import annotations

from typing import Any, TypeVar

from langchain_core.tools import BaseTool

from teola_plugin.errors import RegistrationError

_MARK = "teola_read_only"

T = TypeVar("T", bound=BaseTool)


def read_only(tool: T) -> T:
    """A copy of a tool, declared to change nothing and to be of no harm when nobody asks for it in the end.

    ::

        @read_only
        @tool
        def weather(city: str) -> str: ...

    In an accelerated agent its function may run as soon as the model has written the call, while the rest of the answer
    is still being written; it runs once, and the agent gets that value, or that exception. Tools with functions do so
    (`@tool`, `StructuredTool`, `Tool`); those of classes of one's own, and those that need something of their place in
    the graph (state, store, config, the call's id, `interrupt`), run there. A function that calls others while their
    events are streamed, too. `metadata` of the copy says `{"teola_read_only": True}`. Raises `RegistrationError` for
    what is no tool.
    """
    if not isinstance(tool, BaseTool):
        raise RegistrationError(
            f"read_only was given a {type(tool).__qualname__}, which is no tool of LangChain.",
            hint="write @read_only above @tool",
        )
    return tool.model_copy(update={"metadata": {**(tool.metadata or {}), _MARK: True}})


def is_read_only(tool: Any) -> bool:
    """Return True if the author of a tool has declared it read-only."""
    metadata = getattr(tool, "metadata", None)
    return isinstance(metadata, dict) and metadata.get(_MARK) is True
