"""Prefetching of lists of calls that ingestion makes one after the other, though it knows their arguments.

`get_text_embedding_batch` embeds batch after batch in sync code, and `TitleExtractor` asks for the title of one node
after the other. LlamaIndex's own code runs unchanged, with its events and its progress bar, and its provider methods
find the prefetched results. It makes the first call itself, and each call that has not started when it gets there; so
on success there are as many calls as in the original.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar, copy_context
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.extractors import TitleExtractor

from teola_plugin.adapters.llamaindex.batches import BatchPrefetching, note_nodes_for_write
from teola_plugin.adapters.llamaindex.pipelined_write import current_write
from teola_plugin.adapters.llamaindex.prefetching import original_scope, takes_threads
from teola_plugin.adapters.planned_queries import log_fallback
from teola_plugin.adapters.thread_safety import ThreadSafety
from teola_plugin.runtime.claims import Caller
from teola_plugin.runtime.provider_calls import CallScope, ProviderCallTable
from teola_plugin.runtime.query_run import during
from teola_plugin.runtime.threads import daemon_threads
from teola_plugin.shims.llamaindex.copies import clone, run_without_waiting
from teola_plugin.shims.llamaindex.interceptors import (
    EMBED_BATCH,
    LlamaIndexInvocation,
    body_of,
    embedding_method,
    install,
    intercept_methods,
    live_scopes,
    provider_methods,
    routed_body,
    worker_of,
)
from teola_plugin.shims.llamaindex.models import is_paced
from teola_plugin.shims.llamaindex.records import Unreadable
from teola_plugin.shims.llamaindex.silent_calls import has_own_prompt_code, provider_call_of, silent_body
from teola_plugin.tracer.llamaindex.classes import find_override, is_pool_object

MAX_THREADS = 8
"""Calls of one list that are under way at once; fewer if the model says so by its `num_workers`."""

composite_threads: ContextVar[ThreadSafety | None] = ContextVar("teola_composite_threads", default=None)
"""Set where an accelerated pipeline or index runs: which of the user's own objects several threads may call."""
_title_workers: ContextVar[int] = ContextVar("teola_title_workers", default=1)
"""Calls that `TitleExtractor` may have under way for one document."""


@contextlib.contextmanager
def prefetching(threads: ThreadSafety) -> Iterator[None]:
    """Prefetch, in the body, the calls that composites make one after the other."""
    intercept_batches()
    intercept_methods(
        TitleExtractor, {"extract_titles": _around_extract_titles, "get_title_candidates": _around_title_candidates}
    )
    with during(composite_threads, threads):
        yield


def intercept_batches() -> None:
    """Let the batches of texts that a model embeds be prefetched, until `uninstall`."""
    intercept_methods(
        BaseEmbedding,
        {
            "get_text_embedding_batch": _around_batches,
            "aget_text_embedding_batch": _around_async_batches,
            "__call__": _around_embedding_of_nodes,
            "acall": _around_async_embedding_of_nodes,
        },
    )


