"""`/v1/messages`: Anthropic's form of a chat, read as a chat and written in this form; its form of models."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import ConfigDict, Field

from teola_plugin.errors import EngineError
from teola_plugin.server.errors import THREADS_UNSUPPORTED, HttpError, bad_request, to_anthropic, unsupported
from teola_plugin.server.wire.answers import Answer, Delta, ToolCall, Usage, app_data, event
from teola_plugin.server.wire.requests import (
    Body,
    ChatRequest,
    function_call,
    function_tool,
    further_parameters,
    parse_json,
    to_chat,
)

_ADDRESS = "/v1/messages"
_IGNORED = frozenset(
    {"betas", "cache_control", "diagnostics", "inference_geo", "service_tier", "user_profile_id", "workspace_id"}
)
"""Parameters that change nothing of the answer."""
_CHAT_ONLY = frozenset(
    {
        *("frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_completion_tokens", "n"),
        *("parallel_tool_calls", "presence_penalty", "response_format", "stop", "stream_options", "top_logprobs"),
    }
)
"""Parameters of chats that messages do not have, or spell differently."""
_FORM_HINT = "see Anthropic's reference of messages"
_NO_SERVER_TOOLS = "give tools of your own, with name and input_schema"


def speaks_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """Return True if a request gets Anthropic's form: one for a message, or one for models that names its version.

    `/v1/models` is an address of both protocols; there the header `anthropic-version` decides, which Anthropic's
    clients send. Errors are written in the same form.
    """
    is_message = path == _ADDRESS or path.startswith(f"{_ADDRESS}/")
    return is_message or (path.startswith("/v1/models") and "anthropic-version" in headers)


class MessagesRequest(Body):
    """A request for a message, or (see `TokenCountRequest`) for the number of its tokens."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int = Field(ge=1, le=1 << 24)
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1 << 20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    stream: bool | None = None

    def as_chat(self) -> ChatRequest:
        """Return the request as a chat. Raise `HttpError` for what a chat does not support."""
        extra = further_parameters(self, _IGNORED, _CHAT_ONLY)
        if (self.thinking or {}).get("type") == "enabled":
            raise unsupported("thinking", "the models of this server do not think aloud.", "leave it out")
        if extra.pop("thread", None):
            hint = "send the whole conversation as messages"
            raise bad_request("thread: answers are not kept.", hint, param="thread", code=THREADS_UNSUPPORTED)
        for name in ("mcp_servers", "container", "context_management"):
            value = extra.pop(name, None)
            if value and not (name == "context_management" and _only_clears_thinking(value)):
                raise unsupported(name, "it is a service of Anthropic's.", "leave it out")
        if self.messages[-1].get("role") == "assistant":
            hint = "end with a message of the user"
            raise unsupported("messages", "the last one is an answer, and answers are not continued.", hint)
        system = [] if self.system is None else [{"role": "system", "content": _content(self.system, "system")}]
        metadata = dict(self.metadata or {})
        user = metadata.pop("user_id", None)
        choice = self.tool_choice or {}
        fields = {
            "model": self.model,
            "messages": [*system, *(m for at, one in enumerate(self.messages) for m in _chat_messages(one, at))],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
            "tools": [_chat_tool(tool, at) for at, tool in enumerate(self.tools)] if self.tools else None,
            "tool_choice": _chat_tool_choice(choice) if self.tool_choice is not None else None,
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") is True else None,
            "response_format": self._response_format(),
            "metadata": metadata or None,
            "user": user if isinstance(user, str) else self.user,
        }
        return to_chat({**extra, **{name: value for name, value in fields.items() if value is not None}}, "Anthropic")

    def _response_format(self) -> dict[str, Any] | None:
        """Return the JSON schema that the answer has to fit, as chats name it; None if there is none.

        Raise `HttpError` for an `output_config` whose format is no JSON schema.
        """
        output_format = (self.output_config or {}).get("format")
        if output_format is None:
            return None
        schema = output_format.get("schema") if isinstance(output_format, Mapping) else None
        if not isinstance(schema, Mapping) or output_format.get("type") != "json_schema":
            hint = 'it is {"type": "json_schema", "schema": {...}}'
            raise bad_request("output_config.format: it holds no schema.", hint, param="output_config")
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


