"""`TeolaLLM`: a LlamaIndex LLM on an engine of the pool."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import Any, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.prompts import BasePromptTemplate
from pydantic import ConfigDict

from teola_plugin.adapters.calls import giving_up
from teola_plugin.adapters.llamaindex.messages import assistant, to_chat, to_completion, to_prompt
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
