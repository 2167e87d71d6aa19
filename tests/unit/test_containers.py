"""Tests that containers are read without running user code, using them up or changing them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
from langchain_core.runnables.utils import AddableDict

from teola_plugin.graph import holds, items_of, read_path
from teola_plugin.graph.refs import Slice


class Mine:
    """A container of the user's own, so that each access runs user code."""

    def look(self, *_: Any) -> Any:
        raise AssertionError("user code ran")

    __getitem__ = __len__ = __bool__ = __iter__ = look


class Quiet(list[Any]):
    """A subclass that changes nothing of how it is read."""


class Loud(list[Any]):
    def __len__(self) -> int:
        raise AssertionError("user code ran")


def test_read_path_returns_the_nested_value() -> None:
    given = {"a": [{"b": ("c", "d", "e")}]}
    assert read_path(given, ("a", 0, "b", 1)) == "d"
    assert read_path(given, ("a", 0, "b", Slice(1, None))) == ("d", "e")
    for kind in (dict, OrderedDict, AddableDict, MappingProxyType):
        assert read_path(kind({"a": Quiet([1])}), ("a", 0)) == 1
    with pytest.raises(KeyError):
        read_path({}, ("a",))


def test_read_path_adds_no_key_to_a_defaultdict() -> None:
    grows: defaultdict[str, list[int]] = defaultdict(list, here=[1])
    assert read_path(grows, ("here", 0)) == 1
    with pytest.raises(KeyError):
        read_path(grows, ("there",))
    assert list(grows) == ["here"]


@pytest.mark.parametrize("value", [Mine(), UserDict({"a": 1})])
def test_read_path_does_not_run_lookups_of_user_classes(value: Any) -> None:
    with pytest.raises(TypeError, match="code of the user's"):
        read_path(value, ("a",))


def test_items_of_reads_standard_containers() -> None:
    for value in ([1, 2], (1, 2), {1: 0, 2: 0}, {1, 2}, deque([1, 2]), range(1, 3), {1: 0, 2: 0}.keys(), Quiet([1, 2])):
        assert items_of(value) == [1, 2]
    assert items_of("ab") == ["a", "b"]


def _made() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("value", [iter([1]), _made(), map(str, [1]), zip([1], strict=True), reversed([1])])
def test_items_of_does_not_consume_iterators(value: Any) -> None:
    with pytest.raises(TypeError, match="once only"):
        items_of(value)
    assert len(list(value)) == 1


@pytest.mark.parametrize("value", [Mine(), Loud([1]), UserList([1])])
def test_items_of_rejects_user_classes_and_non_containers(value: Any) -> None:
    with pytest.raises(TypeError, match="code of the user's"):
        items_of(value)
    with pytest.raises(TypeError):
        items_of(5)


def test_holds_gives_truth_without_running_user_code() -> None:
    assert [holds(value) for value in ("a", "", [0], 0, None, 0.5, Quiet(), object())] == [
        True, False, True, False, False, True, False, True,
    ]  # fmt: skip
    for value in (Mine(), Loud([1])):
        with pytest.raises(TypeError, match="code of the user's"):
            holds(value)
