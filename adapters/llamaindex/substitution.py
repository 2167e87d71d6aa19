"""Copies of LlamaIndex objects with accelerated parts in them.

The originals are never touched; what is not replaced is shared with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.response_synthesizers import BaseSynthesizer

from teola_plugin.shims.llamaindex.copies import with_attributes

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
