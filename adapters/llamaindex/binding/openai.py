"""`OpenAI`, `OpenAILike` and `OpenAIEmbedding` on an engine: their own code writes requests and reads answers.

It runs on a copy that has clients of its own, whose transport hands requests for chat completions, or for embeddings,
to the engine. So prompts, parameters, responses, errors and retries are the object's. Plain completions go the object's
own way.

A `CohereRerank` likewise keeps its code; in place of its client an engine scores the documents.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, ClassVar

from teola_plugin.adapters.calls import astreamed_in, streamed_in
from teola_plugin.adapters.engine_specs import check_server, differs
from teola_plugin.adapters.llamaindex.binding.huggingface import RerankerCopy
from teola_plugin.adapters.llamaindex.binding.model_copies import (
    Body,
    ModelCopy,
    copy_of,
    instance_of,
    overridden,
    read,
)
from teola_plugin.adapters.openai_transport import (
    AsyncEngineTransport,
    Captured,
    EngineTransport,
    RerankingClient,
    araising_pool_errors_in,
    best_first,
    capturing,
    raising_pool_errors,
    raising_pool_errors_in,
)
from teola_plugin.adapters.routing import EngineRoute, ServerModel
from teola_plugin.engines.openai.envelope import without_credentials
from teola_plugin.engines.openai.wire import WireGeneration
from teola_plugin.errors import RegistrationError
from teola_plugin.requests.payloads import Generate, Generation
from teola_plugin.runtime.query_run import current_request_context, current_run
from teola_plugin.shims.llamaindex.interceptors import EMBEDDING_METHODS
from teola_plugin.shims.llamaindex.models import (
    CohereRerankParts,
    OpenAIEmbeddingParts,
    OpenAIParts,
    chat_silently,
    credentials,
    messages_of,
    parse_output,
    token_counts,
)
from teola_plugin.shims.openai import cohere_server, http_client

if TYPE_CHECKING:
    from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
    from llama_index.core.prompts import BasePromptTemplate
    from llama_index.core.schema import NodeWithScore

_MODULE = "llama_index.llms.openai.base"
_EMBEDDING = ("llama_index.embeddings.openai.base", "OpenAIEmbedding")
_OPENAI_LIKE = ("llama_index.llms.openai_like.base", "OpenAILike")


class CarriedModel(ModelCopy):
    """A copy of an `OpenAI` on an engine. A stream belongs to the query in which it was requested."""

    is_carried: ClassVar[bool] = True
    """The engine sends requests of the model's own code to the server of the model."""

    def __teola_body__(self, method: str, original: Body) -> Body | None:
        """Return the function that sends the requests of a provider method; None for one that goes its own way."""
        wrap = _BODIES.get(method)
        return None if wrap is None else wrap(self, original)


def _chat(copied: Any, original: Body) -> Body:
    """Return a provider method that runs on the copy, whose client hands requests to the engine.

    Errors of the pool reach the caller as they are, past the `openai` client.
    """

    def chat(_: Any, *args: Any, **kwargs: Any) -> Any:
        with raising_pool_errors():
            return original(copied, *args, **kwargs)

    return chat


def _achat(copied: Any, original: Body) -> Body:
    """Return a provider method as `_chat` does, for an async method."""

    async def achat(_: Any, *args: Any, **kwargs: Any) -> Any:
        with raising_pool_errors():
            return await original(copied, *args, **kwargs)

    return achat


def _stream_chat(copied: Any, original: Body) -> Body:
    """Return a provider method as `_chat` does, for one that streams: its pieces belong to the query of the call."""

    def stream_chat(_: Any, *args: Any, **kwargs: Any) -> Any:
        pieces = raising_pool_errors_in(original(copied, *args, **kwargs))
        return streamed_in(current_run.get(), current_request_context.get(), pieces)

    return stream_chat


