"""`bind=` and `engines=`: the rules by which engines do the work of the models of a LlamaIndex object."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from llama_index.core import Settings
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms.llm import LLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.workflow import Workflow

from teola_plugin.adapters.automatic_engines import Serving, serve
from teola_plugin.adapters.calls import check_engine
from teola_plugin.adapters.engine_specs import (
    EmbeddingServerSpec,
    RerankingServerSpec,
    SpecOrReason,
    embedder_spec,
    reason_for_none,
    reranker_spec,
    server_spec,
)
from teola_plugin.adapters.llamaindex.binding.bind import ROUTER, route_models
from teola_plugin.adapters.llamaindex.binding.huggingface import is_embedding, is_reranker
from teola_plugin.adapters.llamaindex.binding.model_copies import own_class, read
from teola_plugin.adapters.llamaindex.binding.openai import (
    embedding_engines,
    is_cohere_rerank,
    is_openai,
    is_openai_embedding,
    server_model_of,
    server_of_reranker,
)
from teola_plugin.adapters.llamaindex.prefetching import find_scope
from teola_plugin.adapters.options import Options
from teola_plugin.adapters.prompt_cache import cache_form
from teola_plugin.adapters.routing import EngineRoute, RoutingRules, ServerModel
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import need_pool
from teola_plugin.shims.llamaindex.copies import attribute_values
from teola_plugin.shims.llamaindex.engines import SettingsParts
from teola_plugin.shims.llamaindex.interceptors import enable, intercept_models
from teola_plugin.shims.llamaindex.models import HuggingFaceEmbeddingParts, SentenceTransformerRerankParts
from teola_plugin.shims.llamaindex.workflows import objects_used_by_steps
from teola_plugin.tracer.llamaindex.classes import is_pool_object, reachable_objects


def rules_for(obj: Any, options: Options) -> tuple[Options, RoutingRules, Serving | None]:
    """Return the options with their pool, the rules of `bind=` and `engines=`, and the report of the latter.

    `bind=` may name a class of models for all its objects. Raise `RegistrationError` for what an engine cannot do, and
    for a model in `bind=` that does not occur in `obj`.
    """
    serving = None
    servers: dict[ServerModel, EngineRoute] = {}
    pairs = options.bind
    if options.engines is not None:
        serving = _served(obj, options, options.engines)
        options, pairs = replace(options, pool=serving.pool), (*options.bind, *serving.bind)
    if pairs and options.pool is None:
        raise RegistrationError("bind= needs a pool.", hint="pass pool=EnginePool.local(...)")
    routes = [(one, EngineRoute(need_pool(options.pool), engine)) for one, engine in pairs]
    classes = {one: route for one, route in routes if isinstance(one, type)}
    objects = [(one, route) for one, route in routes if not isinstance(one, type)]
    for one, route in objects:
        ROUTER.check(one, route)
        route_models(own_class(one))
    for cls, route in classes.items():
        _route_class(cls, route)
    for cls in subclasses_of(LLM) if options.prompt_cache is not None else ():
        if cache_form(cls) is not None:
            route_models(cls)
    if options.meter is not None:
        enable(find_scope, ROUTER)
        intercept_models()
    for one, _ in options.bind if options.strict else ():
        if not isinstance(one, type) and is_surely_absent(obj, one):
            raise RegistrationError(
                f"bind= names a {type(one).__name__} that is not a part of the {type(obj).__name__}.",
                hint="bind the very object that the engine was made with",
            )
    for bound in () if serving is None else serving.bound:
        address = server_model_of(bound.obj)
        if address is not None and options.pool is not None:
            servers[address] = EngineRoute(options.pool, bound.engine)
    server_rules = servers.get if servers else None
    rules = RoutingRules(objects, classes, server_rules, server_model_of, options.prompt_cache, options.meter)
    return options, rules, serving


def _route_class(cls: type, route: EngineRoute) -> None:
    """Let all models of a class, and of the classes that extend it, be routed. Raise `RegistrationError`."""
    check_engine(*route)
    if not issubclass(cls, LLM | BaseEmbedding | BaseNodePostprocessor):
        raise RegistrationError(
            f"objects of the class {cls.__name__} cannot be bound to an engine.",
            hint="bind LLMs, embedding models or a SentenceTransformerRerank",
        )
    for extended in (cls, *subclasses_of(cls)):
        route_models(extended)


def subclasses_of(cls: Any) -> Iterator[Any]:
    """Yield the classes that extend a class, also those further below."""
    for extended in cls.__subclasses__():
        yield extended
        yield from subclasses_of(extended)


def _served(obj: Any, options: Options, mode: str) -> Serving:
    """Return the engines that `engines=` chose or started for the models of an object."""
    bound_ids = {id(one) for one, _ in options.bind}
    models = [one for one in models_in(obj) if id(one) not in bound_ids]
    choose = partial(engine_for, starts_engines=mode == "dedicated")
    attempt = lambda one, engine, pool: ROUTER.check(one, EngineRoute(pool, engine))  # noqa: E731
    return serve(models, choose, attempt, mode, options.pool)


def engine_for(obj: Any, *, starts_engines: bool) -> SpecOrReason:
    """Return the engine for a model, or the reason why it gets none."""
    if is_openai(obj):
        return server_spec(str(obj.api_base), obj.model, obj.api_key, dedicated=starts_engines)
    try:
        if is_openai_embedding(obj):
            text_engine = embedding_engines(obj)[1]
            options: Any = {"dedicated": starts_engines, "kind": EmbeddingServerSpec}
            return server_spec(str(obj.api_base), text_engine, obj.api_key, **options)
        if is_embedding(obj):
            model = read(HuggingFaceEmbeddingParts, obj).model
            prompts = {"query": model.prompts.get("query") or "", "document": model.prompts.get("text") or ""}
            return embedder_spec(
                obj.model_name, model, normalize=obj.normalize, prompts=prompts, dedicated=starts_engines
            )
        if is_cohere_rerank(obj):
            url, key = server_of_reranker(obj)
            return server_spec(url, obj.model, key, dedicated=starts_engines, kind=RerankingServerSpec)
        if is_reranker(obj):
            return reranker_spec(obj.model, read(SentenceTransformerRerankParts, obj).model, dedicated=starts_engines)
    except RegistrationError as error:
        return str(error)
    return reason_for_none(obj)


def models_in(obj: Any) -> list[Any]:
    """Return the models that an object holds, and those that a workflow's steps name, each once."""
    models: dict[int, Any] = {}
    for root in (obj, *(objects_used_by_steps(obj) if isinstance(obj, Workflow) else ())):
        for node in reachable_objects(root):
            is_model = isinstance(node, LLM | BaseEmbedding) or is_reranker(node) or is_cohere_rerank(node)
            if is_model and not is_pool_object(node):
                models[id(node)] = node
    return list(models.values())


