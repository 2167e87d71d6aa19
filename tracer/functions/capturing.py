"""Bodies that run once for each item, or for one answer of a condition: what they read of the function around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from teola_plugin.graph import Ref
from teola_plugin.tracer.functions.machine import Walker
from teola_plugin.tracer.functions.values import (
    UNKNOWN_VALUE,
    Built,
    Coming,
    Computed,
    Defined,
    Fields,
    Series,
    Spread,
    Symbol,
    Text,
)
from teola_plugin.tracer.symbols import NotUnderstood, Prompted

_RESERVED = ("items", "item", "input", "carry", "condition", "init")


@dataclass(slots=True)
class Captures:
    """What bodies of one holder read, each by the name of one of its inputs."""

    outer: Walker
    inputs: dict[str, Ref] = field(default_factory=dict)

    def body(self) -> Walker:
        return self.outer.body(self._read)

    def _read(self, name: str) -> Symbol:
        symbol = self.outer.frame.read(name)
        return UNKNOWN_VALUE if self.outer.in_place.has(symbol) else self._captured(symbol)

    def changed_in(self, body: Walker) -> bool:
        """What the body changes in place of what it reads is not known here any more. Whether it changes its item."""
        return any([True for _ in self.outer.in_place.of_body(body.in_place, self.inputs)])

    def _captured(self, symbol: Symbol) -> Symbol:
        """The symbol, as a body reads it."""
        if isinstance(symbol, Ref):
            return self._ref(symbol)
        if isinstance(symbol, (Computed, Prompted)):
            try:
                return self._ref(self.outer.ref(symbol))
            except NotUnderstood:
                return UNKNOWN_VALUE
        if isinstance(symbol, Text):
            return Text(tuple(p if isinstance(p, str) else self._captured(p) for p in symbol.pieces))
        if isinstance(symbol, Series):
            items = (Spread(self._captured(i.of)) if isinstance(i, Spread) else self._captured(i) for i in symbol.items)
            return Series(tuple(items), symbol.kind)
        if isinstance(symbol, Fields):
            base = None if symbol.base is None else self._ref(symbol.base)
            return replace(symbol, items=_Later(symbol.items, self._captured), base=base)
        if isinstance(symbol, Built):
            return Built(symbol.kind, _Later(symbol.fields, self._captured))
        if isinstance(symbol, Defined):
            read = symbol.read
            return replace(symbol, read=lambda name: self._captured(read(name)))
        return UNKNOWN_VALUE if isinstance(symbol, Coming) else symbol

    def _ref(self, ref: Ref) -> Ref:
        for name, known in self.inputs.items():
            if known == ref:
                return Ref(f"${name}")
        last = next((part for part in reversed(ref.path) if isinstance(part, str)), ref.producer.strip("$"))
        base = "".join(c if c.isalnum() or c == "_" else "_" for c in last)
        base = f"{base}_" if base in _RESERVED or base.startswith("part") else base
        name, count = base, 1
        while name in self.inputs:
            count += 1
            name = f"{base}{count}"
        self.inputs[name] = ref
        return Ref(f"${name}")


@dataclass(frozen=True, slots=True)
class _Later(Mapping[str, Symbol]):
    """Captured one by one, as they are read."""

    items_: Mapping[str, Symbol]
    captured: Callable[[Symbol], Symbol]

    def __getitem__(self, key: str) -> Symbol:
        return self.captured(self.items_[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)
