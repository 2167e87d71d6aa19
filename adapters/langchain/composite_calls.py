"""Composites that call their parts one after the other, though they know with what: those calls are prefetched.

The composite itself runs unchanged, and its parts find at the provider methods what was prefetched. It makes the first
call itself, and each that has not begun when it comes there; so on success there are as many calls as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from langchain_core.callbacks import AsyncCallbackManager, CallbackManager
from langchain_core.globals import get_debug, get_llm_cache
from langchain_core.language_models import LLM, BaseLanguageModel
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableBinding, RunnableConfig
from langchain_core.runnables.config import ensure_config
from langchain_core.vectorstores import VectorStoreRetriever

from teola_plugin.adapters.langchain import composites
from teola_plugin.adapters.langchain.call_sites import eligible, may_be_prefetched, sites_of
from teola_plugin.adapters.langchain.composites import parts
from teola_plugin.adapters.langchain.embeddings import split_embedding_call
from teola_plugin.adapters.langchain.listening import active_run, composite_rules
from teola_plugin.adapters.langchain.prefetch_plan import is_lowered
from teola_plugin.adapters.langchain.prefetching import (
    calls_scope,
    copied,
    current_calls,
    intercept,
    live,
    prefetch_scope,
    silenced,
    untraced,
)
from teola_plugin.adapters.langchain.vectorstore import TeolaRetriever, TeolaVectorStore
from teola_plugin.adapters.plan_report import CallRow, Explanation, Reason, Status
from teola_plugin.adapters.plan_summary import listed
from teola_plugin.adapters.planned_queries import log_fallback
from teola_plugin.adapters.snapshots import NotCopied, exactly, snapshot
from teola_plugin.adapters.thread_safety import HTTP_CLIENTS, STORES, ThreadSafety
from teola_plugin.runtime.claims import Caller
from teola_plugin.runtime.provider_calls import CallScope, ProviderCallTable
from teola_plugin.runtime.query_run import current_run
from teola_plugin.runtime.threads import daemon_threads
from teola_plugin.shims import langchain as shims
from teola_plugin.shims.interception import splitters
from teola_plugin.shims.langchain_interceptors import intercept_composites, live_scopes
from teola_plugin.tracer.langchain.classes import (
    find_override,
    find_pool_backed,
    is_accelerated,
    is_pool_backed,
    leaf_of,
)
from teola_plugin.tracer.leaf import GenerationLeaf, RerankingLeaf, RetrievalLeaf, TextSearchLeaf

# ------------------------------------------------------------ which parts several threads may call


@dataclass(frozen=True, slots=True)
class Threads:
    """A rule for parts of chains, by what is known of single objects."""

    safety: ThreadSafety

    def allow(self, part: Any) -> bool:
        """Return True if several threads may call the part at once. Runs no user code.

        Not what has handlers of its own, or prints: who hears of a call must not hear of it early. What asks engines of
        a pool may, unless it writes: the graph makes its requests ahead only where it knows the composite.
        """
        if isinstance(part, BaseRetriever):
            return self._retriever(part)
        if isinstance(part, BaseLanguageModel):
            return self.model(part)
        return isinstance(part, Runnable) and self._chain(part)

    def model(self, node: Any) -> bool:
        if is_pool_backed(node):
            return may_be_prefetched(node) and isinstance(leaf_of(node, {}), GenerationLeaf)
        return eligible(node) and self.safety.allows(node, HTTP_CLIENTS)

    def embeddings(self, node: Any) -> bool:
        return is_pool_backed(node) or self.safety.allows(node, HTTP_CLIENTS)

    def _retriever(self, node: Any) -> bool:
        """Return True if several threads may call a retriever at once.

        Its store and embeddings must allow it, or the user must have named it in `concurrent=`. For a composite
        retriever, this must hold for each of its parts.
        """
        if not may_be_prefetched(node):
            return False
        if self.safety.is_named(node):
            return True
        if type(node) is VectorStoreRetriever:
            store = node.vectorstore
            return self.safety.is_named(store) or (
                self.safety.allows(store, STORES) and self.embeddings(getattr(store, "embeddings", None))
            )
        if is_pool_backed(node):
            return self._searches_engines(node)
        parts = composites.parts_of(node)
        return bool(parts) and all(self._part(one) for one in parts)

    def _searches_engines(self, node: Any) -> bool:
        """Return True if a pool-backed retriever's work is done by engines, or by embeddings that threads may share."""
        if isinstance(leaf_of(node, {}), RetrievalLeaf | TextSearchLeaf):
            return True
        store = getattr(node, "vectorstore", None)
        is_plain = isinstance(node, TeolaRetriever) and not find_override(node, TeolaRetriever)
        return is_plain and type(store) is TeolaVectorStore and self.embeddings(store.embeddings)

    def unnamed(self, part: Any) -> tuple[Any, ...]:
        """Return what `concurrent=` would have to name for `allow(part)`; nothing where it holds already, or cannot."""
        blocking = () if self.allow(part) else tuple(self._thread_unsafe_objects(part))
        return blocking if blocking and Threads(ThreadSafety((*self.safety.named, *blocking))).allow(part) else ()

    def _thread_unsafe_objects(self, part: Any) -> Iterator[Any]:
        """Yield the objects because of which threads may not call a part: innermost ones, which the user could name."""
        if isinstance(part, VectorStoreRetriever) and self.safety.allows(part.vectorstore, STORES):
            yield part.vectorstore.embeddings
        elif isinstance(part, VectorStoreRetriever):
            yield part.vectorstore
        elif below := composites.parts_of(part):
            yield from (one for child in below if not self._part(child) for one in self._thread_unsafe_objects(child))
        elif isinstance(part, Runnable) and not isinstance(part, BaseRetriever | BaseLanguageModel):
            leaves = (site.target for site in sites_of(part, mapped=True).values())
            yield from (one for leaf in leaves if not self.allow(leaf) for one in self._thread_unsafe_objects(leaf))
        else:
            yield part

    def _part(self, part: Any) -> bool:
        """Return True for a part of a retriever that threads may share: a retriever, a chain, or a compressor."""
        if isinstance(part, Runnable):
            return self.allow(part)
        if isinstance(leaf_of(part, {}), RerankingLeaf):
            return True
        parts = composites.parts_of(part)
        return self.safety.is_named(part) or (bool(parts) and all(self._part(one) for one in parts))

    def _chain(self, node: Any) -> bool:
        """Return True for a chain that is understood as a whole, so that no user code in it might do anything."""
        own_objects = (site.target for site in sites_of(node, mapped=True).values())
        leaves = [*own_objects, *(one for _, one in find_pool_backed(node, ""))]
        if not leaves:
            return False
        return all(self._leaf(leaf) for leaf in leaves) and is_lowered(node, mapped=True)

    def _leaf(self, node: Any) -> bool:
        if isinstance(node, BaseRetriever | BaseLanguageModel):
            return self.allow(node)
        return isinstance(leaf_of(node, {}), RerankingLeaf)


