"""Copies of LlamaIndex objects: with accelerated parts in them, and with async entries that do not block the loop.

The originals are never touched; what is not replaced is shared with them. The own code of some async entries makes sync
calls of models: in copies of these it runs on a thread. The calls, their order and their spans are the original's. Only
for models of the pool, which may be called from any thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.query_engine import (
    MultiStepQueryEngine,
    RetryGuidelineQueryEngine,
    RetryQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.query_engine.retry_source_query_engine import RetrySourceQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import QueryBundle

from teola_plugin.shims.llamaindex.copies import with_attributes
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

Accelerate = Callable[[Any], Any]
"""Returns a part, accelerated if that gains anything."""
PARTS = (BaseQueryEngine, BaseRetriever, BaseSynthesizer)
"""Classes of parts that can be accelerated by themselves."""


def with_parts(node: Any, lowered: frozenset[int], accelerate: Accelerate) -> Any:
    """Return `node`, or a copy of it whose engines, retrievers and synthesizers are accelerated.

    `lowered`: ids of objects that the graph contains. These are not accelerated, but their own parts may be.
    """
    if not type(node).__module__.startswith("llama_index.core.") or not isinstance(vars(node), dict):
        return node  # the user's own class may do anything with its parts

    def accelerate_part(value: Any) -> Any:
        if not isinstance(value, PARTS):
            return value
        return with_parts(value, lowered, accelerate) if id(value) in lowered else accelerate(value)

    values = {name: _map_values(value, accelerate_part) for name, value in vars(node).items()}
    if all(values[name] is value for name, value in vars(node).items()):
        return node
    return with_attributes(node, values)  # bound methods among the attributes are bound to the copy


def _map_values(value: Any, replace_one: Callable[[Any], Any]) -> Any:
    """Return `value` with its elements replaced; the very same object if none is."""
    if type(value) in (list, tuple):
        items = [_map_values(item, replace_one) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    if type(value) is dict:
        entries = {key: _map_values(item, replace_one) for key, item in value.items()}
        return value if all(entries[key] is value[key] for key in value) else entries
    return replace_one(value)


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
