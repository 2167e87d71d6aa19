"""Tools bound to a `ChatTeola`: LangChain's spellings of tools, choices and calls.

What the engine is told is in `adapters.tool_text`, how calls are read from what it writes in `adapters.tool_calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.messages.tool import tool_call
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from teola_plugin.adapters.tool_calls import new_id
from teola_plugin.adapters.tool_text import ARGUMENTS, ToolText, check_parameters, chosen, tool_names, tool_text

Tool = dict[str, Any] | type | Callable[..., Any] | BaseTool


class Tools(ToolText):
    """The tools that a call may use."""

    __slots__ = ()

    def message(self, plain: AIMessage) -> AIMessage:
        """The answer, with the calls that it holds, each with an id of its own."""
        rest, calls = self.read(plain.text)
        if not calls:
            return plain
        tool_calls = [tool_call(name=call.name, args=call.args, id=new_id()) for call in calls]
        return plain.model_copy(update={"content": rest, "tool_calls": tool_calls})


def described(tools: Sequence[Tool], choice: Any) -> dict[str, Any]:
    """Return the arguments to bind. Raise `RegistrationError` for malformed tools, and a choice that cannot be met."""
    definitions = [convert_to_openai_tool(tool) for tool in tools]
    tool_choice = chosen(choice or None, tool_names(definitions))
    if tool_choice not in ("", "none"):
        check_parameters(definitions)
    return {"tools": definitions, **({"tool_choice": tool_choice} if tool_choice else {})}


def without_tools(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Tools | None]:
    """Return the arguments of a call without those of tools, and the tools, if there are any that may be called.

    Raise `RegistrationError` for malformed tools, and a choice that cannot be met.
    """
    rest = {key: value for key, value in kwargs.items() if key not in ARGUMENTS}
    tools = kwargs.get("tools")
    if not tools:
        chosen(kwargs.get("tool_choice") or None, ())
        return rest, None
    bound = described(tools, kwargs.get("tool_choice"))
    text = tool_text(bound["tools"], bound.get("tool_choice", ""))
    return rest, None if text is None else Tools(text.shown, text.names, text.schema)
