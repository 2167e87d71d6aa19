"""Finds the objects that keep a text alive, by following references."""

from __future__ import annotations

import gc
import types
from collections import deque
from typing import Any

_PASSED = (type, types.ModuleType, types.FrameType, types.BuiltinFunctionType, types.CodeType)
_LAST = (str, bytes, int, float)


def reference_paths(mark: str, *roots: Any) -> list[str]:
    """Return how `roots` refer to each text (or bytes) that contains `mark`.

    Each item names the types on the path of references, from the text back to a root.
    """
    gc.collect()
    came: dict[int, Any] = {id(root): None for root in roots}
    ways: deque[Any] = deque(roots)
    found, raw = [], mark.encode()
    while ways:
        one = ways.popleft()
        if (isinstance(one, str) and mark in one) or (isinstance(one, bytes) and raw in one):
            found.append(_told(one, came))
        if isinstance(one, (*_LAST, *_PASSED)):
            continue
        for inner in _of_function(one) if isinstance(one, types.FunctionType) else gc.get_referents(one):
            if id(inner) not in came and not isinstance(inner, _PASSED):
                came[id(inner)] = one
                ways.append(inner)
    return found


def _of_function(one: types.FunctionType) -> list[Any]:
    """Return what a function refers to, without the globals of its module."""
    return [one.__closure__, one.__defaults__, one.__kwdefaults__, one.__dict__]


def _told(one: Any, came: dict[int, Any]) -> str:
    way = [repr(one)[:60]]
    while (one := came[id(one)]) is not None and len(way) < 12:
        way.append(type(one).__qualname__)
    return " < ".join(way)