class CompositeCalls:
    """The prefetched calls of one list, while the method that makes them runs."""

    def __init__(self, calls: Sequence[LlamaIndexInvocation], workers: int) -> None:
        """`workers`: calls under way at once, the original's own among them."""
        self._table = ProviderCallTable()
        self._targets = frozenset(id(call.target) for call in calls)
        self._waiting, self._workers = deque(calls), workers - 1
        self._context, self._lock = copy_context(), threading.Lock()
        self._scopes: list[CallScope] = []

    @contextlib.contextmanager
    def on_threads(self) -> Iterator[None]:
        """Prefetch on threads while the body runs."""
        with self._claimable():
            daemon_threads().run(self._work, min(self._workers, len(self._waiting)))
            yield

    @contextlib.contextmanager
    def on_loop(self) -> Iterator[None]:
        """Prefetch in tasks of the running loop while the body runs."""
        tasks = [asyncio.create_task(self._awork()) for _ in range(min(self._workers, len(self._waiting)))]
        try:
            with self._claimable():
                yield
        finally:
            for task in tasks:
                task.cancel()

    @contextlib.contextmanager
    def _claimable(self) -> Iterator[None]:
        """Let the method that runs in the body claim the prefetched calls; drop what it did not claim."""
        live_scopes.add(id(self))
        token = original_scope.set((CallScope(self._table, Caller.ORIGINAL, _same), self._targets))
        try:
            yield
        finally:
            original_scope.reset(token)
            with self._lock:
                self._waiting.clear()
                scopes = list(self._scopes)
            for scope in scopes:
                scope.drop()
            self._table.close()
            live_scopes.discard(id(self))

    def _next(self) -> tuple[LlamaIndexInvocation, CallScope] | None:
        """Take the next call that nobody has started; None if there is none left."""
        with self._lock:
            if not self._waiting:
                return None
            scope = CallScope(self._table, Caller.PLANNER, _same, is_offer=True)
            self._scopes.append(scope)
            return self._waiting.popleft(), scope

    def _work(self) -> None:
        """Make calls one after the other, on one of several threads, until none is left or one fails.

        The original meets the error where it claims that call.
        """
        while (claimed := self._next()) is not None:
            call, scope = claimed
            try:
                self._context.copy().run(scope.last_result, call)
            except BaseException:  # the original gets it where it claims the call, and goes no further
                self._stop()

    async def _awork(self) -> None:
        """Make calls as `_work` does, as a task of the running loop."""
        original_scope.set(None)
        while (claimed := self._next()) is not None:
            call, scope = claimed
            try:
                await scope.alast_result(call)
            except asyncio.CancelledError:
                raise
            except BaseException:
                self._stop()

    def _stop(self) -> None:
        with self._lock:
            self._waiting.clear()


def _same(value: Any) -> Any:
    """Return the result itself: the planner does not read it."""
    return value


# ------------------------------------------------------------ batches of texts


def _batch_calls(model: Any, texts: Sequence[str]) -> CompositeCalls | None:
    """Return the calls by which a model embeds texts; None where nothing may be prefetched."""
    threads = composite_threads.get()
    if threads is None or is_paced(model) or not takes_threads(model, threads):
        return None
    if is_pool_object(model) and not getattr(worker_of(model), "is_carried", False):  # its requests go at once
        return None
    try:
        method = embedding_method(type(model))
    except Unreadable:  # it goes its own way
        return None
    workers = min(MAX_THREADS, model.num_workers or MAX_THREADS)
    if workers < 2 or not all(type(text) is str for text in texts):
        return None
    size = model.embed_batch_size
    batches = [tuple(texts[start : start + size]) for start in range(0, len(texts), size)]
    distinct = list(dict.fromkeys(batches if method == EMBED_BATCH else texts))  # of equal calls the first alone
    if len(distinct) < 2:
        return None
    if not install(type(model), (method,)):
        return None
    body = routed_body(model, method, body_of(type(model), method))
    arguments = [(one if isinstance(one, str) else list(one),) for one in distinct[1:]]
    return CompositeCalls([LlamaIndexInvocation(model, method, body, one, {}) for one in arguments], workers)


def _around_batches(original: Any) -> Any:
    """Wrap a model's `get_text_embedding_batch`, so that its later batches are prefetched while the first is embedded.

    On an engine all batches are requested at once; a model of the user's own is called on threads if it allows that.
    """

    @functools.wraps(original)
    def wrapper(self: Any, texts: list[str], *args: Any, **kwargs: Any) -> Any:
        worker = _routed_worker(self)
        if worker is not None:
            write = current_write.get()
            with worker.prefetching(texts, write if write is not None and write.expect(texts) else None):
                return original(self, texts, *args, **kwargs)
        calls = _planned(self, lambda: _batch_calls(self, texts))
        if calls is None:
            return original(self, texts, *args, **kwargs)
        with calls.on_threads():
            return original(self, texts, *args, **kwargs)

    return wrapper


def _around_async_batches(original: Any) -> Any:
    """Wrap a model's `aget_text_embedding_batch` as `_around_batches` does, for models on an engine only."""

    @functools.wraps(original)
    async def wrapper(self: Any, texts: list[str], *args: Any, **kwargs: Any) -> Any:
        worker = _routed_worker(self)
        if worker is None:
            return await original(self, texts, *args, **kwargs)
        write = current_write.get()
        with worker.prefetching(texts, write if write is not None and await write.aexpect(texts) else None):
            return await original(self, texts, *args, **kwargs)

    return wrapper


