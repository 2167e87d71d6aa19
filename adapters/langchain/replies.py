"""Generations of an engine -> what LangChain's models return, whole or in chunks."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGenerationChunk

from teola_plugin.requests.payloads import Generation


def usage(generation: Generation) -> UsageMetadata:
    """Tokens of one generation; `cache_read` are prompt tokens found in the prefix cache."""
    return UsageMetadata(
        input_tokens=generation.prompt_tokens,
        output_tokens=generation.completion_tokens,
        total_tokens=generation.prompt_tokens + generation.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=generation.cached_tokens),
    )


def info(generation: Generation, model_name: str) -> dict[str, Any]:
    """`response_metadata` of the answer."""
    return {"model_name": model_name, "finish_reason": generation.finish_reason, "model_provider": "teola"}


def to_message(generation: Generation, model_name: str) -> AIMessage:
    """The whole answer, without an id: LangChain names it after its run."""
    return AIMessage(
        content=generation.text,
        response_metadata=info(generation, model_name),
        usage_metadata=usage(generation),
    )


def text_chunk(text: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=text))


def last_chunk(generation: Generation, streamed: str, model_name: str) -> ChatGenerationChunk:
    """Ends a stream: what was not streamed, and the only chunk with usage, so that chunks add up to `to_message`."""
    message = AIMessageChunk(
        content=rest(generation, streamed),
        response_metadata=info(generation, model_name),
        usage_metadata=usage(generation),
        chunk_position="last",
    )
    return ChatGenerationChunk(message=message, generation_info={"finish_reason": generation.finish_reason})


def rest(generation: Generation, streamed: str) -> str:
    """Text that no piece carried: engines may send only the end when nobody read from the start."""
    return generation.text[len(streamed) :]
