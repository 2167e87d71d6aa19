"""`OpenAI` and `OpenAILike` on an engine: the object's own code writes the request and reads the answer.

The copy has clients of its own whose transport hands chat completions to the engine. So prompts, parameters, responses,
errors and retries are the object's. Calls that the engine cannot make, such as plain completions, go to the server.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from teola_plugin.adapters.calls import astreamed_in, streamed_in
from teola_plugin.adapters.llamaindex.binding.engine_proxy import (
    EngineProxy,
    differs,
    instance_of,
    overridden,
    proxied,
    read,
)
from teola_plugin.adapters.openai_transport import (
    AsyncEngineTransport,
    Captured,
    EngineTransport,
    araising_pool_errors_in,
    capturing,
    raising_pool_errors,
    raising_pool_errors_in,
)
from teola_plugin.engines.openai.envelope import without_credentials
from teola_plugin.engines.openai.wire import WireGeneration
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate, Generation
from teola_plugin.runtime.context import current_run, current_terms
from teola_plugin.shims.llamaindex.models import (
    OpenAIHooks,
    OpenAIParts,
    chat_silently,
    credentials,
    messages_of,
    parse_output,
    token_counts,
)
from teola_plugin.shims.openai import http_client

if TYPE_CHECKING:
    from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
    from llama_index.core.prompts import BasePromptTemplate

Pieces = Generator[Any, None, None]
AsyncPieces = AsyncGenerator[Any, None]
_MODULE = "llama_index.llms.openai.base"
_OPENAI_LIKE = ("llama_index.llms.openai_like.base", "OpenAILike")


class _ServerModel(OpenAIHooks, EngineProxy):
    """An `OpenAI` on an engine. A stream belongs to the query in which it was requested, whenever it is read."""

    def __teola_chat__(self, chat: Callable[[], ChatResponse]) -> ChatResponse:
        with raising_pool_errors():
            return chat()

    async def __teola_achat__(self, chat: Callable[[], Awaitable[ChatResponse]]) -> ChatResponse:
        with raising_pool_errors():
            return await chat()

    def __teola_stream_chat__(self, chat: Callable[[], Pieces]) -> Pieces:
        pieces = raising_pool_errors_in(chat())
        return streamed_in(current_run.get(), current_terms.get(), pieces)  # type: ignore[return-value]

    async def __teola_astream_chat__(self, chat: Callable[[], Awaitable[AsyncPieces]]) -> AsyncPieces:
        with raising_pool_errors():
            pieces = araising_pool_errors_in(await chat())
        return astreamed_in(current_run.get(), current_terms.get(), pieces)


class _PlannedServerModel(_ServerModel):
    """An `OpenAI` on a server declared to cache prefixes: the graph contains its prompts and prefetches its calls."""

    sends_own_requests: ClassVar[bool] = True

    def payload_of_messages(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Generate:
        """Return the engine's request of `chat`. Runs the object's llm formatting and captures the request unsent."""
        with capturing():
            try:
                chat_silently(self, messages, kwargs)
            except Captured as caught:
                return caught.generation
        raise RegistrationError(f"{type(self).__name__} made no request.", hint="leave it unbound")

    def payload_of_prompt(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Generate:
        """Return the engine's request of `complete`."""
        from llama_index.core.base.llms.generic_utils import prompt_to_messages

        llm: Any = self
        has_own_prompt = not formatted and instance_of(*_OPENAI_LIKE, self) is not None
        text = llm.completion_to_prompt(prompt) if has_own_prompt else prompt
        return self.payload_of_messages(prompt_to_messages(text), **kwargs)

    def payload_of_template(self, template: BasePromptTemplate, /, **prompt_args: Any) -> Generate:
        """Return the engine's request of `predict`."""
        llm: Any = self
        return self.payload_of_messages(messages_of(llm, template, prompt_args))

    def chat_of(self, generation: Generation, **_: Any) -> ChatResponse:
        """Return the response of `chat` for a generation."""
        from llama_index.core.base.llms.types import ChatResponse
        from llama_index.llms.openai.utils import from_openai_message
        from openai.types.chat import ChatCompletion

        assert isinstance(generation, WireGeneration)
        llm: Any = self
        raw = ChatCompletion.model_validate(json.loads(generation.response))
        message = from_openai_message(raw.choices[0].message, modalities=llm.modalities or ["text"])
        return ChatResponse(message=message, raw=raw, additional_kwargs=token_counts(llm, raw))

    def completion_of(self, generation: Generation) -> CompletionResponse:
        """Return the response of `complete` for a generation."""
        from llama_index.core.base.llms.generic_utils import chat_response_to_completion_response

        return chat_response_to_completion_response(self.chat_of(generation))

    def text_of(self, generation: Generation) -> str:
        """Return the result of `predict` for a generation."""
        llm: Any = self
        return parse_output(llm, self.chat_of(generation).message.content or "")


def is_openai(obj: Any) -> bool:
    """Return True if the object is an `OpenAI` or `OpenAILike`, which use the `openai` package."""
    return instance_of(_MODULE, "OpenAI", obj) is not None


def served_by_server(obj: Any, engine: str, pool: EnginePool) -> Any:
    """Return the object with its requests sent by the engine. Raise `RegistrationError` if their servers differ."""
    server: Any = pool.engine(engine)
    _check_server(obj, server)
    kind = (
        _PlannedServerModel
        if server.prefix_caching and obj.metadata.is_chat_model and obj.reuse_client
        else _ServerModel
    )
    client, aclient = _clients(obj)
    engine_client = EngineTransport.client(http_client(client), pool, engine)
    async_engine_client = AsyncEngineTransport.client(http_client(aclient), pool, engine)
    private = OpenAIParts.as_attributes(
        client=client.copy(http_client=engine_client),
        aclient=aclient.copy(http_client=async_engine_client),
        http_client=engine_client,
        async_http_client=async_engine_client,
    )
    return proxied(obj, kind, engine, pool, private)


def _clients(obj: Any) -> tuple[Any, Any]:
    """Return the object's clients, or new ones as it would make them: it makes them when it is first used."""
    base, parts = sys.modules[_MODULE], read(OpenAIParts, obj)
    client = parts.client or base.SyncOpenAI(**credentials(obj))
    aclient = parts.aclient or base.AsyncOpenAI(**credentials(obj, is_async=True))
    return client, aclient


def _check_server(obj: Any, server: Any) -> None:
    base = instance_of(*_OPENAI_LIKE, obj) or instance_of(_MODULE, "OpenAI", obj)
    assert base is not None
    if other := overridden(obj, base):
        raise differs(obj, f"{other} changes how it asks", "leave it unbound")
    own_url = without_credentials(str(obj.api_base)).rstrip("/")
    if own_url != server.base_url:
        reason = f"it talks to {own_url}, the engine {server.name!r} to {server.base_url}"
        raise differs(obj, reason, f"OpenAIServer(base_url={own_url!r}, ...)")
    if server.model is not None and obj.model != server.model:
        reason = f"it asks for {obj.model!r}, the engine {server.name!r} for {server.model!r}"
        raise differs(obj, reason, f"OpenAIServer(model={obj.model!r}, ...)")
