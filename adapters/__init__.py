"""What users hold: accelerated objects, and pool-backed objects of their framework."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Unpack, overload

from teola_plugin.errors import RegistrationError

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel, BaseLLM
    from langchain_core.runnables import Runnable
    from langchain_core.runnables.utils import Input, Output
    from langgraph.typing import ContextT, InputT, OutputT, StateT

    from teola_plugin.adapters import accelerated_types as made
    from teola_plugin.observe.spans import Price
    from teola_plugin.passes import Pass
    from teola_plugin.pool import EnginePool

DISABLE = "TEOLA_DISABLE"
"""Environment variable: set to 1, `accelerate` gives back the very object it got."""


@overload
def accelerate(obj: made.Again, **given: Unpack[made.Keywords]) -> made.Again: ...
@overload
def accelerate(obj: made.QueryEngine, **given: Unpack[made.Keywords]) -> made.AcceleratedQueryEngine: ...
@overload
def accelerate(obj: made.Retriever, **given: Unpack[made.Keywords]) -> made.AcceleratedRetriever: ...
@overload
def accelerate(obj: made.Synthesizer, **given: Unpack[made.Keywords]) -> made.AcceleratedSynthesizer: ...
@overload
def accelerate(obj: made.ChatEngine, **given: Unpack[made.Keywords]) -> made.AcceleratedChatEngine: ...
@overload
def accelerate(obj: made.AnyWorkflow, **given: Unpack[made.Keywords]) -> made.AcceleratedWorkflow: ...
@overload
def accelerate(obj: made.Writes, **given: Unpack[made.Keywords]) -> made.Writes: ...
@overload
def accelerate(
    obj: made.BuiltGraph[StateT, ContextT, InputT, OutputT], **given: Unpack[made.Keywords]
) -> made.AcceleratedGraph[StateT, ContextT, InputT, OutputT]: ...
@overload
def accelerate(obj: made.AnyGraph, **given: Unpack[made.Keywords]) -> made.AcceleratedGraph[Any, Any, Any, Any]: ...
@overload
def accelerate(obj: BaseChatModel, **given: Unpack[made.Keywords]) -> made.AcceleratedChatModel: ...
@overload
def accelerate(obj: BaseLLM, **given: Unpack[made.Keywords]) -> made.AcceleratedLLM: ...
@overload
def accelerate(
    obj: Runnable[Input, Output], **given: Unpack[made.Keywords]
) -> made.AcceleratedRunnable[Input, Output]: ...
def accelerate(
    obj: Any,
    *,
    pool: EnginePool | None = None,
    bind: Mapping[Any, str] | Iterable[tuple[Any, str]] | None = None,
    passes: Iterable[Pass | str] | None = None,
    speculate: str = "auto",
    app: str | None = None,
    shadow: float = 0.0,
    concurrent: Iterable[Any] | None = None,
    strict: bool = True,
    engines: str | None = None,
    read_only: Iterable[Any] | None = None,
    prompt_cache: bool = False,
    prices: Mapping[str, Price] | None = None,
) -> Any:
    """The same object, sooner: an LCEL Runnable in, a Runnable out, with the same answers; LlamaIndex objects alike.

    Args:
        obj: a LangChain Runnable (or what LCEL coerces to one inside a chain), a compiled graph or agent of LangGraph,
            or of LlamaIndex: a query engine, a retriever, a response synthesizer, a chat engine, a workflow, an agent,
            an `IngestionPipeline` or a `VectorStoreIndex`.
        pool: the engines; by default the pool of the pool-backed objects found in `obj`.
        bind: your own models or embeddings, and the pool engine that serves each of them; a list of pairs where an
            object cannot be a key. LangChain: also a class, for all objects of it.
        passes: passes to use instead of the pool's; `()` for none.
        speculate: `auto` (work on predictions on pool engines), `all` (also on your own models), `off`.
        app: a name under which queries are scheduled and traced.
        shadow: the share of calls (`invoke`, `ainvoke`; `query`, `retrieve`, `synthesize` and their async forms) after
            which the original runs, too, in the background, and its answer is compared: a difference is logged and
            counted in `fast.shadow`. Only for objects without side effects, since these calls run twice: no writes, no
            history, no checkpoints. Your handlers see one run. Not for graphs, chat engines and workflows.
        concurrent: your own models, embeddings, stores and retrievers whose sync methods may be called on several
            threads at once: objects, or classes for all objects of theirs. Clients of APIs and stores that are known to
            (`adapters/thread_safety.py`) need not be named. Calls that a sync entry would make one after the other are
            made side by side where all that they touch is known so.
        strict: whether it is an error that something in `bind` does not occur in `obj`. With False one list of bindings
            serves several objects.
        engines: `auto` makes engines for your own models by itself, where they talk to an OpenAI-compatible server of
            this machine or a private network, or are local sentence-transformers; `bind` goes first. One pool is
            started for the whole process. Servers get no request that the original would not send; `dedicated`
            declares that they are there for your apps, and may be sent prompts ahead of time.
            `fast.explain()` says what was bound, what was not and why, and how to write it by hand.
        read_only: tools of a graph or agent that change nothing, so that a call may run as soon as the model has
            written it: tools, names of tools, functions that take a tool and return a bool, and MCP servers. A server
            is its name (`"mcp:weather"`), a `MultiServerMCPClient` or a `ClientSession`; only those of its tools count
            that it declares `readOnlyHint`. docs/graphs.md says more.
        prompt_cache: whether requests tell providers what to cache: OpenAI's get a `prompt_cache_key`, Anthropic's and
            Bedrock's get cache markers. Without it requests are the original's, byte for byte. See docs/using.md.
        prices: the price of each model by its name, in dollars per million tokens: `{"gpt-4o-mini": Price(input=0.15,
            output=0.6)}`. Then `fast.report().cost` and traces say what a query costs, and name models without a price.
            By default the table of the pool, if it has one. See docs/using.md.

    With `TEOLA_DISABLE=1` in the environment, `obj` is returned untouched. Raises `TraceError` for an object that is
    not understood at all; `RegistrationError` for unknown engines, passes or tools, for `concurrent` or `read_only`
    that is no list, for `prices` that are no table of prices, and for `shadow` on an object that is known to write.
    """
    if os.environ.get(DISABLE, "") not in ("", "0"):
        return obj
    from teola_plugin.adapters.contract import adapter_of
    from teola_plugin.adapters.options import Options  # with the passes, which take a while to import

    options = Options.of(
        pool, bind, passes, speculate, app, shadow, concurrent, strict, engines, read_only, prompt_cache, prices
    )
    return adapter_of(obj).accelerate(obj, options)


def uninstall() -> None:
    """Put back every method of other packages' classes that `accelerate` intercepts, exactly as it was.

    Accelerated objects then run as their originals do, until the next `accelerate`.
    """
    from teola_plugin.adapters.contract import uninstall_all

    uninstall_all()


def bound(obj: Any, engine: str, pool: EnginePool) -> Any:
    """See `EnginePool.bound`."""
    homes = [cls.__module__.partition(".")[0] for cls in type(obj).__mro__]
    if any(home.startswith("langchain") for home in homes):
        from teola_plugin.adapters.langchain.binding.workers import bound_object

        return bound_object(obj, engine, pool)
    if any(home.startswith("llama_index") for home in homes):
        from teola_plugin.adapters.llamaindex.binding.bind import bound as bound_in_llamaindex

        return bound_in_llamaindex(obj, engine, pool)
    raise RegistrationError(
        f"a {type(obj).__module__}.{type(obj).__qualname__} cannot be bound to an engine.",
        hint="bind a model, embeddings or a reranker of LangChain or LlamaIndex",
    )
