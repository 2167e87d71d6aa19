"""`accelerate(..., bind={object: engine})`: the user's own models and embeddings, served by engines of the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.documents.compressor import BaseDocumentCompressor
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.runnables import Runnable, RunnableSequence
from langchain_core.vectorstores import InMemoryVectorStore, VectorStoreRetriever

from teola_plugin.adapters.langchain.active import active_run, check_engine
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.llm import TeolaLLM
from teola_plugin.adapters.langchain.routed import parts, rebuilt
from teola_plugin.engines.payloads import EmbedText
from teola_plugin.errors import RegistrationError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.tracer.lcel_classes import changed

Node = Runnable[Any, Any]
Bindings = Mapping[Any, str] | Iterable[tuple[Any, str]]
"""Objects and the engine that serves each; pairs where an object cannot be hashed. Objects count by identity."""

_READ: dict[str, tuple[str, ...]] = {
    "max_tokens": ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "num_predict"),
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "top_k": ("top_k",),
    "seed": ("seed",),
    "stop": ("stop", "stop_sequences"),
}
"""Sampling parameter of the engine -> the names under which models keep it; None there means not set."""
_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repeat_penalty": (None, 1, 1.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "extra_body": (None, {}),
}
"""What the engine cannot do, and the values that ask for nothing."""
_KEPT = (
    "callbacks",
    "tags",
    "metadata",
    "verbose",
    "cache",
    "rate_limiter",
    "disable_streaming",
    "custom_get_token_ids",
)


def bound(chain: Node, bind: Bindings | None, pool: EnginePool | None) -> Node:
    """The chain with the named objects replaced by ones on the pool; the very chain when nothing is bound.

    A chat model becomes a `ChatTeola`, a text model a `TeolaLLM`, with the same name, tags and sampling parameters
    (those the model leaves to its provider are the engine's defaults: greedy, 256 tokens). Messages then carry the
    engine's `response_metadata`. Embeddings are served inside retrievers over an `InMemoryVectorStore`; the vectors in
    the store must come from the same model. Raises `RegistrationError` for what cannot be served faithfully.
    """
    pairs = list(bind.items() if isinstance(bind, Mapping) else bind or ())
    if not pairs:
        return chain
    if pool is None:
        raise RegistrationError(
            "bind= names engines, but there is no pool.", hint="accelerate(..., pool=..., bind=...)"
        )
    chosen: dict[str, Callable[[str], Node]] = {}
    for obj, engine in pairs:
        check_engine(pool, engine)
        found = {
            path: _served(obj, engine, node, kwargs, pool)
            for path, node, kwargs in _leaves(chain, "chain", {})
            if node is obj or _embeds(node, obj)
        }
        if not found:
            raise _absent(obj)
        chosen |= {path: lambda where, made=made: made for path, made in found.items()}  # type: ignore[misc]
    return rebuilt(chain, "chain", chosen)


def _leaves(node: Node, path: str, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Node, Mapping[str, Any]]]:
    """Every node with its path and the arguments bound to it."""
    yield path, node, kwargs
    inner = {**getattr(node, "kwargs", {}), **kwargs}
    for i, (where, part) in enumerate(parts(node)):
        handed_on = where == ".bound" or (isinstance(node, RunnableSequence) and i == 0)
        yield from _leaves(part, path + where, inner if handed_on else {})


def _embeds(node: Any, obj: Any) -> bool:
    return isinstance(node, VectorStoreRetriever) and node.vectorstore.embeddings is obj and obj is not None


def _absent(obj: Any) -> RegistrationError:
    name = type(obj).__name__
    if isinstance(obj, BaseDocumentCompressor) or hasattr(obj, "score"):
        return RegistrationError(
            f"a reranker ({name}) cannot be bound.", hint="use TeolaRerank(pool=pool) in the chain"
        )
    return RegistrationError(
        f"the {name} in bind= does not occur in the chain where it could be replaced.",
        hint="bind the very object that the chain holds; what functions and agents call inside cannot be replaced",
    )


def _served(obj: Any, engine: str, node: Any, kwargs: Mapping[str, Any], pool: EnginePool) -> Node:
    if isinstance(obj, Embeddings):
        return _retriever(node, engine, pool)
    if isinstance(obj, BaseChatModel):
        made: Any = ChatTeola(pool=pool, engine=engine, **_fields(obj))
    elif isinstance(obj, BaseLLM):
        made = TeolaLLM(
            pool=pool, engine=engine, **{k: v for k, v in _fields(obj).items() if k in TeolaLLM.model_fields}
        )
    else:
        raise RegistrationError(
            f"a {type(obj).__name__} cannot be bound to an engine.", hint="bind chat models, text models or embeddings"
        )
    made.sampling(None, kwargs)  # arguments that the chain binds to it
    return made  # type: ignore[no-any-return]


def _fields(model: Any) -> dict[str, Any]:
    """Fields of a pool-backed model that answers as `model` is set up to. Raises `RegistrationError`."""
    name = type(model).__name__
    more = dict(getattr(model, "model_kwargs", None) or {})
    values: dict[str, Any] = {}
    for wanted, names in _READ.items():
        given = [v for n in names if (v := more.pop(n, None)) is not None or (v := _value(model, n)) is not None]
        if given:
            values[wanted] = [given[0]] if wanted == "stop" and isinstance(given[0], str) else given[0]
    for refused, nothing in _REFUSED.items():
        value = more.pop(refused, _value(model, refused))
        if value not in nothing:
            raise RegistrationError(f"{name} has {refused}={value!r}, which the engine cannot do.", hint=_HINT)
    if more:
        raise RegistrationError(f"{name} has model_kwargs that the engine does not know: {sorted(more)}.", hint=_HINT)
    kept = {key: value for key in _KEPT if (value := getattr(model, key, None)) is not None}
    return values | kept | {"name": model.get_name()}


_HINT = "take the parameter out, or leave the model unbound"


def _value(model: Any, name: str) -> Any:
    value = vars(model).get(name)
    return None if callable(value) else value


def _retriever(node: VectorStoreRetriever, engine: str, pool: EnginePool) -> Node:
    store = node.vectorstore
    if not isinstance(store, InMemoryVectorStore) or changed(store, InMemoryVectorStore):
        raise RegistrationError(
            f"embeddings can be bound inside an InMemoryVectorStore, not a {type(store).__name__}.",
            hint="keep the documents in a TeolaVectorStore(pool=pool)",
        )
    if node.search_type != "similarity" or changed(node, VectorStoreRetriever):
        raise RegistrationError(
            f"embeddings can be bound where a plain similarity search runs, not {node.search_type!r} of a "
            f"{type(node).__name__}.",
            hint="leave them unbound here",
        )
    made = PoolEmbeddedRetriever(
        vectorstore=store,
        search_kwargs=node.search_kwargs,
        tags=node.tags,
        metadata=node.metadata,
        name=node.get_name(),
    )
    made._pool, made._engine = pool, engine
    return made


class PoolEmbeddedRetriever(VectorStoreRetriever):
    """A retriever over the user's own store whose queries are embedded by an engine of the pool."""

    _pool: Any = None
    _engine: str = ""

    def _handle(self, query: str, run_manager: Any) -> Any:
        payload = EmbedText(query, "query")
        return self._pool.call(PrimitiveKind.EMBEDDING, self._engine, [payload], run=active_run(run_manager))

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        vector = list(self._handle(query, run_manager).result()[0])
        return self.vectorstore.similarity_search_by_vector(vector, **(self.search_kwargs | kwargs))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        vector = list((await self._handle(query, run_manager))[0])
        return await self.vectorstore.asimilarity_search_by_vector(vector, **(self.search_kwargs | kwargs))

    def _get_ls_params(self, **kwargs: Any) -> Any:
        """As the retriever that it stands for."""
        return {**super()._get_ls_params(**kwargs), "ls_retriever_name": "vectorstore"}
