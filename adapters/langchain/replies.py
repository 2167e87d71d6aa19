"""LangChain's messages: made of an engine's generations, whole or in chunks, and of messages as OpenAI writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, convert_to_messages
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call
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


# ------------------------------------------------------------ messages as OpenAI writes them


def from_openai(
    role: str, text: str, fields: Mapping[str, Any], calls: Sequence[tuple[str | None, str, Any]] = ()
) -> Any:
    """Return the message for one as OpenAI writes it; a pair of role and text if that says all.

    `fields`: `name` and `tool_call_id`, if the message has them. `calls`: id, name and arguments of calls of tools;
    LangChain keeps those apart whose arguments are no JSON object.
    """
    if role == "assistant" and calls:
        valid = [tool_call(name=name, args=args, id=id) for id, name, args in calls if isinstance(args, dict)]
        invalid = [
            invalid_tool_call(name=name, args=args if isinstance(args, str) else json.dumps(args), id=id, error=None)
            for id, name, args in calls
            if not isinstance(args, dict)
        ]
        return AIMessage(text, name=fields.get("name"), tool_calls=valid, invalid_tool_calls=invalid)
    if "name" not in fields and role not in ("tool", "function"):
        return role, text
    return convert_to_messages([{"role": role, "content": text, **fields}])[0]
