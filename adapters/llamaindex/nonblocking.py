"""Async entries whose own code calls models in the sync way: on a thread, so that the loop goes on meanwhile.

What is called, in which order and under which spans, is as it always was. Only for models of the pool, which may be
called from any thread.
"""

from __future__ import annotations

import asyncio
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
from llama_index.core.schema import QueryBundle

from teola_plugin.shims.llamaindex.copies import attributes
from teola_plugin.shims.llamaindex.engines import (
    MultiStepQueryEngineParts,
    QueryEngineParts,
    TransformQueryEngineParts,
    multi_step_aquery,
    query_below,
    with_aquery,
)
from teola_plugin.shims.llamaindex.records import Parts, Unreadable
from teola_plugin.tracer.llamaindex.classes import find_override, is_pool_object, reachable_objects


async def _transformed(engine: TransformQueryEngine, query: QueryBundle) -> Any:
    """The transform asks its LLM before anything is awaited."""
    parts = TransformQueryEngineParts.of(engine)
    run = parts.query_transform.run
    query = await asyncio.to_thread(run, query, metadata=parts.transform_metadata)  # type: ignore[arg-type]
    return await parts.query_engine.aquery(query)


async def _in_a_thread(engine: Any, query: QueryBundle) -> Any:
    """Its async way is its sync way."""
    return await asyncio.to_thread(query_below, engine, query)


async def _stepped(engine: MultiStepQueryEngine, query: QueryBundle) -> Any:
    """Only its last answer is awaited: it stalls a loop of its own. A stream belongs to the loop that reads it."""
    work = multi_step_aquery(engine, query)
    if MultiStepQueryEngineParts.of(engine).streaming:
        return await work
    return await asyncio.to_thread(asyncio.run, work)


_ASYNC: dict[type, tuple[type[Parts], Callable[[Any, QueryBundle], Awaitable[Any]]]] = {
    TransformQueryEngine: (TransformQueryEngineParts, _transformed),
    MultiStepQueryEngine: (MultiStepQueryEngineParts, _stepped),
    RetryQueryEngine: (QueryEngineParts, _in_a_thread),
    RetryGuidelineQueryEngine: (QueryEngineParts, _in_a_thread),
    RetrySourceQueryEngine: (QueryEngineParts, _in_a_thread),
}


def nonblocking(node: Any) -> Any:
    """`node`, or a copy of it whose `aquery` does not stall the loop."""
    kind = type(node)
    if kind not in _ASYNC or find_override(node, kind) or not all(map(is_pool_object, _models(node))):
        return node
    parts, function = _ASYNC[kind]
    try:
        parts.of(node)
    except Unreadable:  # another version: its own way is the only one
        return node
    return with_aquery(node, function)


def _models(node: Any) -> list[Any]:
    """All models that it may call."""
    held = [one for part in reachable_objects(node) for one in attributes(part).values()]
    return [one for one in (*held, *reachable_objects(node)) if isinstance(one, (BaseLLM, BaseEmbedding))]
