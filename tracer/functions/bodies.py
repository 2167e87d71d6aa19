"""Bodies of loops and branches: what they read of the function around them, and the MAP that runs one for each item."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from teola_plugin.graph import ITEM, Attributes, Component, Ref, Role, Slice, read_path
from teola_plugin.graph import items_of as list_items
from teola_plugin.tracer.draft import DERIVED, Span, mark_fallible
from teola_plugin.tracer.functions.interpreter import FunctionInterpreter
from teola_plugin.tracer.functions.operations import as_list, items_of
from teola_plugin.tracer.functions.pure_expressions import substitute
from teola_plugin.tracer.functions.symbols import (
    UNKNOWN_VALUE,
    AwaitableValue,
    DataObject,
    Expression,
    Fields,
    Instance,
    InstancePerItem,
    ItemList,
    KnownValue,
    LocalFunction,
    Spread,
    Symbol,
    Text,
    add_input,
    map_parts,
)
from teola_plugin.tracer.symbols import NotUnderstood, Prompted

MAX_UNROLLED_ITEMS = 16
"""Items of a known list whose bodies are interpreted one by one."""
_RESERVED_INPUTS = ("items", "item", "input", "carry", "condition", "init")

# ------------------------------------------------------------ captured values


@dataclass(slots=True)
class Captures:
    """The values that the bodies of one loop or branch read of the function around them."""

    outer: FunctionInterpreter
    inputs: dict[str, Ref] = field(default_factory=dict)
    """The captured refs, by the name of the component's input that brings them into the body."""
    expressions: dict[str, Expression] = field(default_factory=dict)
    """The values that these bring, as expressions of the function around the body."""
    _reads_environment: bool = False

    def make_body(self) -> FunctionInterpreter:
        """Return an interpreter for a body, which captures what it reads."""
        return self.outer.make_body(self._read, self._to_outer, self._read_environment)

    def record_mutations(self, body: FunctionInterpreter) -> bool:
        """Record outside what the body assigns and changes in place. Return True if it changes its item."""
        self.outer.forget_attributes(body)
        return bool(self.outer.mutations.add_from_body(body.mutations, self.inputs))

    def changes_environment(self, body: FunctionInterpreter) -> bool:
        """Return True if the body reads environment variables that it may change for its next iteration."""
        may_change = body.runs_user_code or body.mutations.has(KnownValue(os.environ))
        return self._reads_environment and may_change

    def _read_environment(self) -> Symbol:
        self._reads_environment = True
        return self._capture(self.outer.environment)

    def _read(self, name: str) -> Symbol:
        symbol = self.outer.frame.read(name)
        return UNKNOWN_VALUE if self.outer.mutations.has(symbol) else self._capture(symbol)

    def _capture(self, symbol: Symbol) -> Symbol:
        """Return the symbol as the body sees it."""
        if isinstance(symbol, Ref):
            return self._capture_ref(symbol, self.outer.to_expression(symbol))
        if isinstance(symbol, (Expression, Prompted)):
            try:
                expression = symbol if isinstance(symbol, Expression) else None
                return self._capture_ref(self.outer.to_ref(symbol), expression)
            except NotUnderstood:
                return UNKNOWN_VALUE
        if isinstance(symbol, (Text, ItemList)):
            return map_parts(symbol, self._capture)
        if isinstance(symbol, Fields):
            base = None if symbol.base is None else self._capture_ref(symbol.base)
            return replace(symbol, items=_LazyCaptures(symbol.items, self._capture), base=base)
        if isinstance(symbol, (Instance, DataObject)):
            return type(symbol)(symbol.kind, _LazyCaptures(symbol.fields, self._capture))
        if isinstance(symbol, LocalFunction):
            read_outer = symbol.read_outer
            return replace(symbol, read_outer=lambda name: self._capture(read_outer(name)))
        return UNKNOWN_VALUE if isinstance(symbol, AwaitableValue) else symbol

    def _capture_ref(self, ref: Ref, expression: Expression | None = None) -> Ref:
        """Make a value of the function around the body an input of the component. Return the ref by which the body
        reads it.

        `expression`: the value as an expression of the outer function, if it is one.
        """
        name = add_input(self.inputs, ref, _input_name)
        if expression is not None:
            self.expressions.setdefault(name, expression)
        return Ref(f"${name}")

    def _to_outer(self, expression: Expression) -> Expression | None:
        """Return an expression of the body as one of the function around it; None if it depends on the item."""
        values: dict[str, Expression] = {}
        for name, ref in expression.refs.items():
            value = self.expressions.get(ref.producer.removeprefix("$"))
            if value is None or any(isinstance(key, Slice) for key in ref.path):
                return None
            values[name] = value.at(*ref.path)
        return substitute(expression, values)


def _input_name(key: str) -> str:
    name = "".join(c if c.isalnum() or c == "_" else "_" for c in key)
    return f"{name}_" if name in _RESERVED_INPUTS or name.startswith("part") else name