# ------------------------------------------------------------ models that do not occur

_LIBRARIES = sys.stdlib_module_names | {
    *("llama_index", "llama_index_instrumentation", "workflows", "teola_plugin", "pydantic", "tiktoken", "numpy"),
    *("tokenizers", "transformers", "sentence_transformers", "torch", "openai", "httpx", "httpx2"),
}
"""Packages whose objects and functions call no model of the user's that LlamaIndex's objects do not hold."""


def is_surely_absent(obj: Any, model: Any) -> bool:
    """Return True if an object cannot call a model: it does not hold it, and runs no code of the user's own."""
    nodes = list(reachable_objects(obj))
    defaults = SettingsParts.of(Settings)
    if any(node is model for node in (*nodes, defaults.llm, defaults.embed_model)):
        return False
    return not any(_may_hold_anything(node) for node in nodes)


def _may_hold_anything(node: Any) -> bool:
    """Return True for an object with code of the user's, which may call models that its attributes do not show."""
    function = getattr(node, "func", node)
    home = function if isinstance(function, FunctionType | MethodType) else type(node)
    if home.__module__.partition(".")[0] not in _LIBRARIES:
        return True
    templates = [value for value in attribute_values(node) if isinstance(value, BasePromptTemplate)]
    return any(template.function_mappings for template in templates)
