"""The engines' messages for LlamaIndex's. Pure, so that a prefetched prompt equals the one that is sent later."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from teola_plugin.errors import RegistrationError
from teola_plugin.requests.payloads import Message, Prompt

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
    kwargs = block.tool_kwargs
    if isinstance(kwargs, str):
        try:
            kwargs = json.loads(kwargs)
        except ValueError:
            pass
    return json.dumps({"name": block.tool_name, "arguments": kwargs})
