"""Parameters of the protocol as an engine of the pool takes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from teola_plugin.adapters.sampling import (
    ToolText,
    check_parameters,
    check_schema,
    parse_tool_choice,
    tool_names,
    tool_text,
)
from teola_plugin.errors import RegistrationError
from teola_plugin.requests.payloads import Message, Sampling
from teola_plugin.server.documents.parts import DOCUMENT, shown_document
from teola_plugin.server.errors import HttpError, bad_request
from teola_plugin.server.wire.requests import (
    HARMLESS,
    UNSUPPORTED,
    ChatMessage,
    ChatRequest,
    Generating,
    has_no_effect,
    parse_json,
)

_ROLES = {"developer": "system", "function": "tool"}
_HINT = "leave it out, or ask a model that can"


def check_known(body: Mapping[str, Any], supported: Iterable[str], model: str) -> None:
    """Raise `HttpError` for an unknown or unsupported parameter that would change the answer."""
    for name, value in body.items():
        if name in UNSUPPORTED:
            if not has_no_effect(name, value):
                raise bad_request(f"the model {model!r} does not do {name}.", _HINT, param=name, code="unsupported")
        elif name not in HARMLESS and name not in supported:
            raise bad_request(f"there is no parameter {name!r:.80}.", "check its name", param=name, code="unknown")


def sampling_of(body: Generating, max_tokens: int, schema: str = "") -> Sampling:
    """Return how to decode at most `max_tokens` tokens. Defaults are those of OpenAI's protocol, e.g. temperature 1."""
    stop = body.stop or ()
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        seed=body.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(one for one in stop if one),
        json_schema=schema,
        ignore_eos=bool(body.ignore_eos),
    )


def schema_of(response_format: Mapping[str, Any] | None) -> str:
    """Return the JSON text of the schema that `response_format` asks for; empty for free text. Raise `HttpError`."""
    if response_format is None:
        return ""
    match response_format.get("type"):
        case "text":
            return ""
        case "json_object":
            return json.dumps({"type": "object"})
        case "json_schema":
            inner = response_format.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, Mapping) else None
            if isinstance(schema, Mapping):
                with _refusing("response_format"):
                    check_schema(schema, "response_format.json_schema.schema")
                return json.dumps(schema)
            hint = 'it is {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
            raise bad_request("response_format holds no schema.", hint, param="response_format")
    raise bad_request(
        f"response_format is of type {response_format.get('type')!r:.80}.",
        "use text, json_object or json_schema",
        param="response_format",
    )


def tools_of(body: ChatRequest) -> ToolText | None:
    """Return the text of the tools that an engine is shown. Raise `HttpError` for malformed tools and choices."""
    tools = body.tools or []
    with _refusing("tools"):
        names = tool_names(tools)
        check_parameters(tools)
    with _refusing("tool_choice"):
        return tool_text(tools, tool_choice_of(body, names))


def tool_choice_of(body: ChatRequest, names: Sequence[str]) -> str:
    """Return the choice as `parse_tool_choice` does. Raise `RegistrationError` for one that cannot be met."""
    if body.tool_choice is not None and not body.tool_choice:
        raise RegistrationError("tool_choice is empty.", hint="leave it out, or use auto, none or required")
    return parse_tool_choice(body.tool_choice, names)


@contextmanager
def _refusing(param: str) -> Iterator[None]:
    """Raise what the body raises of tools and schemas as `HttpError` about this parameter."""
    try:
        yield
    except RegistrationError as error:
        raise bad_request(error.message, error.hint, param=param, code="invalid_value") from None


def check_no_tools(body: ChatRequest, model: str) -> None:
    """Raise `HttpError` for tools, and for a call that is demanded, where the model takes none."""
    if body.tools:
        hint = "leave them out: an app has its own"
        raise bad_request(f"the app {model!r} takes no tools.", hint, param="tools", code="unsupported")
    with _refusing("tool_choice"):
        tool_choice_of(body, [])


def messages_of(messages: Iterable[ChatMessage], model: str) -> tuple[Message, ...]:
    """Return the messages as engines take them, as text alone. Raise `HttpError` for other content."""
    return tuple(Message(_ROLES.get(m.role, m.role), text_of(m, model)) for m in messages)


def text_of(message: ChatMessage, model: str) -> str:
    """Return the text of a message, and its calls as models write them. Raise `HttpError` for images, ..."""
    text = content_of(message, model)
    calls = [json.dumps({"name": name, "arguments": arguments}) for _, name, arguments in calls_of(message)]
    return "\n".join([text, *calls] if text else calls) if calls else text


def content_of(message: ChatMessage, model: str) -> str:
    """Return the text of a message, whose parts are joined. Raise `HttpError` for images, ..."""
    content = message.content or ""
    return content if isinstance(content, str) else "".join(_part(part, model) for part in content)


def _part(part: Mapping[str, Any], model: str) -> str:
    """Return the text of one part of a message. Raise `HttpError` for a part without text, such as an image."""
    text = part.get("text")
    if part.get("type") in ("text", "input_text", "output_text") and isinstance(text, str):
        return text
    if part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if part.get("type") == DOCUMENT and isinstance(text, str):
        return shown_document(part)
    message = f"the model {model!r} takes text only, and a message holds a part of type {part.get('type')!r:.80}."
    raise bad_request(message, "send its text", param="messages", code="unsupported")


def calls_of(message: ChatMessage) -> list[tuple[str | None, str, Any]]:
    """Return id, name and arguments of the calls that a message made; arguments that are not JSON stay the text.

    Raise `HttpError` for what is no call.
    """
    return [_call(call) for call in message.tool_calls or ()]


def _call(call: Mapping[str, Any]) -> tuple[str | None, str, Any]:
    """Return the id, name and arguments of a tool call in a message; arguments that are not JSON stay the text.

    Raise `HttpError` for what is no call.
    """
    function, id = call.get("function"), call.get("id")
    if not isinstance(function, Mapping):
        raise bad_request("a call of a tool has no function.", _CALL_HINT, param="messages")
    name, arguments = function.get("name"), function.get("arguments", "")
    if not isinstance(name, str) or not isinstance(id, str | None) or not isinstance(arguments, str | Mapping):
        raise bad_request("a call of a tool has an id, a name or arguments of no text.", _CALL_HINT, param="messages")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments or "{}", "messages", _CALL_HINT)
        except HttpError:
            return id, name, arguments
    return id, name, arguments


_CALL_HINT = 'a call is {"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}'
