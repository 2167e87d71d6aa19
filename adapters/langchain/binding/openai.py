"""`ChatOpenAI` and `OpenAIEmbeddings` on an engine: their own code writes requests and reads answers, which it carries.

The provider method of the object's own class runs on a private copy of the object, with HTTP clients whose transport
hands chat completions, or requests for embeddings, to the engine. So prompts, parameters, token lists, messages, errors
and retries are the object's. What the engine cannot do goes the object's way.

`HuggingFaceEndpointEmbeddings` do the same, with copies of their clients of `huggingface_hub`.

A `CohereRerank` likewise keeps its code; in place of its client an engine scores the documents.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from weakref import WeakSet

from langchain_core.globals import get_llm_cache
from langchain_core.messages import BaseMessage

from teola_plugin.adapters.calls import astreamed_in, joined, streamed_in
from teola_plugin.adapters.engine_specs import check_server, differs
from teola_plugin.adapters.langchain.listening import call_context
from teola_plugin.adapters.method_adapter import subclass_of
from teola_plugin.adapters.openai_transport import (
    AsyncEngineTransport,
    Captured,
    EngineTransport,
    RerankingClient,
    araising_pool_errors_in,
    capturing,
    raising_pool_errors,
    raising_pool_errors_in,
)
from teola_plugin.adapters.routing import WORKER, EngineRoute, ServerModel
from teola_plugin.adapters.snapshots import FieldSnapshot
from teola_plugin.engines.openai.embedding_server import embeds_in_tei_form
from teola_plugin.engines.openai.envelope import without_credentials
from teola_plugin.engines.openai.wire import WireGeneration, joinable, joined_headers, whole_headers
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate, Generation
from teola_plugin.shims.langchain import (
    always_streams,
    chat_completion_params,
    chat_result,
    prompt_value,
)
from teola_plugin.shims.langchain_interceptors import interceptors, run_manager_in
from teola_plugin.shims.openai import (
    client_of_resource,
    cohere_server,
    has_dynamic_key,
    http_client,
    inference_address,
    inference_client_on,
)
from teola_plugin.shims.pydantic import of_class
from teola_plugin.tracer.leaf import GenerationLeaf

_FORMS: Mapping[bool | None, Literal["", "whole", "unknown"]] = {None: "whole", False: "", True: "unknown"}
"""Whether a model always streams, or never (None: neither) -> the form of its leaf."""
_ENDPOINT = "HuggingFaceEndpointEmbeddings"
_FOR_TRACES = ("ls_structured_output_format", "structured_output_format")
"""Arguments that LangChain takes out before it calls a model."""


def is_openai_chat(obj: Any) -> bool:
    """Return True for a chat model that talks to its server through the `openai` package, as `ChatOpenAI` does."""
    base = getattr(sys.modules.get("langchain_openai.chat_models.base"), "BaseChatOpenAI", None)
    return base is not None and isinstance(obj, base)


def server_model_of(obj: Any) -> ServerModel | None:
    """Return the server and the model that an object of `langchain-openai` names; None for any other object."""
    if not is_openai_chat(obj):
        return None
    return ServerModel(without_credentials(str(obj.root_async_client.base_url)).rstrip("/"), obj.model_name)


def is_openai_embeddings(obj: Any) -> bool:
    """Return True for embeddings that talk to their server through the `openai` package, as `OpenAIEmbeddings` do."""
    cls = getattr(sys.modules.get("langchain_openai.embeddings.base"), "OpenAIEmbeddings", None)
    return cls is not None and isinstance(obj, cls)


def address_of_embeddings(obj: Any) -> str:
    """Return the address of the server of `OpenAIEmbeddings`. Raise `RegistrationError` if it cannot be found."""
    return str(client_of_resource(obj.async_client).base_url)


class CarriedModel:
    """The worker of a model whose requests an engine carries: a private copy, on which the original's methods run."""

    def __init__(self, copy: Any, route: EngineRoute) -> None:
        self._copy, self._route = copy, route

    @property
    def planned(self) -> PlannedRequests | None:
        """The requests of a chat model as tracers see them; None if its server is not declared to cache prefixes."""
        server: Any = self._route.pool.engine(self._route.engine)
        return PlannedRequests(self._copy, self._route) if getattr(server, "prefix_caching", False) else None

    def call(self, method: str, original: Any) -> Callable[..., Any]:
        """Return a provider method that is called as the function of the original's class is."""
        return partial(_CALLS[method], self._copy, self._route.pool, original)


def carried_model(obj: Any, route: EngineRoute) -> tuple[CarriedModel, Callable[[Any], bool]]:
    """Return the worker of a model that talks to a server, and a function that tells if it still stands for it.

    Raises `RegistrationError` where the object and the engine talk to different places.
    """
    check_server(obj, obj.root_async_client.base_url, obj.model_name, route.pool.engine(route.engine))
    clients = [client for client in (obj.root_client, obj.root_async_client) if client is not None]
    snapshot = FieldSnapshot([obj, *clients])
    copy = of_class(subclass_of(type(obj), _Worker, WORKER), obj, _carried(obj, route), {})
    return CarriedModel(copy, route), lambda _: snapshot.holds()


