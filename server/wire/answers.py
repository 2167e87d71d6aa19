"""Answers of models, and the form that OpenAI's protocol gives them."""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse

from teola_plugin import event_streams
from teola_plugin.event_streams import write_event


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    """Tokens of the prompt that were found in a prefix cache."""

    @property
    def total(self) -> int:
        return self.prompt + self.completion

    def to_json(self) -> dict[str, Any]:
        """Return the numbers of tokens in OpenAI's form."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.total,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def usage_of(answers: Sequence[Answer], n: int) -> Usage:
    """Return the tokens of answers to several prompts in turn, `n` to each: a prompt counts once."""
    prompts = [[answer.usage for answer in answers[at : at + n]] for at in range(0, len(answers), max(1, n))]
    return Usage(
        sum(max(usage.prompt for usage in usages) for usages in prompts),
        sum(usage.completion for usages in prompts for usage in usages),
        sum(max(usage.cached for usage in usages) for usages in prompts),
    )


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON text."""

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole choice."""

    text: str
    finish: str = "stop"
    usage: Usage = Usage()
    calls: tuple[ToolCall, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)
    """What apps add to it, e.g. sources."""
    stop_sequence: str = ""
    """The stop string at which the text ends; empty if it ends otherwise or the engine does not report it."""

    def message(self) -> dict[str, Any]:
        """Return the answer as the assistant's message of a chat, in OpenAI's form.

        The content is null, not empty, for an answer that only calls tools, as OpenAI's API has it.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.text or (None if self.calls else "")}
        if self.calls:
            message["tool_calls"] = [call.to_json() for call in self.calls]
        return {**message, "refusal": None, "annotations": []}


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one choice: text, or its end."""

    index: int = 0
    text: str = ""
    end: Answer | None = None


Deltas = AsyncGenerator[Delta, None]


def new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"


# ------------------------------------------------------------ chat


def chat_completion(answers: Sequence[Answer], model: str) -> dict[str, Any]:
    """Return the body of a chat's whole reply in OpenAI's form; each answer is one of its choices."""
    choices = [
        {"index": i, "message": a.message(), "logprobs": None, "finish_reason": a.finish} for i, a in enumerate(answers)
    ]
    return {
        "id": new_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage_of(answers, len(answers)).to_json(),
        **app_data(answers),
    }


def app_data(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return what apps add to their answers under the name `teola`; nothing if they add nothing.

    It is merged into the body of a reply, where OpenAI's clients keep fields that they do not know. Of several answers
    the last one's value of a name counts.
    """
    more = {key: value for answer in answers for key, value in answer.more.items()}
    return {"teola": more} if more else {}


class ChatChunks:
    """A writer of the chunks of one streamed chat."""

    def __init__(self, model: str, usage: bool) -> None:
        self._base = {
            "id": new_id("chatcmpl"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._usage = usage
        self._begun_choices: set[int] = set()
        self._ends: list[Answer] = []

    def chunks_of(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the chunks that a delta becomes: the role, once for each choice, then text, tool calls and the end."""
        role = {"role": "assistant", "content": "", "refusal": None}
        chunks = [] if delta.index in self._begun_choices else [self._chunk(delta.index, role)]
        self._begun_choices.add(delta.index)
        if delta.text:
            chunks.append(self._chunk(delta.index, {"content": delta.text}))
        if delta.end is not None:
            self._ends.append(delta.end)
            calls = [{"index": i, **call.to_json()} for i, call in enumerate(delta.end.calls)]
            chunks += [self._chunk(delta.index, {"tool_calls": calls})] if calls else []
            chunks.append({**self._chunk(delta.index, {}, delta.end.finish), **app_data([delta.end])})
        return chunks

    def end(self) -> list[dict[str, Any]]:
        """Return the last chunk of the stream, with the tokens of all choices; none if the client did not ask for it.

        Call it after the last delta: usage is known only then.
        """
        if not self._usage:
            return []
        return [{**self._base, "choices": [], "usage": usage_of(self._ends, len(self._ends)).to_json()}]

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**self._base, "choices": [choice], **({"usage": None} if self._usage else {})}


# ------------------------------------------------------------ completions


def completion(answers: Sequence[Answer], model: str, n: int) -> dict[str, Any]:
    """Return the body of `n` answers to each prompt in turn.

    `answers` has the choices of the first prompt, then those of the second, and so on; the usage counts each prompt
    once.
    """
    choices = [{"index": i, "text": a.text, "logprobs": None, "finish_reason": a.finish} for i, a in enumerate(answers)]
    base = {"id": new_id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": model}
    return {**base, "choices": choices, "usage": usage_of(answers, n).to_json()}


class CompletionChunks:
    """A writer of the chunks of one streamed completion, with `n` answers to each prompt."""

    def __init__(self, model: str, usage: bool, n: int) -> None:
        self._base = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._usage, self._n = usage, n
        self._ends: dict[int, Answer] = {}

    def chunks_of(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the chunk that a delta of a completion becomes, as a list of one."""
        finish = None if delta.end is None else delta.end.finish
        if delta.end is not None:
            self._ends[delta.index] = delta.end
        choice = {"index": delta.index, "text": delta.text, "logprobs": None, "finish_reason": finish}
        return [{**self._base, "choices": [choice], **({"usage": None} if self._usage else {})}]

    def end(self) -> list[dict[str, Any]]:
        usage = usage_of([answer for _, answer in sorted(self._ends.items())], self._n)
        return [{**self._base, "choices": [], "usage": usage.to_json()}] if self._usage else []


def event(data: object, name: str = "", id: str = "") -> str:
    """Return one server-sent event whose data is JSON."""
    return write_event(json_text(data), name, id)


DONE = write_event(event_streams.DONE)


# ------------------------------------------------------------ JSON

_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Lone surrogates, which UTF-8 has no bytes for, and characters at which many readers cut lines."""


def json_text(value: object) -> str:
    """Return compact JSON, whatever texts `value` has. NaN and infinity, which JSON does not have, become null."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_without_nan(value), ensure_ascii=False, separators=(",", ":"))
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _without_nan(value: Any) -> Any:
    """Return JSON-ready data with null in place of each NaN and infinity."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JSONAnswer(JSONResponse):
    """A response whose JSON may hold any text."""

    def render(self, content: Any) -> bytes:
        return json_text(content).encode()
