"""What a call is given."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from teola_plugin.tracer.functions.composing import spread
from teola_plugin.tracer.functions.machine import Walker
from teola_plugin.tracer.functions.values import Fields, Item, Known, Spread, Symbol, known_object


@dataclass(frozen=True, slots=True)
class Arguments:
    """In the order of the call, and by name."""

    given: tuple[Item, ...]
    named: Mapping[str, Symbol]
    whole: bool = True
    """False where there may be others."""

    @property
    def single(self) -> list[Symbol] | None:
        """Those without a name, one by one; None where a list of unknown length is among them."""
        found = [one for one in self.given if not isinstance(one, Spread)]
        return found if len(found) == len(self.given) else None

    def first(self, name: str, place: int = 0) -> Symbol | None:
        """The argument of that name, which may be given at that place."""
        if name in self.named:
            return self.named[name]
        found = self.given[place] if place < len(self.given) else None
        return None if found is None or any(isinstance(one, Spread) for one in self.given[: place + 1]) else found  # type: ignore[return-value]

    @staticmethod
    def of(walk: Walker, node: ast.Call) -> Arguments:
        given: list[Item] = []
        for one in node.args:
            given += spread(walk.evaluate(one.value)) if isinstance(one, ast.Starred) else [walk.evaluate(one)]
        named: dict[str, Symbol] = {}
        whole = True
        for keyword in node.keywords:
            value = walk.evaluate(keyword.value)
            if keyword.arg is not None:
                named[keyword.arg] = value
                continue
            found = _keywords(value)
            named |= found or {}
            whole = whole and found is not None
        return Arguments(tuple(given), named, whole)


def _keywords(value: Symbol) -> Mapping[str, Symbol] | None:
    """Of `**value`."""
    known, found = known_object(value)
    if isinstance(value, Fields) and value.base is None:
        return value.items
    if known and type(found) is dict and all(type(key) is str for key in found):
        return {key: Known(one) for key, one in found.items()}
    return None
