"""`TeolaLLM`: a LlamaIndex LLM on an engine of the pool."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CitableBlock,
    CitationBlock,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.prompts import BasePromptTemplate
from pydantic import ConfigDict

from teola_plugin.adapters.calls import giving_up
from teola_plugin.adapters.llamaindex.pool_backed import PoolBacked
from teola_plugin.adapters.llamaindex.tools import CallsTools, StreamedText, Tools, split_tools
from teola_plugin.adapters.sampling import EngineModel
from teola_plugin.errors import RegistrationError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Generate, Generation, Message, Prompt
from teola_plugin.runtime.loop_thread import CallHandle
from teola_plugin.shims.llamaindex.models import messages_of, parse_output, text_of

Response = TypeVar("Response", ChatResponse, CompletionResponse)
LastResponse = Callable[[Generation, StreamedText], Response]
"""(generation, the text of it that was streamed) -> the response that ends a stream."""


class TeolaLLM(PoolBacked, EngineModel, CallsTools):
    """A LlamaIndex LLM whose work is done by the pool's engine `engine`.

    ::

        llm = TeolaLLM(pool=pool, engine="llm", max_tokens=128)

    Keyword arguments of a call: `max_tokens`, `temperature`, `top_p`, `top_k`, `seed`, `stop`, `ignore_eos`,
    `json_schema` (dict or JSON text) and `response_format` as OpenAI spells it; `extra_headers` of a chat go nowhere.
    Others raise `RegistrationError`, as do messages that hold more than text. Engine errors pass through unchanged.

    With `is_function_calling_model=True` it calls tools (`chat_with_tools`, `FunctionAgent`, ...). Its chat
    template shows them to the model; of a streamed answer that may be a call, only what is certainly text is delivered.
    """

    engine: str = "llm"
    is_chat_model: bool = True
    """True if the engine gets messages, which its chat template renders; False if it gets plain text."""
    context_window: int | None = None
    """Tokens of prompt and answer together; None for the engine's own limit, if it has one."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True)

    @classmethod
    def class_name(cls) -> str:
        return "TeolaLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """Describe the model to LlamaIndex. The context window is the user's, else the engine's limit, in tokens."""
        limit = self.pool.engine(self.engine).profile.max_request_size
        return LLMMetadata(
            context_window=self.context_window or limit or DEFAULT_CONTEXT_WINDOW,
            num_output=self.max_tokens,
            is_chat_model=self.is_chat_model,
            is_function_calling_model=self.is_function_calling_model,
            model_name=self.model_name,
        )

    # ------------------------------------------------------------ requests

    def payload_of_prompt(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Generate:
        """Return the engine's request of `complete`."""
        text = prompt if formatted or self.completion_to_prompt is None else self.completion_to_prompt(prompt)
        engine_prompt = Prompt(messages=(Message("user", text),)) if self.is_chat_model else Prompt(text=text)
        return Generate(engine_prompt, self.sampling(None, kwargs))

    def payload_of_messages(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Generate:
        """Return the engine's request of `chat`."""
        rest, tools = split_tools(kwargs)
        return self._chat_request(messages, rest, tools)

    def _chat_request(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any], tools: Tools | None) -> Generate:
        """Return the engine's request for a conversation: messages for a chat model, else one text.

        Raise `RegistrationError` for tools without a chat model, and for messages that hold more than text.
        """
        if self.is_chat_model:
            request = Generate(to_prompt(messages), self.sampling(None, kwargs))
            return request if tools is None else tools.added_to(request)
        if tools is not None:
            raise RegistrationError(
                "a TeolaLLM that sends plain text cannot tell its model of tools.", hint="is_chat_model=True"
            )
        assert self.messages_to_prompt is not None  # LlamaIndex's validators set it
        return self.payload_of_prompt(self.messages_to_prompt(messages), formatted=True, **kwargs)

    def payload_of_template(self, template: BasePromptTemplate, /, **prompt_args: Any) -> Generate:
        """Return the engine's request of `predict` (and `stream`, `apredict`, ...)."""
        if self.is_chat_model:
            return self.payload_of_messages(messages_of(self, template, prompt_args))
        return self.payload_of_prompt(text_of(self, template, prompt_args), formatted=True)

    # ------------------------------------------------------------ responses

    def completion_of(self, generation: Generation) -> CompletionResponse:
        """Return the response of `complete` for a generation."""
        return to_completion(generation, self.model_name)

    def chat_of(self, generation: Generation, **kwargs: Any) -> ChatResponse:
        """Return the response of `chat` for a generation. `kwargs`: those of the chat, tools among them."""
        return self._chat_response(generation, split_tools(kwargs)[1])

    def text_of(self, generation: Generation) -> str:
        """Return the result of `predict` for a generation."""
        return parse_output(self, generation.text)

    # ------------------------------------------------------------ LlamaIndex's interface

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        rest, tools = split_tools(kwargs)
        [generation] = self._start(self._chat_request(messages, rest, tools)).result()
        return self._chat_response(generation, tools)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        [generation] = self._start(self.payload_of_prompt(prompt, formatted, **kwargs)).result()
        return self.completion_of(generation)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        rest, tools = split_tools(kwargs)
        [generation] = await self._start(self._chat_request(messages, rest, tools))
        return self._chat_response(generation, tools)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        [generation] = await self._start(self.payload_of_prompt(prompt, formatted, **kwargs))
        return self.completion_of(generation)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        rest, tools = split_tools(kwargs)
        handle = self._start(self._chat_request(messages, rest, tools), stream=True)
        return self._stream_responses(handle, _chat_piece, self._last_chat_response(tools), tools)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        handle = self._start(self.payload_of_prompt(prompt, formatted, **kwargs), stream=True)
        return self._stream_responses(handle, _completion_piece, self._last_completion_response)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        rest, tools = split_tools(kwargs)
        handle = self._start(self._chat_request(messages, rest, tools), stream=True)
        return self._astream_responses(handle, _chat_piece, self._last_chat_response(tools), tools)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        handle = self._start(self.payload_of_prompt(prompt, formatted, **kwargs), stream=True)
        return self._astream_responses(handle, _completion_piece, self._last_completion_response)

    # ------------------------------------------------------------ calls

    def _start(self, request: Generate, *, stream: bool = False) -> CallHandle:
        """Start a request now, even if its answer is streamed: a reader may have left the query when it begins."""
        return self.request(PrimitiveKind.PREFILLING, [request], stream=stream)

    def _chat_response(self, generation: Generation, tools: Tools | None) -> ChatResponse:
        plain = to_chat(generation, self.model_name)
        return plain if tools is None else tools.response(plain)

    def _last_chat_response(self, tools: Tools | None) -> LastResponse[ChatResponse]:
        """Return a function that makes a stream's last response: the whole answer, with the rest as delta."""

        def last_response(generation: Generation, streamed: StreamedText) -> ChatResponse:
            response = self._chat_response(generation, tools)
            return response.model_copy(update={"delta": streamed.rest_of(response.message.content or "")})

        return last_response

    def _last_completion_response(self, generation: Generation, streamed: StreamedText) -> CompletionResponse:
        return to_completion(generation, self.model_name, streamed.rest_of(generation.text))

    def _stream_responses(
        self,
        handle: CallHandle,
        piece_of: Callable[[str, str], Response],
        last_response: LastResponse[Response],
        tools: Tools | None = None,
    ) -> Generator[Response, None, None]:
        """Yield the text so far with each piece; at the end the whole answer with its usage. A real generator."""
        streamed = StreamedText(tools)
        with giving_up(handle):
            for piece in handle.pieces:
                if delta := streamed.add(piece.text):
                    yield piece_of(streamed.delivered, delta)
            [generation] = handle.result()
        yield last_response(generation, streamed)

    async def _astream_responses(
        self,
        handle: CallHandle,
        piece_of: Callable[[str, str], Response],
        last_response: LastResponse[Response],
        tools: Tools | None = None,
    ) -> AsyncGenerator[Response, None]:
        """Yield responses as `_stream_responses` does, in a loop."""
        streamed = StreamedText(tools)
        with giving_up(handle):
            async for piece in handle.pieces:
                if delta := streamed.add(piece.text):
                    yield piece_of(streamed.delivered, delta)
            [generation] = await handle
        yield last_response(generation, streamed)


def _chat_piece(streamed: str, delta: str) -> ChatResponse:
    return ChatResponse(message=assistant(streamed), delta=delta)


def _completion_piece(streamed: str, delta: str) -> CompletionResponse:
    return CompletionResponse(text=streamed, delta=delta)


# ------------------------------------------------------------ messages and responses of engines
# Pure conversions, so that a prefetched prompt equals the one that is sent later.

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
