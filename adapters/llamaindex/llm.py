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
from teola_plugin.adapters.llamaindex import replies
from teola_plugin.adapters.llamaindex.messages import to_prompt
from teola_plugin.adapters.llamaindex.pool_backed import PoolBacked
from teola_plugin.adapters.llamaindex.tools import CallsTools, Tools, Written, taken
from teola_plugin.adapters.sampling import EngineModel
from teola_plugin.errors import RegistrationError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Generate, Generation, Message, Prompt
from teola_plugin.runtime.handles import CallHandle
from teola_plugin.shims.llamaindex.models import messages_of, parse_output, text_of

Response = TypeVar("Response", ChatResponse, CompletionResponse)
Whole = Callable[[Generation, Written], Response]
"""(generation, what was streamed of it) -> the response that ends a stream."""


class TeolaLLM(PoolBacked, EngineModel, CallsTools):
    """A LlamaIndex LLM whose work is done by the pool's engine `engine`.

    ::

        llm = TeolaLLM(pool=pool, engine="llm", max_tokens=128)

    Keyword arguments of a call: `max_tokens`, `temperature`, `top_p`, `top_k`, `seed`, `stop`, `ignore_eos`,
    `json_schema` (dict or JSON text) and `response_format` as OpenAI spells it; `extra_headers` of a chat go nowhere.
    Others raise `RegistrationError`, as do messages that hold more than text. Engine errors pass through as they are.

    With `is_function_calling_model=True` it calls tools (`chat_with_tools`, `FunctionAgent`, ...). They are told to the
    model by its chat template; of a streamed answer that may be a call, only what is certainly text comes in pieces.
    """

    engine: str = "llm"
    is_chat_model: bool = True
    """Whether the engine is sent messages, which it writes by its chat template; else plain text."""
    context_window: int | None = None
    """Tokens of prompt and answer together; None takes the engine's own limit, if it tells one."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True)

    @classmethod
    def class_name(cls) -> str:
        return "TeolaLLM"

    @property
    def metadata(self) -> LLMMetadata:
        limit = self.pool.engine(self.engine).profile.max_request_size
        return LLMMetadata(
            context_window=self.context_window or limit or DEFAULT_CONTEXT_WINDOW,
            num_output=self.max_tokens,
            is_chat_model=self.is_chat_model,
            is_function_calling_model=self.is_function_calling_model,
            model_name=self.model_name,
        )

    # ------------------------------------------------------------ what is asked

    def payload_of_prompt(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Generate:
        """What `complete` asks the engine for."""
        text = prompt if formatted or self.completion_to_prompt is None else self.completion_to_prompt(prompt)
        asked = Prompt(messages=(Message("user", text),)) if self.is_chat_model else Prompt(text=text)
        return Generate(asked, self.sampling(None, kwargs))

    def payload_of_messages(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Generate:
        """What `chat` asks the engine for."""
        rest, tools = taken(kwargs)
        return self._asked(messages, rest, tools)

    def _asked(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any], tools: Tools | None) -> Generate:
        if self.is_chat_model:
            asked = Generate(to_prompt(messages), self.sampling(None, kwargs))
            return asked if tools is None else tools.asked(asked)
        if tools is not None:
            raise RegistrationError(
                "a TeolaLLM that sends plain text cannot tell its model of tools.", hint="is_chat_model=True"
            )
        assert self.messages_to_prompt is not None  # LlamaIndex's validators see to it
        return self.payload_of_prompt(self.messages_to_prompt(messages), formatted=True, **kwargs)

    def payload_of_template(self, template: BasePromptTemplate, /, **prompt_args: Any) -> Generate:
        """What `predict` (and `stream`, `apredict`, ...) asks the engine for."""
        if self.is_chat_model:
            return self.payload_of_messages(messages_of(self, template, prompt_args))
        return self.payload_of_prompt(text_of(self, template, prompt_args), formatted=True)

    # ------------------------------------------------------------ what comes back

    def completion_of(self, generation: Generation) -> CompletionResponse:
        """What `complete` returns for a generation."""
        return replies.to_completion(generation, self.model_name)

    def chat_of(self, generation: Generation, **kwargs: Any) -> ChatResponse:
        """What `chat` returns for a generation. `kwargs`: of the chat, which may tell of tools."""
        return self._answered(generation, taken(kwargs)[1])

    def text_of(self, generation: Generation) -> str:
        """What `predict` returns for a generation."""
        return parse_output(self, generation.text)

    # ------------------------------------------------------------ LlamaIndex's interface

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        rest, tools = taken(kwargs)
        [generation] = self._call(self._asked(messages, rest, tools)).result()
        return self._answered(generation, tools)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        [generation] = self._call(self.payload_of_prompt(prompt, formatted, **kwargs)).result()
        return self.completion_of(generation)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        rest, tools = taken(kwargs)
        [generation] = await self._call(self._asked(messages, rest, tools))
        return self._answered(generation, tools)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        [generation] = await self._call(self.payload_of_prompt(prompt, formatted, **kwargs))
        return self.completion_of(generation)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        rest, tools = taken(kwargs)
        handle = self._call(self._asked(messages, rest, tools), stream=True)
        return self._streamed(handle, _chat_piece, self._whole_chat(tools), tools)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        handle = self._call(self.payload_of_prompt(prompt, formatted, **kwargs), stream=True)
        return self._streamed(handle, _completion_piece, self._whole_completion)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        rest, tools = taken(kwargs)
        handle = self._call(self._asked(messages, rest, tools), stream=True)
        return self._astreamed(handle, _chat_piece, self._whole_chat(tools), tools)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        handle = self._call(self.payload_of_prompt(prompt, formatted, **kwargs), stream=True)
        return self._astreamed(handle, _completion_piece, self._whole_completion)

    # ------------------------------------------------------------ calls

    def _call(self, asked: Generate, *, stream: bool = False) -> CallHandle:
        """Starts at once, also where the answer is streamed: who reads it later may have left the query by then."""
        return self.request(PrimitiveKind.PREFILLING, [asked], stream=stream)

    def _answered(self, generation: Generation, tools: Tools | None) -> ChatResponse:
        plain = replies.to_chat(generation, self.model_name)
        return plain if tools is None else tools.response(plain)

    def _whole_chat(self, tools: Tools | None) -> Whole[ChatResponse]:
        def whole(generation: Generation, written: Written) -> ChatResponse:
            made = self._answered(generation, tools)
            return made.model_copy(update={"delta": written.rest_of(made.message.content or "")})

        return whole

    def _whole_completion(self, generation: Generation, written: Written) -> CompletionResponse:
        return replies.to_completion(generation, self.model_name, written.rest_of(generation.text))

    def _streamed(
        self,
        handle: CallHandle,
        piece_of: Callable[[str, str], Response],
        whole: Whole[Response],
        tools: Tools | None = None,
    ) -> Generator[Response, None, None]:
        """The text so far with each piece; at the end the whole with its usage. A real generator."""
        written = Written(tools)
        with giving_up(handle):
            for piece in handle.pieces:
                if delta := written.add(piece.text):
                    yield piece_of(written.told, delta)
            [generation] = handle.result()
        yield whole(generation, written)

    async def _astreamed(
        self,
        handle: CallHandle,
        piece_of: Callable[[str, str], Response],
        whole: Whole[Response],
        tools: Tools | None = None,
    ) -> AsyncGenerator[Response, None]:
        written = Written(tools)
        with giving_up(handle):
            async for piece in handle.pieces:
                if delta := written.add(piece.text):
                    yield piece_of(written.told, delta)
            [generation] = await handle
        yield whole(generation, written)


def _chat_piece(streamed: str, delta: str) -> ChatResponse:
    return ChatResponse(message=replies.assistant(streamed), delta=delta)


def _completion_piece(streamed: str, delta: str) -> CompletionResponse:
    return CompletionResponse(text=streamed, delta=delta)
