"""Workers of the user's own models, embeddings and cross encoders: pool-backed objects set up as the originals are.

The interceptors ask `route_call` at each provider method. Tracers ask `find_worker`.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn, cast

from langchain_core.documents import BaseDocumentCompressor
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel, BaseLanguageModel, BaseLLM
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore, VectorStoreRetriever
from pydantic import BaseModel

from teola_plugin.adapters.calls import carries_embeddings, carries_openai, check_engine, joined, to_list
from teola_plugin.adapters.langchain.binding.huggingface import (
    cross_encoder_on,
    embeddings_on,
    is_cross_encoder,
    is_own_decoder,
)
from teola_plugin.adapters.langchain.binding.openai import (
    CarriedModel,
    carried_embeddings,
    carried_endpoint_embeddings,
    carried_model,
    cohere_rerank_on,
    is_cohere_rerank,
    is_endpoint_embeddings,
    is_openai_chat,
    is_openai_embeddings,
)
from teola_plugin.adapters.langchain.chat import ChatTeola, json_schema_of
from teola_plugin.adapters.langchain.listening import ConfigScopedModel, call_context
from teola_plugin.adapters.langchain.llm import TeolaLLM, abatch_by_query, batch_by_query
from teola_plugin.adapters.langchain.prefetching import intercept
from teola_plugin.adapters.langchain.tools import without_tools
from teola_plugin.adapters.langchain.vectorstore import StoreSearches
from teola_plugin.adapters.method_adapter import subclass_of
from teola_plugin.adapters.planned_queries import log_fallback
from teola_plugin.adapters.routing import (
    ROUTE,
    WORKER,
    EngineRoute,
    RoutingRules,
    WorkerTable,
    class_route,
    current_rules,
    route_of,
)
from teola_plugin.adapters.sampling import sampling_fields
from teola_plugin.adapters.snapshots import FieldSnapshot
from teola_plugin.errors import RegistrationError
from teola_plugin.graph import LeftToOriginal
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.query_run import current_run
from teola_plugin.shims.interception import observed_by
from teola_plugin.shims.langchain_interceptors import (
    RoutedCall,
    add_routed_methods,
    follow_configured_objects,
    route_calls,
    run_manager_in,
)
from teola_plugin.shims.pydantic import sharing
from teola_plugin.tracer.langchain.classes import find_override, find_workers_with, is_pool_backed, store_resource
from teola_plugin.tracer.leaf import Leaf, StoreLeaf

# ------------------------------------------------------------ workers


def _make_worker(obj: Any, route: EngineRoute) -> tuple[Any, Callable[[Any], bool] | None]:
    """Return what does the work of an object on an engine, and a function that tells if it still stands for it.

    None in place of the function for a store, which its engine keeps alive.
    Raises `RegistrationError` for what no engine can do, and for what this one would do differently.
    """
    pool, engine = route
    check_engine(pool, engine)
    if isinstance(obj, VectorStore):
        return StoreSearches(obj, route), None
    if is_cross_encoder(obj):
        return cross_encoder_on(obj, engine, pool), _fields_are_kept(obj)
    if is_openai_embeddings(obj) and carries_embeddings(pool.engine(engine)):
        return carried_embeddings(obj, route)
    if is_endpoint_embeddings(obj) and carries_embeddings(pool.engine(engine)):
        return carried_endpoint_embeddings(obj, route)
    if is_cohere_rerank(obj):
        return cohere_rerank_on(obj, route)
    if isinstance(obj, Embeddings):
        return embeddings_on(obj, engine, pool), _fields_are_kept(obj)
    if is_own_decoder(obj):
        raise RegistrationError(
            f"a {type(obj).__name__} decodes by means of its own: an engine's answers would be others.",
            hint="leave it unbound, or put ChatTeola(pool=pool) in the chain",
        )
    if is_openai_chat(obj) and carries_openai(pool.engine(engine)):
        return carried_model(obj, route)
    if isinstance(obj, BaseChatModel | BaseLLM):
        fields, is_chat = fields_of(obj), isinstance(obj, BaseChatModel)
        return model_of(fields, is_chat, engine, pool), lambda one: fields_of(one) == fields
    if isinstance(obj, BaseDocumentCompressor) or hasattr(obj, "score"):
        raise RegistrationError(
            f"a reranker ({type(obj).__name__}) cannot be bound.",
            hint="bind its HuggingFaceCrossEncoder or a CohereRerank, or use TeolaRerank(pool=pool) in the chain",
        )
    raise RegistrationError(
        f"a {type(obj).__name__} cannot be bound to an engine.",
        hint="bind chat models, text models, embeddings, vector stores or a HuggingFaceCrossEncoder",
    )


def _fields_are_kept(obj: Any) -> Callable[[Any], bool]:
    """Return a function that tells if the fields of a Pydantic object are what they are now; others do not matter."""
    snapshot = FieldSnapshot([obj] if isinstance(obj, BaseModel) else [])
    return lambda _: snapshot.holds()


_workers = WorkerTable(_make_worker)

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


def model_of(fields: Mapping[str, Any], is_chat: bool, engine: str, pool: EnginePool) -> ChatTeola | TeolaLLM:
    """Return a model on an engine with the fields that `fields_of` gives."""
    if is_chat:
        return ChatTeola(pool=pool, engine=engine, **fields)
    text_fields = {name: value for name, value in fields.items() if name in TeolaLLM.model_fields}
    return TeolaLLM(pool=pool, engine=engine, **text_fields)


def fields_of(model: Any) -> dict[str, Any]:
    """Return the fields of a pool-backed model that answers as `model` is set up to. Raises `RegistrationError`."""
    values = sampling_fields(model, dict(getattr(model, "model_kwargs", None) or {}))
    copied_fields = {key: value for key in _KEPT if (value := getattr(model, key, None)) is not None}
    return values | copied_fields | {"name": model.get_name()}


# ------------------------------------------------------------ calls of provider methods


def route_call(target: Any, method: str, original: Any) -> RoutedCall | None:
    """Return how an engine makes a call of a provider method; None where the object makes it itself.

    An object that a rule names, and that the engine cannot stand for any more, makes its calls itself. Raises
    `RegistrationError` for an object of `EnginePool.bound`.
    """
    route = class_route(type(target))
    if route is None:  # as outside of every query: this takes a microsecond at most
        rules = current_rules.get()
        route = None if rules is None else rules.route(target)
        if route is None:
            return None if rules is None else _unrouted_call(target, method, original, rules)
    if isinstance(target, VectorStore):  # an engine of a store serves its retrievers
        return None
    if route is WORKER:
        return RoutedCall(original, False)
    try:
        worker = _workers.worker(target, route)
    except RegistrationError as error:
        if class_route(type(target)) is not None:
            raise
        log_fallback(error, target, "its engine")
        return None
    if isinstance(worker, CarriedModel):
        return RoutedCall(worker.call(method, original), True)
    if isinstance(target, BaseLanguageModel):
        return RoutedCall(partial(_MODEL_CALLS[method], worker, original), False)
    return RoutedCall(partial(_first_argument_alone, getattr(worker, method)), False)


def _first_argument_alone(method: Callable[[Any], Any], target: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave out providers' own arguments, which say how many texts a request holds: that is the engine's affair."""
    return method(next(iter((*args, *kwargs.values()))))