@dataclass(frozen=True, slots=True)
class _LazyCaptures(Mapping[str, Symbol]):
    """Fields that are captured when they are read, so that those that nobody reads are no inputs."""

    fields: Mapping[str, Symbol]
    capture: Callable[[Symbol], Symbol]

    def __getitem__(self, key: str) -> Symbol:
        return self.capture(self.fields[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


def uncaptured_items(fields: Fields) -> Mapping[str, Symbol]:
    """Return the items of a dictionary as they are around all bodies that have captured it."""
    items = fields.items
    while isinstance(items, _LazyCaptures):
        items = items.fields
    return items


# ------------------------------------------------------------ one body for each item


def map_items(
    interpreter: FunctionInterpreter,
    items: Symbol,
    transform: Callable[[FunctionInterpreter, Symbol], Symbol],
    *,
    one_by_one: bool = True,
) -> Symbol:
    """Return the list of what `transform` makes of each item: a MAP, unless the items are few and known.

    `one_by_one`: the original does so, one item after the other. It awaits coroutines all at once. The items of a list
    of coroutines are coroutines.
    """
    if isinstance(items, AwaitableValue):
        return map_items(interpreter, items.value, lambda body, item: transform(body, AwaitableValue(item)))
    item_list = items_of(items)
    if len(item_list) <= MAX_UNROLLED_ITEMS and not any(isinstance(item, Spread) for item in item_list):
        return ItemList(tuple(transform(interpreter, item) for item in item_list if not isinstance(item, Spread)))
    loop = MapLoop(interpreter, items)
    result = transform(loop.body, Ref(ITEM))
    if result == Ref(ITEM) and not loop.body.draft.components and not loop.body.runs_user_code:
        return items
    if isinstance(result, Instance) and result.kind.__name__ in ("Send", "RemoveMessage"):
        return InstancePerItem(items, result, loop.captures.inputs)
    if isinstance(result, AwaitableValue):
        return AwaitableValue(loop.finish(result.value, one_by_one=False))
    return loop.finish(result, one_by_one=one_by_one)


@dataclass(slots=True)
class MapLoop:
    """A MAP that is being made: the items of a list that is known at run time, and the body for each of them."""

    outer: FunctionInterpreter
    items: Symbol
    captures: Captures = field(init=False)
    body: FunctionInterpreter = field(init=False)

    def __post_init__(self) -> None:
        self.captures = Captures(self.outer)
        self.body = self.captures.make_body()

    def finish(self, result: Symbol, *, one_by_one: bool) -> Symbol:
        """Add the MAP if its body uses any engine. Return the list of the results, unknown if one of them is."""
        try:
            result_ref = self.body.to_ref(result)
        except NotUnderstood:
            result_ref = None
        output = None if self.changes_what_it_reads else self.body.finish_body(result_ref)
        if self.captures.changes_environment(self.body):
            output = result_ref = None
        results: Symbol = UNKNOWN_VALUE
        if output is not None:
            output_ref, is_result = output
            component = self._add_component(output_ref, one_by_one=one_by_one)
            results = component if is_result else UNKNOWN_VALUE
        elif result_ref is not None and not (
            self.body.runs_user_code or self.body.mutations.refs or self.changes_what_it_reads
        ):
            results = self._compute_each(result_ref)
        if self.captures.record_mutations(self.body):
            self.outer.mutations.add_items(self.items)
        if self.body.runs_user_code:
            self.outer.add_user_code()
        return results

    @property
    def changes_what_it_reads(self) -> bool:
        """True if the body changes an existing list or dictionary that expressions hold: each item may need another."""
        changed = self.body.mutations.objects.keys() - self.outer.mutations.objects.keys()
        return not changed.isdisjoint(self.outer.shared.object_names)

    def _compute_each(self, result: Ref) -> Symbol:
        """Return the list of what the body computes for each item, as one CALL; unknown if anything else is in it.

        `result`: the value that the body gives for one item.
        """
        outer, draft = self.outer, self.body.draft
        steps = [(step.name, draft.calls.get(step.name), step.inputs) for step in draft.components.values()]
        is_computed = all(step.role is Role.CALL for step in draft.components.values())
        if not is_computed or result.producer not in draft.components:
            return UNKNOWN_VALUE
        try:
            items = outer.to_ref(as_list(self.items))
        except NotUnderstood:
            return UNKNOWN_VALUE

        def compute(items: Any, **captured: Any) -> list[Any]:
            """Return the results of the body's calls for each item, one item after the other."""
            results = []
            for item in list_items(items):
                values = {ITEM: item, **{f"${name}": value for name, value in captured.items()}}
                for name, call, inputs in steps:
                    assert call is not None
                    arguments = {key: read_path(values[ref.producer], ref.path) for key, ref in inputs}
                    values[name] = call(**arguments)
                results.append(read_path(values[result.producer], result.path))
            return results

        name = outer.draft.name(f"{outer.name}.values")
        outer.shared.helpers.add(name)
        inputs = (("items", items), *self.captures.inputs.items())
        return outer.draft.add(Component(name, Role.CALL, inputs), mark_fallible(compute))

    def _add_component(self, output: Ref, *, one_by_one: bool) -> Symbol:
        """Add the MAP to the outer draft, with the body as its template. Return a ref to the list of results.

        Return an unknown value if the list of items is not known. `output`: the value that the body gives for one item.
        """
        outer, body_draft = self.outer, self.body.draft
        try:
            items = outer.to_ref(as_list(self.items))
        except NotUnderstood:
            return UNKNOWN_VALUE
        name = outer.draft.name(f"{outer.name}.each", *DERIVED)
        template = body_draft.template(output, name)
        outer.draft.absorb(body_draft)
        inputs = (("items", items), *self.captures.inputs.items())
        attributes = Attributes(is_parallel=one_by_one)
        ref = outer.draft.add(Component(name, Role.MAP, inputs, body=template, attributes=attributes))
        outer.append_span(Span((name,), (name,)))
        return ref
