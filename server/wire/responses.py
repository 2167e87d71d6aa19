"""`/v1/responses`: OpenAI's other form of a chat, read as a chat and written in this form."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ConfigDict, Field

from teola_plugin.server.errors import HttpError, bad_request, unsupported
from teola_plugin.server.wire.answers import Answer, Delta, ToolCall, Usage, event
from teola_plugin.server.wire.requests import (
    HARMLESS,
    Body,
    ChatRequest,
    function_call,
    function_tool,
    further_parameters,
    to_chat,
)

_IGNORED = frozenset({*HARMLESS, "include", "reasoning", "truncation", "background", "prompt_cache_options"})
"""Parameters that change nothing of the answer."""


_CHAT_ONLY = frozenset({"messages", "max_completion_tokens", "response_format", "n", "functions", "function_call"})
"""Parameters of chats that responses do not have, or spell differently."""


class ResponsesRequest(Body):
    model_config = ConfigDict(extra="allow", protected_namespaces=())
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=1 << 24)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = None
    previous_response_id: str | None = None

    def as_chat(self) -> ChatRequest:
        """Return the request as a chat. Raise `HttpError` for what a chat does not support."""
        if self.previous_response_id is not None:
            hint = "send the whole conversation as input"
            raise unsupported("previous_response_id", "answers are not kept.", hint)
        extra = further_parameters(self, _IGNORED, _CHAT_ONLY)
        instructions = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        fields = {
            "model": self.model,
            "messages": [*instructions, *_messages(self.input)],
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_tool(one) for one in self.tools] if self.tools else None,
            "tool_choice": _choice(self.tool_choice),
            "response_format": _format(self.text),
            "metadata": self.metadata,
            "user": self.user,
        }
        return to_chat({**extra, **fields})


def _messages(input: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a chat for the `input` of a request: one text, or a list of items.

    Raise `HttpError` for an empty list and for items that a chat does not have.
    """
    if isinstance(input, str):
        return [{"role": "user", "content": input}]
    if not input:
        raise bad_request("input is empty.", "give a text, or a list of messages", param="input")
    return [message for item in input if (message := _message(item)) is not None]


def _message(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the chat message for one item of `input`; None for reasoning, which is left out.

    Raise `HttpError` for all others.
    """
    match item.get("type", "message"):
        case "message":
            content = item.get("content")
            role = item.get("role", "user")
            if role not in ("system", "developer", "user", "assistant") or not isinstance(content, str | list):
                reason = "the role of an item is unknown, or its content is missing."
                raise bad_request(f"input: {reason}", "see OpenAI's form of messages", param="input")
            return {"role": role, "content": _parts(content)}
        case "function_call":
            name, arguments, call_id = (_text_of(item, key) for key in ("name", "arguments", "call_id"))
            return {"role": "assistant", "tool_calls": [function_call(call_id, name, arguments)]}
        case "function_call_output":
            output = item.get("output")
            if output is None:
                raise bad_request("input: an output of a function is missing.", "give a text", param="input")
            content = _parts(output) if isinstance(output, str | list) else json.dumps(output)
            return {"role": "tool", "tool_call_id": _text_of(item, "call_id"), "content": content}
        case "reasoning":
            return None
    raise unsupported("input", f"there are no items of type {item.get('type')!r:.80} here.", "send messages")


def _text_of(item: Mapping[str, Any], key: str) -> str:
    """Return a text field of an item of `input`; empty if it is absent. Raise `HttpError` for what is no text."""
    value = item.get(key, "")
    if not isinstance(value, str):
        raise bad_request(f"input: {key} of an item is no text.", "see OpenAI's form of calls", param="input")
    return value


def _parts(content: str | list[Any]) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: Any) -> dict[str, Any]:
    """Return a part of a message as chats have it: a file, a text, or any other part unchanged.

    Raise `HttpError` for what is no object.
    """
    if not isinstance(part, Mapping):
        raise bad_request("input: a part of a message is no object.", "see OpenAI's form of messages", param="input")
    if part.get("type") == "input_file":
        return {"type": "file", "file": {key: value for key, value in part.items() if key != "type"}}
    text = part.get("type") in ("input_text", "output_text", "text")
    return {"type": "text", "text": part.get("text")} if text else dict(part)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported("tools", f"there is no tool of type {tool.get('type')!r:.80} here.", "give functions")
    return function_tool({k: v for k, v in tool.items() if k in ("name", "description", "parameters", "strict")})


def _choice(choice: str | Mapping[str, Any] | None) -> Any:
    if isinstance(choice, Mapping) and choice.get("type", "function") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the form that the answer has to have, as chats name it in `response_format`; None if it is free.

    `text`: the request's field `text`. Raise `HttpError` if its format is no object.
    """
    form = (text or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise bad_request("text.format: it is no object.", 'e.g. {"type": "text"}', param="text.format")
    if form.get("type") != "json_schema":
        return dict(form)
    inner = {key: value for key, value in form.items() if key != "type"}
    return {"type": "json_schema", "json_schema": inner}


# ------------------------------------------------------------ answers


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the numbers of tokens in the form of OpenAI's Responses protocol."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total,
    }


def _text_item(id: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_text_part(text)]
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: ToolCall, status: str) -> dict[str, Any]:
    base = {"id": _id("fc"), "type": "function_call", "status": status, "call_id": call.id}
    return {**base, "name": call.name, "arguments": call.arguments}


