"""LlamaIndex's seam: the methods by which models, stores, retrievers and postprocessors call their provider.

An LLM's public methods emit events around a body, and spans around both. The body is intercepted, so events, spans and
callbacks happen in the original's place, unchanged. It stands in a variable of the decorator's closure, or in the
`__wrapped__` of a span. Classes whose methods only call other public methods are left alone: what those call is
intercepted instead.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from array import array
from collections.abc import AsyncGenerator, Callable, Generator, Hashable, Mapping
from functools import lru_cache
from types import FunctionType
from typing import Any, Protocol

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms import LLM
from llama_index.core.llms.callbacks import llm_chat_callback
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import QueryBundle
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQuery
from llama_index_instrumentation.dispatcher import DISPATCHER_SPAN_DECORATED_ATTR

from teola_plugin.request_keys import freeze
from teola_plugin.shims.interception import (
    STREAM_OPENED,
    ClassAttribute,
    ClosureCell,
    FunctionSlot,
    MethodInterceptors,
    Wrap,
    WrappedFunction,
    observed,
    observers,
)
from teola_plugin.shims.llamaindex.records import Unreadable
from teola_plugin.shims.stack_levels import hide_from_stack_levels

Body = Callable[..., Any]
PUBLIC_METHODS = ("complete", "acomplete", "chat", "achat")
"""Methods of an LLM that answer whole, each with events around it."""
PROMPT_METHODS = (
    *("_complete", "_acomplete", "_chat", "_achat"),
    *("_stream_complete", "_astream_complete", "_stream_chat", "_astream_chat"),
)
"""The methods of `OpenAI` that send a prompt: all others call one of these."""
STREAMING_METHODS = ("stream_complete", "astream_complete", "stream_chat", "astream_chat")
"""Those that answer in chunks: each returns a generator."""
STRUCTURED_METHODS = (
    *("structured_predict", "astructured_predict"),
    *("stream_structured_predict", "astream_structured_predict"),
)
"""Methods of an LLM that come to the others with a schema in the arguments."""
EMBED_QUERY, EMBED_TEXT = ("_get_query_embedding", "_aget_query_embedding"), "_get_text_embedding"
EMBED_BATCH = "_get_text_embeddings"
EMBEDDING_METHODS = (*EMBED_QUERY, EMBED_TEXT, EMBED_BATCH, "_aget_text_embedding", "_aget_text_embeddings")
TOOL_METHODS = ("_prepare_chat_with_tools", "get_tool_calls_from_response")
"""Methods of an LLM that write a provider's arguments for tools, and read calls of tools from its answer."""
SEARCH = ("query", "aquery")
RETRIEVE = ("_retrieve", "_aretrieve")
POSTPROCESS = ("_postprocess_nodes", "_apostprocess_nodes")
_PURE = frozenset((*EMBED_QUERY, *SEARCH))
_KINDS = {
    **dict.fromkeys((*EMBED_QUERY, EMBED_TEXT, EMBED_BATCH), "EMBEDDING"),
    **dict.fromkeys((*SEARCH, *RETRIEVE), "SEARCHING"),
    **dict.fromkeys(POSTPROCESS, "RERANKING"),
}
"""What the trace calls a method; `GENERATION` for the others."""
_OPENAI = ("llama_index.llms.openai.base.OpenAI", "llama_index.llms.openai_like.base.OpenAILike")
_OPENAI_BODIES = ("_complete", "_acomplete", "_chat", "_achat")
_OPENAI_STREAMS = ("_stream_complete", "_astream_complete", "_stream_chat", "_astream_chat")
"""All public methods of OpenAI's classes call one of these, which emit no events."""
HUGGINGFACE_EMBED = "_embed"
"""The method of `HuggingFaceEmbedding` that all its others call."""
_FRAMEWORK_METHODS = (
    *("predict", "apredict", "_get_prompt", "_get_messages"),
    *("_parse_output", "_extend_prompt", "_extend_messages"),
)
"""Methods of `LLM` that decide what its provider methods are called with."""


