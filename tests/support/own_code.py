"""User code with a side effect, which therefore never counts as pure."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

CALLS: list[str] = []
"""Names of the functions that were called."""


def with_side_effect(func: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the same function with a side effect: each call appends its name to `CALLS`."""

    @wraps(func)
    def run(value: Any) -> Any:
        CALLS.append(func.__name__)
        return func(value)

    return run
