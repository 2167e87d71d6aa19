"""Which client callables may run on the pool's loop: small ones of our own, and simple ones on short values.

All others (the user's functions, parsers, packing, splitting, whatever gets long texts) run in threads: whatever one of
them does, other queries go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Call = TypeVar("_Call", bound=Callable[..., Any])
Measure = Callable[[Any, int], int]
"""(value, most) -> characters and items of plain data; more than `most` for anything else."""
SHORT = 16_384
"""Characters and items that a simple callable deals with in well under a millisecond."""


def on_loop(call: _Call) -> _Call:
    """Marks a function that does little, whatever it is given, and runs no code but ours."""
    call.teola_on_loop = True  # type: ignore[attr-defined]
    return call


def simple(measure: Measure) -> Callable[[_Call], _Call]:
    """Marks a function whose time is in proportion to the plain data that it is given: a prompt that is filled in, a
    function of one walk. A thread would cost it more time than it takes."""

    def mark(call: _Call) -> _Call:
        call.teola_measure = measure  # type: ignore[attr-defined]
        return call

    return mark


def own_thread(call: _Call) -> _Call:
    """Marks a function of the user's that may take its time, and that no other code of its query has to wait for."""
    call.teola_own_thread = True  # type: ignore[attr-defined]
    return call


def has_own_thread(call: object) -> bool:
    """Whether it is marked so."""
    return bool(getattr(call, "teola_own_thread", False))


def runs_on_loop(call: object, given: object = None) -> bool:
    """Whether a call with this value may run there; without one, with any value."""
    if getattr(call, "teola_on_loop", False):
        return True
    measure: Measure | None = getattr(call, "teola_measure", None)
    return measure is not None and given is not None and measure(given, SHORT) <= SHORT
