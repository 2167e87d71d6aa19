"""Parameters of the protocol -> what an engine of the pool is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from teola_plugin.adapters.tool_text import ToolText, chosen, tool_text
from teola_plugin.requests.payloads import Message, Sampling
from teola_plugin.server.documents.parts import DOCUMENT, shown_document
from teola_plugin.server.errors import HttpError, bad_request
from teola_plugin.server.wire.chat import HARMLESS, NOTHING, ChatMessage, ChatRequest, Generating

_ROLES = {"developer": "system", "function": "tool"}
_HINT = "leave it out, or ask a model that can"


def check_known(body: Mapping[str, Any], known: Iterable[str], model: str) -> None:
    """Raises `HttpError` for a parameter that would be ignored though it decides the answer."""
    for name, value in body.items():
        if name in NOTHING:
            if value not in NOTHING[name]:
                raise bad_request(f"the model {model!r} does not do {name}.", _HINT, param=name, code="unsupported")
        elif name not in HARMLESS and name not in known:
            raise bad_request(f"there is no parameter {name!r:.80}.", "check its name", param=name, code="unknown")


def sampling_of(body: Generating, most: int, schema: str = "") -> Sampling:
    """How to decode; `most` tokens. What is not said is as in OpenAI's protocol: drawn at temperature 1."""
    stop = body.stop or ()
    return Sampling(
        max_tokens=most,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        seed=body.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(one for one in stop if one),
        json_schema=schema,
        ignore_eos=bool(body.ignore_eos),
    )


def schema_of(wanted: Mapping[str, Any] | None) -> str:
    """JSON text of the schema that `response_format` asks for; empty for free text. Raises `HttpError`."""
    match (wanted or {}).get("type", "text"):
        case "text":
            return ""
        case "json_object":
            return json.dumps({"type": "object"})
        case "json_schema":
            inner = (wanted or {}).get("json_schema")
            schema = inner.get("schema") if isinstance(inner, Mapping) else None
            if isinstance(schema, Mapping):
                return json.dumps(schema)
            hint = 'it is {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
            raise bad_request("response_format holds no schema.", hint, param="response_format")
    raise bad_request(
        f"response_format is of type {(wanted or {}).get('type')!r:.80}.",
        "use text, json_object or json_schema",
        param="response_format",
    )


def tools_of(body: ChatRequest) -> ToolText | None:
    """What the engine is told of tools. Raises `HttpError`, `RegistrationError` for a choice that is none of them."""
    shown = body.tools or []
    for tool in shown:
        function = tool.get("function")
        known = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if tool.get("type", "function") != "function" or not known:
            raise bad_request("a tool is no function with a name.", "see OpenAI's form of tools", param="tools")
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        if parameters is not None and not isinstance(parameters, Mapping):
            raise bad_request("the parameters of a tool are no JSON schema.", "give an object", param="tools")
    return tool_text(shown, chosen(body.tool_choice, [tool["function"]["name"] for tool in shown]))


def messages_of(messages: Iterable[ChatMessage], model: str) -> tuple[Message, ...]:
    """As engines take them: text alone. Raises `HttpError`."""
    return tuple(Message(_ROLES.get(m.role, m.role), text_of(m, model)) for m in messages)


def text_of(message: ChatMessage, model: str) -> str:
    """Of a message: its text, and the calls that it made, as models write them. Raises `HttpError` for images, ..."""
    content = message.content or ""
    text = content if isinstance(content, str) else "".join(_part(part, model) for part in content)
    calls = [_call(call) for call in message.tool_calls or ()]
    return "\n".join([text, *calls] if text else calls) if calls else text


def _part(part: Mapping[str, Any], model: str) -> str:
    text = part.get("text")
    if part.get("type") in ("text", "input_text", "output_text") and isinstance(text, str):
        return text
    if part.get("type") == DOCUMENT and isinstance(text, str):
        return shown_document(part)
    raise _not_text(part, model)


def _not_text(part: Mapping[str, Any], model: str) -> HttpError:
    what = f"the model {model!r} takes text only, and a message holds a part of type {part.get('type')!r:.80}."
    return bad_request(what, "send its text", param="messages", code="unsupported")


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise bad_request("a call of a tool has no function.", "see OpenAI's form of tool calls", param="messages")
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError):
        arguments = function.get("arguments")
    return json.dumps({"name": function.get("name"), "arguments": arguments})