class ProviderScope(Protocol):
    """On whose behalf provider calls are made; see `CallScope`."""

    def result(self, invocation: Any, /) -> Any: ...

    async def aresult(self, invocation: Any, /) -> Any: ...

    def stream(self, invocation: Any, /) -> Any: ...

    async def astream(self, invocation: Any, /) -> Any: ...


FindScope = Callable[[Any], ProviderScope | None]
"""Returns the scope of a call that is made here on a model or store; None outside every query."""


class Router(Protocol):
    """Says which objects do the work of the user's own models; see `adapters/llamaindex/binding/workers.py`."""

    def worker_of(self, target: Any, /) -> Any:
        """Return the worker of a model here; None for a model that does its work itself."""
        ...

    def body_of(self, target: Any, method: str, original: Body, /) -> Body:
        """Return the function that does the work of a provider method: the worker's, or the original."""
        ...


# ------------------------------------------------------------ bodies


def slot_of(cls: type, name: str) -> FunctionSlot:
    """Return the place that holds the body of a method that the class defines."""
    decorator, function = None, vars(cls)[name]
    while type(function) is not FunctionType and hasattr(function, "__wrapped__"):  # a span says it is a function
        decorator, function = function, function.__wrapped__
    if type(function) is FunctionType:
        variables, cells = function.__code__.co_freevars, function.__closure__ or ()
        if function.__code__.co_filename == llm_chat_callback.__code__.co_filename and "f" in variables:
            return ClosureCell(cells[variables.index("f")])
    return ClassAttribute(cls, name) if decorator is None else WrappedFunction(decorator)


def defining_class(kind: type, name: str) -> type:
    """Return the class that defines a method of `kind`. Raises `Unreadable` if there is no such method."""
    cls = next((cls for cls in kind.__mro__ if name in vars(cls)), None)
    if cls is None:
        raise Unreadable(f"it has no method {name!r}")
    return cls


def body_of(kind: type, name: str) -> Body:
    """Return the body of a method, without spans, events and our wrapper. Raises `Unreadable`."""
    body: Body = slot_of(defining_class(kind, name), name).get()
    original: Body = getattr(body, _ORIGINAL, body)
    return original


_Span = type(vars(BaseRetriever)["retrieve"])
"""The class of what LlamaIndex's span decorator returns."""


def written_function(kind: type, name: str) -> FunctionType | None:
    """Return a method of a class as it stands in the source, if nothing but LlamaIndex's span is around it.

    None for a method with decorators of the user's own, which may leave its code out, such as those of a cache.
    """
    method = vars(defining_class(kind, name))[name]
    if type(method) is _Span and hasattr(method, DISPATCHER_SPAN_DECORATED_ATTR):
        method = method.__wrapped__
    function = getattr(method, _ORIGINAL, method)
    return function if type(function) is FunctionType and not hasattr(function, "__wrapped__") else None


CALLS_NOBODY = "__teola_calls_nobody__"
"""Attribute of classes whose objects only find out how a model would be called."""
_ORIGINAL = "__teola_original__"
"""Attribute of our wrappers: the function that they stand for."""


def is_openai(kind: type) -> bool:
    """Return True for OpenAI's class of LLMs, and for that of servers like it."""
    return f"{kind.__module__}.{kind.__qualname__}" in _OPENAI


def is_async_method(name: str) -> bool:
    """Return True for the name of a provider method that is a coroutine function."""
    return name.startswith(("a", "_a"))


def provider_methods(kind: type) -> tuple[str, ...]:
    """Return the names of the methods by which objects of a class call their provider.

    Raises `Unreadable` for a class of another kind, or one that is not known to call its provider by them.
    """
    if issubclass(kind, LLM):
        return _methods_of_llm(kind)
    if issubclass(kind, BaseRetriever):
        return _methods_of_own_class(kind, BaseRetriever, RETRIEVE, "retrieve", "aretrieve")
    if issubclass(kind, BaseNodePostprocessor):
        return _methods_of_own_class(
            kind, BaseNodePostprocessor, POSTPROCESS, "postprocess_nodes", "apostprocess_nodes"
        )
    if issubclass(kind, BaseEmbedding):
        _require_unchanged(kind, BaseEmbedding, "get_query_embedding", "aget_query_embedding")
        _require_unchanged(kind, BaseEmbedding, "get_agg_embedding_from_queries", "aget_agg_embedding_from_queries")
        return EMBED_QUERY
    if issubclass(kind, BasePydanticVectorStore):
        return SEARCH
    raise Unreadable(f"{kind.__name__} is not known")


