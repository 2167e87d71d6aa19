"""`engines=`: the models of a LlamaIndex object, and the engines for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms.llm import LLM

from teola_plugin.adapters.automatic_engines import Serving, serve
from teola_plugin.adapters.engine_specs import SpecOrReason, embedder_spec, reason_for_none, reranker_spec, server_spec
from teola_plugin.adapters.llamaindex.binding.engine_proxy import EngineProxy, read
from teola_plugin.adapters.llamaindex.binding.huggingface import is_embedding, is_reranker
from teola_plugin.adapters.llamaindex.binding.openai import is_openai
from teola_plugin.adapters.llamaindex.pool_backed import PoolBacked
from teola_plugin.adapters.llamaindex.substitution import replaced
from teola_plugin.adapters.options import Options
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.shims.llamaindex.models import HuggingFaceEmbeddingParts, SentenceTransformerRerankParts

BindOne = Callable[[Any, str, EnginePool], Any]


def with_serving(obj: Any, options: Options, attempt: BindOne) -> tuple[Options, Serving | None]:
    """Return the options with the objects that `engines=` binds, and its report; None without `engines=`."""
    if options.engines is None:
        return options, None
    bound_ids = {id(one) for one, _ in options.bind}
    models = [one for one in models_in(obj) if id(one) not in bound_ids]
    choose = partial(engine_for, starts_engines=options.engines == "dedicated")
    serving = serve(models, choose, attempt, options.engines, options.pool)
    return replace(options, pool=serving.pool, bind=options.bind + serving.bind), serving


def engine_for(obj: Any, *, starts_engines: bool) -> SpecOrReason:
    """Return the engine for a model, or the reason why it gets none."""
    if is_openai(obj):
        return server_spec(str(obj.api_base), obj.model, obj.api_key, dedicated=starts_engines)
    try:
        if is_embedding(obj):
            model = read(HuggingFaceEmbeddingParts, obj).model
            prompts = {"query": model.prompts.get("query") or "", "document": model.prompts.get("text") or ""}
            return embedder_spec(
                obj.model_name, model, normalize=obj.normalize, prompts=prompts, dedicated=starts_engines
            )
        if is_reranker(obj):
            return reranker_spec(obj.model, read(SentenceTransformerRerankParts, obj).model, dedicated=starts_engines)
    except RegistrationError as error:
        return str(error)
    return reason_for_none(obj)


def models_in(obj: Any) -> list[Any]:
    """Return the models in the places where `bind=` looks for them, each once."""
    models: dict[int, Any] = {}

    def note(node: Any) -> None:
        is_model = isinstance(node, LLM | BaseEmbedding) or is_reranker(node)
        if is_model and not isinstance(node, PoolBacked | EngineProxy):
            models[id(node)] = node

    replaced(obj, note)
    return list(models.values())
