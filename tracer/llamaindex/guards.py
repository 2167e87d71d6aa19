"""What a plan rests on: while every guard holds, the object is what it was when traced, and its plan is used again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from teola_plugin.shims.llamaindex.records import Parts, Unreadable


@dataclass(frozen=True, slots=True)
class AttributeGuard:
    """An attribute that the plan rests on."""

    node: Any
    name: str
    value: Any

    @property
    def holds(self) -> bool:
        return _same(getattr(self.node, self.name, None), self.value)


@dataclass(frozen=True, slots=True)
class PartsGuard:
    """What an object was made of when it was read."""

    node: Any
    parts: Parts

    @property
    def holds(self) -> bool:
        try:
            now = type(self.parts).of(self.node)
        except Unreadable:
            return False
        return all(_same(getattr(now, one.name), getattr(self.parts, one.name)) for one in fields(now))


@dataclass(frozen=True, slots=True)
class ElementsGuard:
    """A list or dictionary that the plan rests on: its elements, in order."""

    container: Any
    elements: tuple[Any, ...]

    @property
    def holds(self) -> bool:
        now = tuple(_elements(self.container))
        return len(now) == len(self.elements) and all(a is b for a, b in zip(now, self.elements, strict=True))


Guard = AttributeGuard | PartsGuard | ElementsGuard


def _same(now: Any, before: Any) -> bool:
    return now is before or (isinstance(now, (str, int, float, bool)) and bool(now == before))


def _elements(container: Any) -> Sequence[Any]:
    return list(container.values()) if isinstance(container, Mapping) else container


def guards_of(node: Any, parts: Parts) -> Iterator[Guard]:
    """Of an object and the lists in it."""
    yield PartsGuard(node, parts)
    for value in (getattr(parts, one.name) for one in fields(parts)):
        if isinstance(value, (list, tuple, dict)):
            yield ElementsGuard(value, tuple(_elements(value)))
