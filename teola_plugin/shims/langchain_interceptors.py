"""LangChain's seam: the methods by which models and retrievers call their provider, and tools their function.

The framework's own `invoke`, `stream` and `generate`, its callbacks, caches and rate limiters run above these methods,
unchanged. `_generate`, `_stream` and the others are documented for subclasses; they are wrapped in the class that
defines them, never in a base class: `BaseChatModel._should_stream` compares `type(self)._stream` with its own, and
`BaseTool.arun` compares `type(self)._arun`.
"""

from __future__ import annotations

import copy
import datetime
import decimal
import functools
import re
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol
from weakref import ref

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.cross_encoders import BaseCrossEncoder
from langchain_core.documents.compressor import BaseDocumentCompressor
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.messages import BaseMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables.configurable import RunnableConfigurableFields
from langchain_core.tools import BaseTool
from langchain_core.vectorstores import VectorStore

from teola_plugin.request_keys import TargetKey, freeze, freeze_fields
from teola_plugin.shims.interception import MethodInterceptors, Wrap, looks_like, observed, observers, splitting
from teola_plugin.shims.mcp import ignores_runtime
from teola_plugin.shims.stack_levels import hide_from_stack_levels


class ProviderScope(Protocol):
    """On whose behalf provider calls are made; see `CallScope`."""

    def items(self, invocation: Any, /) -> Iterator[Any]: ...

    def aitems(self, invocation: Any, /) -> AsyncIterator[Any]: ...

    def result(self, invocation: Any, /) -> Any: ...

    async def aresult(self, invocation: Any, /) -> Any: ...


class FindScope(Protocol):
    """Returns the scope of a call that is made here on a model or retriever; None outside every query."""

    def __call__(self, target: Any, run_manager: Any, /) -> ProviderScope | None: ...


class ToolClaim(Protocol):
    """The original's claim to the prefetched call of a tool, in the place of that call."""

    tool: Any

    def result(self, invocation: Any, /) -> Any: ...

    async def aresult(self, invocation: Any, /) -> Any: ...


_UNWRAPPED_MODULES = tuple(
    f"langchain_core.{name}"
    for name in (
        "language_models.chat_models",
        "language_models.llms",
        "retrievers",
        "documents.compressor",
        "tools.base",
        "embeddings.embeddings",
        "cross_encoders",
    )
)
"""Where the framework defines the defaults of these methods, which call each other."""
_COMPOSITES = "langchain_classic.retrievers."
"""Retrievers and compressors that call other objects. The provider methods of those objects are wrapped instead."""
_DRAWN_ID = re.compile(r"(lc_)?run-|[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\Z")
"""The ids of messages that LangChain makes of the run's id, and those that LangGraph draws for messages of a state."""

interceptors = MethodInterceptors()