def carried_embeddings(obj: Any, route: EngineRoute) -> tuple[CarriedModel, Callable[[Any], bool]]:
    """Return the worker of `OpenAIEmbeddings`, and a function that tells if it still stands for them.

    Raises `RegistrationError` where the object and the engine talk to different places.
    """
    server = route.pool.engine(route.engine)
    check_server(obj, address_of_embeddings(obj), obj.model, server, "EmbeddingServer")
    on_loop = client_of_resource(obj.async_client)
    sync = None if obj.client is None else client_of_resource(obj.client)  # None: only a coroutine gives its key
    snapshot = FieldSnapshot([one for one in (obj, sync, on_loop) if one is not None])
    clients: dict[str, Any] = {}
    if sync is not None:
        clients["client"] = sync.copy(http_client=EngineTransport.client(http_client(sync), *route)).embeddings
    carrying = AsyncEngineTransport.client(http_client(on_loop), *route)
    clients["async_client"] = on_loop.copy(http_client=carrying).embeddings
    copy = of_class(subclass_of(type(obj), _Worker, WORKER), obj, clients, {})
    return CarriedModel(copy, route), lambda _: snapshot.holds()


def is_endpoint_embeddings(obj: Any) -> bool:
    """Return True for `HuggingFaceEndpointEmbeddings` of `langchain-huggingface`."""
    cls = getattr(sys.modules.get("langchain_huggingface.embeddings.huggingface_endpoint"), _ENDPOINT, None)
    return cls is not None and isinstance(obj, cls)


def endpoint_address(obj: Any) -> tuple[str, str]:
    """Return the address of the server of `HuggingFaceEndpointEmbeddings`, and the reason if no engine can carry them.

    One of both is empty.
    """
    addresses = {inference_address(client) for client in (obj.client, obj.async_client)}
    if None in addresses:
        return "", "one of its clients is not an InferenceClient of huggingface_hub 1 or newer"
    if len(addresses) > 1:
        return "", "its two clients talk to different addresses"
    address = str(addresses.pop())
    return address, "" if address else "it names a model on Hugging Face's hub, not the address of a server"


def carried_endpoint_embeddings(obj: Any, route: EngineRoute) -> tuple[CarriedModel, Callable[[Any], bool]]:
    """Return the worker of `HuggingFaceEndpointEmbeddings`, and a function that tells if it still stands for them.

    Raises `RegistrationError` where no engine can carry their requests, or the engine's server is another one.
    """
    address, reason = endpoint_address(obj)
    if reason:
        raise differs(obj, reason, "leave it unbound")
    server: Any = route.pool.engine(route.engine)
    if not embeds_in_tei_form(address, server.base_url):
        url = without_credentials(address).rstrip("/")
        reason = f"it talks to {url}, the engine {server.name!r} to {server.base_url}"
        raise differs(obj, reason, f"EmbeddingServer(base_url={url.removesuffix('/embed')!r})")
    snapshot = FieldSnapshot([obj, obj.client, obj.async_client])
    clients = {
        "client": inference_client_on(obj.client, lambda http: EngineTransport.client(http, *route)),
        "async_client": inference_client_on(obj.async_client, lambda http: AsyncEngineTransport.client(http, *route)),
    }
    copy = of_class(subclass_of(type(obj), _Worker, WORKER), obj, clients, {})
    return CarriedModel(copy, route), lambda _: snapshot.holds()


def is_cohere_rerank(obj: Any) -> bool:
    """Return True for a `CohereRerank` of `langchain-cohere`."""
    cls = getattr(sys.modules.get("langchain_cohere.rerank"), "CohereRerank", None)
    return cls is not None and isinstance(obj, cls)


def address_of_reranker(obj: Any) -> str:
    """Return the address in front of `/rerank` of a `CohereRerank`. Raise `RegistrationError` if it is not found."""
    server = cohere_server(obj.client)
    if server is None:
        raise differs(obj, "the address of its client cannot be found", "leave it unbound")
    return f"{server[0]}/v2"


def cohere_rerank_on(obj: Any, route: EngineRoute) -> tuple[CarriedModel, Callable[[Any], bool]]:
    """Return the worker of a `CohereRerank`, and a function that tells if it still stands for it.

    Raises `RegistrationError` where the object and the engine talk to different places.
    """
    check_server(obj, address_of_reranker(obj), obj.model, route.pool.engine(route.engine), "RerankingServer")
    snapshot = FieldSnapshot([obj])
    client = RerankingClient(obj.client, obj.model, *route)
    copy = of_class(subclass_of(type(obj), _Worker, WORKER), obj, {"client": client}, {})
    return CarriedModel(copy, route), lambda _: snapshot.holds()


