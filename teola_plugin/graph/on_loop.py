"""Which client callables may run on the pool's loop: those of our own that are small and bounded.

All others (the user's functions, parsers, prompts, packing, splitting) run in threads: whatever one of them does, other
queries go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Call = TypeVar("_Call", bound=Callable[..., Any])


def on_loop(call: _Call) -> _Call:
    """Marks a function that does little, whatever it is given, and runs no code but ours."""
    call.teola_on_loop = True  # type: ignore[attr-defined]
    return call


def runs_on_loop(call: object) -> bool:
    return bool(getattr(call, "teola_on_loop", False))
