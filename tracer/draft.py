"""The workflow template that is built while an object is traced, and the result of tracing."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from teola_plugin.graph import (
    INPUT,
    ClientCalls,
    Component,
    DraftText,
    Ref,
    Role,
    WorkflowTemplate,
    on_loop,
    read_path,
    simple,
)
from teola_plugin.requests.draft_texts import forms_of_labels
from teola_plugin.tracer.purity.purity import plain_size
from teola_plugin.tracer.report import TraceNode, TraceReport
from teola_plugin.tracer.symbols import Prompted, Record, Value, packer, simplify

ClientCall = Callable[..., Any]
"""A function that the graph calls in this process to compute a component."""
Names = tuple[str, ...]
Labels = tuple[str, ...]
DERIVED = ("prefilling", "decoding", "chunking", "embedding", "ingestion", "searching")
"""Suffixes of the primitives that `build_pgraph` makes of a component."""
_DEFAULT_SPELLING = "lines"
"""How a list is assumed to be spelled when user code splits it; only a prediction, verified later."""


def mark_fallible(call: ClientCall) -> ClientCall:
    """Mark a callable whose exception may end the original's run: a parser, the user's own function.

    The callable itself is marked and returned. Its exceptions are no faults of the plan (`failed_prefetch`).
    """
    call.teola_may_raise = True  # type: ignore[attr-defined]
    return call


def as_lookahead(component: Component, *, certain: bool) -> Component:
    """Return the component so that it may start before the original has chosen it, or is `certain` to choose it.

    Where it is not certain, a model call that has a form (whole or streamed) becomes one of unknown form, in bodies,
    too.
    """
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
    """The first and the last components of a part of the chain."""

    heads: Names = ()
    tails: Names = ()


@dataclass(frozen=True, slots=True)
class TraceResult:
    """A framework object as a workflow template. `str(report)` says what became of each of its parts."""

    template: WorkflowTemplate
    calls: Mapping[str, ClientCall]
    """Client callables by component name."""
    sizes: Callable[[Any], dict[str, int]]
    """Query input -> expected sizes by component name; never raises."""
    watched: Mapping[tuple[str, ...], str]
    """Path of a run of the original (see `paths`) -> the OPAQUE component whose value that run returns."""
    report: TraceReport
    required_keys: tuple[Ref, ...] = ()
    """Keys that a step reads, and raises without, though no component of the graph stands for it."""
    required_variables: tuple[Ref, ...] = ()
    """Variables of prompts that take their value bare, too: if a dictionary comes, it must have them."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """See `Draft.sources`."""
    created_models: Mapping[str, CreatedModel] = field(default_factory=dict)
    """See `Draft.created_models`."""


@dataclass(frozen=True, slots=True)
class CreatedModel:
    """A model or retriever that a function creates, and that is not known before the function runs."""

    name: str
    """The name of its class, or of the framework's function that creates it."""
    has_settings: bool
    """True if settings of the call are among its arguments: with the same settings it is known from then on."""


