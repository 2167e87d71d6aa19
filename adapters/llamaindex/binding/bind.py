"""Engines for the user's own LlamaIndex models: who does a model's work, and `pool.bound`.

The interceptors of `shims/llamaindex/interceptors.py` ask here where a provider method of a routed model is called. The
model itself, and the framework's code above its provider methods, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms.llm import LLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from pydantic import BaseModel

from teola_plugin.adapters.calls import carries_embeddings, carries_openai, check_engine
from teola_plugin.adapters.llamaindex.binding.huggingface import (
    embedding_copy,
    is_embedding,
    is_reranker,
    reranker_copy,
)
from teola_plugin.adapters.llamaindex.binding.model_copies import OWN_CLASS, Body, instance_of, own_class, read
from teola_plugin.adapters.llamaindex.binding.openai import (
    carried_copy,
    carried_embedding,
    cohere_copy,
    decisive_cohere_values,
    decisive_embedding_values,
    decisive_values,
    is_cohere_rerank,
    is_openai,
    is_openai_embedding,
)
from teola_plugin.adapters.llamaindex.composite_calls import intercept_batches
from teola_plugin.adapters.llamaindex.llm import TeolaLLM
from teola_plugin.adapters.llamaindex.pool_backed import PoolBacked, TeolaEmbedding, refuse_pickling
from teola_plugin.adapters.llamaindex.prefetching import find_scope
from teola_plugin.adapters.llamaindex.vector_store import StoreQueries
from teola_plugin.adapters.method_adapter import subclass_of
from teola_plugin.adapters.planned_queries import log_fallback
from teola_plugin.adapters.routing import ROUTE, WORKER, EngineRoute, WorkerTable, current_rules, route_of
from teola_plugin.adapters.sampling import sampling_fields
from teola_plugin.adapters.snapshots import FieldSnapshot
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.shims.interception import observed_by
from teola_plugin.shims.llamaindex.copies import sharing
from teola_plugin.shims.llamaindex.interceptors import (
    EMBEDDING_METHODS,
    PROMPT_METHODS,
    PUBLIC_METHODS,
    STREAMING_METHODS,
    TOOL_METHODS,
    body_of,
    enable,
    install_routing,
    is_provider_method,
)
from teola_plugin.shims.llamaindex.models import HuggingFaceEmbeddingParts, SentenceTransformerRerankParts

_OWN_DECODERS = (
    ("llama_index.llms.huggingface.base", "HuggingFaceLLM"),
    ("llama_index.llms.llama_cpp.base", "LlamaCPP"),
)
_SHARED_FIELDS = ("callback_manager", "rate_limiter")
_LLM_FIELDS = (
    "system_prompt",
    "messages_to_prompt",
    "completion_to_prompt",
    "output_parser",
    "pydantic_program_mode",
    "query_wrapper_prompt",
    *_SHARED_FIELDS,
)
_METADATA_FIELDS = ("model_name", "context_window", "is_chat_model", "is_function_calling_model")
_EMBEDDING_FIELDS = ("model_name", "embed_batch_size", "num_workers", "embeddings_cache", *_SHARED_FIELDS)

# ------------------------------------------------------------ workers


class LLMWorker(TeolaLLM):
    """The worker of an LLM of any class."""

    __teola_route__: ClassVar[Any] = WORKER

    def __teola_body__(self, method: str, original: Body) -> Body | None:
        if method not in (*PUBLIC_METHODS, *STREAMING_METHODS, *TOOL_METHODS):
            return None
        return partial(_call_as, self, body_of(TeolaLLM, method))


class OpenAIWorker(LLMWorker):
    """The worker of an `OpenAI` on an engine that is no `OpenAIServer`."""

    def __teola_body__(self, method: str, original: Body) -> Body | None:
        """Return a body that takes prompts as they are: the class's own methods have formatted them."""
        body = super().__teola_body__(method, original)
        if body is None or not method.endswith("complete"):
            return body
        return lambda _, prompt, formatted=True, **kwargs: body(_, prompt, formatted=True, **kwargs)


