"""Finds the objects that keep a text alive, by following references."""

from __future__ import annotations

import gc
import types
from collections import deque
from typing import Any

_SKIPPED_TYPES = (type, types.ModuleType, types.FrameType, types.BuiltinFunctionType, types.CodeType)
_LEAF_TYPES = (str, bytes, int, float)


def reference_paths(mark: str, *roots: Any) -> list[str]:
    """Return how `roots` refer to each text (or bytes) that contains `mark`.

    Each item names the types on the path of references, from the text back to a root.
    """
    gc.collect()
    parents: dict[int, Any] = {id(root): None for root in roots}
    queue: deque[Any] = deque(roots)
    paths, raw = [], mark.encode()
    while queue:
        item = queue.popleft()
        if (isinstance(item, str) and mark in item) or (isinstance(item, bytes) and raw in item):
            paths.append(_path_of(item, parents))
        if isinstance(item, (*_LEAF_TYPES, *_SKIPPED_TYPES)):
            continue
        for inner in _references_of_function(item) if isinstance(item, types.FunctionType) else gc.get_referents(item):
            if id(inner) not in parents and not isinstance(inner, _SKIPPED_TYPES):
                parents[id(inner)] = item
                queue.append(inner)
    return paths


def _references_of_function(function: types.FunctionType) -> list[Any]:
    """Return what a function refers to, without the globals of its module."""
    return [function.__closure__, function.__defaults__, function.__kwdefaults__, function.__dict__]


def _path_of(item: Any, parents: dict[int, Any]) -> str:
    names = [repr(item)[:60]]
    while (item := parents[id(item)]) is not None and len(names) < 12:
        names.append(type(item).__qualname__)
    return " < ".join(names)