class TokenCountRequest(MessagesRequest):
    """A request for the number of tokens of a prompt: the engine reads it, and writes one token."""

    max_tokens: int = Field(1, ge=1, le=1)


def _only_clears_thinking(context_management: Any) -> bool:
    """Return True if its edits only leave out what a model thought earlier, as is done here in any case."""
    edits = context_management.get("edits") if isinstance(context_management, Mapping) else None
    if not isinstance(edits, list):
        return False
    kinds = [edit.get("type") if isinstance(edit, Mapping) else None for edit in edits]
    return all(isinstance(kind, str) and kind.startswith("clear_thinking") for kind in kinds)


# ------------------------------------------------------------ messages as chats have them


def _chat_messages(message: Mapping[str, Any], at: int) -> Iterator[dict[str, Any]]:
    """Yield a message as those of a chat: each result of a tool is one of its own. Raise `HttpError`."""
    role, content, field = message.get("role"), message.get("content"), f"messages.{at}"
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{field}.role: it is {role!r:.80}.", "use user or assistant", param=f"{field}.role")
    if not isinstance(content, str | list):
        raise bad_request(f"{field}.content: it is neither a text nor a list of blocks.", _FORM_HINT, param="messages")
    if role == "assistant":
        yield _chat_answer(content, f"{field}.content")
        return
    rest = list[Any]()
    for number, block in enumerate(content if isinstance(content, list) else ()):
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            if rest:
                yield {"role": role, "content": _content(rest, f"{field}.content")}
                rest = []
            yield _tool_message(block, f"{field}.content.{number}")
        else:
            rest.append(block)
    if isinstance(content, str) or rest or not content:
        yield {"role": role, "content": _content(rest or content, f"{field}.content")}


def _chat_answer(content: str | list[Any], field: str) -> dict[str, Any]:
    """Return an earlier answer of the model, with its calls. What it thought is left out, as Anthropic does."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, calls = list[Any](), list[dict[str, Any]]()
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            id, name, arguments = block.get("id"), block.get("name"), block.get("input", {})
            if not isinstance(id, str) or not isinstance(name, str) or not isinstance(arguments, Mapping):
                hint = 'a call is {"type": "tool_use", "id": "...", "name": "...", "input": {...}}'
                raise bad_request(f"{field}.{number}: id, name or input is wrong.", hint, param="messages")
            calls.append(function_call(id, name, json.dumps(arguments, ensure_ascii=False)))
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(block)
    message = {"role": "assistant", "content": _content(texts, field) if texts else None, "tool_calls": calls or None}
    return {name: value for name, value in message.items() if value is not None}


def _tool_message(block: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return the result of a tool. One that is an error and says nothing becomes the text `error`."""
    id, content = block.get("tool_use_id"), block.get("content", "")
    if not isinstance(id, str) or not isinstance(content, str | list):
        hint = 'a result is {"type": "tool_result", "tool_use_id": "...", "content": "..."}'
        raise bad_request(f"{field}: tool_use_id or content is wrong.", hint, param="messages")
    if not content and block.get("is_error") is True:
        content = "error"
    return {"role": "tool", "tool_call_id": id, "content": _content(content, f"{field}.content")}