class _Worker:
    """A mixin before the object's class: its calls are never routed."""


_CARRIED: WeakSet[Any] = WeakSet()
"""HTTP clients whose requests an engine carries."""


def _carried(obj: Any, route: EngineRoute) -> dict[str, Any]:
    """Return clients like the object's, whose requests the engine carries."""
    clients: dict[str, Any] = {}
    if obj.root_client is not None:
        sync = EngineTransport.client(http_client(obj.root_client), *route)
        root = obj.root_client.copy(http_client=sync)
        clients |= {"root_client": root, "client": root.chat.completions}
        _CARRIED.add(sync)
    on_loop = AsyncEngineTransport.client(http_client(obj.root_async_client), *route)
    root = obj.root_async_client.copy(http_client=on_loop)
    _CARRIED.add(on_loop)
    return clients | {"root_async_client": root, "async_client": root.chat.completions}


def _generate(copy: Any, pool: EnginePool, original: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    with joined(*call_context(pool, run_manager_in(args, kwargs))), raising_pool_errors():
        return original(copy, *args, **kwargs)


async def _agenerate(copy: Any, pool: EnginePool, original: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    with joined(*call_context(pool, run_manager_in(args, kwargs))), raising_pool_errors():
        return await original(copy, *args, **kwargs)


def _stream(copy: Any, pool: EnginePool, original: Any, target: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    context = call_context(pool, run_manager_in(args, kwargs))
    yield from streamed_in(*context, raising_pool_errors_in(original(copy, *args, **kwargs)))


async def _astream(
    copy: Any, pool: EnginePool, original: Any, target: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[Any]:
    """Yield chunks of the original's `_astream`, which runs on the private copy in the query of the caller.

    Errors of the pool reach the caller as they are, past the `openai` client.
    """
    context = call_context(pool, run_manager_in(args, kwargs))
    chunks = original(copy, *args, **kwargs)
    async with aclosing(astreamed_in(*context, araising_pool_errors_in(chunks))) as items:
        async for chunk in items:
            yield chunk


_CALLS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("_generate", "embed_documents", "embed_query", "compress_documents"), _generate),
    **dict.fromkeys(("_agenerate", "aembed_documents", "aembed_query"), _agenerate),
    "_stream": _stream,
    "_astream": _astream,
}


class PlannedRequests:
    """The requests of a model on a server declared to cache prefixes, as tracers see them."""

    def __init__(self, model: Any, route: EngineRoute) -> None:
        """`model`: the private copy."""
        self._model, self._route = model, route

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> GenerationLeaf | None:
        """Return None with a cache or a rate limiter, which a prefetch would go around, for the Responses API, and
        where the key comes from a function of the user's."""
        model = self._model
        cached = model.cache or (model.cache is None and get_llm_cache() is not None)
        arguments = {key: value for key, value in kwargs.items() if key not in _FOR_TRACES}
        if cached or model.rate_limiter is not None or model.root_client is None:
            return None
        if has_dynamic_key(model.root_client) or http_client(model.root_client) not in _CARRIED:
            return None
        params = chat_completion_params(model, arguments)
        if params is None or not joinable(params | (params.get("extra_body") or {})):
            return None
        form = _FORMS[always_streams(model, arguments)]
        request, message = partial(_request, model, kwargs=arguments), partial(_message, model)
        return GenerationLeaf(self._route.engine, request, message, form=form)


def _request(model: Any, value: Any, kwargs: Mapping[str, Any]) -> Generate:
    """Return the request that a call by `invoke` sends if it does not stream."""
    request, streams = _captured_request(model, value, kwargs), always_streams(model, kwargs)
    if streams is False:
        return replace(request, form=None)  # whoever listens, it sends the same
    return request.with_unknown_form() if streams else request


def _captured_request(model: Any, value: Any, kwargs: Mapping[str, Any]) -> Generate:
    """Return the request that a call would make, caught before it is sent.

    Runs nothing but the object's own formatting.
    """
    messages: list[BaseMessage] = prompt_value(model, value).to_messages()
    arguments = dict(kwargs)
    with capturing():
        try:
            generate = interceptors.original_of(type(model), "_generate") or type(model)._generate
            generate(model, messages, stop=arguments.pop("stop", None), **arguments)
        except Captured as caught:
            return caught.generation
    raise RegistrationError(f"{type(model).__name__} made no request.", hint="leave it unbound")


def _message(model: Any, generation: Generation) -> Any:
    """Return what the object makes of an answer, as `invoke` does."""
    assert isinstance(generation, WireGeneration)
    result = chat_result(model, json.loads(generation.response), joined_headers(whole_headers(generation.headers)))
    message = result.generations[0].message
    info = {**(result.generations[0].generation_info or {}), **(result.llm_output or {})}
    message.response_metadata = {**info, **message.response_metadata}
    return message
