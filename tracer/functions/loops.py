"""What is done with each item of a list that is made at run time: a MAP, whose body is walked once."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from teola_plugin.graph import ITEM, Attributes, Component, Ref, Role
from teola_plugin.tracer.draft import DERIVED, Span
from teola_plugin.tracer.functions.composing import spread
from teola_plugin.tracer.functions.machine import Walker
from teola_plugin.tracer.functions.values import (
    UNKNOWN_VALUE,
    Built,
    Coming,
    Computed,
    Fields,
    Series,
    Spread,
    Symbol,
    Text,
)
from teola_plugin.tracer.symbols import NotUnderstood, Prompted

UNROLLED = 16
"""Items of a list at hand that are walked one by one."""
_RESERVED = ("items", "item", "input", "carry")
Each = Callable[[Walker, Symbol], Symbol]


def mapped(walk: Walker, items: Symbol, each: Each, *, beside: bool) -> Symbol:
    """The list of what `each` makes of the items; `beside` where plain code takes one after the other."""
    known = spread(items)
    if len(known) <= UNROLLED and not any(isinstance(one, Spread) for one in known):
        return Series(tuple(each(walk, one) for one in known if not isinstance(one, Spread)))
    found = Items(walk, items)
    made = each(found.body, Ref(ITEM))
    return found.holder(made, beside=beside)


@dataclass(slots=True)
class Items:
    """Items of a list that is made at run time, and the body of what is done with each."""

    outer: Walker
    items: Symbol
    inputs: dict[str, Ref] = field(default_factory=dict)
    """What the body reads of the function around it."""
    body: Walker = field(init=False)

    def __post_init__(self) -> None:
        self.body = self.outer.body(self._read)

    def _read(self, name: str) -> Symbol:
        return self._captured(self.outer.frame.read(name))

    def _captured(self, symbol: Symbol) -> Symbol:
        """The symbol, as the body reads it."""
        if isinstance(symbol, Ref):
            return self._ref(symbol)
        if isinstance(symbol, Computed):
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
            return Built(symbol.kind, {k: self._captured(v) for k, v in symbol.fields.items()})
        if isinstance(symbol, Prompted):
            return self._ref(self.outer.ref(symbol))
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

    def holder(self, made: Symbol, *, beside: bool) -> Symbol:
        """The MAP, where its body asks engines for anything."""
        walk, body = self.outer, self.body
        try:
            wanted = body.ref(made)
        except NotUnderstood:
            wanted = None
        output = body.finished(wanted)
        found: Symbol = UNKNOWN_VALUE
        if output is not None:
            try:
                name = walk.draft.name(f"{walk.name}.each", *DERIVED)
                items = walk.ref(_listed(self.items))
            except NotUnderstood:
                return self._after(found)
            template = body.draft.template(output[0], name)
            walk.draft.absorb(body.draft)
            inputs = (("items", items), *self.inputs.items())
            said = Attributes(beside=beside)
            component = Component(name, Role.MAP, inputs, body=template, attributes=said)
            ref = walk.draft.add(component)
            walk.emitted(Span((name,), (name,)))
            found = ref if output[1] else UNKNOWN_VALUE
        return self._after(found)

    def _after(self, found: Symbol) -> Symbol:
        if self.body.runs_user_code:
            self.outer.user_code()
        return found


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


def _listed(items: Symbol) -> Symbol:
    """What an expression gives may be an iterator."""
    if not isinstance(items, Computed) or items.ref is not None:
        return items
    code = ast.Call(ast.Name("list", ast.Load()), [items.code], [])
    return Computed(code, items.refs, items.objects)
