"""LangChain's seam: the methods by which integrations of models and retrievers call their provider.

The framework's own `invoke`, `stream` and `generate`, its callbacks, caches and rate limiters run above these methods,
unchanged. `_generate`, `_stream` and the others are documented for subclasses; they are wrapped in the class that
defines them, never in a base class: `BaseChatModel._should_stream` compares `type(self)._stream` with its own.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakSet

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents.compressor import BaseDocumentCompressor
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.messages import BaseMessage
from langchain_core.retrievers import BaseRetriever

from teola_plugin.request_keys import TargetKey, freeze
from teola_plugin.shims.interception import MethodInterceptors, Wrap
from teola_plugin.shims.stack_levels import hide_from_stack_levels


class ProviderScope(Protocol):
    """On whose behalf provider calls are made; see `CallScope`."""

    def items(self, invocation: Any, /) -> Iterator[Any]: ...

    def aitems(self, invocation: Any, /) -> AsyncIterator[Any]: ...


class FindScope(Protocol):
    """Returns the scope of a call that is made here on a model or retriever; None outside every query."""

    def __call__(self, target: Any, run_manager: Any, /) -> ProviderScope | None: ...


_BASES = (BaseChatModel, BaseLLM, BaseRetriever, BaseDocumentCompressor)
_UNWRAPPED_MODULES = tuple(
    f"langchain_core.{name}"
    for name in ("language_models.chat_models", "language_models.llms", "retrievers", "documents.compressor")
)
"""Where the framework defines the defaults of these methods, which call each other."""
_COMPOSITES = "langchain_classic.retrievers."
"""Retrievers and compressors that call other objects. The provider methods of those objects are wrapped instead."""
_PREFIX_OF_RUN_IDS = ("lc_run-", "run-")
"""How ids of messages begin that the framework makes of the run's id."""

interceptors = MethodInterceptors()


class LangChainInvocation:
    """One entry into a provider method; see `Invocation`."""

    __slots__ = ("_args", "_kwargs", "_method", "_original", "kind", "streams", "target")

    def __init__(
        self, target: Any, method: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.target, self._method, self._original = target, method, original
        self._args, self._kwargs = args, kwargs
        self.streams = "stream" in method
        kinds = ((BaseRetriever, "SEARCHING"), (BaseDocumentCompressor, "RERANKING"))
        self.kind = next((kind for base, kind in kinds if isinstance(target, base)), "GENERATION")

    @property
    def run_id(self) -> Any:
        """The id of the run whose manager the method was given; None without one."""
        return getattr(self._manager, "run_id", None)

    def key(self) -> Hashable:
        """Return the object, the method and the arguments, without the run manager."""
        names = _PARAMETERS.get(self._method, ("input", "stop", "run_manager"))
        given = dict(zip(names, self._args, strict=False)) | self._kwargs
        first = given.pop(next(iter(given)))
        arguments = {name: given[name] for name in sorted(given) if name not in _HEARS and given[name] is not None}
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
            return _nothing() if self._method.startswith("_a") else None
        return getattr(manager, name)(*args, **kwargs)

    @property
    def _manager(self) -> Any:
        return run_manager_in(self._args, self._kwargs)


_HEARS = frozenset(("run_manager", "callbacks"))
"""Parameters that decide who hears of a call, and nothing of its result."""
_COMPRESSING = ("input", "query", "callbacks")
_PARAMETERS = {"compress_documents": _COMPRESSING, "acompress_documents": _COMPRESSING}
"""Names of the positional parameters by method, where they are not those of models."""


async def _nothing() -> None:
    """Return nothing, on a loop."""


def run_manager_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the run manager among the arguments of a provider method; None if there is none."""
    manager = args[2] if len(args) > 2 else kwargs.get("run_manager")
    return kwargs.get("callbacks") if manager is None else manager


def message_key(value: Any) -> Hashable | None:
    """Return the key of a message without the id that the framework gave it; None for any other value."""
    if not isinstance(value, BaseMessage):
        return None
    given_id = value.id is not None and not value.id.startswith(_PREFIX_OF_RUN_IDS)
    fields = {name: one for name, one in value.__dict__.items() if name != "id" or given_id}
    return type(value), freeze(fields), freeze(value.__pydantic_extra__)


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


def _result(original: Any) -> Any:
    name = original.__name__

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = _scope(self, args, kwargs) if live_scopes else None
        if scope is None:
            return original(self, *args, **kwargs)
        return _only(list(scope.items(LangChainInvocation(self, name, original, args, kwargs))))

    return wrapper


def _aresult(original: Any) -> Any:
    name = original.__name__

    @functools.wraps(original)
    async def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = _scope(self, args, kwargs) if live_scopes else None
        if scope is None:
            return await original(self, *args, **kwargs)
        return _only([one async for one in scope.aitems(LangChainInvocation(self, name, original, args, kwargs))])

    return wrapper


def _only(results: list[Any]) -> Any:
    if not results:
        raise TypeError("the result of a prefetched call cannot be copied")
    return results[0]


def _chunks(original: Any) -> Any:
    name = original.__name__

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        scope = _scope(self, args, kwargs) if live_scopes else None
        if scope is None:
            return original(self, *args, **kwargs)  # type: ignore[no-any-return]
        return scope.items(LangChainInvocation(self, name, original, args, kwargs))

    return wrapper


def _achunks(original: Any) -> Any:
    name = original.__name__

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        scope = _scope(self, args, kwargs) if live_scopes else None
        if scope is None:
            return original(self, *args, **kwargs)  # type: ignore[no-any-return]
        return scope.aitems(LangChainInvocation(self, name, original, args, kwargs))

    return wrapper


METHODS = {
    "_generate": _result,
    "_agenerate": _aresult,
    "_call": _result,
    "_acall": _aresult,
    "_stream": _chunks,
    "_astream": _achunks,
    "_get_relevant_documents": _result,
    "_aget_relevant_documents": _aresult,
    "compress_documents": _result,
    "acompress_documents": _aresult,
}
"""The provider methods, and how each is wrapped."""


def install(find_scope: FindScope) -> None:
    """Intercept the provider methods of every class of models and retrievers that there is. Idempotent."""
    _find_scope[:] = [find_scope]
    interceptors.is_installed = True
    wrap_new_classes()


def wrap_new_classes() -> bool:
    """Intercept the methods of classes that were defined since. Return False, and do nothing, after `uninstall`."""
    if not interceptors.is_installed:
        return False
    new, todo = list[type](), list[type](_BASES)
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        if cls not in _seen:
            _seen.add(cls)
            new.append(cls)
    interceptors.install([cls for cls in new if not _is_framework(cls)], METHODS)
    return True


def _is_framework(cls: type) -> bool:
    return cls.__module__ in _UNWRAPPED_MODULES or cls.__module__.startswith(_COMPOSITES)


_seen: WeakSet[type] = WeakSet()
"""Classes whose methods are intercepted."""


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
