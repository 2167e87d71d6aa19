"""`engines=`: the models of a chain, or of a graph's nodes, and the engines that they ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from teola_plugin.adapters.automatic_engines import LeftAlone, Serving, serve
from teola_plugin.adapters.engine_specs import SpecOrReason, embedder_spec, reason_for_none, reranker_spec, server_spec
from teola_plugin.adapters.held import MOST, below, held
from teola_plugin.adapters.langchain.binding.bind import CLOSED, bound, replaced
from teola_plugin.adapters.langchain.binding.huggingface import is_cross_encoder, is_embeddings, prompts_of
from teola_plugin.adapters.langchain.binding.openai import is_openai_chat
from teola_plugin.adapters.options import Options
from teola_plugin.adapters.whole import kept_by
from teola_plugin.shims.langchain import sentence_transformer
from teola_plugin.tracer.langchain.classes import is_pool_backed


def with_serving(chain: Any, options: Options, holders: Any = ()) -> tuple[Options, Serving | None]:
    """Return the options with what `engines=` binds, and a record of what it has done; None without `engines=`.

    `chain` may be a list of Runnables; `holders`: what else may hold their models, and is not looked into by `bind=`.
    """
    if options.engines is None:
        return options, None
    bound_ids = {id(obj) for obj, _ in options.bind}
    models = [one for one in models_in(chain) if id(one) not in bound_ids]
    attempt = lambda obj, engine, pool: bound(chain, [(obj, engine)], pool, holders=holders)  # noqa: E731
    want = partial(engine_for, starts_engines=options.engines == "dedicated")
    serving = serve(models, want, attempt, options.engines, options.pool)
    seen = bound_ids | {id(one) for one in models}
    unserved = (
        one for one in _in_functions((chain, holders)) if id(one) not in seen and not isinstance(want(one), str)
    )
    left = tuple(LeftAlone(one, _why_unbound(chain, holders, one)) for one in unserved)
    return replace(options, pool=serving.pool, bind=options.bind + serving.bind), replace(
        serving, left=serving.left + left
    )


def engine_for(obj: Any, *, starts_engines: bool) -> SpecOrReason:
    """Return the engine that a model asks for, or why it gets none."""
    if is_openai_chat(obj):
        key = getattr(obj.openai_api_key, "get_secret_value", lambda: None)()
        return server_spec(str(obj.root_async_client.base_url), obj.model_name, key, dedicated=starts_engines)
    if is_embeddings(obj):
        loaded = sentence_transformer(obj)
        prompts = {} if loaded is None else prompts_of(obj, loaded)
        normalize = bool(obj.encode_kwargs.get("normalize_embeddings"))
        return embedder_spec(obj.model_name, loaded, normalize=normalize, prompts=prompts, dedicated=starts_engines)
    if is_cross_encoder(obj):
        return reranker_spec(obj.model_name, obj.client, dedicated=starts_engines)
    return reason_for_none(obj)


def models_in(chain: Any) -> Iterable[Any]:
    """Return the models, embeddings and cross encoders where `bind=` looks for them, each once."""
    models: dict[int, Any] = {}

    def note(node: Any, kwargs: Mapping[str, Any]) -> Any:
        models.update((id(one), one) for one in (node, *_of_store(node)) if _is_model(one))
        return node

    replaced(chain, note)
    return list(models.values())


def _of_store(node: Any) -> Iterator[Any]:
    store = node.vectorstore if isinstance(node, VectorStoreRetriever) else node
    if isinstance(store, VectorStore):
        yield store.embeddings


def _is_model(node: Any) -> bool:
    models = isinstance(node, BaseLanguageModel | Embeddings) or is_cross_encoder(node)
    return models and not is_pool_backed(node) and not hasattr(type(node), "__teola_served_by__")


def _in_functions(root: Any) -> Iterator[Any]:
    """Return the models that functions hold, where `bind=` does not look."""
    reach = lambda node: () if issubclass(type(node), CLOSED) else held(node)  # noqa: E731
    return (one for one in below(root, reach, most=MOST) if _is_model(one))


def _why_unbound(chain: Any, holders: Any, obj: Any) -> str:
    keeper = kept_by((chain, holders), obj, CLOSED) or "something"
    return f"it is held by {keeper}: pool.bound(model, engine) is for that"