@dataclass(slots=True)
class Draft:
    """A template under construction: components, their callables and their order.

    The body of a loop has a draft of its own, which its parent absorbs once the body is known to be lowered.
    """

    components: dict[str, Component] = field(default_factory=dict)
    calls: dict[str, ClientCall] = field(default_factory=dict)
    order: list[tuple[str, str]] = field(default_factory=list)
    estimates: list[tuple[str, Ref, Callable[[Any], int]]] = field(default_factory=list)
    watched: dict[tuple[str, ...], str] = field(default_factory=dict)
    nodes: list[TraceNode] = field(default_factory=list)
    list_spellings: dict[str, str] = field(default_factory=dict)
    """Components that turn a model's text into a list -> how the list is spelled, empty if another one says it."""
    labels: dict[str, Labels] = field(default_factory=dict)
    """Components whose text is read by a parser of a few labels -> these labels."""
    names: set[str] = field(default_factory=set)
    sources: dict[str, str] = field(default_factory=dict)
    """`file:line` of the call in a function's source that a component, or a location, stands for, by its name."""
    created_models: dict[str, CreatedModel] = field(default_factory=dict)
    """Models that functions create and that are not known before, by the location: `function:line`."""
    formatted_prompts: dict[Prompted, Ref] = field(default_factory=dict)
    required_keys: list[Ref] = field(default_factory=list)
    required_variables: list[Ref] = field(default_factory=list)

    def name(self, preferred: str, *parts: str) -> str:
        """Reserve a name like `preferred` for a component, and `name.part` for each part. Return the name."""
        base = re.sub(r"[^\w.\-]", "_", preferred) or "_"
        name, count = base, 1
        while not self.names.isdisjoint(reserved := [name, *(f"{name}.{part}" for part in parts)]):
            count += 1
            name = f"{base}{count}"
        self.names.update(reserved)
        return name

    def add(self, component: Component, call: ClientCall | None = None) -> Ref:
        """Add a component to the template, with the function that computes it if that runs in this process.

        Return a reference to its value.
        """
        self.components[component.name] = component
        if call is not None:
            self.calls[component.name] = call
        return Ref(component.name)

    def call(self, name: str, call: ClientCall, scope: Names, /, **inputs: Ref) -> Ref:
        """Add a CALL of pure framework code. Return a reference to its result."""
        return self.add(Component(name, Role.CALL, tuple(inputs.items()), scope=scope), call)

    def materialize(self, value: Value, name: str, scope: Names) -> Ref:
        """Return the value as one reference: CALLs named after their reader pack a dictionary, or format a prompt."""
        value = simplify(value)
        if isinstance(value, Ref):
            return value
        if isinstance(value, Record):
            items = {
                key: self.materialize(item, name, scope) if isinstance(item, Prompted) else item
                for key, item in value.items.items()
            }
            inputs, pack = packer(Record(items, value.base))
            return self.add(Component(self.name(f"{name}.pack"), Role.CALL, inputs, scope=scope), on_loop(pack))
        if value not in self.formatted_prompts:
            inputs = tuple((key, self.materialize(item, name, scope)) for key, item in value.inputs)
            component = Component(self.name(f"{name}.prompt"), Role.CALL, inputs, scope=scope)
            call = simple(plain_size)(lambda **variables: value.render(variables))
            self.formatted_prompts[value] = self.add(component, call)
        return self.formatted_prompts[value]

    def span(self, names: Names) -> Span:
        """Return the heads and tails of components that are tied by data alone."""
        producers = {name: {ref.producer for _, ref in self.components[name].inputs} for name in names}
        read = set[str]().union(*producers.values())
        heads = tuple(name for name in names if producers[name].isdisjoint(producers))
        return Span(heads, tuple(name for name in names if name not in read))

    def in_sequence(self, first: Span, second: Span) -> Span:
        """Order all of `first` before all of `second`. Return the span of both.

        The order is noted in the draft, between the tails of `first` and the heads of `second`. An empty span orders
        nothing; the other one is then returned.
        """
        if not first.heads or not second.heads:
            return second if second.heads else first
        self.order += [(tail, head) for tail in first.tails for head in second.heads]
        return Span(first.heads, second.tails)

    def new_body(self) -> Draft:
        """Return an empty draft for the body of a loop or a branch, with names that do not collide with this one's."""
        return Draft(names=self.names, sources=self.sources, created_models=self.created_models)

    def absorb(self, body: Draft) -> None:
        """Take over what a body needs at run time; its components stay in its own template."""
        self.calls |= body.calls
        self.nodes += body.nodes

    def adopt_calls(self, other: Draft) -> None:
        """Take over the callables of another draft, some of whose components were added to this one."""
        self.calls |= other.calls
        self.list_spellings |= {
            name: spelling for name, spelling in other.list_spellings.items() if name in self.components
        }

    def template(self, output: Ref, name: str) -> WorkflowTemplate:
        components = _with_labels(tuple(self.components.values()), self.labels, self.list_spellings)
        components = _with_splits(components, self.list_spellings)
        return WorkflowTemplate(components, output, tuple(dict.fromkeys(self.order)), name)

    def finish(self, output: Ref, name: str) -> TraceResult:
        """Return the template with `output` as its result, and all that running it needs."""
        input_estimates = tuple(estimate for estimate in self.estimates if estimate[1].producer == INPUT)

        def sizes(value: Any) -> dict[str, int]:
            by_name = {name: _estimate_size(estimate, value, ref) for name, ref, estimate in input_estimates}
            return {name: size for name, size in by_name.items() if size is not None}

        descriptions = {name: f"{node.class_name} at {node.path}" for node in self.nodes for name in node.components}
        return TraceResult(
            self.template(output, name),
            ClientCalls(self.calls, descriptions),
            sizes,
            MappingProxyType(dict(self.watched)),
            TraceReport(tuple(self.nodes)),
            tuple(self.required_keys),
            tuple(self.required_variables),
            self.sources,
            self.created_models,
        )