def require_framework_methods(kind: type) -> None:
    """Raise `Unreadable` for a class of LLMs that decides itself what its provider methods are called with."""
    _require_unchanged(kind, LLM, *_FRAMEWORK_METHODS)


def _methods_of_llm(kind: type) -> tuple[str, ...]:
    """Return the methods by which an LLM class calls its provider, without those that call other public methods.

    Raise `Unreadable` if there are none, or if the class prepares prompts by code of its own.
    """
    require_framework_methods(kind)
    if is_openai(kind):
        return (*_OPENAI_BODIES, *_OPENAI_STREAMS)
    names = tuple(name for name in PUBLIC_METHODS if not _delegates(body_of(kind, name)))
    if not names:
        raise Unreadable(f"{kind.__name__} calls another class's methods")
    streams = (name for name in STREAMING_METHODS if is_intercepted(kind, name))
    return (*names, *(name for name in streams if not _delegates(body_of(kind, name))))


def _methods_of_own_class(kind: type, base: type, names: tuple[str, ...], *framework_methods: str) -> tuple[str, ...]:
    """Return those of the methods that a class from elsewhere than the framework's core has itself.

    Raise `Unreadable` for a class of llama-index-core, whose methods call others, and for one that overrides one of
    `framework_methods`.
    """
    if kind.__module__.startswith("llama_index.core."):
        raise Unreadable(f"{kind.__name__} calls methods of other objects")
    _require_unchanged(kind, base, *framework_methods)
    return tuple(name for name in names if is_intercepted(kind, name))


_PUBLIC_NAMES = frozenset((*PUBLIC_METHODS, *STREAMING_METHODS, *STRUCTURED_METHODS))


def _delegates(body: Any) -> bool:
    """Return True if a body calls another public method, or that of a class above."""
    code = body.__code__
    return "__class__" in code.co_freevars or not _PUBLIC_NAMES.isdisjoint(code.co_names)


def _require_unchanged(kind: type, base: type, *names: str) -> None:
    """Raise `Unreadable` if a class overrides one of these methods of its base: its own code may make other calls."""
    for name in names:
        if inspect.getattr_static(kind, name, None) is not inspect.getattr_static(base, name):
            raise Unreadable(f"{kind.__name__} has a {name!r} of its own")


def embedding_method(kind: type[BaseEmbedding]) -> str:
    """Return the method by which `get_text_embedding_batch` calls the model: of a batch, or of text after text.

    Raises `Unreadable` for a class with a `get_text_embedding_batch` of its own.
    """
    _require_unchanged(kind, BaseEmbedding, "get_text_embedding_batch")
    inherited = inspect.getattr_static(kind, EMBED_BATCH, None) is inspect.getattr_static(BaseEmbedding, EMBED_BATCH)
    return EMBED_TEXT if inherited else EMBED_BATCH


# ------------------------------------------------------------ calls


_SETTING_TYPES = frozenset((str, int, float, bool, dict, list))


def _settings_hash(target: Any) -> int:
    """Return a hash of the plain values of a model's settings, such as its temperature, which code may set.

    Fields of a user's subclass do not count: a model that counts its calls stays the same model.
    """
    kind: Any = type(target)
    values = [getattr(target, "__dict__", {}).get(name) for name in _setting_names(kind)]
    return hash(freeze([value for value in values if type(value) in _SETTING_TYPES]))


