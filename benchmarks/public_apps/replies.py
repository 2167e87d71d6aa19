"""What the fake hosted model answers: a function of the request's body alone, so equal requests get equal answers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

ITEMS = 3
"""Length of lists that the model is asked for."""
WORDS = (
    *("the", "survey", "reports", "that", "local", "teams", "keep", "short", "notes", "while", "larger", "groups"),
    *("rely", "on", "shared", "plans", "and", "review", "them", "often"),
)


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, also of one whose content is a list of parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


def token_count(text: str) -> int:
    """Return the number of tokens of a text, as the fake model counts: four characters each."""
    return max(1, -(-len(text) // 4))


def prompt_tokens(body: Mapping[str, Any]) -> int:
    """Return the number of tokens that a chat request is billed for: messages, tools and schema."""
    return token_count(json.dumps([body["messages"], body.get("tools"), body.get("response_format")]))


def reply(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the assistant's message for the body of a chat request."""
    messages: Sequence[Mapping[str, Any]] = body["messages"]
    prompt = "\n".join(map(text_of, messages))
    schema = (body.get("response_format") or {}).get("json_schema", {}).get("schema")
    if schema is not None:
        return {"role": "assistant", "content": json.dumps(_value(schema, schema, prompt, ""))}
    tool = _chosen_tool(body)
    if tool is not None:
        arguments = json.dumps(_value(tool["parameters"], tool["parameters"], prompt, ""))
        call = {"name": tool["name"], "arguments": arguments}
        call_id = f"call_{_digest(prompt + tool['name'])}"
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": call}],
        }
    return {"role": "assistant", "content": _text(prompt)}


def _chosen_tool(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the function that the model calls: the one it is told to, else each of its tools once, in order."""
    tools: list[Mapping[str, Any]] = [tool["function"] for tool in body.get("tools") or ()]
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        return next(tool for tool in tools if tool["name"] == choice["function"]["name"])
    if not tools or choice == "none":
        return None
    if choice == "required":
        return tools[0]
    calls = sum(len(message.get("tool_calls") or ()) for message in body["messages"])
    return tools[calls] if calls < len(tools) else None


def _value(schema: Mapping[str, Any], root: Mapping[str, Any], prompt: str, name: str) -> Any:
    """Return a value that a JSON schema allows. Grades are "no" for prompts about something off-topic."""
    if "$ref" in schema:
        return _value(root["$defs"][schema["$ref"].rpartition("/")[2]], root, prompt, name)
    if "anyOf" in schema:
        return _value(schema["anyOf"][0], root, prompt, name)
    if "enum" in schema:
        return _grade(schema["enum"], prompt)
    kind = schema.get("type")
    if kind == "object":
        return {key: _value(value, root, prompt, f"{name}.{key}") for key, value in schema["properties"].items()}
    if kind == "array":
        return [_value(schema["items"], root, prompt, f"{name}.{number}") for number in range(ITEMS)]
    if kind == "boolean":
        return "off-topic" not in prompt
    if kind in ("integer", "number"):
        return 7
    return _grade(("yes", "no"), prompt) if "score" in name else f"{_words(prompt + name, 8)} {_digest(prompt + name)}"


def _grade(values: Sequence[Any], prompt: str) -> Any:
    return values[1] if "off-topic" in prompt and len(values) > 1 else values[0]


def _text(prompt: str) -> str:
    if "sub_question" in prompt:  # LlamaIndex's question generator
        tools = re.findall(r'"(\w+)": "Useful', prompt)
        items = [{"sub_question": f"{_words(prompt + tool, 7)}?", "tool_name": tool} for tool in tools]
        return f"```json\n{json.dumps({'items': items}, indent=4)}\n```"
    if re.search(r"\b(newlines?|per line|on each line)\b", prompt):
        return "\n".join(f"{_words(f'{prompt}{number}', 8)} {number + 1}" for number in range(ITEMS))
    return f"{_words(prompt, 24 + int(_digest(prompt), 16) % 16)} {_digest(prompt)}"


def _words(seed: str, count: int) -> str:
    start = int(_digest(seed), 16)
    return " ".join(WORDS[(start + 7 * number) % len(WORDS)] for number in range(count))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