# ------------------------------------------------------------ which calls are prefetched


MOST = min(32, (os.cpu_count() or 1) + 4)
"""Calls at once, of one composite: as many as `batch` makes where nothing else is said."""


class PartCall(NamedTuple):
    """A call that a composite is about to make."""

    part: Any
    input: Any
    kwargs: Mapping[str, Any]


class CompositeRules:
    """Which composites of an accelerated object may have their calls prefetched, and which parts on threads."""

    def __init__(self, roots: Iterable[Any], threads: Threads) -> None:
        self._threads = threads
        self._bounded = {id(node): node for root in roots for node in _bounded(root)}
        self._allowed: dict[int, tuple[Any, bool]] = {}

    def allows(self, part: Any, *, on_loop: bool = False) -> bool:
        """Return True if several calls of a part may run at once: on threads, or on a loop."""
        if on_loop and type(part)._acall is not LLM._acall:
            return True
        entry = self._allowed.get(id(part))
        if entry is None or entry[0] is not part:
            if len(self._allowed) > 256:
                self._allowed.clear()
            entry = self._allowed[id(part)] = part, self._threads.allow(part)
        return entry[1]

    @property
    def threads(self) -> Threads:
        """Which parts several threads may call."""
        return self._threads

    def prefetched(self, node: Any, calls: Sequence[PartCall], callbacks: Any, *, on_loop: bool) -> list[PartCall]:
        """Return those of the calls that a composite is about to make that are prefetched."""
        if id(node) in self._bounded or ensure_config().get("max_concurrency") is not None:
            return []
        models = not all(type(call.part) is VectorStoreRetriever for call in calls)
        cached = models and get_llm_cache() is not None
        if cached or get_debug() or shims.attached_by_environment() or not shims.listeners_are_known():
            return []
        distinct = list(_distinct(calls))[1:]
        return [call for call in distinct if self.allows(call.part, on_loop=on_loop)]

    def splits_batches(self, model: Any) -> bool:
        """Return True if the requests of one call of `OpenAIEmbeddings` may be sent side by side."""
        is_limited = id(model) in self._bounded or ensure_config().get("max_concurrency") is not None
        return not is_limited and not model.show_progress_bar and self._threads.embeddings(model)


