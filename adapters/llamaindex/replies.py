"""The responses of LlamaIndex's models for the generations of an engine, whole or in pieces."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole

from teola_plugin.requests.payloads import Generation


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
    return ChatResponse(
        message=assistant(generation.text),
        delta=delta,
        raw=raw(generation, model_name),
        additional_kwargs=usage(generation),
    )


def assistant(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=text)