def _content(content: str | Sequence[Any], field: str) -> str | list[dict[str, Any]]:
    """Return the content of a message as chats have it: one text, or parts. Raise `HttpError`."""
    if isinstance(content, str):
        return content
    parts = [part for number, block in enumerate(content) for part in _parts(block, f"{field}.{number}")]
    if not parts:
        return ""
    return str(parts[0]["text"]) if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _parts(block: Any, field: str) -> Iterator[dict[str, Any]]:
    """Yield a block as parts of a chat's message. Raise `HttpError`, which names the block, for an unknown one."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    source = block.get("source") if isinstance(block, Mapping) else None
    if kind == "text" and isinstance(block.get("text"), str):
        yield {"type": "text", "text": block["text"]}
    elif kind == "image" and isinstance(source, Mapping):
        yield {"type": "image_url", "image_url": {"url": _image_address(source, field)}}
    elif kind == "document" and isinstance(source, Mapping):
        if isinstance(citations := block.get("citations"), Mapping) and citations.get("enabled") is True:
            raise unsupported(field, "answers have no citations.", "leave citations out")
        yield from _document_parts(source, block.get("title"), field)
    else:
        reason = f"there are no blocks of type {kind!r:.80} here, or it is malformed."
        raise unsupported(field, reason, "send text, images, documents, tool_use and tool_result")


def _image_address(source: Mapping[str, Any], field: str) -> str:
    """Return the address of an image, which is a data URL for one in base64. Raise `HttpError` for other sources."""
    match source.get("type"):
        case "base64" if isinstance(source.get("data"), str) and isinstance(source.get("media_type"), str):
            return f"data:{source['media_type']};base64,{source['data']}"
        case "url" if isinstance(source.get("url"), str):
            return str(source["url"])
    raise unsupported(f"{field}.source", "it is neither base64 nor a url.", "send the image in base64, or its address")


def _document_parts(source: Mapping[str, Any], title: Any, field: str) -> Iterator[dict[str, Any]]:
    """Yield a document as a part that the server reads, or as the texts that it consists of."""
    name = {"filename": title} if isinstance(title, str) and title else {}
    kind, content = source.get("type"), source.get("content")
    if kind == "content" and isinstance(content, str | list):
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for number, block in enumerate(blocks):
            yield from _parts(block, f"{field}.source.content.{number}")
        return
    keys = {"base64": ("data", "file_data"), "text": ("data", "text"), "url": ("url", "file_url")}
    key, chat_key = keys.get(str(kind), ("file_id", "file_id"))
    value = source.get(key)
    if not isinstance(value, str):
        raise unsupported(f"{field}.source", f"there are no sources of type {kind!r:.80} here.", _FORM_HINT)
    if kind == "base64":
        value = f"data:{source.get('media_type') or ''};base64,{value}"
    yield {"type": "file", "file": {**name, chat_key: value}}


def _chat_tool(tool: Mapping[str, Any], at: int) -> dict[str, Any]:
    """Return a tool of Anthropic's form as chats have it. Raise `HttpError` for malformed and built-in ones."""
    if tool.get("type", "custom") != "custom":
        reason = f"there is no tool of type {tool.get('type')!r:.80} here."
        raise unsupported(f"tools.{at}", reason, _NO_SERVER_TOOLS)
    if not isinstance(tool.get("input_schema"), Mapping):
        raise bad_request(f"tools.{at}.input_schema: it is no JSON schema.", _NO_SERVER_TOOLS, param="tools")
    fields = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return function_tool({**fields, "parameters": tool["input_schema"]})


def _chat_tool_choice(choice: Mapping[str, Any]) -> str | dict[str, Any]:
    """Return Anthropic's choice of tools as chats name it. Raise `HttpError` for an unknown one."""
    match choice.get("type"):
        case "auto" | "none" as kind:
            return str(kind)
        case "any":
            return "required"
        case "tool" if isinstance(choice.get("name"), str):
            return function_tool({"name": choice["name"]})
    raise bad_request(
        "tool_choice: its type is unknown, or its name is missing.", "use auto, any, tool or none", param="tool_choice"
    )


# ------------------------------------------------------------ answers

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
"""Reasons for the end of an answer, by their names in chats; every other one is `end_turn`."""