def _bounded(node: Any) -> Iterator[Any]:
    """Yield what stands below a binding that says `max_concurrency`, which composites do not hand on."""
    if isinstance(node, RunnableBinding) and "max_concurrency" in node.config:
        yield from _all(node.bound)
    else:
        for part in _parts(node):
            yield from _bounded(part)


def _all(node: Any) -> Iterator[Any]:
    yield node
    for part in _parts(node):
        yield from _all(part)


def _parts(node: Any) -> list[Any]:
    return composites.parts_of(node) if composites.name_of(node) else [part for _, part in parts(node)]


def _distinct(calls: Iterable[PartCall]) -> Iterator[PartCall]:
    """Yield the first of equal calls, with a copy of its input. Once it is made, a cache may know what others give."""
    seen: list[PartCall] = []
    for call in calls:
        try:
            one = PartCall(call.part, snapshot(call.input), call.kwargs)
        except NotCopied:
            one = call
        if not any(other.part is call.part and exactly(other.input, one.input) for other in seen):
            seen.append(one)
            yield one


class CompositeCalls:
    """The prefetched calls of one composite, while its method runs."""

    def __init__(self, calls: Sequence[PartCall], callbacks: Any, *, on_loop: bool) -> None:
        run = active_run(callbacks)
        table = current_calls(run)
        self._table, self._is_own = table or ProviderCallTable(), table is None
        self._waiting, self._scopes = deque(calls), list[CallScope]()
        self._outer = prefetch_scope.get()
        """The prefetch inside which the composite runs, if any: the original has yet to come to the calls."""
        self._kinds = shims.streaming_kinds(callbacks) or ()
        self._context, self._config = copy_context(), ensure_config()
        self._context.run(current_run.set, run)
        self._lock = threading.Lock()
        self._on_loop = on_loop
        self._tasks: list[asyncio.Task[None]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Prefetch while the body runs; drop what it did not claim, unless the original may still claim it."""
        live_scopes.add(id(self))
        token = calls_scope.set(CallScope(self._table, Caller.ORIGINAL, copied))
        try:
            if self._on_loop:
                self._tasks = [self._start(call) for call in self._waiting]
            else:
                daemon_threads().run(self._work, min(len(self._waiting), MOST - 1))
            yield
        finally:
            calls_scope.reset(token)
            with self._lock:
                self._waiting.clear()
                scopes = list(self._scopes)
            for task in self._tasks:
                task.cancel()
            for scope in scopes if self._outer is None else ():
                scope.drop()
            if self._is_own:
                self._table.close()
            live_scopes.discard(id(self))

    def _next(self) -> PartCall | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def _work(self) -> None:
        """Make the waiting calls, one after the other, in a thread."""
        while (call := self._next()) is not None:
            _, context, config = self._prefetch_context(CallbackManager)
            context.run(self._call, call, config)

    def _call(self, call: PartCall, config: RunnableConfig) -> None:
        with live(config), untraced(), contextlib.suppress(BaseException):  # the original gets it where it claims
            call.part.invoke(call.input, config, **call.kwargs)

    def _start(self, call: PartCall) -> asyncio.Task[None]:
        """Start one prefetched call as a task of the running loop, in a context that no handler hears."""
        scope, context, config = self._prefetch_context(AsyncCallbackManager)
        task = asyncio.get_running_loop().create_task(self._acall(call, config), context=context)
        scope.stop = task.cancel
        return task

    async def _acall(self, call: PartCall, config: RunnableConfig) -> None:
        with live(config), untraced(), contextlib.suppress(BaseException):
            await call.part.ainvoke(call.input, config, **call.kwargs)

    def _prefetch_context(self, manager: Any) -> tuple[CallScope, Any, RunnableConfig]:
        """Return a scope, a context and a config for one prefetched call, of which no handler hears."""
        scope = CallScope(self._table, Caller.PLANNER, copied, is_offer=True)
        if self._outer is not None:
            self._outer.adopt(scope)
        with self._lock:
            self._scopes.append(scope)
        context = self._context.copy()
        config = context.run(silenced, scope, self._config, self._kinds, manager)
        return scope, context, config


# ------------------------------------------------------------ what each composite is about to call


def _calls_for_queries(node: Any, queries: list[str], run_manager: Any) -> tuple[list[PartCall], Any]:
    return [PartCall(node.retriever, query, {}) for query in queries], run_manager


def _calls_for_retrievers(node: Any, query: str, run_manager: Any, **_: Any) -> tuple[list[PartCall], Any]:
    return [PartCall(retriever, query, {}) for retriever in node.retrievers], run_manager


def _calls_for_documents(
    node: Any, documents: Sequence[Any], query: str, callbacks: Any = None
) -> tuple[list[PartCall], Any]:
    """Return the calls that an extractor or filter is about to make, one for each document, and who hears of them.

    None of them if it makes its question by a function of the user's.
    """
    if not composites.asks_as_usual(node):
        return [], callbacks
    return [PartCall(node.llm_chain, node.get_input(query, one), {}) for one in documents], callbacks


_NOT_HANDED_ON = ("tags", "metadata", "run_name", "run_id")


def _calls_for_messages(
    model: Any, messages: Sequence[Any], stop: Any = None, callbacks: Any = None, **kwargs: Any
) -> tuple[list[PartCall], Any]:
    """Return the calls that `BaseChatModel.generate` is about to make, one per conversation, and who hears of them."""
    arguments = {name: one for name, one in kwargs.items() if name not in _NOT_HANDED_ON}
    return [PartCall(model, list(prompt), {**arguments, "stop": stop}) for prompt in messages], callbacks


def _calls_for_prompts(
    model: Any, prompts: Sequence[str], stop: Any = None, run_manager: Any = None, **kwargs: Any
) -> tuple[list[PartCall], Any]:
    return [PartCall(model, prompt, {**kwargs, "stop": stop}) for prompt in prompts], run_manager


EXPECTED: Mapping[str, Mapping[str, Callable[..., tuple[list[PartCall], Any]]]] = {
    composites.MULTI_QUERY: {"retrieve_documents": _calls_for_queries},
    composites.ENSEMBLE: {"rank_fusion": _calls_for_retrievers},
    composites.MERGER: {"merge_documents": _calls_for_retrievers},
    composites.EXTRACTOR: {"compress_documents": _calls_for_documents},
    "langchain_core.language_models.chat_models.BaseChatModel": {"generate": _calls_for_messages},
    "langchain_core.language_models.llms.LLM": {"_generate": _calls_for_prompts, "_agenerate": _calls_for_prompts},
}
"""By class and method: the calls that the method makes one after the other, and the callbacks that hear of them."""


def _calls_of(expected: Any, node: Any, args: Any, kwargs: Any, *, on_loop: bool) -> CompositeCalls | None:
    """Return the prefetched calls of a composite's method that begins now; None if nothing may be prefetched.

    `expected` lists the calls that the method makes. A failure is logged, and the composite runs as it always did.
    """
    rules = composite_rules.get()
    if rules is None:
        return None
    try:
        calls, callbacks = expected(node, *args, **kwargs)
        if len(calls) < 2 or not (isinstance(node, BaseLanguageModel) or composites.name_of(node)):
            return None
        prefetched_calls = rules.prefetched(node, calls, callbacks, on_loop=on_loop)
        return CompositeCalls(prefetched_calls, callbacks, on_loop=on_loop) if prefetched_calls else None
    except Exception as error:  # nothing has been called yet
        log_fallback(error, node)
        return None


def _wrapping(expected: Any, *, on_loop: bool) -> Callable[[Any], Any]:
    """Return the function that replaces a composite's method by one that prefetches the calls of its parts.

    `expected`: see `_calls_of`. With `on_loop` the method is a coroutine function.
    """

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls = _calls_of(expected, self, args, kwargs, on_loop=False)
            if calls is None:
                return original(self, *args, **kwargs)
            with calls.running():
                return original(self, *args, **kwargs)

        @functools.wraps(original)
        async def awrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls = _calls_of(expected, self, args, kwargs, on_loop=True)
            if calls is None:
                return await original(self, *args, **kwargs)
            with calls.running():
                return await original(self, *args, **kwargs)

        return awrapper if on_loop else wrapper

    return wrap


def intercept_composite_methods() -> None:
    """Intercept the methods of `EXPECTED` in those of the classes that are imported, and the provider methods."""
    intercept()
    splitters[:] = [split_embedding_call]
    intercept_composites(
        {
            cls: {name: _wrapping(expected, on_loop=name == "_agenerate") for name, expected in methods.items()}
            for cls, methods in EXPECTED.items()
        }
    )


# ------------------------------------------------------------ what the report says


def composite_rows(chain: Any, rules: CompositeRules) -> Iterator[CallRow]:
    """Yield a row for each composite in a chain, and for each part of it that it calls one after the other."""
    for node in _composites(chain):
        for part in composites.calls_of(node):
            name, target = type(node).__name__, type(part).__name__
            if rules.allows(part):
                start = "side by side, not one after the other"
                yield CallRow(name, Status.PREFETCHED, target, start=start)
                continue
            blocking = tuple(type(one).__name__ for one in rules.threads.unnamed(part))
            explanation = (
                Explanation(Reason.ONE_THREAD, blocking) if blocking else Explanation(Reason.NOT_SHARED, (target,))
            )
            yield CallRow(name, Status.IN_PLACE, target, explanation=explanation)


def rows_of_planned_parts(chain: Any) -> Iterator[tuple[str, list[CallRow]]]:
    """Yield the path and the calls of each part that gains by a plan of its own, such as an arm of a branch."""
    for path, part in find_pool_backed(chain, "chain"):
        if is_accelerated(part) and getattr(part, "gains", False):
            rows = list(cast(Any, part).__teola_report__().calls)
            for number, row in enumerate(rows):
                if row.source.startswith("chain"):
                    rows[number] = replace(row, source=path + row.source.removeprefix("chain"))
            yield path, rows


def advice(chain: Any, threads: Threads) -> tuple[str, ...]:
    """Return what to name in `concurrent=`, so that sync calls of composites need not wait for each other."""
    classes_by_part: dict[str, dict[str, None]] = {}
    for node in _composites(chain):
        names = [type(one).__name__ for part in composites.calls_of(node) for one in threads.unnamed(part)]
        if names:
            classes_by_part.setdefault(listed(list(dict.fromkeys(names))), {})[type(node).__name__] = None
    return tuple(
        _NAME_THEM.format(names=names, classes=listed(list(classes_by_part[names]))) for names in classes_by_part
    )


_NAME_THEM = (
    "if several threads may call {names} at once, say so: accelerate(..., concurrent=[{names}]); "
    "then the sync calls of {classes} run side by side"
)


def _composites(node: Any) -> Iterator[Any]:
    return (one for one in _all(node) if composites.name_of(one))
