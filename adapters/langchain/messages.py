"""LangChain messages -> the engines' `Message`s. Pure, so that a prompt built ahead equals the one sent later."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from teola_plugin.errors import RegistrationError
from teola_plugin.requests.payloads import Message, Prompt

_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (SystemMessage, "system"),
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (ToolMessage, "tool"),
    (FunctionMessage, "tool"),
)
_CHAT_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
}
_NOT_FOR_THE_MODEL = frozenset({"reasoning", "thinking", "redacted_thinking"})
"""Blocks of other models' answers that are left out when the answer is sent back."""
_TOOL_CALLS = frozenset({"tool_use", "tool_call", "function_call"})
"""Blocks that `AIMessage.tool_calls` repeats."""


def to_prompt(messages: Sequence[BaseMessage]) -> Prompt:
    """The prompt of a conversation. Raises `RegistrationError` for what a text engine cannot take (images, ...)."""
    if not messages:
        raise RegistrationError("ChatTeola was given no messages.", hint="pass at least one message or a string")
    return Prompt(messages=tuple(Message(_role(m), _text(m)) for m in messages))


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        role = _CHAT_ROLES.get(message.role.lower())
    else:
        role = next((role for kind, role in _ROLES if isinstance(message, kind)), None)
    if role is None:
        role = getattr(message, "role", message.type)
        raise RegistrationError(
            f"ChatTeola cannot send a message of role {role!r}.", hint="use system, human, ai or tool messages"
        )
    return role


def _text(message: BaseMessage) -> str:
    content: str | Sequence[Any] = message.content
    blocks: Iterable[Any] = [content] if isinstance(content, str) else content
    text = "".join(_block_text(block, message) for block in blocks)
    if isinstance(message, AIMessage) and message.tool_calls:
        calls = [json.dumps({"name": c["name"], "arguments": c["args"]}) for c in message.tool_calls]
        text = "\n".join([text, *calls] if text else calls)
    return text


def _block_text(block: Any, message: BaseMessage) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type", "")
    if kind == "text":
        return str(block["text"])
    if isinstance(message, AIMessage) and (kind in _NOT_FOR_THE_MODEL or kind in _TOOL_CALLS):
        return ""
    raise RegistrationError(
        f"ChatTeola takes text only, but a {message.type} message holds a part of type {kind!r}.",
        hint="send its text, or call a multimodal model for this step; it may stand in the same chain",
    )
