"""What an engine is told of the tools that a model may call, whatever the framework.

The model's own chat template says what they are. Where a call is demanded, the engine can write nothing else;
otherwise the model decides, and `tool_calls` tells how it writes a call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.adapters.tool_calls import Call, read
from teola_plugin.errors import unknown_name

ANY = ("any", "required")
ARGUMENTS = ("tools", "tool_choice", "strict", "parallel_tool_calls")
"""Arguments of a call that are about tools, as OpenAI's clients name them."""


@dataclass(frozen=True, slots=True)
class ToolText:
    """What a call is told of."""

    shown: str
    """JSON text, as OpenAI describes tools."""
    names: tuple[str, ...]
    schema: str
    """JSON text of what must be written; empty where the model decides."""

    def read(self, text: str) -> tuple[str, list[Call]]:
        """What of an answer is not a call, and the calls."""
        return read(text, self.names)


def tool_text(shown: Sequence[Mapping[str, Any]], choice: str) -> ToolText | None:
    """Of tools as OpenAI describes them, and a choice as `chosen` gives it; None where no tool may be called."""
    if not shown or choice == "none":
        return None
    names = tuple(tool["function"]["name"] for tool in shown)
    called = [tool["function"] for tool in shown if choice in ("any", tool["function"]["name"])]
    return ToolText(json.dumps(shown), names, _schema(called) if choice else "")


def chosen(choice: Any, names: Sequence[str]) -> str:
    """The name of a tool, `any`, `none`, or empty for the model's own. Raises `RegistrationError` for another."""
    if isinstance(choice, Mapping):
        choice = (choice.get("function") or choice).get("name")
    if choice is True or choice in ANY:
        return "any"
    if not choice or choice == "auto":
        return ""
    if choice != "none" and choice not in names:
        raise unknown_name("tool_choice", str(choice), [*names, "any", "auto", "none"])
    return str(choice)


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
