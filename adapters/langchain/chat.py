"""`ChatTeola`: a chat model on an LLM engine of the pool.

LangChain's messages are made of an engine's generations, whole or in chunks, and of messages as OpenAI writes them.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.globals import get_llm_cache
from langchain_core.language_models.base import LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import ConfigDict

from teola_plugin.adapters.calls import giving_up
from teola_plugin.adapters.langchain.listening import (
    ConfigScopedModel,
    ModelCall,
    PendingAnswer,
    call_context,
    listening,
)
from teola_plugin.adapters.langchain.tools import ToolDefinition, Tools, described, without_tools
from teola_plugin.adapters.sampling import EngineModel, list_shape, schema_drafts
from teola_plugin.errors import RegistrationError, unknown_name
from teola_plugin.graph import PrimitiveKind, on_loop
from teola_plugin.requests.payloads import Generate, Generation, Message, Prompt, Sampling
from teola_plugin.runtime.loop_thread import CallHandle
from teola_plugin.shims.langchain import prompt_value
from teola_plugin.tracer.leaf import GenerationLeaf

if TYPE_CHECKING:
    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun


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
    """Return the role by which an LLM engine gets a message. Raise `RegistrationError` for an unknown role."""
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
    """Return all of a message as text, with the calls of tools in it as lines of JSON."""
    content: str | Sequence[Any] = message.content
    blocks: Iterable[Any] = [content] if isinstance(content, str) else content
    text = "".join(_block_text(block, message) for block in blocks)
    if isinstance(message, AIMessage) and message.tool_calls:
        calls = [json.dumps({"name": c["name"], "arguments": c["args"]}) for c in message.tool_calls]
        text = "\n".join([text, *calls] if text else calls)
    return text


def _block_text(block: Any, message: BaseMessage) -> str:
    """Return the text of one block of a message's content.

    In answers, reasoning and calls of tools are left out. Raise `RegistrationError` for images and other blocks.
    """
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


_METHODS = ("json_schema", "function_calling", "json_mode")
"""All are the same here: the engine can only write what the schema allows."""


def structured_output(
    model: BaseChatModel,
    schema: dict[str, Any] | type,
    *,
    include_raw: bool = False,
    method: str = "json_schema",
    strict: bool | None = None,
    **unknown: Any,
) -> Runnable[LanguageModelInput, Any]:
    """`model` bound to `schema`, then its parser. Raises `RegistrationError` for another method or argument."""
    for name in unknown:
        raise unknown_name("argument of with_structured_output", name, ["include_raw", "method", "strict"])
    if method not in _METHODS:
        raise unknown_name("method of with_structured_output", method, list(_METHODS))
    format_shown = {"kwargs": {"method": "json_schema", "strict": strict}, "schema": _schema_for_models(schema)}
    bound = model.bind(json_schema=json_schema_of(schema), ls_structured_output_format=format_shown)
    parser: BaseOutputParser[Any] = JsonOutputParser()
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        parser = PydanticOutputParser(pydantic_object=schema)
    if not include_raw:
        return bound | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    raw: Runnable[LanguageModelInput, Any] = RunnableMap(raw=bound)
    return raw | parsed.with_fallbacks([failed], exception_key="parsing_error")


def json_schema_of(schema: dict[str, Any] | type) -> dict[str, Any]:
    """A JSON schema as it is; that of a pydantic class; anything else as LangChain describes it."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        describe = getattr(schema, "model_json_schema", None) or schema.schema  # type: ignore[attr-defined]
        return describe()  # type: ignore[no-any-return]
    plain = isinstance(schema, dict) and "parameters" not in schema and "function" not in schema
    return schema if plain else convert_to_json_schema(schema)  # type: ignore[return-value]


def _schema_for_models(schema: dict[str, Any] | type) -> dict[str, Any]:
    """The schema as LangChain's tracers expect it; one that has no title cannot be written that way."""
    return (
        json_schema_of(schema) if isinstance(schema, dict) and "title" not in schema else convert_to_json_schema(schema)
    )


_PREFILLING = PrimitiveKind.PREFILLING