class MessageWriter:
    """A writer of one message, whole or event by event."""

    def __init__(self, body: MessagesRequest, request_id: str) -> None:
        self._request_id = request_id
        self._next_index = 0
        """Index of the next content block."""
        self._has_open_text = False
        self._base = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": body.model,
        }

    def to_json(self, answer: Answer) -> dict[str, Any]:
        """Return the whole message. Raise `EngineError` for calls whose arguments are no JSON object.

        A call that is cut off because the answer has reached its limit of tokens is left out instead.
        """
        texts = [{"type": "text", "text": answer.text}] if answer.text else []
        calls = [block for call in answer.calls if (block := self._call_block(call, answer)) is not None]
        end = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop_sequence or None}
        return {**self._base, "content": [*texts, *calls], **end, "usage": _usage(answer.usage), **app_data([answer])}

    def _call_block(self, call: ToolCall, answer: Answer) -> dict[str, Any] | None:
        """Return a call of a tool; None for one that is cut off with its answer, since its input is not complete."""
        try:
            arguments = parse_json(call.arguments or "{}", "arguments", "")
        except HttpError:
            arguments = None
        if isinstance(arguments, dict):
            return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
        if answer.finish == "length":
            return None
        hint = "ask again, or give the tool a simpler schema"
        raise EngineError(f"the model called {call.name!r:.80} with arguments that are no JSON object.", hint=hint)

    # ------------------------------------------------------------ events

    def begin_events(self) -> Iterator[str]:
        """Yield the first event. How many tokens the prompt has is known at the end, and told there."""
        end = {"stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**self._base, "content": [], **end, "usage": _usage(Usage())})

    def events_of(self, delta: Delta) -> Iterator[str]:
        """Yield the events of a piece of text, and those of the end: calls of tools, then how the message ends."""
        if delta.text:
            if not self._has_open_text:
                yield from self._begin_block({"type": "text", "text": ""})
                self._has_open_text = True
            yield self._delta_event({"type": "text_delta", "text": delta.text})
        if delta.end is None:
            return
        answer = delta.end
        if self._has_open_text:
            self._has_open_text = False
            yield _event("content_block_stop", index=self._next_index - 1)
        for call in answer.calls:
            yield from self._begin_block({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            yield self._delta_event({"type": "input_json_delta", "partial_json": call.arguments or "{}"})
            yield _event("content_block_stop", index=self._next_index - 1)
        end = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop_sequence or None}
        yield _event("message_delta", delta=end, usage=_usage(answer.usage), **app_data([answer]))
        yield _event("message_stop")

    def failure_event(self, error: HttpError) -> str:
        """Return the last event of a stream that fails."""
        return event(to_anthropic(error, self._request_id)[1], "error")

    def _begin_block(self, block: dict[str, Any]) -> Iterator[str]:
        """Yield the event that begins a content block; after the first one also a ping, as Anthropic's API sends it.

        The caller yields the block's deltas and its end; until then `_next_index - 1` is the index of the block.
        """
        yield _event("content_block_start", index=self._next_index, content_block=block)
        if self._next_index == 0:
            yield _event("ping")
        self._next_index += 1

    def _delta_event(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._next_index - 1, delta=delta)


def _event(kind: str, /, **fields: Any) -> str:
    return event({"type": kind, **fields}, kind)


def _stop_reason(answer: Answer) -> str:
    """Return why a message ends, by Anthropic's name of the reason.

    An answer with calls ends with `tool_use` also where the engine's server reports a plain end, as some do if the
    request demanded a call.
    """
    if answer.stop_sequence:
        return "stop_sequence"
    reason = _STOP_REASONS.get(answer.finish, "end_turn")
    return "tool_use" if answer.calls and reason == "end_turn" else reason  # servers say "stop" for a demanded call


def _usage(usage: Usage) -> dict[str, int]:
    """Return the numbers of tokens. As in Anthropic's protocol, those from a cache are not among `input_tokens`."""
    return {
        "input_tokens": max(0, usage.prompt - usage.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


# ------------------------------------------------------------ models


def model_info(name: str, created: int, details: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `/v1/models` says of a model. `created`: seconds since 1970; `details`: those of the model."""
    created_at = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    limit = {"max_input_tokens": details["max_model_len"]} if details.get("max_model_len") else {}
    title = str(details.get("root") or name)
    return {
        "type": "model",
        "id": name,
        "display_name": title,
        "created_at": created_at,
        "lifecycle": "active",
        **limit,
    }


def model_page(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all models, as the only page of the list.

    The form is Anthropic's. The ids of the first and last model are None if the key may ask none.
    """
    first, last = (models[0]["id"], models[-1]["id"]) if models else (None, None)
    return {"data": list(models), "has_more": False, "first_id": first, "last_id": last}
