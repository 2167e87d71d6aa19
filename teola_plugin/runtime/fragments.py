"""What decides how a fragment is instantiated: items and the predictions that equal them, conditions."""

from __future__ import annotations

from typing import Any

from teola_plugin.graph import PrimitiveKind, Ref
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.scheduling.events import Expand, Expanded


def expansion(run: QueryRun, order: Expand, now: float) -> Expanded:
    """The answer to `order`. Raises what reading the value or making a list of it raises."""
    p = order.primitive
    value = run.store.read(order.reads)
    if p.kind in (PrimitiveKind.BRANCH, PrimitiveKind.LOOP):
        return Expanded(now, run.id, p.id, int(bool(value)))
    items = list(value)
    return Expanded(now, run.id, p.id, len(items), _matches(run, items, order.predicted))


def _matches(run: QueryRun, items: list[Any], predicted: tuple[Ref, ...]) -> tuple[int | None, ...]:
    """Which prediction equals each item; its own place first. A prediction serves one item."""
    guesses = {i: run.store.read(ref) for i, ref in enumerate(predicted) if ref.producer in run.store}
    matches: list[int | None] = []
    for index, item in enumerate(items):
        order = [index, *guesses] if index in guesses else list(guesses)
        hit = next((i for i in order if type(guesses[i]) is type(item) and guesses[i] == item), None)
        matches.append(hit)
        if hit is not None:
            del guesses[hit]
    return tuple(matches)