class ChatTeola(ConfigScopedModel, EngineModel, BaseChatModel):
    """A LangChain chat model whose work is done by the pool's engine `engine`.

    ::

        llm = ChatTeola(pool=pool, engine="llm", max_tokens=128)

    Keyword arguments of a call, or of `bind`: `max_tokens`, `temperature`, `top_p`, `top_k`, `seed`, `stop`,
    `ignore_eos`, `json_schema` (dict or JSON text) and `response_format` as OpenAI spells it. Others raise
    `RegistrationError`, as do messages that hold more than text. Engine errors pass through as they are.
    """

    streaming: bool = False
    """Stream also when invoked, so that callbacks get the tokens as they come."""
    disable_streaming: bool | Literal["tool_calling"] = "tool_calling"
    """With tools an answer has to be read before it is known what it is."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self.disable_streaming = self.disable_streaming or "tool_calling"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        """Make one request to the engine and return its whole answer, to whose tool calls an agent may listen."""
        asking = self._call_settings(stop, kwargs)
        answer = self._start_call(messages, asking, run_manager)
        return self._result(answer, answer.result(), asking.tools)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        """Make one request as `_generate` does, awaiting the answer."""
        asking = self._call_settings(stop, kwargs)
        answer = self._start_call(messages, asking, run_manager)
        return self._result(answer, await answer, asking.tools)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        """Yield the answer in chunks as the engine writes it.

        The last chunk carries what was not streamed, and the usage. The request is cancelled if the reader stops before
        the end.
        """
        handle = self._call(messages, self.sampling(stop, kwargs), run_manager)
        streamed = ""
        with giving_up(handle):
            for piece in handle.pieces:
                if piece.text:
                    streamed += piece.text
                    chunk = text_chunk(piece.text)
                    if run_manager:
                        run_manager.on_llm_new_token(piece.text, chunk=chunk)
                    yield chunk
            chunk = last_chunk(handle.result()[0], streamed, self.model_name)
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        """Yield the answer as `_stream` does, in a loop."""
        handle = self._call(messages, self.sampling(stop, kwargs), run_manager)
        streamed = ""
        with giving_up(handle):
            async for piece in handle.pieces:
                if piece.text:
                    streamed += piece.text
                    chunk = text_chunk(piece.text)
                    if run_manager:
                        await run_manager.on_llm_new_token(piece.text, chunk=chunk)
                    yield chunk
            chunk = last_chunk((await handle)[0], streamed, self.model_name)
            if run_manager:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    def _call_settings(self, stop: Sequence[str] | str | None, kwargs: Mapping[str, Any]) -> _CallSettings:
        """Return how a call with these arguments is decoded. Raises `RegistrationError`."""
        rest, tools = without_tools(kwargs)
        sampling = self.sampling(stop, rest)
        if tools is not None and tools.schema:
            sampling = replace(sampling, json_schema=tools.schema)
        return _CallSettings(sampling, tools)

    def _call(self, messages: Sequence[BaseMessage], sampling: Sampling, run_manager: Any) -> CallHandle:
        """A call whose answer is read while it is written."""
        request = Generate(to_prompt(messages), sampling)
        run, request_context = call_context(self.pool, run_manager)
        handle: CallHandle = self.pool.call(
            _PREFILLING, self.engine, [request], stream=True, run=run, request_context=request_context
        )
        return handle

    def _start_call(self, messages: Sequence[BaseMessage], asking: _CallSettings, run_manager: Any) -> PendingAnswer:
        """A call whose answer comes whole; an agent hears of the calls of tools in it."""
        request = asking.payload(messages)
        run, request_context = call_context(self.pool, run_manager)
        hearing = None
        if run is not None and asking.tools is not None:
            hearing = listening(ModelCall(self.pool, self.engine, run, request.prompt, asking.tools.names, to_prompt))
        handle = self.pool.call(
            _PREFILLING,
            self.engine,
            [request],
            stream=hearing is not None,
            speculative=True,
            run=run,
            request_context=request_context,
        )
        return PendingAnswer(handle, hearing)

    def _result(self, answer: PendingAnswer, values: Sequence[Generation], tools: Tools | None) -> ChatResult:
        """Return the engine's generation as LangChain's result, and pass the message to a listening agent, if any."""
        message = self._message(values[0], tools)
        answer.is_whole(message)
        info = {"finish_reason": values[0].finish_reason}
        return ChatResult(generations=[ChatGeneration(message=message, generation_info=info)])

    def _message(self, generation: Generation, tools: Tools | None) -> AIMessage:
        plain = to_message(generation, self.model_name)
        return plain if tools is None else tools.message(plain)

    def bind_tools(
        self, tools: Sequence[ToolDefinition], *, tool_choice: str | bool | dict[str, Any] | None = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Tools that the model may call, or must (`tool_choice`: a name, `any`); see `tools`.

        They are told to the model by its chat template: one that knows of no tools says nothing of them. The answer to
        a call with tools comes whole, also as a stream.
        """
        return self.bind(**described(tools, tool_choice), **kwargs)  # type: ignore[return-value]

    def with_structured_output(
        self, schema: dict[str, Any] | type, *, include_raw: bool = False, **kwargs: Any
    ) -> Runnable[LanguageModelInput, Any]:
        """Answers constrained to `schema` (a pydantic class, a TypedDict or a JSON schema) and parsed by it.

        `method` and `strict` change nothing: the engine writes only what the schema allows. With `include_raw` the
        output is `{"raw", "parsed", "parsing_error"}`.
        """
        return structured_output(self, schema, include_raw=include_raw, **kwargs)

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> GenerationLeaf | None:
        """Return None also with a response cache or a rate limiter: a prefetch would go around them."""
        cached = self.cache or (self.cache is None and get_llm_cache() is not None)
        if cached or self.rate_limiter is not None:
            return None
        try:
            asking = self._call_settings(None, kwargs)
        except Exception:  # what the call itself refuses, in its place
            return None
        items, expected = list_shape(asking.sampling.json_schema)
        return GenerationLeaf(
            engine=self.engine,
            payload=lambda value: asking.payload(prompt_value(self, value).to_messages()),
            message=on_loop(lambda generation: self._message(generation, asking.tools)),
            items=items,
            expected=expected,
            forms=schema_drafts(asking.sampling.json_schema, "" if asking.tools is None else asking.tools.definitions),
            simple=True,
        )

    @property
    def _llm_type(self) -> str:
        return "teola-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return LangSmithParams(**{**super()._get_ls_params(stop=stop, **kwargs), "ls_provider": "teola"})


