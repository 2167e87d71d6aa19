"""`serve=`: the models of a chain, or of a graph's nodes, and the engines that they ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from teola_plugin.adapters.held import MOST, below, held
from teola_plugin.adapters.langchain.binding.bind import CLOSED, bound
from teola_plugin.adapters.langchain.binding.huggingface import is_cross_encoder, is_embeddings, prompts_of
from teola_plugin.adapters.langchain.binding.openai import is_openai_chat
from teola_plugin.adapters.langchain.binding.walk import replaced
from teola_plugin.adapters.options import Options
from teola_plugin.adapters.serving.serving import LeftAlone, Serving, serve
from teola_plugin.adapters.serving.specs import Wanted, embedder_of, none_for, reranker_of, server_of
from teola_plugin.adapters.whole import kept_by
from teola_plugin.shims.langchain import sentence_transformer
from teola_plugin.tracer.langchain.classes import is_pool_backed


def with_serving(chain: Any, options: Options, beside: Any = ()) -> tuple[Options, Serving | None]:
    """The options with what `serve=` binds, and what it has done; nothing without it.

    `chain` may be a list of Runnables; `beside`: what else may hold their models, and is not looked into by `bind=`.
    """
    if options.serve is None:
        return options, None
    known = {id(obj) for obj, _ in options.bind}
    models = [one for one in models_in(chain) if id(one) not in known]
    attempt = lambda obj, engine, pool: bound(chain, [(obj, engine)], pool, beside=beside)  # noqa: E731
    want = partial(wanted, own=options.serve == "own")
    made = serve(models, want, attempt, options.serve, options.pool)
    seen = known | {id(one) for one in models}
    kept = (one for one in _in_functions((chain, beside)) if id(one) not in seen and not isinstance(want(one), str))
    left = tuple(LeftAlone(one, _held(chain, beside, one)) for one in kept)
    return replace(options, pool=made.pool, bind=options.bind + made.bind), replace(made, left=made.left + left)


def wanted(obj: Any, *, own: bool) -> Wanted:
    """The engine that a model asks for, or why it gets none."""
    if is_openai_chat(obj):
        key = getattr(obj.openai_api_key, "get_secret_value", lambda: None)()
        return server_of(str(obj.root_async_client.base_url), obj.model_name, key, own=own)
    if is_embeddings(obj):
        loaded = sentence_transformer(obj)
        prompts = {} if loaded is None else prompts_of(obj, loaded)
        normalize = bool(obj.encode_kwargs.get("normalize_embeddings"))
        return embedder_of(obj.model_name, loaded, normalize=normalize, prompts=prompts, own=own)
    if is_cross_encoder(obj):
        return reranker_of(obj.model_name, obj.client, own=own)
    return none_for(obj)


def models_in(chain: Any) -> Iterable[Any]:
    """Models, embeddings and cross encoders where `bind=` looks for them, each once."""
    found: dict[int, Any] = {}

    def note(node: Any, kwargs: Mapping[str, Any]) -> Any:
        found.update((id(one), one) for one in (node, *_of_store(node)) if _is_model(one))
        return node

    replaced(chain, note)
    return list(found.values())


def _of_store(node: Any) -> Iterator[Any]:
    store = node.vectorstore if isinstance(node, VectorStoreRetriever) else node
    if isinstance(store, VectorStore):
        yield store.embeddings


def _is_model(node: Any) -> bool:
    models = isinstance(node, BaseLanguageModel | Embeddings) or is_cross_encoder(node)
    return models and not is_pool_backed(node) and not hasattr(type(node), "__teola_served_by__")


def _in_functions(root: Any) -> Iterator[Any]:
    """Models that are held where `bind=` does not look."""
    reach = lambda node: () if issubclass(type(node), CLOSED) else held(node)  # noqa: E731
    return (one for one in below(root, reach, most=MOST) if _is_model(one))


def _held(chain: Any, beside: Any, obj: Any) -> str:
    keeper = kept_by((chain, beside), obj, CLOSED) or "something"
    return f"it is held by {keeper}: pool.bound(model, engine) is for that"
