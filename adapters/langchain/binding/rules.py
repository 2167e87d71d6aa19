"""Which of an app's own models engines serve: by `bind=`, and by `engines=`, which finds an engine for each itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.vectorstores import VectorStore

from teola_plugin.adapters.automatic_engines import PROCESS, Serving, serve
from teola_plugin.adapters.engine_specs import (
    EmbeddingServerSpec,
    EndpointSpec,
    EngineSpec,
    RerankingServerSpec,
    SpecOrReason,
    embedder_spec,
    reason_for_none,
    reranker_spec,
    server_spec,
)
from teola_plugin.adapters.langchain.binding.huggingface import is_cross_encoder, is_embeddings, prompts_of
from teola_plugin.adapters.langchain.binding.openai import (
    address_of_embeddings,
    address_of_reranker,
    endpoint_address,
    is_cohere_rerank,
    is_endpoint_embeddings,
    is_openai_chat,
    is_openai_embeddings,
    server_model_of,
)
from teola_plugin.adapters.langchain.binding.workers import (
    check_arguments,
    check_bindings,
    intercept_calls,
    intercept_routed_class,
)
from teola_plugin.adapters.options import Options
from teola_plugin.adapters.reachable import MAX_OBJECTS, reachable, referents
from teola_plugin.adapters.routing import ROUTE, EngineRoute, RoutingRules, ServerModel
from teola_plugin.engines.openai.envelope import without_credentials
from teola_plugin.errors import RegistrationError, TeolaError
from teola_plugin.pool import EnginePool
from teola_plugin.shims.langchain import sentence_transformer
from teola_plugin.tracer.langchain.classes import is_accelerated, is_pool_backed


def routing_of(root: Any, options: Options) -> tuple[Options, RoutingRules | None, Serving | None]:
    """Return the rules by which models of an app are routed; None without `bind=` and `engines=`.

    Also the options, with the pool that the engines are in, and what `engines=` has done. `root`: what the app is made
    of; functions below it are looked into, and nothing runs. Raises `RegistrationError` for what an engine cannot do,
    and, if `options.strict`, for an object in `bind=` that does not occur in the app.
    """
    if options.prompt_cache is not None or options.meter is not None:
        intercept_calls()
    if not options.bind and options.engines is None:
        return options, RoutingRules(prompt_cache=options.prompt_cache, meter=options.meter) or None, None
    parts = list(reachable(root, _parts, limit=MAX_OBJECTS))
    routes = check_bindings(options.bind, options.pool)
    for obj, route in routes:
        _check_occurrence(obj, parts, options.strict)
        _check_bound_arguments(obj, route, parts)
    options, serving = _with_engines(parts, options)
    objects = [(obj, route) for obj, route in routes if not isinstance(obj, type)]
    classes = {obj: route for obj, route in routes if isinstance(obj, type)}
    servers = None
    if serving is not None:
        pool = serving.pool
        served_models = [] if pool is None else [(one.obj, EngineRoute(pool, one.engine)) for one in serving.bound]
        servers = _server_routes(served_models, options)
        objects += served_models
    for cls in {*classes, *(type(obj) for obj, _ in objects)}:
        intercept_routed_class(cls)
    if servers is not None:
        intercept_routed_class(BaseLanguageModel)
    rules = RoutingRules(objects, classes, servers, server_model_of, options.prompt_cache, options.meter)
    return options, rules, serving


def models_in(root: Any) -> list[Any]:
    """Return the models, embeddings and cross encoders that an app is made of, each once."""
    return [part for part in reachable(root, _parts, limit=MAX_OBJECTS) if _is_model(part)]


def _parts(node: Any) -> Iterable[Any]:
    """Return the parts of an object in which models are looked for: of a store, its embeddings alone."""
    cls: Any = type(node)
    if issubclass(cls, VectorStore):
        return (node.embeddings,)
    home = str(getattr(cls, "__module__", "")).partition(".")[0]
    is_closed = home in _WITHOUT_MODELS or issubclass(cls, BaseCallbackHandler) or is_accelerated(node)
    return () if is_closed else referents(node)


_WITHOUT_MODELS = frozenset(
    {"asyncio", "chromadb", "faiss", "httpx", "httpx2", "logging", "numpy", "openai", "threading", "tokenizers"}
    | {"huggingface_hub", "sentence_transformers", "torch", "transformers"}
)
"""Packages whose objects hold no model of the user's."""


def _is_model(node: Any) -> bool:
    is_model = isinstance(node, BaseLanguageModel | Embeddings) or is_cross_encoder(node) or is_cohere_rerank(node)
    return is_model and not is_pool_backed(node) and not hasattr(type(node), ROUTE)


# ------------------------------------------------------------ `bind=`


def _check_occurrence(obj: Any, parts: list[Any], strict: bool) -> None:
    """Raise `RegistrationError` for an object that does not occur, as far as that can be told."""
    if not strict or isinstance(obj, type) or len(parts) >= MAX_OBJECTS or any(part is obj for part in parts):
        return
    raise RegistrationError(
        f"the {type(obj).__name__} in bind= does not occur in the chain.",
        hint="bind the very object that the chain, or a function in it, holds; or pass strict=False",
    )