@lru_cache(maxsize=1024)
def _setting_names(cls: Any) -> tuple[str, ...]:
    """Return the names of the fields that LlamaIndex's own classes among the bases of `cls` declare."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("llama_index.")]
    return tuple(dict.fromkeys(name for base in bases for name in getattr(base, "model_fields", ())))


class LlamaIndexInvocation:
    """One entry into a provider method; see `Invocation`."""

    __slots__ = ("_args", "_body", "_kwargs", "_method", "is_pure", "kind", "streams", "target")

    run_id: Any = None

    def __init__(self, target: Any, method: str, body: Body, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.target, self._method, self._body = target, method, body
        self._args, self._kwargs = args, kwargs
        self.kind = _KINDS.get(method, "GENERATION")
        self.is_pure = method in _PURE
        self.streams = method in _STREAMS

    @property
    def is_async(self) -> bool:
        """True if the method is a coroutine function."""
        return is_async_method(self._method)

    def key(self, target: Any = None) -> Hashable:
        """Return the very object with its settings at this moment, the method and the arguments.

        Where two objects of equal configuration embed the same query, the planner makes a call for each of them.
        `target`: an object whose calls count as the same ones.
        """
        kwargs = {name: self._kwargs[name] for name in sorted(self._kwargs)}
        model = self.target if target is None else target
        arguments = freeze(self._args, query_key), freeze(kwargs, query_key)
        return id(model), _settings_hash(model), self._method, *arguments

    def start(self, record: Callable[[Any], object] | None) -> Any:
        """Call the body of the method; return its chunks behind `STREAM_OPENED` if it returns a generator."""
        if not self.streams:
            return self._body(self.target, *self._args, **self._kwargs)
        chunk_of = _detached if record is not None else _unchanged
        return self._achunks(chunk_of) if self.is_async else self._chunks(chunk_of)

    def _chunks(self, chunk_of: Callable[[Any], Any]) -> Generator[Any, None, None]:
        """Call the body and yield its chunks after `STREAM_OPENED`; yield the value alone if it is no generator."""
        chunks = self._body(self.target, *self._args, **self._kwargs)
        if not isinstance(chunks, Generator):  # the framework takes it for a whole answer
            yield chunks
            return
        with contextlib.closing(chunks):
            yield STREAM_OPENED
            for chunk in chunks:
                yield chunk_of(chunk)

    async def _achunks(self, chunk_of: Callable[[Any], Any]) -> AsyncGenerator[Any, None]:
        """Call the async body and yield its chunks after `STREAM_OPENED`; only the value if it is no generator."""
        chunks = await self._body(self.target, *self._args, **self._kwargs)
        if not isinstance(chunks, AsyncGenerator):
            yield chunks
            return
        async with contextlib.aclosing(chunks):
            yield STREAM_OPENED
            async for chunk in chunks:
                yield chunk_of(chunk)

    def report(self, event: Any) -> Any:
        """Report nothing: these methods have no run manager."""


def _unchanged(chunk: Any) -> Any:
    return chunk


def _detached(chunk: Any) -> Any:
    """Return a chunk that stays as it is: OpenAI's classes go on writing in the tool calls of earlier ones."""
    message = getattr(chunk, "message", None)
    if message is None or not message.additional_kwargs:
        return chunk
    kwargs = copy.deepcopy(message.additional_kwargs)
    return chunk.model_copy(update={"message": message.model_copy(update={"additional_kwargs": kwargs})})


def query_key(value: Any) -> Hashable | None:
    """Return the key of a query of a store or a retriever, whose vector is long; None for any other value."""
    vector_name = _VECTORS.get(type(value))
    if vector_name is None:
        return None
    fields = dict(vars(value))
    vector = fields[vector_name]
    if type(vector) is list and all(type(one) is float for one in vector):
        fields[vector_name] = array("d", vector).tobytes()
    return type(value), freeze(fields)


_VECTORS: dict[type, str] = {VectorStoreQuery: "query_embedding", QueryBundle: "embedding"}
"""Classes of queries, and the field that holds the vector."""


# ------------------------------------------------------------ the wrappers

interceptors = MethodInterceptors(slot_of)
live_scopes: set[int] = set()
"""Ids of the queries and composites that are under way. While there is none, wrappers look no further."""
_find_scope: list[FindScope] = []
"""Set by `enable`: how a call finds the query that it belongs to."""
_router: list[Router] = []
"""Set by `enable`: who does the work of routed models."""