class ResponseWriter:
    """A writer of one response, whole or event by event."""

    def __init__(self, body: ResponsesRequest) -> None:
        self._text_id = _id("msg")
        self._number = 0
        self._text: str | None = None
        self._output: list[dict[str, Any]] = []
        self._base = {
            "id": _id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }

    def to_json(self, answer: Answer) -> dict[str, Any]:
        """Return the whole response: the text, if there is any or no call is made, then the tool calls."""
        if answer.text or not answer.calls:
            self._output.append(_text_item(self._text_id, answer.text, "completed"))
        self._output += [_call_item(call, "completed") for call in answer.calls]
        return self._completed(answer)

    def _completed(self, answer: Answer) -> dict[str, Any]:
        """Return the response as it ends: completed, or incomplete if the limit of tokens has cut it."""
        cut = answer.finish == "length"
        more = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}
        status = "incomplete" if cut else "completed"
        return {**self._base, **more, "status": status, "output": self._output, "usage": _usage(answer.usage)}

    # ------------------------------------------------------------ events

    def begin_events(self) -> Iterator[str]:
        response = {**self._base, "status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def events_of(self, delta: Delta) -> Iterator[str]:
        """Yield the events of a piece of text, and those of the end: the whole text, tool calls, then the response."""
        if delta.text:
            yield from self._text_start_events()
            self._text = (self._text or "") + delta.text
            yield self._event("response.output_text.delta", **self._text_position(), delta=delta.text, logprobs=[])
        if delta.end is not None:
            yield from self._end_events(delta.end)

    def failure_event(self, error: HttpError) -> str:
        details = {"code": error.code or "server_error", "message": str(error)}
        response = {**self._base, "status": "failed", "output": self._output, "error": details, "usage": None}
        return self._event("response.failed", response=response)

    def _text_start_events(self) -> Iterator[str]:
        """Yield the events that announce the text of the response, unless they were sent before."""
        if self._text is None:
            self._text = ""
            item = _text_item(self._text_id, None, "in_progress")
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._event("response.content_part.added", **self._text_position(), part=_text_part(""))

    def _end_events(self, answer: Answer) -> Iterator[str]:
        """Yield the last events: the end of the text, the tool calls, and the whole response."""
        if not answer.calls:
            yield from self._text_start_events()
        if self._text is not None:
            item = _text_item(self._text_id, self._text, "completed")
            yield self._event("response.output_text.done", **self._text_position(), text=self._text, logprobs=[])
            yield self._event("response.content_part.done", **self._text_position(), part=_text_part(self._text))
            yield self._event("response.output_item.done", output_index=0, item=item)
            self._output.append(item)
        for call in answer.calls:
            yield from self._call_events(call)
        response = self._completed(answer)
        yield self._event(f"response.{response['status']}", response=response)

    def _call_events(self, call: ToolCall) -> Iterator[str]:
        """Yield the events of one tool call, whose arguments come in one piece. Add the call to the response."""
        item, at = _call_item(call, "completed"), len(self._output)
        position = {"item_id": item["id"], "output_index": at}
        opened = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", output_index=at, item=opened)
        yield self._event("response.function_call_arguments.delta", **position, delta=call.arguments)
        yield self._event("response.function_call_arguments.done", **position, name=call.name, arguments=call.arguments)
        yield self._event("response.output_item.done", output_index=at, item=item)
        self._output.append(item)

    def _text_position(self) -> dict[str, Any]:
        return {"item_id": self._text_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, /, **fields: Any) -> str:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **fields}, kind)
