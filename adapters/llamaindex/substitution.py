"""Copies of LlamaIndex objects with other parts in them: accelerated ones, or ones that engines of a pool serve.

The originals are never touched; what is not replaced is shared with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.indices.base import BaseIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.response_synthesizers import BaseSynthesizer

from teola_plugin.shims.llamaindex.copies import attributes, with_attributes, with_overlay
from teola_plugin.tracer.llamaindex.classes import is_composite

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

    return with_values(node, {name: _map_values(value, accelerate_part) for name, value in attributes(node).items()})


def replaced(root: Any, change: Callable[[Any], Any | None]) -> Any:
    """Return `root`, or a copy of it in which objects are replaced by what `change` returns; None keeps an object."""
    replacements: dict[int, Any] = {}

    def replace_one(node: Any) -> Any:
        if id(node) not in replacements:
            replacements[id(node)] = node  # a cycle keeps the original
            other = change(node)
            replacements[id(node)] = other if other is not None else _with_parts_replaced(node, replace_one)
        return replacements[id(node)]

    return replace_one(root)


def _with_parts_replaced(node: Any, replace_one: Callable[[Any], Any]) -> Any:
    if not hasattr(node, "__dict__") or isinstance(node, type) or not is_composite(node):
        return node
    return with_values(node, {name: _map_values(value, replace_one) for name, value in attributes(node).items()})


def _map_values(value: Any, replace_one: Callable[[Any], Any]) -> Any:
    """Return `value` with its elements replaced; the very same object if none is."""
    if type(value) in (list, tuple):
        items = [_map_values(item, replace_one) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    if type(value) is dict:
        entries = {key: _map_values(item, replace_one) for key, item in value.items()}
        return value if all(entries[key] is value[key] for key in value) else entries
    return replace_one(value)


def with_values(node: Any, values: Mapping[str, Any]) -> Any:
    """Return `node`, or if attributes differ, a copy with these `values` that shares the original's state.

    LlamaIndex's own engines, retrievers and synthesizers have no state, so a plain copy is enough for them. Bound
    methods among the attributes are bound to the copy.
    """
    changes = {name: values[name] for name, value in attributes(node).items() if values[name] is not value}
    if not changes:
        return node
    if isinstance(node, _STATEFUL) or not type(node).__module__.startswith("llama_index."):
        return with_overlay(node, changes)
    return with_attributes(node, values)


_STATEFUL = (BaseIndex, IngestionPipeline)
