"""`/v1/chat/completions`, as clients ask."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from teola_plugin.requests.bad_input import lone_surrogate

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
INT64 = 2**63


class Body(BaseModel):
    """A request of the protocol. What is not known is kept: engines that carry requests pass it on."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    model: str = Field(min_length=1, max_length=256)
    user: str | None = None
    metadata: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _text_is_unicode(cls, data: Any) -> Any:
        try:
            wrong = lone_surrogate(json.dumps(data, ensure_ascii=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"it is not plain JSON: {error}") from None
        if wrong:
            raise ValueError(wrong)
        return data

    def given(self) -> dict[str, Any]:
        """What the client has sent, as JSON-ready data."""
        return self.model_dump(mode="json", exclude_unset=True)


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: Role
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")
    include_usage: bool | None = None


class Generating(Body):
    """What requests for chats and for completions have in common."""

    max_tokens: int | None = Field(None, ge=1, le=1 << 24)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 20)
    n: int | None = Field(None, ge=1, le=16)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(Generating):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 24)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def characters(self) -> int:
        """That it asks with, about: of parts that are no text, some each."""
        return sum(_length(message.content) for message in self.messages)


def _length(content: str | list[dict[str, Any]] | None) -> int:
    if content is None or isinstance(content, str):
        return len(content or "")
    return sum(len(text) if isinstance(text := part.get("text"), str) else 256 for part in content)


class CompletionRequest(Generating):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=16)
    suffix: str | None = None


HARMLESS = frozenset(
    {
        *("metadata", "model", "user", "stream", "stream_options", "store", "service_tier", "parallel_tool_calls"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "reasoning_effort", "verbosity", "strict"),
    }
)
"""Parameters that say nothing of the answer which an engine could do otherwise."""
NOTHING: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "echo": (None, False),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "functions": (None, []),
    "function_call": (None, "none"),
    "web_search_options": (None,),
}
"""Parameters that an engine of the pool does not know, and the values of them that ask for nothing."""
