"""Tools bound to a `ChatTeola`: told to the model by its own chat template, its calls read from what it writes.

Where a call is demanded (`tool_choice`), the engine can write nothing else. Otherwise the model decides; how it writes
a call is in `tool_calls`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.messages.tool import tool_call
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from teola_plugin.adapters.langchain.tool_calls import read
from teola_plugin.errors import unknown_name

ANY = ("any", "required")
OF_TOOLS = ("tools", "tool_choice", "strict", "parallel_tool_calls")
"""Arguments of a call that are about tools; the engine has no use for the last two."""

Tool = dict[str, Any] | type | Callable[..., Any] | BaseTool


@dataclass(frozen=True, slots=True)
class Tools:
    """What a call is told of."""

    shown: str
    """JSON text, as OpenAI describes tools."""
    names: tuple[str, ...]
    schema: str
    """JSON text of what must be written; empty where the model decides."""

    def message(self, plain: AIMessage) -> AIMessage:
        """The answer, with the calls that it holds, each with an id of its own."""
        rest, calls = read(plain.text, self.names)
        if not calls:
            return plain
        made = [tool_call(name=call.name, args=call.args, id=f"call_{uuid.uuid4().hex[:24]}") for call in calls]
        return plain.model_copy(update={"content": rest, "tool_calls": made})


def described(tools: Sequence[Tool], choice: Any) -> dict[str, Any]:
    """Arguments to bind. Raises `RegistrationError` for a choice that is none of the tools."""
    shown = [convert_to_openai_tool(tool) for tool in tools]
    wanted = _choice(choice, [tool["function"]["name"] for tool in shown])
    return {"tools": shown, **({"tool_choice": wanted} if wanted else {})}


def _choice(choice: Any, names: list[str]) -> str:
    """The name of a tool, `any`, `none`, or empty for the model's own."""
    if isinstance(choice, Mapping):
        choice = (choice.get("function") or choice).get("name")
    if choice is True or choice in ANY:
        return "any"
    if not choice or choice == "auto":
        return ""
    if choice != "none" and choice not in names:
        raise unknown_name("tool_choice", str(choice), [*names, "any", "auto", "none"])
    return str(choice)


def taken(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Tools | None]:
    """The arguments of a call without those of tools; the tools, if there are any that may be called."""
    rest = {key: value for key, value in kwargs.items() if key not in OF_TOOLS}
    given = kwargs.get("tools")
    if not given:
        return rest, None
    bound = described(given, kwargs.get("tool_choice"))
    shown, choice = bound["tools"], bound.get("tool_choice", "")
    if choice == "none":
        return rest, None
    names = tuple(tool["function"]["name"] for tool in shown)
    called = [tool["function"] for tool in shown if choice in ("any", tool["function"]["name"])]
    return rest, Tools(json.dumps(shown), names, _schema(called) if choice else "")


def _schema(functions: Sequence[Mapping[str, Any]]) -> str:
    """JSON text of one call of one of them; definitions stand where references look for them."""
    definitions: dict[str, Any] = {}
    schemas: list[dict[str, Any]] = []
    for function in functions:
        parameters = dict(function.get("parameters") or {"type": "object", "properties": {}})
        definitions |= parameters.pop("$defs", {})
        properties = {"name": {"enum": [function["name"]]}, "arguments": parameters}
        required = ["name", "arguments"]
        schemas += [{"type": "object", "properties": properties, "required": required, "additionalProperties": False}]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return json.dumps({**schema, **({"$defs": definitions} if definitions else {})})
