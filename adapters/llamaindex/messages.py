"""Conversion between LlamaIndex's messages and responses and those of the engines.

It is pure, so that a prefetched prompt equals the one that is sent later.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CitableBlock,
    CitationBlock,
    CompletionResponse,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from teola_plugin.errors import RegistrationError
from teola_plugin.requests.payloads import Generation, Message, Prompt

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}
_SILENT = (CachePoint, ThinkingBlock)
"""Blocks that the model does not see."""


def to_prompt(messages: Sequence[ChatMessage]) -> Prompt:
    """Return the prompt of a conversation. Raise `RegistrationError` for blocks that are no text (images, ...)."""
    if not messages:
        raise RegistrationError("TeolaLLM was given no messages.", hint="pass at least one ChatMessage, or a string")
    return Prompt(messages=tuple(Message(_ROLES[m.role], _text(m)) for m in messages))


def _text(message: ChatMessage) -> str:
    """Return the text blocks, as `ChatMessage.content` joins them; then the tool calls, a line of JSON each."""
    parts = list(_texts(message.blocks, message))
    calls = [_call_as_json(block) for block in message.blocks if isinstance(block, ToolCallBlock)]
    return "\n".join([part for part in parts if part or not calls] + calls)


def _texts(blocks: Iterable[Any], message: ChatMessage) -> Iterable[str]:
    """Yield the texts in the blocks of a message. Raise `RegistrationError` for blocks that no text engine takes."""
    for block in blocks:
        if isinstance(block, TextBlock):
            yield block.text
        elif isinstance(block, CitableBlock):
            yield from _texts(block.content, message)
        elif isinstance(block, CitationBlock):
            yield from _texts([block.cited_content], message)
        elif not isinstance(block, (*_SILENT, ToolCallBlock)):
            kind = getattr(block, "block_type", type(block).__name__)
            raise RegistrationError(
                f"TeolaLLM takes text only, but a {message.role.value} message holds a block of type {kind!r}.",
                hint="send its text, or use a multimodal LLM for this step; it may stand in the same engine",
            )


def _call_as_json(block: ToolCallBlock) -> str:
    """Return a tool call in a message as a line of JSON, in the form in which open models write calls."""
    kwargs = block.tool_kwargs
    if isinstance(kwargs, str):
        try:
            kwargs = json.loads(kwargs)
        except ValueError:
            pass
    return json.dumps({"name": block.tool_name, "arguments": kwargs})


def usage(generation: Generation) -> dict[str, int]:
    """Return the token counts of a generation, under LlamaIndex's names."""
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.completion_tokens,
        "total_tokens": generation.prompt_tokens + generation.completion_tokens,
    }


def raw(generation: Generation, model_name: str) -> dict[str, Any]:
    """Return the `raw` of a response; `cached_tokens` are prompt tokens that were found in the prefix cache."""
    cached = {"prompt_tokens_details": {"cached_tokens": generation.cached_tokens}}
    return {
        "model": model_name,
        "finish_reason": generation.finish_reason,
        "usage": {**usage(generation), **cached},
    }


def to_completion(generation: Generation, model_name: str, delta: str | None = None) -> CompletionResponse:
    return CompletionResponse(
        text=generation.text, delta=delta, raw=raw(generation, model_name), additional_kwargs=usage(generation)
    )


def to_chat(generation: Generation, model_name: str, delta: str | None = None) -> ChatResponse:
    """Return a generation as the response of `chat`, with its usage. `delta`: the text of the last piece."""
    return ChatResponse(
        message=assistant(generation.text),
        delta=delta,
        raw=raw(generation, model_name),
        additional_kwargs=usage(generation),
    )


def assistant(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=text)


_OPENAI_ROLES = {"developer": MessageRole.SYSTEM}


def chat_messages(pairs: Iterable[tuple[str, str]]) -> list[ChatMessage]:
    """Return the messages for pairs (role as OpenAI names it, text)."""
    return [ChatMessage(role=_OPENAI_ROLES.get(role) or MessageRole(role), content=text) for role, text in pairs]
