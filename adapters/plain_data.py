"""Plain data (what JSON has, and tuples): copies of one's own, and snapshots that tell every change."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

_ATOMS = (str, bool, int, type(None))


def own_copy(value: Any) -> Any:
    """A copy that shares nothing that can be changed in place."""
    if type(value) is dict:
        return {key: own_copy(inner) for key, inner in value.items()}
    if type(value) is list:
        return [own_copy(inner) for inner in value]
    return value if type(value) in _ATOMS or type(value) is float else copy.deepcopy(value)


def snapshot(value: Any) -> Hashable:
    """Equal for values that nobody can tell apart: `True`, `1` and `1.0` differ, so do orders of keys.

    Raises `TypeError` for what is no plain data.
    """
    kind = type(value)
    if kind in _ATOMS:
        return kind, value
    if kind is float:
        return kind, value.hex()
    if kind is dict:
        return kind, tuple((snapshot(key), snapshot(inner)) for key, inner in value.items())
    if kind in (list, tuple):
        return kind, tuple(snapshot(inner) for inner in value)
    raise TypeError(f"{kind.__name__} is no plain data")