def _unrouted_call(target: Any, method: str, original: Any, rules: RoutingRules) -> RoutedCall | None:
    """Return how an object that no engine stands for makes a call under these rules; None for its own way.

    Models get the keys and markers of the prompt cache, and their calls are counted for an app with prices. Retrievers
    over a store that an engine serves search by it. Other retrievers and compressors are joined to their query, where
    it is not the ambient one, as in batches: embeddings below have no callbacks to find it by.
    """
    if isinstance(target, BaseLanguageModel):
        method_here = original
        if rules.prompt_cache is not None and isinstance(target, BaseChatModel):
            method_here = rules.prompt_cache.wrap(target, original) or original
        if rules.usage is not None and method not in _OF_SEVERAL_CALLS and not is_pool_backed(target):
            method_here = observed_by(rules.usage, method_here)
        return None if method_here is original else RoutedCall(method_here, True)
    if isinstance(target, VectorStoreRetriever) and (searches := _store_searches(target, rules)) is not None:
        search = searches.wrap_search(method, original)
        if search is not None:
            return RoutedCall(search, True)
    if not isinstance(target, BaseRetriever | BaseDocumentCompressor) or current_run.get() is not None:
        return None
    pool = next(iter(rules.pools), None)
    if pool is None:
        return None

    def call(target: Any, *args: Any, **kwargs: Any) -> Any:
        with joined(*call_context(pool, run_manager_in(args, kwargs))):
            return original(target, *args, **kwargs)

    async def acall(target: Any, *args: Any, **kwargs: Any) -> Any:
        with joined(*call_context(pool, run_manager_in(args, kwargs))):
            return await original(target, *args, **kwargs)

    return RoutedCall(acall if method in _ASYNC_METHODS else call, True)


