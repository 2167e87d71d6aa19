"""`ChatOpenAI` on an engine: the object's own code writes the request and reads the answer, the engine carries both.

The copy that runs in the chain has HTTP clients of its own whose transport hands chat completions to the engine. So
prompts, parameters, messages, errors and retries are the object's. What the engine cannot do goes the object's way.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, cast
from weakref import WeakSet

from langchain_core.globals import get_llm_cache
from langchain_core.messages import BaseMessage

from teola_plugin.adapters.calls import astreamed_in, joined, streamed_in
from teola_plugin.adapters.langchain.current_query import ConfigScopedModel, call_context
from teola_plugin.adapters.openai_transport import (
    AsyncEngineTransport,
    Captured,
    EngineTransport,
    araising_pool_errors_in,
    capturing,
    raising_pool_errors,
    raising_pool_errors_in,
)
from teola_plugin.adapters.own_class import ServedBy, subclass_of
from teola_plugin.engines.openai.envelope import without_credentials
from teola_plugin.engines.openai.wire import WireGeneration, joinable, joined_headers, whole_headers
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate, Generation
from teola_plugin.shims.langchain import always_streams, chat_completion_params, chat_result, prompt_value
from teola_plugin.shims.openai import http_client, key_is_asked_for
from teola_plugin.shims.pydantic import of_class
from teola_plugin.tracer.leaf import GenerationLeaf

_FORMS: Mapping[bool | None, Literal["", "whole", "unknown"]] = {None: "whole", False: "", True: "unknown"}
"""Whether a model always streams, or never (None: neither) -> the form of its leaf."""
_FOR_TRACES = ("ls_structured_output_format", "structured_output_format")
"""Arguments that LangChain takes out before it calls a model."""


def is_openai_chat(obj: Any) -> bool:
    """Return True for a chat model that talks to its server through the `openai` package, as `ChatOpenAI` does."""
    import sys

    base = getattr(sys.modules.get("langchain_openai.chat_models.base"), "BaseChatOpenAI", None)
    return base is not None and isinstance(obj, base)


def served_by_server(obj: Any, engine: str, pool: EnginePool) -> Any:
    """Return the object as it is, carried by the engine.

    Raises `RegistrationError` where the two talk to different places.
    """
    server: Any = pool.engine(engine)
    _check(obj, server)
    base = _OnCachingServer if server.prefix_caching else _OnServer
    cls = subclass_of(type(obj), base, ServedBy(pool, engine))
    return of_class(cls, obj, _carried(obj, ServedBy(pool, engine)), {})


_CARRIED: WeakSet[Any] = WeakSet()
"""HTTP clients whose requests an engine carries."""


def _carried(obj: Any, served_by: ServedBy) -> dict[str, Any]:
    """Return clients like the object's, whose requests the engine carries."""
    clients: dict[str, Any] = {}
    if obj.root_client is not None:
        sync = EngineTransport.client(http_client(obj.root_client), *served_by)
        root = obj.root_client.copy(http_client=sync)
        clients |= {"root_client": root, "client": root.chat.completions}
        _CARRIED.add(sync)
    on_loop = AsyncEngineTransport.client(http_client(obj.root_async_client), *served_by)
    root = obj.root_async_client.copy(http_client=on_loop)
    _CARRIED.add(on_loop)
    return clients | {"root_async_client": root, "async_client": root.chat.completions}


def _check(obj: Any, server: Any) -> None:
    base_url = without_credentials(str(obj.root_async_client.base_url)).rstrip("/")
    if base_url != server.base_url:
        raise RegistrationError(
            f"the {type(obj).__name__} talks to {base_url}, the engine {server.name!r} to {server.base_url}.",
            hint=f"OpenAIServer(base_url={base_url!r}, ...)",
        )
    if server.model is not None and obj.model_name != server.model:
        raise RegistrationError(
            f"the {type(obj).__name__} asks for {obj.model_name!r}, the engine {server.name!r} for {server.model!r}.",
            hint=f"OpenAIServer(model={obj.model_name!r}, ...)",
        )


class _OnServer(ConfigScopedModel):
    """A mixin before the object's class in the order of methods: calls find their query, wherever they run."""

    __teola_served_by__: ClassVar[ServedBy]

    @property
    def pool(self) -> EnginePool:  # type: ignore[override]
        return self.__teola_served_by__.pool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """One that its class makes, as `configurable_fields` has it do, is served like the one that it is made after.
        Raises `RegistrationError` where it talks to another place."""
        super().__init__(*args, **kwargs)
        served_by, model = self.__teola_served_by__, cast(Any, self)
        _check(model, served_by.pool.engine(served_by.engine))
        if http_client(model.root_async_client) not in _CARRIED:
            vars(self).update(_carried(model, served_by))

    def _generate(self, *args: Any, run_manager: Any = None, **kwargs: Any) -> Any:
        with joined(*call_context(self.pool, run_manager)), raising_pool_errors():
            return super()._generate(*args, run_manager=run_manager, **kwargs)  # type: ignore[misc]

    async def _agenerate(self, *args: Any, run_manager: Any = None, **kwargs: Any) -> Any:
        with joined(*call_context(self.pool, run_manager)), raising_pool_errors():
            return await super()._agenerate(*args, run_manager=run_manager, **kwargs)  # type: ignore[misc]

    def _stream(self, *args: Any, run_manager: Any = None, **kwargs: Any) -> Iterator[Any]:
        context = call_context(self.pool, run_manager)
        chunks = super()._stream(*args, run_manager=run_manager, **kwargs)  # type: ignore[misc]
        yield from streamed_in(*context, raising_pool_errors_in(chunks))

    async def _astream(self, *args: Any, run_manager: Any = None, **kwargs: Any) -> AsyncIterator[Any]:
        context = call_context(self.pool, run_manager)
        chunks = super()._astream(*args, run_manager=run_manager, **kwargs)  # type: ignore[misc]
        async with aclosing(astreamed_in(*context, araising_pool_errors_in(chunks))) as items:
            async for chunk in items:
                yield chunk


class _OnCachingServer(_OnServer):
    """A model on a server declared to cache prefixes: the graph knows its prompts, and calls it when they are ready."""

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> GenerationLeaf | None:
        """Return None with a cache or a rate limiter, which a prefetch would go around, for the Responses API, and
        where the key comes from a function of the user's."""
        model: Any = self
        cached = model.cache or (model.cache is None and get_llm_cache() is not None)
        arguments = {key: value for key, value in kwargs.items() if key not in _FOR_TRACES}
        if cached or model.rate_limiter is not None or model.root_client is None:
            return None
        if key_is_asked_for(model.root_client) or http_client(model.root_client) not in _CARRIED:
            return None
        params = chat_completion_params(model, arguments)
        if params is None or not joinable(params | (params.get("extra_body") or {})):
            return None
        engine = model.__teola_served_by__.engine
        form = _FORMS[always_streams(model, arguments)]
        request, message = partial(_request, model, kwargs=arguments), partial(_message, model)
        return GenerationLeaf(engine, request, message, form=form)


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
            super(_OnServer, model)._generate(messages, stop=arguments.pop("stop", None), **arguments)
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
