"""From components to a workflow template: what a component adds, and the names that it can read.

The draft, the report, and what becomes of both are those that tracers use, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from teola_plugin.errors import GraphError
from teola_plugin.graph import INPUT, Component, Primitive, Ref, Role
from teola_plugin.graph.refs import Inputs
from teola_plugin.tracer.draft import DERIVED, ClientCall, Draft, Span
from teola_plugin.tracer.report import Level, TraceNode
from teola_plugin.workflow import component as user
from teola_plugin.workflow.component import Flow
from teola_plugin.workflow.values import Estimate, Kind, Value


@dataclass(slots=True)
class Scope:
    """A template in the making, and the values that its components can read by name.

    A body has a scope of its own; what it reads of the one around it is captured.
    """

    draft: Draft = field(default_factory=Draft)
    values: dict[str, Value] = field(default_factory=dict)
    around: Scope | None = None
    captured: dict[str, Ref] = field(default_factory=dict)

    def new_body(self, values: Mapping[str, Value]) -> Scope:
        return Scope(self.draft.new_body(), dict(values), self)

    def find(self, name: str) -> Value | None:
        """The value of that name; it is captured if it is of the scope around. None where there is none."""
        if name in self.values or self.around is None:
            return self.values.get(name)
        outer = self.around.find(name)
        if outer is None:
            return None
        self.captured[name] = outer.ref
        captured_value = self.values[name] = Value(Ref(f"${name}"), outer.kind, _fixed_width(outer.width))
        return captured_value

    def lower(self, flow: Flow) -> dict[str, Value]:
        """Lower all components of a flow, in an order that it allows. Return their values by name."""
        spans: dict[str, Span] = {}
        for one in in_order(flow):
            before = set(self.draft.components)
            value = one.decompose(Decomposition(self, one))
            added = tuple(name for name in self.draft.components if name not in before)
            spans[one.name] = self.draft.span(added)
            self.values[one.name] = value
            self.draft.nodes.append(TraceNode(one.name, type(one).__name__, _level(self.draft, added), added))
        for first, second in flow.order:
            self.draft.in_sequence(spans[first], spans[second])
        return {one.name: self.values[one.name] for one in flow}


def _fixed_width(width: int | Estimate | None) -> int | None:
    return width if isinstance(width, int) else None


def _level(draft: Draft, added: Sequence[str]) -> Level:
    """Code of the user's stays where it is, whatever else the component asks for."""
    roles = {draft.components[name].role for name in added}
    return "original" if roles & {Role.OPAQUE, Role.TOOL} else "lowered"


def in_order(flow: Flow) -> list[user.Component]:
    """Components, each behind what it reads and what comes before it. Raises `GraphError` for a cycle."""
    names = {one.name for one in flow}
    waits = {one.name: {name for name in one.needs() if name in names} for one in flow}
    for first, second in flow.order:
        waits[second].add(first)
    try:
        return [flow[name] for name in TopologicalSorter(waits).static_order()]
    except CycleError as error:
        circle = " >> ".join(error.args[1])
        raise GraphError(
            f"the components wait for each other in a circle: {circle}.",
            hint="take one of these joins away, or have a component read another value; for rounds there is Loop",
        ) from None


