"""Async entries whose own code makes sync calls of models: these run on a thread, so that they do not block the loop.

The calls, their order and their spans are the original's. Only for models of the pool, which may be called from any
thread.
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


async def _query_with_transform(engine: TransformQueryEngine, query: QueryBundle) -> Any:
    """Run the transform, which makes a sync call of its LLM, on a thread."""
    parts = TransformQueryEngineParts.of(engine)
    run = parts.query_transform.run
    query = await asyncio.to_thread(run, query, metadata=parts.transform_metadata)  # type: ignore[arg-type]
    return await parts.query_engine.aquery(query)


async def _query_on_thread(engine: Any, query: QueryBundle) -> Any:
    """Run the sync method on a thread: the engine's `aquery` only calls it."""
    return await asyncio.to_thread(query_below, engine, query)


async def _query_in_steps(engine: MultiStepQueryEngine, query: QueryBundle) -> Any:
    """Run the steps in a loop on a thread: all calls but the last are sync. A stream stays in its reader's loop."""
    answer = multi_step_aquery(engine, query)
    if MultiStepQueryEngineParts.of(engine).streaming:
        return await answer
    return await asyncio.to_thread(asyncio.run, answer)


_NONBLOCKING: dict[type, tuple[type[Parts], Callable[[Any, QueryBundle], Awaitable[Any]]]] = {
    TransformQueryEngine: (TransformQueryEngineParts, _query_with_transform),
    MultiStepQueryEngine: (MultiStepQueryEngineParts, _query_in_steps),
    RetryQueryEngine: (QueryEngineParts, _query_on_thread),
    RetryGuidelineQueryEngine: (QueryEngineParts, _query_on_thread),
    RetrySourceQueryEngine: (QueryEngineParts, _query_on_thread),
}


def nonblocking(node: Any) -> Any:
    """Return `node`, or a copy of it whose `aquery` does not block the loop."""
    kind = type(node)
    if kind not in _NONBLOCKING or find_override(node, kind) or not all(map(is_pool_object, _models(node))):
        return node
    parts, aquery = _NONBLOCKING[kind]
    try:
        parts.of(node)
    except Unreadable:  # an unknown version: it runs as the original does
        return node
    return with_aquery(node, aquery)


def _models(node: Any) -> list[Any]:
    """Return all models that an object may call."""
    attribute_values = [one for part in reachable_objects(node) for one in vars(part).values()]
    return [one for one in (*attribute_values, *reachable_objects(node)) if isinstance(one, (BaseLLM, BaseEmbedding))]
