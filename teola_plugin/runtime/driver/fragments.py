"""What decides how a fragment is instantiated: items and the predictions that equal them, conditions."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from teola_plugin.graph import PrimitiveKind, Ref, holds, items_of
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.scheduling.graph_events import Expand, Expanded


def expansion(run: QueryRun, order: Expand, now: float) -> Expanded:
    """The answer to `order`. Raises what reading the value or its items raises."""
    p = order.primitive
    value = run.store.read(order.reads)
    if p.kind in (PrimitiveKind.BRANCH, PrimitiveKind.LOOP):
        return Expanded(now, run.id, p.id, int(holds(value)))
    items = items_of(value)
    return Expanded(now, run.id, p.id, len(items), _matches(run, items, order.predicted))


def _matches(run: QueryRun, items: list[Any], predicted: tuple[Ref, ...]) -> tuple[int | None, ...]:
    """Which prediction equals each item; its own place first. A prediction serves one item."""
    guesses = {i: run.store.read(ref) for i, ref in enumerate(predicted) if ref.producer in run.store}
    types = {type(guess) for guess in guesses.values()}
    alike: dict[Hashable, dict[int, Any]] = {}
    for place, guess in guesses.items():
        alike.setdefault(_kind(guess), {})[place] = guess
    matches: list[int | None] = []
    for index, item in enumerate(items):
        mine = alike.get(_kind(item), {}) if type(item) in types else {}
        order = (index, *mine) if index in mine else mine
        hit = next((i for i in order if type(mine[i]) is type(item) and mine[i] == item), None)
        matches.append(hit)
        if hit is not None:
            del mine[hit]
    return tuple(matches)


def _kind(value: Any) -> Hashable:
    """The same for values of one type that are equal, and rarely for others: there may be thousands of them."""
    try:
        return type(value), hash(_frozen(value))
    except Exception:  # not even hashable: compared with all of its type
        return type(value), None


def _frozen(value: Any) -> Hashable:
    """Lists and dictionaries, which is what lists of items hold, by what is in them."""
    if type(value) is dict:
        return frozenset([(key, _frozen(inner)) for key, inner in value.items()])
    return tuple([_frozen(inner) for inner in value]) if type(value) is list else value