class Decomposition:
    """The builder that a component fills in its `decompose` method."""

    def __init__(self, scope: Scope, component: user.Component) -> None:
        self._scope, self._component = scope, component
        self._sources = component.sources()

    @property
    def name(self) -> str:
        return self._component.name

    def read(self, port: str) -> Value:
        """Return the value that the component reads at a port. Raise GraphError for an unknown name or a wrong kind."""
        source = self._sources[port]
        value = self._scope.find(source)
        if value is None:
            raise GraphError(
                f"{self.name}: {port} reads {source!r}, which is neither an input nor a component before it.",
                hint=f"say what it reads: {type(self._component).__name__}({self.name!r}, {port}='...')",
            )
        accepted = self._component.kinds(port)
        if not value.kind.fits(accepted):
            words = " or ".join(kind.value for kind in accepted)
            raise GraphError(
                f"{self.name}: {port} reads {source!r}, which is {value.kind.value}; expected {words}.",
                hint="put a component between the two that makes one of the other, e.g. a Function",
            )
        return value

    def ref(self, port: str) -> Ref:
        """Return the reference to the value that the component reads at a port."""
        return self.read(port).ref

    def of_query(self, name: str) -> Ref:
        """Something that every query brings, whatever the workflow's inputs."""
        value = self._scope.find(name)
        assert value is not None, f"queries bring no {name}"
        return value.ref

    def part(self, suffix: str = "") -> str:
        """A name for a part of the component that no other has."""
        return self._scope.draft.name(f"{self.name}.{suffix}" if suffix else self.name, *DERIVED)

    def waits_for_engines(self, ref: Ref) -> bool:
        """Return True if a value is known only after an engine, or code of the user's, has run.

        False for a value from outside this decomposition.
        """
        part = self._scope.draft.components.get(ref.producer)
        if part is None or part.role not in (Role.CALL, Role.CONDITION):
            return part is not None
        return any(self.waits_for_engines(read) for _, read in part.inputs)

    # ------------------------------------------------------------ parts

    def add(self, component: Component, call: ClientCall | None = None, *, width: int | Estimate | None = None) -> Ref:
        """A part as the graph has them; `call` makes its payload or its value, `width` is how many requests it has."""
        draft = self._scope.draft
        if isinstance(width, Estimate) and width.ref.producer == INPUT:
            draft.estimates.append((component.name, width.ref, width.count))
        return draft.add(component, call)

    def call(self, suffix: str, function: ClientCall, /, **inputs: Ref) -> Ref:
        """Pure code, quick or not: it may run early, and more than once."""
        return self._scope.draft.call(self.part(suffix), function, (), **inputs)

    def list_of(self, suffix: str, function: ClientCall, spelling: str, /, **inputs: Ref) -> Ref:
        """Pure code that reads a list from a model's text, so spelled: its items may be worked on as they close."""
        items = self.call(suffix, function, **inputs)
        self._scope.draft.list_spellings[items.producer] = spelling
        return items

    def primitives(
        self, *primitives: Primitive, calls: Mapping[str, Callable[..., Any]] | None = None, **more: Ref
    ) -> Ref:
        """Add the primitives of a custom component. The last one gives its value.

        Args:
            primitives: Primitives with ids of their own. `Ref("$port")` refers to the value at a port, or to one of
                `more`.
            calls: The functions that `Primitive.call` names.
            more: Further values by name.
        """
        name = self.part()
        inputs = tuple((port, self.ref(port)) for port in self._sources) + tuple(more.items())
        self._scope.draft.calls |= {f"{name}.{key}": call for key, call in (calls or {}).items()}
        return self.add(Component(name, Role.CUSTOM, inputs, primitives=primitives))

    def hold(self, suffix: str, role: Role, inputs: Inputs, body: Body, **more: Any) -> Ref:
        """A holder of a body (and of another one, `otherwise`): for each item, round by round, or one of two arms."""
        other: Body | None = more.pop("otherwise", None)
        bodies = [one for one in (body, other) if one is not None]
        captured: dict[str, Ref] = {}
        for one in bodies:
            self._scope.draft.absorb(one.scope.draft)
            captured |= one.scope.captured
        name = self.part(suffix)
        templates = [one.scope.draft.template(one.output.ref, name) for one in bodies]
        otherwise = templates[1] if other is not None else None
        all_inputs = inputs + tuple((key, ref) for key, ref in captured.items() if key not in dict(inputs))
        return self._scope.draft.add(
            Component(name, role, all_inputs, body=templates[0], otherwise=otherwise, **more),
        )

    def new_body(self, flow: Flow, **values: Value) -> Body:
        """A flow that a holder holds; it reads `values`, and whatever the holder could read."""
        scope = self._scope.new_body(values)
        outputs = scope.lower(flow)
        return Body(scope, outputs[last_of(flow)])

    def lower(self, flow: Flow, **values: Value) -> dict[str, Value]:
        """The components of a flow become parts of what is made here; they read `values`, too."""
        self._scope.values |= values
        return self._scope.lower(flow)

    def made_by_hand(self, build: Callable[[Decomposition], Value], **values: Value) -> Body:
        """A body without components of the user's: what `build` adds to it."""
        scope = self._scope.new_body(values)
        return Body(scope, build(Decomposition(scope, self._component)))


@dataclass(frozen=True, slots=True)
class Body:
    """A lowered flow of a holder, and the value that it gives."""

    scope: Scope
    output: Value

    @property
    def kind(self) -> Kind:
        return self.output.kind

    @property
    def only_searches(self) -> bool:
        """Return True if all of it is searches, or pure code on their hits."""
        parts = self.scope.draft.components.values()
        kinds = all(part.role in _SEARCHES and not any(effect.writes for effect in part.effects) for part in parts)
        return kinds and any(part.engine for part in parts)


_SEARCHES = frozenset({Role.SEARCHING, Role.RETRIEVAL, Role.EMBEDDING, Role.RERANKING, Role.CALL})


def last_of(flow: Flow, owner: str = "the flow") -> str:
    """The one component that nothing comes after. Raises `GraphError` where there are more, or none."""
    read = {name for one in flow for name in one.needs()}
    ends = [name for name in flow.tails if name not in read]
    if len(ends) != 1:
        names = ", ".join(ends) or "none"
        raise GraphError(
            f"{owner} ends in {len(ends)} components ({names}), so it is not clear which gives its value.",
            hint="join them: [a, b] >> c, or say output='name'",
        )
    return ends[0]
