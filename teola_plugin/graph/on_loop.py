"""Marks for client callables that may run on the pool's loop: small ones of our own, and simple ones on short values.

All others (the user's functions, parsers, packing, splitting, anything on long texts) run in threads, so that they
never hold up other queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Call = TypeVar("_Call", bound=Callable[..., Any])
Measure = Callable[[Any, int], int]
"""`(value, limit)` -> number of characters and items of plain data; more than `limit` for anything else."""
SHORT = 16_384
"""Number of characters and items that a simple callable processes in well under a millisecond."""


def on_loop(call: _Call) -> _Call:
    """Mark a function that is quick for any argument and runs no code but ours."""
    call.teola_on_loop = True  # type: ignore[attr-defined]
    return call


def simple(measure: Measure) -> Callable[[_Call], _Call]:
    """Mark a function whose time is proportional to the size of its argument, such as filling in a prompt.

    For short arguments a thread would cost more than the call itself.
    """

    def mark(call: _Call) -> _Call:
        call.teola_measure = measure  # type: ignore[attr-defined]
        return call

    return mark


def own_thread(call: _Call) -> _Call:
    """Mark a function of the user's that may take long, and that no other code of its query waits for."""
    call.teola_own_thread = True  # type: ignore[attr-defined]
    return call


def has_own_thread(call: object) -> bool:
    """Return True if the function was marked by `own_thread`."""
    return bool(getattr(call, "teola_own_thread", False))


def runs_on_loop(call: object, argument: object = None) -> bool:
    """Return True if the function may run on the loop with this argument; without one, with any argument."""
    if getattr(call, "teola_on_loop", False):
        return True
    measure: Measure | None = getattr(call, "teola_measure", None)
    return measure is not None and argument is not None and measure(argument, SHORT) <= SHORT