def _astream_chat(copied: Any, original: Body) -> Body:
    """Return a provider method as `_stream_chat` does, for an async method."""

    async def astream_chat(_: Any, *args: Any, **kwargs: Any) -> Any:
        with raising_pool_errors():
            pieces = araising_pool_errors_in(await original(copied, *args, **kwargs))
        return astreamed_in(current_run.get(), current_request_context.get(), pieces)

    return astream_chat


_BODIES = {"_chat": _chat, "_achat": _achat, "_stream_chat": _stream_chat, "_astream_chat": _astream_chat}


class PlannedModel(CarriedModel):
    """A model on a server declared to cache prefixes: the graph contains its prompts and prefetches its calls."""

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


class CarriedEmbedding(ModelCopy):
    """A copy of an `OpenAIEmbedding` whose requests an engine carries."""

    is_carried: ClassVar[bool] = True
    """The engine sends requests of the model's own code to the server of the model."""

    def __teola_body__(self, method: str, original: Body) -> Body | None:
        """Return the function that sends the requests of a provider method."""
        if method not in EMBEDDING_METHODS:
            return None
        return (_achat if iscoroutinefunction(original) else _chat)(self, original)


def is_openai_embedding(obj: Any) -> bool:
    """Return True if the object is an `OpenAIEmbedding`, which uses the `openai` package."""
    return instance_of(*_EMBEDDING, obj) is not None


def embedding_engines(obj: Any) -> tuple[str, str]:
    """Return the names of the models that an `OpenAIEmbedding` asks for queries and for texts."""
    parts = read(OpenAIEmbeddingParts, obj)
    return parts.query_engine, parts.text_engine


def carried_embedding(obj: Any, route: EngineRoute) -> Any:
    """Return a copy of an `OpenAIEmbedding` whose requests the engine sends.

    Raise `RegistrationError` if the two have different servers or models.
    """
    cls = instance_of(*_EMBEDDING, obj)
    assert cls is not None
    if other := overridden(obj, cls):
        raise differs(obj, f"{other} changes how it asks", "leave it unbound")
    for model in embedding_engines(obj):
        check_server(obj, obj.api_base, model, route.pool.engine(route.engine), "EmbeddingServer")
    private = _attributes_on_engine(obj, sys.modules[_EMBEDDING[0]], OpenAIEmbeddingParts, route)
    return copy_of(obj, CarriedEmbedding, route, private)


def decisive_embedding_values(obj: Any) -> tuple[Any, ...]:
    """Return the values of an `OpenAIEmbedding` that its copy was made of; others are read when they are used."""
    parts = read(OpenAIEmbeddingParts, obj)
    means = tuple(credentials(obj).values()) if parts.client is None else ()
    return (*means, parts.client, parts.aclient, obj.api_base, *embedding_engines(obj), obj.reuse_client)


def is_openai(obj: Any) -> bool:
    """Return True if the object is an `OpenAI` or `OpenAILike`, which use the `openai` package."""
    return instance_of(_MODULE, "OpenAI", obj) is not None


def server_model_of(obj: Any) -> ServerModel | None:
    """Return the server and the model that an object asks; None for one that is no `OpenAI`."""
    if not is_openai(obj):
        return None
    return ServerModel(without_credentials(str(obj.api_base)).rstrip("/"), obj.model)


def carried_copy(obj: Any, route: EngineRoute) -> Any:
    """Return a copy whose requests the engine sends. Raise `RegistrationError` if the two have different servers."""
    server: Any = route.pool.engine(route.engine)
    _check_server(obj, server)
    is_planned = server.prefix_caching and obj.metadata.is_chat_model and obj.reuse_client
    private = _attributes_on_engine(obj, sys.modules[_MODULE], OpenAIParts, route)
    return copy_of(obj, PlannedModel if is_planned else CarriedModel, route, private)


def decisive_values(obj: Any) -> tuple[Any, ...]:
    """Return the values of the object that its copy was made of; others are read when they are used."""
    parts = read(OpenAIParts, obj)
    means = tuple(credentials(obj).values()) if parts.client is None else ()
    is_chat_model = getattr(obj, "is_chat_model", None)  # of `OpenAI`, the model's name decides
    return (*means, parts.client, parts.aclient, obj.api_base, obj.model, is_chat_model, obj.reuse_client)