@dataclass(frozen=True, slots=True)
class _CallSettings:
    """The settings of a call, apart from its messages: the same for one made early, so that they are one request."""

    sampling: Sampling
    tools: Tools | None

    def payload(self, messages: Sequence[BaseMessage]) -> Generate:
        prompt = to_prompt(messages)
        return Generate(prompt if self.tools is None else replace(prompt, tools=self.tools.definitions), self.sampling)


def token_usage(generation: Generation) -> UsageMetadata:
    """Tokens of one generation; `cache_read` are prompt tokens found in the prefix cache."""
    return UsageMetadata(
        input_tokens=generation.prompt_tokens,
        output_tokens=generation.completion_tokens,
        total_tokens=generation.prompt_tokens + generation.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=generation.cached_tokens),
    )


def response_metadata(generation: Generation, model_name: str) -> dict[str, Any]:
    """`response_metadata` of the answer."""
    return {"model_name": model_name, "finish_reason": generation.finish_reason, "model_provider": "teola"}


def to_message(generation: Generation, model_name: str) -> AIMessage:
    """The whole answer, without an id: LangChain names it after its run."""
    return AIMessage(
        content=generation.text,
        response_metadata=response_metadata(generation, model_name),
        usage_metadata=token_usage(generation),
    )


def text_chunk(text: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=text))


def last_chunk(generation: Generation, streamed: str, model_name: str) -> ChatGenerationChunk:
    """Ends a stream: what was not streamed, and the only chunk with usage, so that chunks add up to `to_message`."""
    message = AIMessageChunk(
        content=unstreamed_text(generation, streamed),
        response_metadata=response_metadata(generation, model_name),
        usage_metadata=token_usage(generation),
        chunk_position="last",
    )
    return ChatGenerationChunk(message=message, generation_info={"finish_reason": generation.finish_reason})


def unstreamed_text(generation: Generation, streamed: str) -> str:
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
