"""Async entries whose own code calls models in the sync way: on a thread, so that the loop goes on meanwhile.

What is called, in which order and under which spans, is as it always was. Only for models of the pool, which may be
called from any thread.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.query_engine import (
    MultiStepQueryEngine,
    RetryGuidelineQueryEngine,
    RetryQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.query_engine.retry_source_query_engine import RetrySourceQueryEngine
from llama_index_instrumentation import get_dispatcher

from teola_plugin.tracer.llamaindex.known import changed, inside, is_leaf


async def _transformed(self: TransformQueryEngine, query_bundle: Any) -> Any:
    """The transform asks its LLM before anything is awaited."""
    run = self._query_transform.run
    query_bundle = await asyncio.to_thread(run, query_bundle, metadata=self._transform_metadata)
    return await self._query_engine.aquery(query_bundle)


async def _in_a_thread(self: Any, query_bundle: Any) -> Any:
    """Its async way is its sync way."""
    return await asyncio.to_thread(self._query, query_bundle)


async def _stepped(self: MultiStepQueryEngine, query_bundle: Any) -> Any:
    """Only its last answer is awaited: it stalls a loop of its own. A stream belongs to the loop that reads it."""
    work = inspect.unwrap(MultiStepQueryEngine._aquery)(self, query_bundle)
    if self._response_synthesizer._streaming:
        return await work
    return await asyncio.to_thread(asyncio.run, work)


_ASYNC: dict[type, Callable[[Any, Any], Awaitable[Any]]] = {
    TransformQueryEngine: _transformed,
    MultiStepQueryEngine: _stepped,
    RetryQueryEngine: _in_a_thread,
    RetryGuidelineQueryEngine: _in_a_thread,
    RetrySourceQueryEngine: _in_a_thread,
}


def unblocked(node: Any) -> Any:
    """`node`, or a copy of it whose `aquery` does not stall the loop."""
    kind = type(node)
    if kind not in _ASYNC or changed(node, kind) or not all(map(is_leaf, _models(node))):
        return node
    made, function = copy.copy(node), _named(_ASYNC[kind])
    spanned: Any = get_dispatcher(kind.__module__).span(function)
    vars(made)["_aquery"] = spanned.__get__(made, kind)
    return made


def _named(function: Callable[[Any, Any], Awaitable[Any]]) -> Any:
    """A function of its own, under the name that its span shall have."""

    async def _aquery(self: Any, query_bundle: Any) -> Any:
        return await function(self, query_bundle)

    return _aquery


def _models(node: Any) -> list[Any]:
    """All models that it may call."""
    held = [one for part in inside(node) for one in vars(part).values()]
    return [one for one in (*held, *inside(node)) if isinstance(one, (BaseLLM, BaseEmbedding))]