class EmbeddingWorker(TeolaEmbedding):
    """The worker of an embedding model of any class."""

    __teola_route__: ClassVar[Any] = WORKER

    def __teola_body__(self, method: str, original: Body) -> Body | None:
        return partial(_call_as, self, body_of(TeolaEmbedding, method)) if method in EMBEDDING_METHODS else None


def _call_as(worker: Any, body: Body, _: Any, *args: Any, **kwargs: Any) -> Any:
    return body(worker, *args, **kwargs)


def make_worker(obj: Any, route: EngineRoute) -> tuple[Any, Callable[[Any], bool] | None]:
    """Return who does the work of `obj` on the engine, and a function that tells if that is still so.

    None in place of the function for a vector store, which its engine keeps alive.
    `HuggingFaceEmbedding`, `SentenceTransformerRerank`, `OpenAI` or `OpenAILike` on an `OpenAIServer` engine,
    `OpenAIEmbedding` on an `EmbeddingServer`, and `CohereRerank` on a `RerankingServer` keep their own code: results
    and settings are theirs. The worker of another LLM is a `TeolaLLM` with its prompts and sampling parameters (those
    that it leaves to its provider are the engine's defaults: greedy, 256 tokens), of another embedding model a
    `TeolaEmbedding`.

    Raises `RegistrationError` for an object that cannot be served so.
    """
    check_engine(*route)
    if isinstance(obj, BasePydanticVectorStore):
        return StoreQueries(obj, route), None
    if is_embedding(obj):
        return embedding_copy(obj, route), _while_same(obj, _values_of_embedding)
    if is_reranker(obj):
        return reranker_copy(obj, route), _while_same(obj, _values_of_reranker)
    if is_cohere_rerank(obj):
        return cohere_copy(obj, route), _while_same(obj, decisive_cohere_values)
    if is_openai(obj) and carries_openai(route.pool.engine(route.engine)):
        return carried_copy(obj, route), _while_same(obj, decisive_values)
    if is_openai_embedding(obj) and carries_embeddings(route.pool.engine(route.engine)):
        return carried_embedding(obj, route), _while_same(obj, decisive_embedding_values)
    if isinstance(obj, LLM):
        snapshot = FieldSnapshot([obj])
        return _llm_worker(obj, route), lambda _: snapshot.holds()
    if isinstance(obj, BaseEmbedding):
        snapshot = FieldSnapshot([obj])
        fields = _fields(obj, _EMBEDDING_FIELDS, TeolaEmbedding)
        return EmbeddingWorker(pool=route.pool, engine=route.engine, **fields), lambda _: snapshot.holds()
    if isinstance(obj, BaseNodePostprocessor):
        raise RegistrationError(
            f"a postprocessor ({type(obj).__name__}) cannot be bound.",
            hint="bind a SentenceTransformerRerank, a CohereRerank or the LLM in it, or use TeolaRerank(pool=pool)",
        )
    raise RegistrationError(
        f"a {type(obj).__name__} cannot be bound to an engine.",
        hint="bind LLMs, embedding models, vector stores or a SentenceTransformerRerank",
    )


def _while_same(obj: Any, values: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], bool]:
    before = values(obj)
    return lambda now: values(now) == before


def _values_of_embedding(obj: Any) -> tuple[Any, ...]:
    parts = read(HuggingFaceEmbeddingParts, obj)
    return obj.model_name, obj.normalize, id(parts.model), parts.parallel_process


def _values_of_reranker(obj: Any) -> tuple[Any, ...]:
    return obj.model, id(read(SentenceTransformerRerankParts, obj).model)


def _llm_worker(obj: LLM, route: EngineRoute) -> LLMWorker:
    """Return the pool-backed LLM that answers in place of the user's, with the same settings.

    Raise `RegistrationError` for an LLM that decodes by its own means, and for settings that the engine does not have.
    """
    if any(instance_of(module, name, obj) for module, name in _OWN_DECODERS):
        raise RegistrationError(
            f"a {type(obj).__name__} decodes by means of its own: an engine's answers would be others.",
            hint="leave it unbound, or use TeolaLLM(pool=pool)",
        )
    metadata = obj.metadata
    fields = _fields(obj, _LLM_FIELDS, TeolaLLM)
    fields |= {name: getattr(metadata, name) for name in _METADATA_FIELDS}
    sampling = sampling_fields(obj, dict(getattr(obj, "additional_kwargs", None) or {}))
    kind = OpenAIWorker if is_openai(obj) else LLMWorker
    return kind(pool=route.pool, engine=route.engine, **fields, **sampling)