def _attributes_on_engine(
    obj: Any, module: Any, kind: type[OpenAIParts] | type[OpenAIEmbeddingParts], route: EngineRoute
) -> dict[str, Any]:
    """Return private attributes for a copy of the object: its clients, with transports that lead to the engine.

    An object that was never used has no clients yet; then they are made as it would make them.

    Args:
        obj: The user's object.
        module: The module of its class.
        kind: The class of its parts.
        route: The pool and the engine.
    """
    parts = read(kind, obj)
    client = parts.client or (getattr(module, "SyncOpenAI", None) or module.OpenAI)(**credentials(obj))
    aclient = parts.aclient or module.AsyncOpenAI(**credentials(obj, is_async=True))
    engine_client = EngineTransport.client(http_client(client), *route)
    async_engine_client = AsyncEngineTransport.client(http_client(aclient), *route)
    return kind.as_attributes(
        client=client.copy(http_client=engine_client),
        aclient=aclient.copy(http_client=async_engine_client),
        http_client=engine_client,
        async_http_client=async_engine_client,
    )


def _check_server(obj: Any, server: Any) -> None:
    """Raise `RegistrationError` for another server or model than the engine's, and for overridden methods."""
    base = instance_of(*_OPENAI_LIKE, obj) or instance_of(_MODULE, "OpenAI", obj)
    assert base is not None
    if other := overridden(obj, base):
        raise differs(obj, f"{other} changes how it asks", "leave it unbound")
    check_server(obj, obj.api_base, obj.model, server)


# ------------------------------------------------------------ Cohere's rerankers

_COHERE = ("llama_index.postprocessor.cohere_rerank.base", "CohereRerank")


class CohereRerankCopy(RerankerCopy):
    """A copy of a `CohereRerank` on an engine, with its requests and results for the graph."""

    keep_retrieval_score: ClassVar[bool] = False

    def select(self, nodes: list[NodeWithScore], scores: Sequence[float]) -> list[NodeWithScore]:
        """Return the result of `postprocess_nodes` for the engine's scores: new objects with the nodes themselves."""
        obj: Any = self
        return [
            type(nodes[position])(node=nodes[position].node, score=scores[position])
            for position in best_first(scores, obj.top_n)
        ]


def is_cohere_rerank(obj: Any) -> bool:
    """Return True for a `CohereRerank` of `llama-index-postprocessor-cohere-rerank`."""
    return instance_of(*_COHERE, obj) is not None


def server_of_reranker(obj: Any) -> tuple[str, str | None]:
    """Return the address in front of `/rerank` of a `CohereRerank`, and its key.

    Raise `RegistrationError` if the address is not found.
    """
    server = cohere_server(read(CohereRerankParts, obj).client)
    if server is None:
        raise differs(obj, "the address of its client cannot be found", "leave it unbound")
    return f"{server[0]}/v2", server[1]


def cohere_copy(obj: Any, route: EngineRoute) -> Any:
    """Return a copy that scores on an engine. Raise `RegistrationError` if the two have different servers or models."""
    cls = instance_of(*_COHERE, obj)
    assert cls is not None
    if other := overridden(obj, cls):
        raise differs(obj, f"{other} changes how it reranks", "leave it unbound")
    check_server(obj, server_of_reranker(obj)[0], obj.model, route.pool.engine(route.engine), "RerankingServer")
    parts = read(CohereRerankParts, obj)
    client = RerankingClient(parts.client, obj.model, *route)
    return copy_of(obj, CohereRerankCopy, route, parts.as_attributes(client=client))


def decisive_cohere_values(obj: Any) -> tuple[Any, ...]:
    """Return the values of a `CohereRerank` that its copy was made of; others are read when they are used."""
    return obj.model, id(read(CohereRerankParts, obj).client)
