"""What is done with each item of a list that is made at run time: a MAP, whose body is walked once."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field

from teola_plugin.graph import ITEM, Attributes, Component, Ref, Role
from teola_plugin.tracer.draft import DERIVED, Span
from teola_plugin.tracer.functions.capturing import Captures
from teola_plugin.tracer.functions.composing import spread
from teola_plugin.tracer.functions.machine import Walker
from teola_plugin.tracer.functions.values import UNKNOWN_VALUE, Built, Coming, Computed, Sent, Series, Spread, Symbol
from teola_plugin.tracer.symbols import NotUnderstood

UNROLLED = 16
"""Items of a list at hand that are walked one by one."""
Each = Callable[[Walker, Symbol], Symbol]


def mapped(walk: Walker, items: Symbol, each: Each, *, beside: bool = True) -> Symbol:
    """The list of what `each` makes of the items; `beside` where plain code takes one after the other.

    Of coroutines it is a list that comes, and they run side by side.
    """
    known = spread(items)
    if len(known) <= UNROLLED and not any(isinstance(one, Spread) for one in known):
        return Series(tuple(each(walk, one) for one in known if not isinstance(one, Spread)))
    found = Items(walk, items)
    made = each(found.body, Ref(ITEM))
    if isinstance(made, Built) and made.kind.__name__ == "Send":
        return Sent(items, made, found.captures.inputs)
    if isinstance(made, Coming):
        return Coming(found.holder(made.value, beside=False))
    return found.holder(made, beside=beside)


@dataclass(slots=True)
class Items:
    """Items of a list that is made at run time, and the body of what is done with each."""

    outer: Walker
    items: Symbol
    captures: Captures = field(init=False)
    body: Walker = field(init=False)

    def __post_init__(self) -> None:
        self.captures = Captures(self.outer)
        self.body = self.captures.body()

    def holder(self, made: Symbol, *, beside: bool) -> Symbol:
        """The MAP, where its body asks engines for anything."""
        try:
            wanted = self.body.ref(made)
        except NotUnderstood:
            wanted = None
        output = self.body.finished(wanted)
        found: Symbol = UNKNOWN_VALUE
        if output is not None:
            found = self._component(output[0], beside=beside)
            found = found if output[1] else UNKNOWN_VALUE
        if self.captures.changed_in(self.body):
            self.outer.in_place.add(self.items)
        if self.body.runs_user_code:
            self.outer.user_code()
        return found

    def _component(self, output: Ref, *, beside: bool) -> Symbol:
        walk, draft = self.outer, self.body.draft
        try:
            items = walk.ref(listed(self.items))
        except NotUnderstood:
            return UNKNOWN_VALUE
        name = walk.draft.name(f"{walk.name}.each", *DERIVED)
        template = draft.template(output, name)
        walk.draft.absorb(draft)
        inputs = (("items", items), *self.captures.inputs.items())
        said = Attributes(beside=beside)
        made = walk.draft.add(Component(name, Role.MAP, inputs, body=template, attributes=said))
        walk.emitted(Span((name,), (name,)))
        return made


def listed(items: Symbol) -> Symbol:
    """As a list: what an expression gives may be an iterator."""
    if not isinstance(items, Computed) or isinstance(items.code, (ast.Name, ast.ListComp)):
        return items
    code = ast.Call(ast.Name("list", ast.Load()), [items.code], [])
    return Computed(code, items.refs, items.objects)