def _fields(obj: Any, names: Sequence[str], kind: type[BaseModel]) -> dict[str, Any]:
    """Return the values of the fields that this version of LlamaIndex has: `rate_limiter` is new."""
    return {name: getattr(obj, name) for name in names if name in kind.model_fields}


# ------------------------------------------------------------ routes


class ModelRouter:
    """Says which objects do the work of routed models; see `Router` in `shims/llamaindex/interceptors.py`."""

    def __init__(self) -> None:
        self._workers = WorkerTable(make_worker)

    def worker_of(self, target: Any) -> Any:
        """Return the worker of a model here; None for a model that does its work itself, and for a vector store.

        That is also one whose fields were set to what the engine cannot do, which is logged once. Plans take a store
        for the user's own, also where an engine makes its searches.
        """
        route = None if isinstance(target, BasePydanticVectorStore) else route_of(target)
        return None if route is None else self._worker_on(route, target)

    def body_of(self, target: Any, method: str, original: Body) -> Body:
        """Return the function that does the work of a provider method: the worker's, or the original."""
        route = route_of(target)
        if route is None:
            return _unrouted_body(target, method, original)
        worker = self._worker_on(route, target)
        return original if worker is None else worker.__teola_body__(method, original) or original

    def _worker_on(self, route: EngineRoute, target: Any) -> Any:
        """Return the worker of a model on an engine; None, after a log entry, if the engine cannot do its work."""
        try:
            return self.check(target, route)
        except Exception as error:
            log_fallback(error, target, "a call on an engine")
            return None

    def check(self, target: Any, route: EngineRoute) -> Any:
        """Return the worker of a model on an engine. Raise `RegistrationError` for what the engine cannot do."""
        return self._workers.worker(target, route)


def _unrouted_body(target: Any, method: str, original: Body) -> Body:
    """Return the function of a provider method of a model that no engine stands for, under the rules here.

    It has the keys of the prompt cache, and the calls of LLMs are counted for an app with prices.
    """
    rules, body = current_rules.get(), original
    if rules is None:
        return original
    if rules.prompt_cache is not None and method in PROMPT_METHODS:
        body = rules.prompt_cache.wrap(target, original) or original
    if rules.usage is None or not isinstance(target, LLM) or isinstance(target, PoolBacked) or method in TOOL_METHODS:
        return body
    return observed_by(rules.usage, body) if is_provider_method(target, method) else body


ROUTER = ModelRouter()


def route_models(kind: type) -> None:
    """Let models of a class be routed, until `uninstall`."""
    enable(find_scope, ROUTER)
    install_routing(kind)
    if issubclass(kind, BaseEmbedding):
        intercept_batches()


# ------------------------------------------------------------ pool.bound


class _Bound:
    """A mixin before the class of an object that is routed wherever it is called."""

    def __getstate__(self) -> NoReturn:
        refuse_pickling(self)


def bound(obj: Any, engine: str, pool: EnginePool) -> Any:
    """Return an object of a subclass of the class of `obj` that shares its state, whose work an engine does.

    See `EnginePool.bound` and `make_worker`. Raise `RegistrationError` for an object that cannot be served so.
    """
    if isinstance(obj, BasePydanticVectorStore):
        raise RegistrationError(
            f"a {type(obj).__name__} cannot be served outside of accelerated apps.",
            hint=f"accelerate(app, pool=pool, bind=[(my_store, {engine!r})])",
        )
    route = EngineRoute(pool, engine)
    current: Any = getattr(type(obj), ROUTE, None)
    if current and current != route:
        raise RegistrationError(
            f"the {type(obj).__name__} is served by the engine {current.engine!r} already.",
            hint="bind the object that it was made of",
        )
    if current:
        return obj
    ROUTER.check(obj, route)
    own = own_class(obj)
    route_models(own)
    cls = subclass_of(own, _Bound, route, members=lambda: {OWN_CLASS: own})
    return sharing(cls, obj)
