"""`accelerate(..., bind={object: engine})`: the user's own models and embeddings, served by engines of the pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents.compressor import BaseDocumentCompressor
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from teola_plugin.adapters.calls import carries_openai, check_engine
from teola_plugin.adapters.langchain.binding.huggingface import (
    cross_encoder_on,
    embeddings_on,
    is_cross_encoder,
    is_own_decoder,
)
from teola_plugin.adapters.langchain.binding.models import model_on
from teola_plugin.adapters.langchain.binding.openai import is_openai_chat, served_by_server
from teola_plugin.adapters.langchain.binding.same_class import in_class_of
from teola_plugin.adapters.langchain.binding.stores import retriever_on, store_on
from teola_plugin.adapters.langchain.binding.walk import Make, replaced
from teola_plugin.adapters.own_class import ServedBy
from teola_plugin.adapters.whole import in_part, kept_by
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool

Node = Runnable[Any, Any]


def bound(
    chain: Any, bind: Sequence[tuple[Any, str]], pool: EnginePool | None, *, strict: bool = True, holders: Any = ()
) -> Any:
    """Return the chain (or a list of them) with the named objects replaced by ones on the pool; the very object if none
    is.

    A `ChatOpenAI` on an `OpenAIServer` engine keeps its own code and is carried by the engine. Another chat model
    becomes a `ChatTeola`, a text model a `TeolaLLM`, with the same name, tags and sampling parameters (those the model
    leaves to its provider are the engine's defaults: greedy, 256 tokens); messages then carry the engine's
    `response_metadata`. Embeddings and cross encoders are replaced wherever they sit in retrievers and compressors;
    see `stores` for the stores. Raises `RegistrationError` for what cannot be served faithfully, for what functions in
    the chain, or in `holders`, hold as well, and, if `strict`, for what does not occur.
    """
    if bind and pool is None:
        raise RegistrationError(
            "bind= names engines, but there is no pool.", hint="accelerate(..., pool=..., bind=...)"
        )
    for obj, engine in bind:
        assert pool is not None
        check_engine(pool, engine)
        bound_chain = replaced(chain, _replacement(obj, engine, pool))
        if bound_chain is chain and strict:
            raise _absent(obj)
        if bound_chain is not chain and (keeper := kept_by((bound_chain, holders), obj, CLOSED)):
            raise in_part(obj, keeper)
        chain = bound_chain
    return chain


CLOSED = (VectorStore, BaseCallbackHandler)
"""Stores embed their documents as they always did; handlers hear, and are no part of the chain."""


def bound_object(obj: Any, engine: str, pool: EnginePool) -> Any:
    """Return a copy of one object, of a subclass of its class, served as `bind=` serves it; see `EnginePool.bound`.

    Raises `RegistrationError` for what cannot be served faithfully.
    """
    check_engine(pool, engine)
    served_by = ServedBy(pool, engine)
    current: ServedBy | None = getattr(type(obj), "__teola_served_by__", None)
    if current is not None and current != served_by:
        raise RegistrationError(
            f"the {type(obj).__name__} is served by the engine {current.engine!r} already.",
            hint="bind the object that it was made of",
        )
    return obj if current is not None else in_class_of(obj, _replacement(obj, engine, pool)(obj, {}), served_by)


def _replacement(obj: Any, engine: str, pool: EnginePool) -> Make:
    """Return what replaces `obj`. Raises `RegistrationError` for what no engine can do."""
    if is_cross_encoder(obj):
        return _replace_only(obj, lambda kwargs: cross_encoder_on(obj, engine, pool))
    if isinstance(obj, Embeddings):
        return _embeddings(obj, engine, pool)
    if is_own_decoder(obj):
        raise RegistrationError(
            f"a {type(obj).__name__} decodes by means of its own: an engine's answers would be others.",
            hint="leave it unbound, or put ChatTeola(pool=pool) in the chain",
        )
    if is_openai_chat(obj) and carries_openai(pool.engine(engine)):
        return _replace_only(obj, lambda kwargs: served_by_server(obj, engine, pool))
    if isinstance(obj, BaseChatModel | BaseLLM):
        return _replace_only(obj, lambda kwargs: model_on(obj, engine, pool, kwargs))
    if isinstance(obj, BaseDocumentCompressor) or hasattr(obj, "score"):
        raise RegistrationError(
            f"a reranker ({type(obj).__name__}) cannot be bound.",
            hint="bind its HuggingFaceCrossEncoder, or use TeolaRerank(pool=pool) in the chain",
        )
    raise RegistrationError(
        f"a {type(obj).__name__} cannot be bound to an engine.",
        hint="bind chat models, text models, embeddings or a HuggingFaceCrossEncoder",
    )


def _replace_only(obj: Any, make: Callable[[Mapping[str, Any]], Any]) -> Make:
    return lambda node, kwargs: make(kwargs) if node is obj else node


def _embeddings(obj: Embeddings, engine: str, pool: EnginePool) -> Make:
    engine_embeddings: Any = None

    def stand_in(node: Any, kwargs: Mapping[str, Any]) -> Any:
        nonlocal engine_embeddings
        store = node.vectorstore if isinstance(node, VectorStoreRetriever) else node
        if node is not obj and not (isinstance(store, VectorStore) and store.embeddings is obj):
            return node
        engine_embeddings = engine_embeddings or embeddings_on(obj, engine, pool)
        if node is obj:
            return engine_embeddings
        return store_on(node, engine_embeddings) if node is store else retriever_on(node, engine_embeddings)

    return stand_in


def _absent(obj: Any) -> RegistrationError:
    return RegistrationError(
        f"the {type(obj).__name__} in bind= does not occur in the chain where it could be replaced.",
        hint="bind the very object that the chain holds; for what functions and agents hold, pool.bound(model, engine)",
    )