class LangChainInvocation:
    """One entry into a provider method; see `Invocation`."""

    __slots__ = ("_args", "_kwargs", "_method", "_original", "kind", "streams", "target")

    is_pure = False

    def __init__(
        self, target: Any, method: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.target, self._method, self._original = target, method, original
        self._args, self._kwargs = args, kwargs
        self.streams = "stream" in method
        searching = BaseRetriever, VectorStore
        kinds = ((searching, "SEARCHING"), (BaseDocumentCompressor, "RERANKING"), (Embeddings, "EMBEDDING"))
        self.kind = next((kind for base, kind in kinds if isinstance(target, base)), "GENERATION")

    @property
    def run_id(self) -> Any:
        """The id of the run whose manager the method was given; None without one."""
        return getattr(self._manager, "run_id", None)

    def key(self) -> Hashable:
        """Return the object, the method and the arguments, without the run manager."""
        names = _PARAMETERS.get(self._method, ("input", "stop", "run_manager"))
        positions = map(str, range(len(names), len(self._args)))
        values = dict(zip((*names, *positions), self._args, strict=False)) | self._kwargs
        first = values.pop(names[0] if names[0] in values else next(iter(values)))
        arguments = {name: values[name] for name in sorted(values) if name not in _HEARS and values[name] is not None}
        return TargetKey(self.target), self._method, freeze(first, message_key), freeze(arguments, message_key)

    def start(self, record: Callable[[Any], object] | None) -> Any:
        """Call the original method."""
        args, kwargs = self._args, self._kwargs
        manager = self._manager
        if record is not None and isinstance(manager, (CallbackManagerForLLMRun, AsyncCallbackManagerForLLMRun)):
            recorder = recording(manager, record)
            args = tuple(recorder if one is manager else one for one in args)
            kwargs = {name: recorder if one is manager else one for name, one in kwargs.items()}
        return self._original(self.target, *args, **kwargs)

    def report(self, event: Any) -> Any:
        """Report to the run manager of this call what a prefetched one reported to its own."""
        name, args, kwargs = event
        manager = self._manager
        if manager is None:
            return _return_none() if self._method.startswith("_a") else None
        return getattr(manager, name)(*args, **kwargs)

    @property
    def _manager(self) -> Any:
        return run_manager_in(self._args, self._kwargs)


_HEARS = frozenset(("run_manager", "callbacks"))
"""Parameters that decide who hears of a call, and nothing of its result."""
_COMPRESSING = ("input", "query", "callbacks")
SEARCH_METHODS = {
    "similarity_search": "query",
    "similarity_search_with_score": "query",
    "similarity_search_by_vector": "embedding",
    "max_marginal_relevance_search": "query",
}
"""The searches of vector stores, and the name of their first parameter; the second one is `k`."""
_PARAMETERS = {"compress_documents": _COMPRESSING, "acompress_documents": _COMPRESSING} | {
    f"{prefix}{method}": (first, "k") for method, first in SEARCH_METHODS.items() for prefix in ("", "a")
}
"""Names of the positional parameters by method, where they are not those of models."""


async def _return_none() -> None:
    """Return nothing, on a loop."""


def run_manager_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the run manager among the arguments of a provider method; None if there is none."""
    manager = args[2] if len(args) > 2 else kwargs.get("run_manager")
    return kwargs.get("callbacks") if manager is None else manager


_ATOMS = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)
"""Immutable types of arguments, besides those of JSON. Some values that Python takes as equal print differently."""


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """The result of a tool's function, or its exception, which counts as a result: the function is called once."""

    value: Any = None
    error: Exception | None = None

    def get(self) -> Any:
        """Return the value, or raise the exception."""
        if self.error is not None:
            raise self.error
        return self.value


class ToolInvocation(LangChainInvocation):
    """One entry into `_run` or `_arun` of a tool. Its result is a `ToolOutcome`."""

    __slots__ = ("is_started",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_started = False
        """Set once the tool's function is called by this invocation."""

    @property
    def run_id(self) -> Any:
        """The id of the tool's run; None where it is prefetched."""
        return getattr(self._kwargs.get("run_manager"), "run_id", None)

    def key(self) -> Hashable:
        """Return the tool, the method and the arguments that the model wrote."""
        left_out = _NO_ARGUMENTS | {"runtime"} if ignores_runtime(self.target) else _NO_ARGUMENTS
        arguments = {name: self._kwargs[name] for name in sorted(self._kwargs) if name not in left_out}
        return TargetKey(self.target), self._method, freeze(self._args, _argument_key), freeze(arguments, _argument_key)

    def start(self, record: Callable[[Any], object] | None) -> Any:
        """Call the original method. Return its outcome, or an awaitable of it."""
        self.is_started = True
        return self._aoutcome() if self._method.startswith("_a") else self._outcome()

    def set_config(self, config: Any) -> None:
        """Have the method called with this config."""
        self._kwargs = {**self._kwargs, "config": config}

    def _outcome(self) -> ToolOutcome:
        """Call the tool's function once, and return its value or exception as an outcome."""
        try:
            return ToolOutcome(self._original(self.target, *self._args, **self._kwargs))
        except Exception as error:
            return ToolOutcome(error=error)

    async def _aoutcome(self) -> ToolOutcome:
        """Call the tool's async function once, and return its value or exception as an outcome."""
        try:
            return ToolOutcome(await self._original(self.target, *self._args, **self._kwargs))
        except Exception as error:
            return ToolOutcome(error=error)


def tool_invocation(tool: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ToolInvocation | None:
    """Return an entry into a method of a tool below everybody who has wrapped it; None if it is not intercepted."""
    original = interceptors.original_of(type(tool), method)
    return None if original is None else ToolInvocation(tool, method, original, args, kwargs)


_NO_ARGUMENTS = frozenset(("config", "run_manager"))
"""Parameters of tools that the framework fills in, by their names."""


def _argument_key(value: Any) -> Hashable | None:
    return (type(value), repr(value)) if isinstance(value, _ATOMS) else message_key(value)


def message_key(value: Any) -> Hashable | None:
    """Return the key of a message without an id that the framework drew for it; None for any other value."""
    if not isinstance(value, BaseMessage):
        return None
    fields, extra = value.__dict__, value.__pydantic_extra__
    if value.id is not None and _DRAWN_ID.match(value.id):
        fields = {**fields, "id": None}
    return type(value), freeze_fields(fields), freeze_fields(extra) if extra else None


# ------------------------------------------------------------ what a provider reports to its run manager

_REPORTS = ("on_llm_new_token", "on_stream_event", "on_text", "on_retry", "on_custom_event")


def recording(manager: Any, record: Callable[[Any], object]) -> Any:
    """Return a run manager like this one, which hands what it is told to `record` as (method, args, kwargs)."""
    recorder = copy.copy(manager)
    recorder.__class__ = _recorder_class(type(manager))  # type: ignore[arg-type]
    recorder.teola_record = record
    return recorder


@lru_cache(maxsize=16)
def _recorder_class(cls: type) -> type:
    is_async = issubclass(cls, AsyncCallbackManagerForLLMRun)
    methods = {name: _recorded(name, is_async=is_async) for name in _REPORTS if hasattr(cls, name)}
    return type(f"Recording{cls.__name__}", (cls,), methods)


def _recorded(name: str, *, is_async: bool) -> Callable[..., Any]:
    """Return a method for a recording run manager, which records a report instead of making it."""

    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.teola_record((name, args, kwargs))

    async def arecord(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.teola_record((name, args, kwargs))

    return arecord if is_async else record


# ------------------------------------------------------------ the wrappers

_find_scope: list[FindScope] = []
"""Set by `install`: how a call finds the query that it belongs to."""


live_scopes: set[int] = set()
"""Ids of the queries, composites and prefetches that are under way. While there is none, wrappers look no further."""


def _scope(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProviderScope | None:
    if not interceptors.is_installed:
        return None
    return _find_scope[0](target, run_manager_in(args, kwargs))


def _observed(target: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    return observed(call) if observers and isinstance(target, (BaseChatModel, BaseLLM)) else call


def _wrap_provider_method(original: Any) -> Any:
    """Wrap a provider method so that it claims a prefetched result, or an engine of a pool makes the call."""
    name = original.__name__

    @looks_like(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (live_scopes or _routes_calls or observers):
            return original(self, *args, **kwargs)
        routed = _routed(self, name, original)
        scope = _scope(self, args, kwargs) if live_scopes and (routed is None or routed.is_claimed) else None
        call = _observed(self, original if routed is None else routed.call)
        if scope is None:
            return call(self, *args, **kwargs)
        return scope.result(LangChainInvocation(self, name, call, args, kwargs))

    return wrapper


def _wrap_async_provider_method(original: Any) -> Any:
    """Wrap an async provider method that returns its result, as `_wrap_provider_method` does for a sync one."""
    name = original.__name__

    @looks_like(original)
    async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (live_scopes or _routes_calls or observers):
            return await original(self, *args, **kwargs)
        routed = _routed(self, name, original)
        scope = _scope(self, args, kwargs) if live_scopes and (routed is None or routed.is_claimed) else None
        call = _observed(self, original if routed is None else routed.call)
        if scope is None:
            return await call(self, *args, **kwargs)
        return await scope.aresult(LangChainInvocation(self, name, call, args, kwargs))

    return wrapper


def _stream_wrapper(original: Any, entry: str) -> Any:
    """Return the wrapper of a method that returns an iterator of chunks. `entry`: the scope's method for it."""
    name = original.__name__

    @looks_like(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (live_scopes or _routes_calls or observers):
            return original(self, *args, **kwargs)
        routed = _routed(self, name, original)
        scope = _scope(self, args, kwargs) if live_scopes and (routed is None or routed.is_claimed) else None
        call = _observed(self, original if routed is None else routed.call)
        if scope is None:
            return call(self, *args, **kwargs)
        return getattr(scope, entry)(LangChainInvocation(self, name, call, args, kwargs))

    return wrapper


# ------------------------------------------------------------ calls that an engine of a pool answers


class RoutedCall(NamedTuple):
    """A provider method as an engine of a pool does it."""

    call: Callable[..., Any]
    """Called as the function of the original's class is: with the object first."""
    is_claimed: bool
    """True if the results of prefetched calls are claimed at the method; False if the pool claims by requests."""


class RouteCall(Protocol):
    """Returns how an engine makes a call of a method; None where the object makes it itself."""

    def __call__(self, target: Any, method: str, original: Any, /) -> RoutedCall | None: ...


_routes_calls: list[RouteCall] = []
"""Set by `route_calls`."""


def route_calls(route_call: RouteCall) -> None:
    """Ask from now on, at every call of a provider method, if an engine makes it."""
    _routes_calls[:] = [route_call]


def add_routed_methods(cls: type) -> None:
    """Intercept methods that a class of routed objects inherits from the framework, which would go to a thread.

    `_stream` and `_astream` are left out: the framework looks at which class defines them.
    """
    wrap_new_classes()
    methods = next((methods for base, methods in _INHERITED.items() if issubclass(cls, base)), {})
    interceptors.add(cls, {name: wrap for name, wrap in methods.items() if _is_inherited(cls, name)})


def follow_configured_objects(note: Callable[[Any, Any], object]) -> None:
    """Call `note` with what `configurable_fields` makes of an object for a call, and the object.

    Private: `_prepare` of `RunnableConfigurableFields`; since langchain-core 0.1. Without it: nothing is noted.
    """

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
            runnable, config = original(self, *args, **kwargs)
            if interceptors.is_installed:
                note(runnable, self.default)
            return runnable, config

        return prepare

    interceptors.install([RunnableConfigurableFields], {"_prepare": wrap})


def _is_inherited(cls: type, name: str) -> bool:
    definer = next((base for base in cls.__mro__ if name in vars(base)), cls)
    return definer.__module__.startswith("langchain_core.")


def _routed(target: Any, name: str, original: Any) -> RoutedCall | None:
    return _routes_calls[0](target, name, original) if _routes_calls and interceptors.is_installed else None


def _only_routed(original: Any) -> Any:
    """Wrap a method that nothing is prefetched for."""
    name = original.__name__

    @looks_like(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        routed = _routed(self, name, original)
        return (original if routed is None else routed.call)(self, *args, **kwargs)

    return wrapper


def _aonly_routed(original: Any) -> Any:
    """Wrap an async method that nothing is prefetched for: an engine of a pool may make the call."""
    name = original.__name__

    @looks_like(original)
    async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        routed = _routed(self, name, original)
        return await (original if routed is None else routed.call)(self, *args, **kwargs)

    return wrapper


_INHERITED: dict[type, dict[str, Wrap]] = {
    BaseChatModel: {"_generate": _only_routed, "_agenerate": _aonly_routed},
    BaseLLM: {
        "_generate": _only_routed,
        "_agenerate": _aonly_routed,
        "batch": _only_routed,
        "abatch": _aonly_routed,
    },
    Embeddings: {"aembed_documents": _aonly_routed, "aembed_query": _aonly_routed},
}
"""Methods of the framework's bases that are intercepted on the classes of routed objects."""


# ------------------------------------------------------------ tools


tool_claim: ContextVar[ToolClaim | None] = ContextVar("teola_tool_claim", default=None)
"""Set in the place of a tool call that was prefetched."""


def _claim_of(tool: Any) -> ToolClaim | None:
    claim = tool_claim.get()
    return claim if claim is not None and claim.tool is tool and interceptors.is_installed else None


def _tool_result(original: Any) -> Any:
    """Wrap a tool's `_run`: where its call was prefetched, return that result instead of calling the function."""
    name = original.__name__

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        claim = _claim_of(self)
        if claim is None:
            return original(self, *args, **kwargs)
        return claim.result(ToolInvocation(self, name, original, args, kwargs))

    return wrapper


def _tool_aresult(original: Any) -> Any:
    """Wrap a tool's `_arun`, as `_tool_result` does for `_run`."""
    name = original.__name__

    @functools.wraps(original)
    async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        claim = _claim_of(self)
        if claim is None:
            return await original(self, *args, **kwargs)
        return await claim.aresult(ToolInvocation(self, name, original, args, kwargs))

    return wrapper


METHODS: dict[str, Wrap] = {
    "_generate": _wrap_provider_method,
    "_agenerate": _wrap_async_provider_method,
    "_call": _wrap_provider_method,
    "_acall": _wrap_async_provider_method,
    "_stream": partial(_stream_wrapper, entry="items"),
    "_astream": partial(_stream_wrapper, entry="aitems"),
    "_get_relevant_documents": _wrap_provider_method,
    "_aget_relevant_documents": _wrap_async_provider_method,
    "compress_documents": _wrap_provider_method,
    "acompress_documents": _wrap_async_provider_method,
}
"""The provider methods of models and retrievers, and how each is wrapped."""
EMBEDDING_METHODS = {
    "embed_documents": splitting(_wrap_provider_method),
    "aembed_documents": splitting(_wrap_async_provider_method),
    "embed_query": _wrap_provider_method,
    "aembed_query": _wrap_async_provider_method,
}
"""Those of embeddings."""
STORE_METHODS = {
    **dict.fromkeys(SEARCH_METHODS, _wrap_provider_method),
    **{f"a{method}": _wrap_async_provider_method for method in SEARCH_METHODS},
}
"""Those of vector stores."""
ROUTED_METHODS = {"score": _only_routed}
"""Those of cross encoders."""
TOOL_METHODS = {"_run": _tool_result, "_arun": _tool_aresult}
"""Those of tools."""
_METHODS_BY_BASE: tuple[tuple[tuple[type, ...], Mapping[str, Wrap]], ...] = (
    ((BaseChatModel, BaseLLM, BaseRetriever, BaseDocumentCompressor), METHODS),
    ((Embeddings,), EMBEDDING_METHODS),
    ((VectorStore,), STORE_METHODS),
    ((BaseCrossEncoder,), ROUTED_METHODS),
    ((BaseTool,), TOOL_METHODS),
)


def install(find_scope: FindScope) -> None:
    """Intercept the provider methods of every class of models, retrievers and tools that there is. Idempotent."""
    _find_scope[:] = [find_scope]
    interceptors.is_installed = True
    wrap_new_classes()


def wrap_new_classes(required: Iterable[type] | None = None) -> bool:
    """Intercept the methods of classes that were defined since, if one of the `required` ones is among them.

    Return False, and do nothing, after `uninstall`.
    """
    if not interceptors.is_installed:
        return False
    if required is not None and all(id(cls) in _seen for cls in required):
        return True
    new, todo = list[type](), [base for bases, _ in _METHODS_BY_BASE for base in bases]
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        seen_class = _seen.get(id(cls))
        if seen_class is None or seen_class() is not cls:
            _seen[id(cls)] = ref(cls, partial(_forget, id(cls)))
            new.append(cls)
    if not new:
        return True
    new = [cls for cls in new if not (cls.__module__ in _UNWRAPPED_MODULES or cls.__module__.startswith(_COMPOSITES))]
    for bases, methods in _METHODS_BY_BASE:
        interceptors.install([cls for cls in new if issubclass(cls, bases)], methods)
    return True


_seen: dict[int, ref[type]] = {}
"""Classes whose methods are intercepted, by identity: looked up for every class at every query."""


def _forget(identity: int, _: object) -> None:
    _seen.pop(identity, None)


def intercept_composites(methods: Mapping[str, Mapping[str, Wrap]]) -> None:
    """Wrap methods of composites too: by the class's full name, the methods and what wraps them. Classes that are not
    imported yet are left for the next time."""
    for full_name, wraps in methods.items():
        module, _, name = full_name.rpartition(".")
        cls = getattr(sys.modules.get(module), name, None)
        if isinstance(cls, type):
            interceptors.install([cls], wraps)


def uninstall() -> None:
    """Put every provider method back as it was. Accelerated objects prefetch nothing until the next `install`."""
    interceptors.uninstall()
    _seen.clear()


hide_from_stack_levels(globals())
