"""What a plan rests on: while every guard holds, the object is what it was when traced, and its plan is used again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.shims.llamaindex.records import Parts, Unreadable

Read = Callable[[Any], Any]


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
    values: tuple[tuple[Read, Any], ...]
    """How each of its parts is read, and what it was."""

    @property
    def holds(self) -> bool:
        try:
            return all(_same(read(self.node), before) for read, before in self.values)
        except Unreadable:
            return False


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
    values = tuple((read, getattr(parts, name)) for name, read in parts.readers())
    yield PartsGuard(node, values)
    for _, value in values:
        if isinstance(value, (list, tuple, dict)):
            yield ElementsGuard(value, tuple(_elements(value)))
