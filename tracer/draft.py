"""A template in the making."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from teola_plugin.graph import INPUT, ClientCalls, Component, Ref, Role, WorkflowTemplate, on_loop, read_path, simple
from teola_plugin.tracer.label_outputs import Labels, with_labels
from teola_plugin.tracer.list_outputs import with_splits
from teola_plugin.tracer.purity.purity import plain_size
from teola_plugin.tracer.report import TraceNode, TraceReport
from teola_plugin.tracer.symbols import Prompted, Record, Value, packer, simplest

Call = Callable[..., Any]
Names = tuple[str, ...]
DERIVED = ("prefilling", "decoding", "chunking", "embedding", "ingestion", "searching")
"""Endings of the primitives that `build_pgraph` makes of a component."""


def may_raise(call: Call) -> Call:
    """Marks a callable that may end the plain object's run where it stands: a parser, the user's own function."""
    call.teola_may_raise = True  # type: ignore[attr-defined]
    return call


def raises(call: object) -> bool:
    """Whether it is marked so."""
    return bool(getattr(call, "teola_may_raise", False))


def begun_before(component: Component, *, certain: bool) -> Component:
    """Return a component of what the original may choose, or is `certain` to choose, so that it may begin before."""
    if not certain:
        component = _with_unknown_form(component)
    return replace(component, attributes=component.attributes.with_(lookahead=certain))


def _with_unknown_form(component: Component) -> Component:
    """Return the component, with its body, as one that the original may not ask for; see `Attributes.form`."""
    changes: dict[str, Any] = {}
    for name in ("body", "otherwise"):
        template = getattr(component, name)
        inner = None if template is None else tuple(map(_with_unknown_form, template.components))
        if template is not None and inner != template.components:
            changes[name] = replace(template, components=inner)
    if component.attributes.form:
        changes["attributes"] = component.attributes.with_(form="unknown")
    return replace(component, **changes) if changes else component


@dataclass(frozen=True, slots=True)
class Span:
    """The components of a part of the chain that run first and last in it."""

    heads: Names = ()
    tails: Names = ()


@dataclass(frozen=True, slots=True)
class Traced:
    """A framework object as the graph sees it. `str(report)` says what became of each of its parts."""

    template: WorkflowTemplate
    calls: Mapping[str, Call]
    """Client callables by component name."""
    sizes: Callable[[Any], dict[str, int]]
    """Query input -> expected sizes by component name; never raises."""
    watched: Mapping[tuple[str, ...], str]
    """Node path (see `paths`) of the plain run -> the OPAQUE component whose value that run returns."""
    report: TraceReport
    looked_up: tuple[Ref, ...] = ()
    """Keys that a step reads, and raises without, though nothing of the graph stands for it."""
    filled_in: tuple[Ref, ...] = ()
    """Variables of prompts that take them bare, too: where a dictionary comes, it must have them."""


@dataclass(slots=True)
class Draft:
    """Collects components, callables and order. A `.map()` body has its own, absorbed once it is known good."""

    components: dict[str, Component] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    order: list[tuple[str, str]] = field(default_factory=list)
    estimates: list[tuple[str, Ref, Callable[[Any], int]]] = field(default_factory=list)
    watched: dict[tuple[str, ...], str] = field(default_factory=dict)
    nodes: list[TraceNode] = field(default_factory=list)
    lists: dict[str, str] = field(default_factory=dict)
    """Components that turn a model's text into a list -> how the list is spelled, empty where another says it."""
    labels: dict[str, Labels] = field(default_factory=dict)
    """Components whose text is read by what understands only these answers -> those."""
    names: set[str] = field(default_factory=set)
    formatted: dict[Prompted, Ref] = field(default_factory=dict)
    looked_up: list[Ref] = field(default_factory=list)
    filled_in: list[Ref] = field(default_factory=list)

    def name(self, wanted: str, *parts: str) -> str:
        """A name of its own, whose `name.part` are free as well."""
        base = re.sub(r"[^\w.\-]", "_", wanted) or "_"
        found, count = base, 1
        while not self.names.isdisjoint(every := [found, *(f"{found}.{part}" for part in parts)]):
            count += 1
            found = f"{base}{count}"
        self.names.update(every)
        return found

    def add(self, component: Component, call: Call | None = None) -> Ref:
        self.components[component.name] = component
        if call is not None:
            self.calls[component.name] = call
        return Ref(component.name)

    def call(self, name: str, call: Call, scope: Names, /, **inputs: Ref) -> Ref:
        """A CALL of pure framework code."""
        return self.add(Component(name, Role.CALL, tuple(inputs.items()), scope=scope), call)

    def real(self, value: Value, name: str, scope: Names) -> Ref:
        """The value as one ref: a dictionary is packed, a prompt formatted, by CALLs named after their reader."""
        value = simplest(value)
        if isinstance(value, Ref):
            return value
        if isinstance(value, Record):
            solid = {k: self.real(v, name, scope) if isinstance(v, Prompted) else v for k, v in value.items.items()}
            inputs, pack = packer(Record(solid, value.base))
            return self.add(Component(self.name(f"{name}.pack"), Role.CALL, inputs, scope=scope), on_loop(pack))
        if value not in self.formatted:
            inputs = tuple((key, self.real(inner, name, scope)) for key, inner in value.inputs)
            component = Component(self.name(f"{name}.prompt"), Role.CALL, inputs, scope=scope)
            self.formatted[value] = self.add(component, simple(plain_size)(lambda **given: value.render(given)))
        return self.formatted[value]

    def span(self, names: Names) -> Span:
        """Heads and tails of components that are tied by data alone."""
        own = {name: {ref.producer for _, ref in self.components[name].inputs} for name in names}
        read = set[str]().union(*own.values())
        return Span(tuple(n for n in names if own[n].isdisjoint(own)), tuple(n for n in names if n not in read))

    def then(self, first: Span, second: Span) -> Span:
        """All of `first` before all of `second`."""
        if not first.heads or not second.heads:
            return second if second.heads else first
        self.order += [(tail, head) for tail in first.tails for head in second.heads]
        return Span(first.heads, second.tails)

    def body(self) -> Draft:
        return Draft(names=self.names)

    def absorb(self, body: Draft) -> None:
        """Takes over what a `.map()` body needs at run time; its components stay in its own template."""
        self.calls |= body.calls
        self.nodes += body.nodes

    def template(self, output: Ref, name: str) -> WorkflowTemplate:
        labelled = with_labels(tuple(self.components.values()), self.labels, self.lists)
        components = with_splits(labelled, self.lists)
        return WorkflowTemplate(components, output, tuple(dict.fromkeys(self.order)), name)

    def _objects(self) -> dict[str, str]:
        """What components are of, in words."""
        return {name: f"{node.class_name} at {node.path}" for node in self.nodes for name in node.components}

    def finished(self, output: Ref, name: str) -> Traced:
        estimates = tuple(e for e in self.estimates if e[1].producer == INPUT)

        def sizes(value: Any) -> dict[str, int]:
            return {
                name: size for name, ref, estimate in estimates if (size := _size(estimate, value, ref)) is not None
            }

        return Traced(
            self.template(output, name),
            ClientCalls(self.calls, self._objects()),
            sizes,
            MappingProxyType(dict(self.watched)),
            TraceReport(tuple(self.nodes)),
            tuple(self.looked_up),
            tuple(self.filled_in),
        )


def _size(estimate: Callable[[Any], int], value: Any, ref: Ref) -> int | None:
    """An estimate is a hint: an input it does not understand has none, and the plain run tells why."""
    try:
        return estimate(read_path(value, ref.path))
    except Exception:
        return None
