"""`OpenAI` and `OpenAILike` on an engine: the object's own code writes the request and reads the answer.

The copy has clients of its own whose transport hands chat completions to the engine. So prompts, parameters, responses,
errors and retries are the object's. What the engine cannot do goes the object's way: plain completions, for one.
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
from teola_plugin.adapters.openai.bypass import (
    Captured,
    araising_pool_errors_in,
    capturing,
    raising_pool_errors,
    raising_pool_errors_in,
)
from teola_plugin.adapters.openai.transport import AsyncEngineTransport, EngineTransport
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
_LIKE = ("llama_index.llms.openai_like.base", "OpenAILike")


class _Served(OpenAIHooks, EngineProxy):
    """Streams belong to the query in which they were asked for, whenever they are read."""

    def __teola_chat__(self, chat: Callable[[], ChatResponse]) -> ChatResponse:
        with raising_pool_errors():
            return chat()

    async def __teola_achat__(self, chat: Callable[[], Awaitable[ChatResponse]]) -> ChatResponse:
        with raising_pool_errors():
            return await chat()

    def __teola_stream_chat__(self, chat: Callable[[], Pieces]) -> Pieces:
        made = raising_pool_errors_in(chat())
        return streamed_in(current_run.get(), current_terms.get(), made)  # type: ignore[return-value]

    async def __teola_astream_chat__(self, chat: Callable[[], Awaitable[AsyncPieces]]) -> AsyncPieces:
        with raising_pool_errors():
            made = araising_pool_errors_in(await chat())
        return astreamed_in(current_run.get(), current_terms.get(), made)


class _ServedAhead(_Served):
    """On a server declared to cache prefixes: the graph knows its prompts, and calls it when they are ready."""

    sends_own_requests: ClassVar[bool] = True

    def payload_of_messages(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Generate:
        """What `chat` asks the engine for, caught before it is sent: runs nothing but the object's own formatting."""
        with capturing():
            try:
                chat_silently(self, messages, kwargs)
            except Captured as caught:
                return caught.asked
        raise RegistrationError(f"{type(self).__name__} made no request.", hint="leave it unbound")

    def payload_of_prompt(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Generate:
        """What `complete` asks the engine for."""
        from llama_index.core.base.llms.generic_utils import prompt_to_messages

        own: Any = self
        like = not formatted and instance_of(*_LIKE, self) is not None
        text = own.completion_to_prompt(prompt) if like else prompt
        return self.payload_of_messages(prompt_to_messages(text), **kwargs)

    def payload_of_template(self, template: BasePromptTemplate, /, **prompt_args: Any) -> Generate:
        """What `predict` asks the engine for."""
        own: Any = self
        return self.payload_of_messages(messages_of(own, template, prompt_args))

    def chat_of(self, generation: Generation, **_: Any) -> ChatResponse:
        """What `chat` returns for a generation."""
        from llama_index.core.base.llms.types import ChatResponse
        from llama_index.llms.openai.utils import from_openai_message
        from openai.types.chat import ChatCompletion

        assert isinstance(generation, WireGeneration)
        own: Any = self
        raw = ChatCompletion.model_validate(json.loads(generation.response))
        message = from_openai_message(raw.choices[0].message, modalities=own.modalities or ["text"])
        return ChatResponse(message=message, raw=raw, additional_kwargs=token_counts(own, raw))

    def completion_of(self, generation: Generation) -> CompletionResponse:
        """What `complete` returns for a generation."""
        from llama_index.core.base.llms.generic_utils import chat_response_to_completion_response

        return chat_response_to_completion_response(self.chat_of(generation))

    def text_of(self, generation: Generation) -> str:
        """What `predict` returns for a generation."""
        own: Any = self
        return parse_output(own, self.chat_of(generation).message.content or "")


def is_openai(obj: Any) -> bool:
    """Whether it talks to its server through the `openai` package, as `OpenAI` and `OpenAILike` do."""
    return instance_of(_MODULE, "OpenAI", obj) is not None


def served_by_server(obj: Any, engine: str, pool: EnginePool) -> Any:
    """The object as it is, carried by the engine. Raises `RegistrationError` where the two talk to different places."""
    server: Any = pool.engine(engine)
    _check(obj, server)
    kind = _ServedAhead if server.prefix_caching and obj.metadata.is_chat_model and obj.reuse_client else _Served
    client, aclient = _clients(obj)
    carried = EngineTransport.client(http_client(client), pool, engine)
    acarried = AsyncEngineTransport.client(http_client(aclient), pool, engine)
    private = OpenAIParts.as_attributes(
        client=client.copy(http_client=carried),
        aclient=aclient.copy(http_client=acarried),
        http_client=carried,
        async_http_client=acarried,
    )
    return proxied(obj, kind, engine, pool, private)


def _clients(obj: Any) -> tuple[Any, Any]:
    """The object's clients, or such as it would make; it makes them when it is first used."""
    base, parts = sys.modules[_MODULE], read(OpenAIParts, obj)
    client = parts.client or base.SyncOpenAI(**credentials(obj))
    aclient = parts.aclient or base.AsyncOpenAI(**credentials(obj, is_async=True))
    return client, aclient


def _check(obj: Any, server: Any) -> None:
    known = instance_of(*_LIKE, obj) or instance_of(_MODULE, "OpenAI", obj)
    assert known is not None
    if other := overridden(obj, known):
        raise differs(obj, f"{other} changes how it asks", "leave it unbound")
    own = without_credentials(str(obj.api_base)).rstrip("/")
    if own != server.base_url:
        what = f"it talks to {own}, the engine {server.name!r} to {server.base_url}"
        raise differs(obj, what, f"OpenAIServer(base_url={own!r}, ...)")
    if server.model is not None and obj.model != server.model:
        what = f"it asks for {obj.model!r}, the engine {server.name!r} for {server.model!r}"
        raise differs(obj, what, f"OpenAIServer(model={obj.model!r}, ...)")