def _check_bound_arguments(obj: Any, route: EngineRoute, parts: Iterable[Any]) -> None:
    """Raise `RegistrationError` for arguments that are bound to the object and that its engine cannot take."""
    for part in parts:
        if isinstance(part, RunnableBindingBase):
            target, kwargs = _innermost(part)
            if target is obj:
                check_arguments(obj, route, kwargs)


def _innermost(binding: Any) -> tuple[Any, dict[str, Any]]:
    """Return what a binding calls in the end, and the arguments that it gets."""
    kwargs: dict[str, Any] = {}
    while True:
        if isinstance(binding, RunnableBindingBase):
            binding, kwargs = binding.bound, {**binding.kwargs, **kwargs}
        elif isinstance(binding, RunnableSequence):
            binding = binding.first
        else:
            return binding, kwargs


# ------------------------------------------------------------ `engines=`


def _with_engines(parts: Iterable[Any], options: Options) -> tuple[Options, Serving | None]:
    """Return the options with the pool of the engines that the models ask for, and which those are."""
    if options.engines is None:
        return options, None
    bound_ids = {id(obj) for obj, _ in options.bind}
    models = [part for part in parts if _is_model(part) and id(part) not in bound_ids]
    want = partial(engine_for, starts_engines=options.engines == "dedicated")

    def attempt(obj: Any, engine: str, pool: EnginePool) -> None:
        [(_, route)] = check_bindings([(obj, engine)], pool)
        _check_bound_arguments(obj, route, parts)

    serving = serve(models, want, attempt, options.engines, options.pool)
    return replace(options, pool=serving.pool), serving


def engine_for(obj: Any, *, starts_engines: bool) -> SpecOrReason:
    """Return the engine that a model asks for, or why it gets none."""
    if is_openai_chat(obj):
        key = getattr(obj.openai_api_key, "get_secret_value", lambda: None)()
        return server_spec(str(obj.root_async_client.base_url), obj.model_name, key, dedicated=starts_engines)
    if is_openai_embeddings(obj):
        url, key = address_of_embeddings(obj), getattr(obj.openai_api_key, "get_secret_value", lambda: None)()
        return server_spec(url, obj.model, key, dedicated=starts_engines, kind=EmbeddingServerSpec)
    if is_endpoint_embeddings(obj):
        url, reason = endpoint_address(obj)
        root = without_credentials(url).rstrip("/").removesuffix("/embed")
        return reason or server_spec(root, "", None, dedicated=starts_engines, kind=EndpointSpec)
    if is_cohere_rerank(obj):
        key = getattr(obj.cohere_api_key, "get_secret_value", lambda: None)()
        return server_spec(address_of_reranker(obj), obj.model, key, dedicated=starts_engines, kind=RerankingServerSpec)
    if is_embeddings(obj):
        loaded = sentence_transformer(obj)
        prompts = {} if loaded is None else prompts_of(obj, loaded)
        normalize = bool(obj.encode_kwargs.get("normalize_embeddings"))
        return embedder_spec(obj.model_name, loaded, normalize=normalize, prompts=prompts, dedicated=starts_engines)
    if is_cross_encoder(obj):
        return reranker_spec(obj.model_name, obj.client, dedicated=starts_engines)
    return reason_for_none(obj)


def _server_routes(
    served_models: Iterable[tuple[Any, EngineRoute]], options: Options
) -> Callable[[ServerModel], EngineRoute | None]:
    """Return the rule for models that are created while the app runs: by the server and the model that they name.

    A server that no model named before gets an engine when it is first called, unless that would send it requests.
    """
    routes: dict[ServerModel, EngineRoute | None] = {}
    for obj, route in served_models:
        if (address := server_model_of(obj)) is not None:
            routes[address] = route
    pool = options.pool

    def route_of_server(address: ServerModel) -> EngineRoute | None:
        """Return the engine for models of one server and name, looked for once; None if they go their own way."""
        if address not in routes:
            spec = server_spec(address.base_url, address.model, None, dedicated=False)
            routes[address] = _engine_of(spec, address) if isinstance(spec, EngineSpec) else None
        return routes[address]

    def _engine_of(spec: EngineSpec, address: ServerModel) -> EngineRoute | None:
        """Return an engine for a server that no model named before; None if there is none.

        In a pool of the user's it must be there already. Otherwise the process's own pool starts one, unless engines
        are dedicated: those would send the server requests that nobody waits for.
        """
        if pool is not None and pool is not PROCESS.pool:
            for name in pool.engine_names:
                engine: Any = pool.engine(name)
                if spec.is_kind_of(engine) and engine.model in (None, address.model):
                    return EngineRoute(pool, name)
            return None
        if options.engines == "dedicated":
            return None
        try:
            return EngineRoute(*PROCESS.engine_for(spec))
        except TeolaError:  # the object goes its own way
            return None

    return route_of_server