def _around_embedding_of_nodes(original: Any) -> Any:
    """Wrap a method by which an embedding model embeds nodes: note them for the write that stores rows meanwhile."""

    @functools.wraps(original)
    def wrapper(self: Any, nodes: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        note_nodes_for_write(nodes)
        return original(self, nodes, *args, **kwargs)

    return wrapper


def _around_async_embedding_of_nodes(original: Any) -> Any:
    """Wrap a coroutine method as `_around_embedding_of_nodes` wraps a method."""

    @functools.wraps(original)
    async def wrapper(self: Any, nodes: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        note_nodes_for_write(nodes)
        return await original(self, nodes, *args, **kwargs)

    return wrapper


def _routed_worker(model: Any) -> BatchPrefetching | None:
    """Return the worker that embeds for a model of the user's own; None for a model that does it itself."""
    worker = worker_of(model)
    return worker if isinstance(worker, BatchPrefetching) else None


# ------------------------------------------------------------ titles of nodes


def _title_calls(extractor: Any, nodes: Sequence[Any]) -> CompositeCalls | None:
    """Return the calls by which an extractor asks for titles; None where nothing may be prefetched."""
    workers = _title_workers.get()
    if composite_threads.get() is None or workers < 2 or len(nodes) < 2:
        return None
    llm = extractor.llm
    if type(extractor) is not TitleExtractor or find_override(extractor, TitleExtractor):
        return None
    if is_pool_object(llm) or is_paced(llm) or has_own_prompt_code(llm):
        return None
    try:
        provider_methods(type(llm))
        calls = [_title_call(extractor, node) for node in nodes]
    except Unreadable:  # its calls cannot be told from their events
        return None
    if not all(call.is_async for call in calls):
        return None
    if not install(type(llm), provider_methods(type(llm))):
        return None
    distinct = list({call.key(): call for call in calls}.values())
    return CompositeCalls(distinct[1:], workers)


def _title_call(extractor: TitleExtractor, node: Any) -> LlamaIndexInvocation:
    """Return the call that an extractor makes of its LLM; a copy of the extractor with a recording LLM finds it."""
    llm = extractor.llm

    def run(recorder: Any) -> Any:
        """Run the extractor's own code on a copy, whose LLM records the call instead of making it."""

        async def apredict(*args: Any, **kwargs: Any) -> Any:
            return recorder.predict(*args, **kwargs)

        dry = extractor.model_copy(update={"llm": clone(recorder, apredict=apredict)})
        return run_without_waiting(body_of(TitleExtractor, "get_title_candidates")(dry, [node]))

    method, args, kwargs = provider_call_of(llm, run, is_async=True)
    return LlamaIndexInvocation(llm, method, silent_body(llm, method), args, kwargs)


def _around_extract_titles(original: Any) -> Any:
    """Wrap `extract_titles`, so that the documents share the workers that the extractor allows."""

    @functools.wraps(original)
    async def wrapper(self: Any, nodes_by_doc_id: Mapping[Any, Any]) -> Any:
        with during(_title_workers, self.num_workers // max(1, len(nodes_by_doc_id))):
            return await original(self, nodes_by_doc_id)

    return wrapper


def _around_title_candidates(original: Any) -> Any:
    """Wrap `get_title_candidates`, so that titles of all nodes of a document are prefetched in tasks of the loop."""

    @functools.wraps(original)
    async def wrapper(self: Any, nodes: list[Any]) -> Any:
        calls = _planned(self, lambda: _title_calls(self, nodes))
        if calls is None:
            return await original(self, nodes)
        with calls.on_loop():
            return await original(self, nodes)

    return wrapper


def _planned(composite: Any, plan: Callable[[], CompositeCalls | None]) -> CompositeCalls | None:
    """Return the prefetched calls that `plan` makes; None, after a log entry, if that fails: the original just runs."""
    try:
        return plan()
    except Exception as error:  # nothing has been called yet: the original tells what is wrong
        log_fallback(error, composite)
        return None
