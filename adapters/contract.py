"""The contract between `accelerate` and the adapters of frameworks, and the adapters that there are.

The adapter of another framework derives from `adapters.method_adapter.MethodAdapter`, which has all that no framework
needs for itself, and is registered by `register`.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, Protocol

from teola_plugin.errors import TraceError
from teola_plugin.shims import httpx

if TYPE_CHECKING:
    from teola_plugin.adapters.options import Options
    from teola_plugin.runtime.usage import Tokens


class Adapter(Protocol):
    """The parts of a framework's adapter that `accelerate` uses."""

    def recognizes(self, obj: Any) -> bool:
        """Return True for an object of the framework that may be accelerated. Runs no user code."""
        ...

    def accelerate(self, obj: Any, options: Options) -> Any:
        """Return an object that does the same, sooner. Raises `TraceError` and `RegistrationError`."""
        ...

    def uninstall(self) -> None:
        """Put back every method that the adapter intercepts."""
        ...


class LangGraphAdapter:
    """Compiled graphs and agents of LangGraph."""

    def recognizes(self, obj: Any) -> bool:
        """Return True for a graph of this process; a remote one runs elsewhere, and is a LangChain Runnable."""
        if not _has_base_of(obj, "langgraph.pregel"):
            return False
        from teola_plugin.adapters.langgraph.accelerate import is_graph

        return is_graph(obj)

    def accelerate(self, obj: Any, options: Options) -> Any:
        from teola_plugin.adapters.langgraph.accelerate import accelerate_graph

        return accelerate_graph(obj, options)

    def uninstall(self) -> None:
        """Do nothing: graphs call LangChain's objects."""


class LangChainAdapter:
    """Runnables of LangChain."""

    def recognizes(self, obj: Any) -> bool:
        return _has_base_of(obj, "langchain_core.")

    def accelerate(self, obj: Any, options: Options) -> Any:
        from teola_plugin.adapters.langchain.accelerate import accelerate_runnable

        return accelerate_runnable(obj, options, accelerate_graph_in_chain)

    def uninstall(self) -> None:
        _uninstall_shim("teola_plugin.shims.langchain_interceptors")


class LlamaIndexAdapter:
    """Engines, retrievers, synthesizers, workflows, pipelines and indexes of LlamaIndex."""

    def recognizes(self, obj: Any) -> bool:
        return _has_base_of(obj, "llama_index.core.", "workflows.")

    def accelerate(self, obj: Any, options: Options) -> Any:
        from teola_plugin.adapters.llamaindex.accelerate import accelerate_llamaindex

        return accelerate_llamaindex(obj, options)

    def uninstall(self) -> None:
        _uninstall_shim("teola_plugin.shims.llamaindex.interceptors")


def _has_base_of(obj: Any, *modules: str) -> bool:
    return any(cls.__module__.startswith(modules) for cls in type(obj).__mro__)


def _uninstall_shim(name: str) -> None:
    """Uninstall the interceptors of a shim. One that was not imported has intercepted nothing.

    `name`: of the shim's module. Importing it here would import its framework, too.
    """
    shim = sys.modules.get(name)
    if shim is not None:
        shim.uninstall()


# ------------------------------------------------------------ the registry


_LANGGRAPH = LangGraphAdapter()
_adapters: list[Adapter] = [_LANGGRAPH, LangChainAdapter(), LlamaIndexAdapter()]
"""In the order in which they are asked: a graph of LangGraph is a Runnable of LangChain, too."""


def register(adapter: Adapter) -> None:
    """Let `accelerate` take objects of another framework. Adapters that are registered later are asked first."""
    _adapters.insert(0, adapter)


def unregister(adapter: Adapter) -> None:
    """Put back what an adapter intercepts, and do not ask it any more.

    Raise `ValueError` for an adapter that is not registered. Objects that it accelerated before are not changed.
    """
    adapter.uninstall()
    _adapters.remove(adapter)


def adapter_of(obj: Any) -> Adapter:
    """Return the adapter that recognizes an object. Raises `TraceError` if there is none."""
    adapter = next((one for one in _adapters if one.recognizes(obj)), None)
    if adapter is None:
        raise TraceError(
            f"cannot accelerate a {type(obj).__module__}.{type(obj).__qualname__}.",
            hint="pass a LangChain Runnable (a chain, a retriever, a model) or a LlamaIndex query engine; "
            "wrap a plain function in RunnableLambda",
        )
    return adapter


def reported_tokens(value: Any) -> Tokens | None:
    """Return the tokens that a result or a chunk reports, as a registered adapter reads it; None if none can."""
    for adapter in _adapters:
        with contextlib.suppress(Exception):  # the call has succeeded: its caller shall not hear of this
            tokens: Tokens | None = getattr(adapter, "tokens_of", _no_tokens)(value)
            if tokens is not None:
                return tokens
    return None


def _no_tokens(value: Any) -> None:
    """Read nothing: the adapters of this package have readers of their own."""


def uninstall_all() -> None:
    """Put back every method that any adapter intercepts, and those of httpx's clients."""
    for adapter in _adapters:
        adapter.uninstall()
    httpx.uninstall()


def accelerate_graph_in_chain(obj: Any, options: Options) -> Any:
    """Return the accelerated graph if an object in a chain is one of LangGraph's; the very object otherwise."""
    return _LANGGRAPH.accelerate(obj, options) if _LANGGRAPH.recognizes(obj) else obj
