"""Tests of which prefetched instance serves which item of a list."""

from __future__ import annotations

import random
from typing import Any, cast

from teola_plugin.graph import Fragment, Graph, Primitive, PrimitiveKind, Ref, named
from teola_plugin.runtime.driver.graph_driver import expansion
from teola_plugin.runtime.query_run import QueryRun, QueryStore
from teola_plugin.scheduling.events import Expand
from tests.support.steps import growth

K = PrimitiveKind
EACH = Graph([Primitive("e", K.CALL, inputs=named(x=Ref("$item")))], Ref("e"))
MAP = Primitive("m", K.MAP, inputs=named(items=Ref("$items")), fragment=Fragment(EACH, Ref("e")))


class Run:
    """The parts of a live query that reading values needs."""

    def __init__(self, items: list[Any], predicted: list[Any]) -> None:
        self.id = "q"
        self.store = QueryStore({"items": items})
        for i, value in enumerate(predicted):
            self.store.put(f"p{i}", value)


def matches(items: list[Any], predicted: list[Any], missing: int = 0) -> tuple[int | None, ...]:
    refs = tuple(Ref(f"p{i}") for i in range(len(predicted) + missing))
    order = Expand("q", MAP, Ref("$items"), refs)
    return expansion(cast(QueryRun, Run(items, predicted)), order, 0.0).matches


def by_the_book(items: list[Any], predicted: list[Any]) -> tuple[int | None, ...]:
    """Return the instance at the item's own position, or else the first that no item has."""
    left = dict(enumerate(predicted))
    found: list[int | None] = []
    for index, item in enumerate(items):
        order = [index, *left] if index in left else list(left)
        hit = next((i for i in order if type(left[i]) is type(item) and left[i] == item), None)
        found.append(hit)
        left.pop(hit, None)  # type: ignore[arg-type]
    return tuple(found)


def test_each_item_gets_the_prediction_that_equals_it() -> None:
    assert matches(["a", "b"], ["b", "a"]) == (1, 0)
    assert matches(["a", "a", "b"], ["a", "x", "a"]) == (0, 2, None)
    assert matches([1, True, 1.0], [1.0, 1, True]) == (1, 2, 0)
    assert matches([{"q": ["a", 1]}, {"q": ["b"]}], [{"q": ["b"]}, {"q": ["a", 1.0]}]) == (1, 0)
    assert matches(["a"], ["a"], missing=2) == (0,)


def test_unhashable_values_are_compared_one_by_one() -> None:
    assert matches([bytearray(b"a"), {"s": {1}}], [{"s": {1}}, bytearray(b"a")]) == (1, 0)


class Hashed:
    """An item whose comparison is the user's own code."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("user code ran")

    def __hash__(self) -> int:
        raise AssertionError("user code ran")


def test_unpredicted_items_are_not_compared() -> None:
    assert matches([Hashed(), "a"], []) == (None, None)
    assert matches([Hashed(), "a"], ["x", "a"]) == (None, 1)


def test_matching_equals_item_by_item_comparison() -> None:
    values: list[Any] = ["a", "b", 1, 1.0, True, None, ["a"], [1], [True], {"k": 1}, {"k": 1.0}, {"k": ["a"]}, (1, 2)]
    for seed in range(300):
        rng = random.Random(seed)
        items, predicted = ([rng.choice(values) for _ in range(rng.randrange(9))] for _ in range(2))
        assert matches(items, predicted) == by_the_book(items, predicted)


def test_matching_wrong_predictions_takes_linear_time() -> None:
    def wrong(width: int) -> None:
        assert set(matches([{"q": f"a{i}"} for i in range(width)], [{"q": f"b{i}"} for i in range(width)])) == {None}

    assert growth(wrong, 50) < 1.3