def _estimate_size(estimate: Callable[[Any], int], value: Any, ref: Ref) -> int | None:
    """Return the estimate, or None for an input that it does not understand: the original's run will say why."""
    try:
        return estimate(read_path(value, ref.path))
    except Exception:
        return None


# ------------------------------------------------------------ shapes of outputs: labels, and lists that are mapped over


def label_forms(labels: Labels) -> tuple[DraftText, ...]:
    """Return the forms of an answer that is one of these labels, or begins with one."""
    return tuple(DraftText("the labels that are understood", text=form) for form in forms_of_labels(labels))


def _with_labels(
    components: tuple[Component, ...], labels: Mapping[str, Labels], pass_through: Collection[str]
) -> tuple[Component, ...]:
    """Return the components, each GENERATION with the labels that its reader takes, unless its schema says more.

    `labels` is keyed by the component whose value the reader gets; `pass_through` names components that hand a model's
    text on.
    """
    by_name = {c.name: c for c in components}
    changed: dict[str, Component] = {}
    for name, words in labels.items():
        source = by_name.get(name)
        while source is not None and source.name in pass_through and len(source.inputs) == 1:
            source = by_name.get(source.inputs[0][1].producer)
        if source is not None and source.role is Role.GENERATION and not source.attributes.forms:
            changed[source.name] = replace(source, attributes=source.attributes.with_(forms=label_forms(words)))
    return tuple(changed.get(c.name, c) for c in components) if changed else components


def _with_splits(components: tuple[Component, ...], spellings: Mapping[str, str]) -> tuple[Component, ...]:
    """Return the components, with each GENERATION marked splittable whose items are read one by one.

    `spellings`: components that hand a model's text on (parser, user code) -> how they read a list (a kind of
    `ItemStream`), empty if unknown. A MAP over a GENERATION gets its expected number of items.
    """
    readers: dict[str, list[Component]] = {}
    for c in components:
        for producer in dict.fromkeys(ref.producer for _, ref in c.inputs):
            readers.setdefault(producer, []).append(c)
    item_readers = {c.name: _item_readers(c, readers, spellings) for c in components if c.role is Role.GENERATION}
    certain = {reader.name for pairs in item_readers.values() for reader, spelling in pairs if spelling}
    changed: dict[str, Component] = {}
    for c in components:
        # User code reads more than it needs. If one generation is known to be the list, no other is assumed to be.
        pairs = [pair for pair in item_readers.get(c.name, ()) if pair[1] or pair[0].name not in certain]
        if not pairs:
            continue
        items = c.attributes.items or pairs[0][1] or _DEFAULT_SPELLING  # the model's own schema knows best
        changed[c.name] = replace(c, splittable=True, attributes=c.attributes.with_(items=items))
        for reader, _ in pairs:
            if reader.role is Role.MAP and reader.expected is None:
                changed[reader.name] = replace(reader, expected=c.expected)
    return tuple(changed.get(c.name, c) for c in components) if changed else components


def _item_readers(
    generation: Component, readers: Mapping[str, list[Component]], spellings: Mapping[str, str]
) -> list[tuple[Component, str]]:
    """Return the MAPs and batchable components that work on each item of a text, with the list's spelling if known."""
    pairs: list[tuple[Component, str]] = []
    pending, seen = [(generation.name, generation.attributes.items)], {generation.name}
    while pending:
        name, spelling = pending.pop(0)
        for reader in readers.get(name, ()):
            first_input = reader.inputs[0][1].producer
            if reader.role is Role.MAP or (reader.batchable and first_input == name):
                pairs.append((reader, spelling))
            elif reader.name in spellings and reader.name not in seen:
                seen.add(reader.name)
                pending.append((reader.name, spelling or spellings[reader.name]))
    return pairs
