"""LlamaIndex's messages for a conversation that is a list of pairs."""

from __future__ import annotations

from collections.abc import Iterable

from llama_index.core.llms import ChatMessage, MessageRole

_ROLES = {"developer": MessageRole.SYSTEM}


def chat_messages(pairs: Iterable[tuple[str, str]]) -> list[ChatMessage]:
    """Return the messages for pairs (role as OpenAI names it, text)."""
    return [ChatMessage(role=_ROLES.get(role) or MessageRole(role), content=text) for role, text in pairs]