def _scope(target: Any, method: str) -> ProviderScope | None:
    is_claimable = interceptors.is_installed and is_provider_method(target, method)
    return _find_scope[0](target) if is_claimable else None


def worker_of(target: Any) -> Any:
    """Return the worker of a routed model; None for a model that does its work itself, and after `uninstall`."""
    return _router[0].worker_of(target) if _router and interceptors.is_installed else None


def routed_body(target: Any, method: str, original: Body) -> Body:
    """Return the function that does the work of a provider method: of the target's worker, or the original.

    Without a router, or after `uninstall`, that is the original. Calls of an LLM are observed as well if somebody
    counts them.
    """
    body = _router[0].body_of(target, method, original) if _router and interceptors.is_installed else original
    if not observers or not isinstance(target, LLM) or method in TOOL_METHODS:
        return body
    return observed(body) if body is not original or is_provider_method(target, method) else body


def intercept_models() -> None:
    """Intercept the calls of all LLMs whose classes are imported, as far as their methods are understood."""
    pending = list(LLM.__subclasses__())
    while pending:
        kind = pending.pop()
        if hasattr(kind, CALLS_NOBODY):
            continue
        pending += kind.__subclasses__()
        with contextlib.suppress(Unreadable):
            install(kind, provider_methods(kind))


def _keep_original(wrap: Wrap) -> Wrap:
    """Return a wrap whose wrappers also remember the function that they stand for, which `body_of` returns."""

    def wrap_and_remember(original: Any) -> Any:
        wrapper = wrap(original)
        setattr(wrapper, _ORIGINAL, original)
        return wrapper

    return wrap_and_remember


def is_provider_method(target: Any, name: str) -> bool:
    """Return False for a public method of `OpenAI` itself: its provider methods are those that the public ones call.

    The public ones are intercepted for subclasses of the user's, which have them from `OpenAI`.
    """
    return name not in _PUBLIC_NAMES or not is_openai(type(target))


def _intercept(name: str, *, is_claimable: bool) -> Wrap:
    """Return a wrap that hands calls to the worker of a routed model, and has prefetched ones claimed."""
    streams = name in _STREAMS

    def wrap(original: Any) -> Any:
        """Return the wrapper of a provider method: sync or async, by its name. Async generator functions are only
        passed on."""

        @functools.wraps(original)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            """Claim the result of a prefetched call in the running query, or make the call, by a worker if there is
            one."""
            body = routed_body(self, name, original)
            scope = _scope(self, name) if is_claimable and live_scopes else None
            if scope is None:
                return body(self, *args, **kwargs)
            invocation = LlamaIndexInvocation(self, name, body, args, kwargs)
            return scope.stream(invocation) if streams else scope.result(invocation)

        @functools.wraps(original)
        async def awrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            """Claim the result of a prefetched call in the running query, or make the call, by a worker if there is
            one."""
            body = routed_body(self, name, original)
            scope = _scope(self, name) if is_claimable and live_scopes else None
            if scope is None:
                return await body(self, *args, **kwargs)
            invocation = LlamaIndexInvocation(self, name, body, args, kwargs)
            return await (scope.astream(invocation) if streams else scope.aresult(invocation))

        @functools.wraps(original)
        def pass_on(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs)

        if inspect.isasyncgenfunction(original):  # nobody awaits it
            return pass_on
        return awrapper if is_async_method(name) else wrapper

    return _keep_original(wrap)