def _store_searches(retriever: VectorStoreRetriever, rules: RoutingRules) -> StoreSearches | None:
    """Return what searches for a retriever over a store that an engine serves; None for any other.

    Also None for retrievers with code of the user's.
    """
    route = rules.route(retriever.vectorstore)
    if route is None or find_override(retriever, VectorStoreRetriever):
        return None
    try:
        return cast(StoreSearches, _workers.worker(retriever.vectorstore, route))
    except RegistrationError as error:  # a rule by class: the engine serves another store of this class
        log_fallback(error, retriever.vectorstore, "its engine")
        return None


_OF_SEVERAL_CALLS = ("batch", "abatch")
"""Methods that call the provider methods of the same model."""
_ASYNC_METHODS = ("_aget_relevant_documents", "acompress_documents")


def _generate(worker: Any, _: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    arguments, schema = _engine_arguments(kwargs)
    return _parsed(worker._generate(*args, **arguments), schema)


async def _agenerate(worker: Any, _: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    arguments, schema = _engine_arguments(kwargs)
    return _parsed(await worker._agenerate(*args, **arguments), schema)


def _stream(worker: Any, original: Any, target: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Yield the answer of the pool-backed worker, in place of the original's `_stream`.

    An answer with tool calls or a parsed format comes as one chunk, as it must be read whole.
    """
    if _comes_whole(kwargs):
        yield _as_chunk(_generate(worker, original, target, *args, **kwargs))
        return
    yield from worker._stream(*args, **kwargs)


async def _astream(worker: Any, original: Any, target: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """Yield the answer of the pool-backed worker, as `_stream` does, in a loop."""
    if _comes_whole(kwargs):
        yield _as_chunk(await _agenerate(worker, original, target, *args, **kwargs))
        return
    chunks = worker._astream(*args, **kwargs)
    try:
        async for chunk in chunks:
            yield chunk
    finally:
        await chunks.aclose()


def _call(worker: Any, original: Any, target: Any, prompt: str, *args: Any, **kwargs: Any) -> str:
    return cast(str, worker._generate([prompt], *args, **kwargs).generations[0][0].text)


async def _acall(worker: Any, original: Any, target: Any, prompt: str, *args: Any, **kwargs: Any) -> str:
    return cast(str, (await worker._agenerate([prompt], *args, **kwargs)).generations[0][0].text)


_MODEL_CALLS: dict[str, Callable[..., Any]] = {
    "_generate": _generate,
    "_agenerate": _agenerate,
    "_stream": _stream,
    "_astream": _astream,
    "_call": _call,
    "_acall": _acall,
    "batch": lambda worker, original, target, *args, **kwargs: batch_by_query(original, target, *args, **kwargs),
    "abatch": lambda worker, original, target, *args, **kwargs: abatch_by_query(original, target, *args, **kwargs),
}
"""By the method of the original: how a `ChatTeola` or a `TeolaLLM` does it."""


def _engine_arguments(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], type | None]:
    """Return the arguments of a call as an engine takes them, and the class that the answer is to be parsed as."""
    schema = kwargs.get("response_format")
    if not isinstance(schema, type):
        return dict(kwargs), None
    rest = {name: value for name, value in kwargs.items() if name != "response_format"}
    return {**rest, "json_schema": json_schema_of(schema)}, schema


def _parsed(result: Any, schema: Any) -> Any:
    """Add the parsed answer to a message, as OpenAI's client does where the format of the answer is a class."""
    for generation in () if schema is None else result.generations:
        generation.message.additional_kwargs["parsed"] = schema.model_validate_json(generation.message.text)
    return result


def _comes_whole(kwargs: Mapping[str, Any]) -> bool:
    """Return True for calls whose answer has to be read before it is known what it is."""
    return isinstance(kwargs.get("response_format"), type) or without_tools(kwargs)[1] is not None


def _as_chunk(result: ChatResult) -> ChatGenerationChunk:
    """Return a whole answer as the only chunk of a stream."""
    generation = result.generations[0]
    message = cast(AIMessage, generation.message)
    fields = {name: value for name, value in vars(message).items() if name != "type"}
    return ChatGenerationChunk(
        message=AIMessageChunk(**fields, chunk_position="last"), generation_info=generation.generation_info
    )


# ------------------------------------------------------------ leaves


_ENTRIES = ("invoke", "ainvoke", "stream", "astream", "generate", "agenerate", "generate_prompt", "agenerate_prompt")


class _RoutedModel:
    """A routed model as tracers see it."""

    def __init__(self, model: Any, worker: Any) -> None:
        self._model, self._worker = model, worker

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> Leaf | None:
        """Return None where its class does more in a call than LangChain does: its request is not known then."""
        if _does_more_than_the_framework(type(self._model)):  # type: ignore[arg-type]
            return None
        try:
            arguments, schema = _engine_arguments(kwargs)
        except Exception:  # what the call itself refuses, in its place
            return None
        return None if schema is not None else self._worker.__teola_leaf__(arguments)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=512)
def _does_more_than_the_framework(cls: Any) -> bool:
    """Return True if a model's class replaces LangChain's own `invoke`, `stream`, `generate` or their like.

    Its requests are then not known from its fields, so none is prefetched. Our own classes do not count.
    """
    framework_class = BaseChatModel if issubclass(cls, BaseChatModel) else BaseLLM
    original_class = next(
        one for one in cls.__mro__ if issubclass(one, framework_class) and not issubclass(one, _BoundObject)
    )
    return any(
        getattr(original_class, name, None) is not getattr(framework_class, name, None)
        for name in _ENTRIES
        if not str(getattr(getattr(original_class, name, None), "__module__", "")).startswith("teola_plugin.")
    )


class _RoutedRetriever:
    """A retriever over an `InMemoryVectorStore` whose embeddings are routed, as tracers see it."""

    def __init__(self, retriever: VectorStoreRetriever, embeddings: Any) -> None:
        self._retriever, self._embeddings = retriever, embeddings

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> StoreLeaf:
        """Describe the retriever's search to tracers: an engine embeds the query, and the store's own code searches.

        A store with many rows is searched by the original alone (`LeftToOriginal`), as the search would be made twice.
        """
        retriever, store = self._retriever, cast(InMemoryVectorStore, self._retriever.vectorstore)
        search = getattr(store, _SEARCHES[retriever.search_type])
        arguments = {**retriever.search_kwargs, **kwargs}

        def prefetched_search(vector: Any) -> Any:
            if len(store.store) > SMALL:
                raise LeftToOriginal("the store is too large to be searched twice; a TeolaVectorStore is searched once")
            return search(to_list(vector), **arguments)

        embedded_text = getattr(self._embeddings, "sent", str)
        return StoreLeaf(self._embeddings.engine, embedded_text, prefetched_search, store_resource(store))


_SEARCHES = {
    "similarity": "similarity_search_by_vector",
    "mmr": "max_marginal_relevance_search_by_vector",
}
"""Search type -> the method to which the store's own search hands the vector of the query."""
SMALL = 500
"""Documents that are searched in a few milliseconds: an early search holds up the loop of the engines."""


def find_worker(node: Any) -> Any:
    """Return the pool-backed object that does the work of a node under the rules here; None without one."""
    if current_rules.get() is None:
        return None
    if isinstance(node, VectorStoreRetriever):
        return _retriever_worker(node)
    route = route_of(node)
    if route is None:
        return None
    try:
        worker = _workers.worker(node, route)
    except RegistrationError:  # it makes its calls itself
        return None
    if isinstance(worker, CarriedModel):
        worker = worker.planned
    return _RoutedModel(node, worker) if isinstance(node, BaseLanguageModel) and worker is not None else worker


def _retriever_worker(node: VectorStoreRetriever) -> _RoutedRetriever | None:
    """Return a retriever over an `InMemoryVectorStore`, embedded by an engine, as tracers see it.

    None for other stores and kinds of search, and for subclasses with code of the user's.
    """
    store = node.vectorstore
    if type(store) is not InMemoryVectorStore or node.search_type not in _SEARCHES or route_of(store) is not None:
        return None
    if find_override(node, VectorStoreRetriever):
        return None
    worker = find_worker(store.embeddings)
    return None if worker is None else _RoutedRetriever(node, worker)


# ------------------------------------------------------------ `pool.bound`


class _BoundObject:
    """An object of the user's class whose class carries its route. It shares the state of the original."""

    @property
    def pool(self) -> Any:
        route: EngineRoute = getattr(type(self), ROUTE)
        return route.pool


class _BoundModel(_BoundObject, ConfigScopedModel):
    def __getstate__(self) -> NoReturn:
        """Raise `RegistrationError`: the pool that a model on an engine belongs to lives in this process."""
        raise RegistrationError(
            f"a {type(self).__name__} on an engine cannot be pickled: its pool lives in this process.",
            hint="pickle your own object, and call pool.bound in the process that asks",
        )


class _PlannedModel(_BoundModel):
    """One whose requests tracers may know."""

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> Leaf | None:
        worker = _workers.worker(self, getattr(type(self), ROUTE))
        worker = worker.planned if isinstance(worker, CarriedModel) else worker
        return _RoutedModel(self, worker).__teola_leaf__(kwargs)


class _PlannedObject(_BoundObject):
    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> Leaf | None:
        worker = _workers.worker(self, getattr(type(self), ROUTE))
        return worker.__teola_leaf__(kwargs)  # type: ignore[no-any-return]


def bound_object(obj: Any, engine: str, pool: EnginePool) -> Any:
    """Return an object of a subclass of the original's class that shares its state; see `EnginePool.bound`.

    Raises `RegistrationError` for what cannot be served faithfully.
    """
    check_engine(pool, engine)
    if isinstance(obj, VectorStore):
        raise RegistrationError(
            f"a {type(obj).__name__} cannot be served outside of accelerated apps.",
            hint=f"accelerate(app, pool=pool, bind=[(my_store, {engine!r})])",
        )
    route = EngineRoute(pool, engine)
    current = class_route(type(obj))
    if current and current != route:
        raise RegistrationError(
            f"the {type(obj).__name__} is served by the engine {current.engine!r} already.",
            hint="bind the object that it was made of",
        )
    if current:
        return obj
    worker, _ = _make_worker(obj, route)
    if isinstance(worker, type(obj)) and not isinstance(worker, CarriedModel):
        return worker
    intercept_routed_class(type(obj))
    instance = _sharing(subclass_of(type(obj), _mixin(obj, worker), route), obj)
    _workers.worker(instance, route)
    return instance


def _mixin(obj: Any, worker: Any) -> type:
    """Return the mixin for the class of an object that `pool.bound` puts on an engine.

    `worker`: the object that does the work of `obj` there. If tracers cannot know a model's requests (`planned` of a
    `CarriedModel` is None: its server is not declared to cache prefixes), the mixin has no leaf.
    """
    if not isinstance(obj, BaseLanguageModel):
        return _BoundObject if isinstance(worker, CarriedModel) else _PlannedObject
    return _BoundModel if isinstance(worker, CarriedModel) and worker.planned is None else _PlannedModel


def _sharing(cls: type, obj: Any) -> Any:
    """Create an instance of `cls` that shares the fields of the user's object.

    Raise `RegistrationError` for an object without a `__dict__` that can be shared.
    """
    if isinstance(obj, BaseModel):
        return sharing(cls, obj)
    instance: Any = object.__new__(cls)
    try:
        object.__setattr__(instance, "__dict__", vars(obj))
    except (AttributeError, TypeError) as error:
        raise RegistrationError(
            f"a {type(obj).__name__} keeps its attributes where they cannot be shared.",
            hint="use TeolaEmbeddings(pool=pool) instead",
        ) from error
    return instance


# ------------------------------------------------------------ rules


def check_bindings(bind: Iterable[tuple[Any, str]], pool: EnginePool | None) -> list[tuple[Any, EngineRoute]]:
    """Return the route of each object or class in `bind=`.

    Raises `RegistrationError` for what the engine cannot do, and without a pool.
    """
    routes: list[tuple[Any, EngineRoute]] = []
    for obj, engine in bind:
        if pool is None:
            raise RegistrationError(
                "bind= names engines, but there is no pool.", hint="accelerate(..., pool=..., bind=...)"
            )
        check_engine(pool, engine)
        route = EngineRoute(pool, engine)
        if not isinstance(obj, type):
            _workers.worker(obj, route)
        routes.append((obj, route))
    return routes


def check_arguments(node: Any, route: EngineRoute, kwargs: Mapping[str, Any]) -> None:
    """Raise `RegistrationError` for arguments bound to a routed model that its engine cannot take."""
    worker = _workers.worker(node, route)
    if isinstance(worker, ChatTeola):
        arguments, _ = _engine_arguments(kwargs)
        worker.sampling(None, without_tools(arguments)[0])
    elif isinstance(worker, TeolaLLM):
        worker.sampling(None, kwargs)


def intercept_calls() -> None:
    """Ask the routing rules at every call of a provider method from now on."""
    intercept()
    route_calls(route_call)


def intercept_routed_class(cls: type) -> None:
    """Intercept the provider methods of a class whose objects are routed, inherited ones too."""
    intercept_calls()
    follow_configured_objects(_derive)
    add_routed_methods(cls)


def _derive(obj: Any, original: Any) -> None:
    """Route what `configurable_fields` makes of a routed object as the original is routed."""
    rules = current_rules.get()
    if rules is not None:
        rules.derive(obj, original)


find_workers_with(find_worker)
