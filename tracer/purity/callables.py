"""What is understood of plain callables without running them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from teola_plugin.tracer.purity.purity import Purity, known_purity


@dataclass(frozen=True, slots=True)
class Keys:
    """`itemgetter(*keys)`: one key gives its value, several give a tuple."""

    keys: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class AttributeGetter:
    """`attrgetter(...)`: run as it is."""

    get: Callable[[Any], Any]


def understood(func: object) -> Keys | AttributeGetter | Purity | None:
    """What `func` reads of its argument, or None: it is user code."""
    if type(func) is FunctionType:
        return known_purity(func)
    if type(func) is operator.attrgetter:
        return AttributeGetter(func)
    if type(func) is operator.itemgetter:
        keys: tuple[object, ...] = func.__reduce__()[1]  # type: ignore[assignment]
        known = tuple(key for key in keys if isinstance(key, (str, int)))
        if len(known) == len(keys):
            return Keys(known)
    return None
