"""User code that nobody can see through."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

CALLS: list[str] = []
"""What was called: a side effect."""


def own(func: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function, but with a side effect, so that it can never count as pure."""

    @wraps(func)
    def run(value: Any) -> Any:
        CALLS.append(func.__name__)
        return func(value)

    return run