_STREAMS = frozenset((*STREAMING_METHODS, *_OPENAI_STREAMS))
_CLAIMABLE = (
    *(*PUBLIC_METHODS, *_OPENAI_BODIES, *_STREAMS, *EMBED_QUERY, EMBED_TEXT, EMBED_BATCH),
    *(*SEARCH, *RETRIEVE, *POSTPROCESS),
)
_WRAPS = {name: _intercept(name, is_claimable=True) for name in _CLAIMABLE}
_ROUTED_LLM_METHODS = (*PUBLIC_METHODS, *STREAMING_METHODS, *TOOL_METHODS, *_OPENAI_BODIES, *_OPENAI_STREAMS)
_ROUTED_METHODS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (LLM, _ROUTED_LLM_METHODS),
    (BaseEmbedding, (*EMBEDDING_METHODS, HUGGINGFACE_EMBED)),
    (BaseNodePostprocessor, POSTPROCESS),
    (BasePydanticVectorStore, SEARCH),
)
"""For each class of models and stores, the methods by which a worker may do their work."""
_ROUTING_WRAPS = {name: _intercept(name, is_claimable=False) for _, names in _ROUTED_METHODS for name in names}
_DEFAULTS = (
    *("LLM", "BaseLLM", "FunctionCallingLLM", "CustomLLM", "BaseEmbedding"),
    *("BasePydanticVectorStore", "BaseRetriever", "BaseNodePostprocessor"),
)
"""Classes of the framework whose methods call other methods of the same object."""


def enable(find_scope: FindScope, router: Router | None = None) -> None:
    """Let methods be intercepted from now on, until `uninstall`.

    `find_scope`: how a call finds its query. `router`: who does the work of routed models; None for nobody new.
    """
    _find_scope[:] = [find_scope]
    _router[:] = _router if router is None else [router]
    interceptors.is_installed = True


def install(kind: type, names: tuple[str, ...]) -> bool:
    """Intercept provider methods of objects of a class. Idempotent. Return False, and do nothing, after `uninstall`."""
    if not interceptors.is_installed:
        return False
    for name in names:
        cls = next((cls for cls in kind.__mro__ if name in vars(cls)), None)
        if cls is not None and not _is_framework_default(cls):
            interceptors.install([cls], {name: _WRAPS[name]})
    return True


def install_routing(kind: type) -> None:
    """Intercept all methods by which a worker may do the work of models of a class. Idempotent.

    Methods that a class inherits from the framework are intercepted there, so that async calls stay async. A method
    whose body calls that of the class above is left alone.
    """
    for name in next((names for base, names in _ROUTED_METHODS if issubclass(kind, base)), ()):
        for cls in kind.__mro__:
            if name in vars(cls) and not _calls_super(slot_of(cls, name).get()):
                wraps = _WRAPS if _is_claimable(cls, name) else _ROUTING_WRAPS
                interceptors.install([cls], {name: wraps[name]})
                break


def _calls_super(body: Any) -> bool:
    """Return True for a method that calls the one of the class above: `super()` leaves `__class__` among its names.

    Such a method keeps its own code; the one above is intercepted in its place.
    """
    code = getattr(getattr(body, _ORIGINAL, body), "__code__", None)
    return code is not None and "__class__" in code.co_freevars


def _is_claimable(cls: type, name: str) -> bool:
    """Return True for a method whose calls may be prefetched and claimed, if a plan knows them."""
    if name not in _WRAPS or _is_framework_default(cls):
        return False
    if name not in (*PUBLIC_METHODS, *STREAMING_METHODS):
        return True
    body = body_of(cls, name)
    return hasattr(body, "__code__") and not _delegates(body)


def intercept_methods(cls: type, wraps: Mapping[str, Wrap]) -> None:
    """Wrap methods of a class by the given wraps. Idempotent; does nothing after `uninstall`."""
    if interceptors.is_installed:
        interceptors.install([cls], {name: _keep_original(wrap) for name, wrap in wraps.items()})


def is_intercepted(kind: type, name: str) -> bool:
    """Return True if the class that defines a method is one whose methods are intercepted, not a framework default."""
    cls = next((cls for cls in kind.__mro__ if name in vars(cls)), None)
    return cls is not None and not _is_framework_default(cls)


def _is_framework_default(cls: type) -> bool:
    """Return True for a base class of `llama_index.core` whose methods call others of the same object.

    `install` does not intercept methods that such a class defines. `install_routing` does, but only to hand the work
    of routed models to their workers: prefetched calls are not claimed there.
    """
    return cls.__module__.startswith("llama_index.core.") and cls.__name__ in _DEFAULTS


def uninstall() -> None:
    """Put every provider method back as it was."""
    interceptors.uninstall()


hide_from_stack_levels(globals())
