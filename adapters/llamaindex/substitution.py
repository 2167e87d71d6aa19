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
"""A part -> the same part, accelerated if that is of any use."""
PARTS = (BaseQueryEngine, BaseRetriever, BaseSynthesizer)
"""What can be accelerated by itself."""


def with_parts(node: Any, known: frozenset[int], accelerate: Accelerate) -> Any:
    """`node`, or a copy of it whose engines, retrievers and synthesizers are accelerated, but for the `known` ones.

    What those are made of need not all be known.
    """
    if not type(node).__module__.startswith("llama_index.core.") or not isinstance(vars(node), dict):
        return node  # a class of the user's own may do anything with its parts

    def one(value: Any) -> Any:
        if not isinstance(value, PARTS):
            return value
        return with_parts(value, known, accelerate) if id(value) in known else accelerate(value)

    return with_values(node, {name: _mapped(value, one) for name, value in attributes(node).items()})


def replaced(root: Any, change: Callable[[Any], Any | None]) -> Any:
    """`root`, or a copy of it in which every object for which `change` gives another has that in its place."""
    made: dict[int, Any] = {}

    def one(node: Any) -> Any:
        if id(node) not in made:
            made[id(node)] = node  # a cycle keeps the original
            other = change(node)
            made[id(node)] = other if other is not None else _inside(node, one)
        return made[id(node)]

    return one(root)


def _inside(node: Any, one: Callable[[Any], Any]) -> Any:
    if not hasattr(node, "__dict__") or isinstance(node, type) or not is_composite(node):
        return node
    return with_values(node, {name: _mapped(value, one) for name, value in attributes(node).items()})


def _mapped(value: Any, one: Callable[[Any], Any]) -> Any:
    """`value` with its elements changed; the very same object when none is."""
    if type(value) in (list, tuple):
        made = [_mapped(item, one) for item in value]
        return value if all(a is b for a, b in zip(made, value, strict=True)) else type(value)(made)
    if type(value) is dict:
        known = {key: _mapped(item, one) for key, item in value.items()}
        return value if all(known[key] is value[key] for key in value) else known
    return one(value)


def with_values(node: Any, values: Mapping[str, Any]) -> Any:
    """Return `node`; where attributes differ, an object of its class and state in which these are others.

    LlamaIndex's own engines, retrievers and synthesizers keep no state: a copy does for them. Its own bound methods are
    the copy's.
    """
    changes = {name: values[name] for name, value in attributes(node).items() if values[name] is not value}
    if not changes:
        return node
    if isinstance(node, _WITH_STATE) or not type(node).__module__.startswith("llama_index."):
        return with_overlay(node, changes)
    return with_attributes(node, values)


_WITH_STATE = (BaseIndex, IngestionPipeline)
