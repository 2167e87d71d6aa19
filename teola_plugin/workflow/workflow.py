"""A workflow: components joined by `>>`, what it is asked with, and what it gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from teola_plugin.errors import GraphError
from teola_plugin.graph import INPUT, Graph, Primitive, PrimitiveKind, Ref, WorkflowTemplate, build_pgraph
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.workflow.component import Flow, Joinable, check_name
from teola_plugin.workflow.config import Config, config_of, config_schema
from teola_plugin.workflow.control import configured, free_names, moved
from teola_plugin.workflow.decomposition import Scope, in_order, last_of
from teola_plugin.workflow.indexing import PER_QUERY, THIS_QUERY
from teola_plugin.workflow.inputs import Input, checked_inputs, kind_of
from teola_plugin.workflow.values import Kind, Value

if TYPE_CHECKING:
    from teola_plugin.passes import Pass
    from teola_plugin.pool import EnginePool
    from teola_plugin.workflow.deployment import Deployment

OUTPUTS = "outputs"
_HIDDEN = frozenset({Kind.VECTOR, Kind.VECTORS})
"""Kinds of values that a result does not have, unless nobody else reads them: they are large."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """A workflow under one configuration: its template, and what of it a result tells."""

    traced: TraceResult
    output: str
    sources: str
    """The component whose value are the answer's sources; empty for none."""
    text: str
    """The component of the graph whose text, as it is written, is that of the output; empty where it has none."""
    temporary: tuple[str, ...]
    """Stores with a collection of the query's own."""


@dataclass(frozen=True, init=False)
class Workflow:
    """Components and their order, under a name: a template for queries, without a value of any.

    `flow`: components joined by `>>`. Values have names: a component reads inputs of the workflow, and other
    components' values, by name; `>>` says what comes before what. `inputs` may declare what the workflow is asked
    with; the rest is found. `output` names the component that gives the answer, by default the last; `sources` the
    one whose passages it rests on, by default the nearest before it.
    Raises `GraphError` for names that nothing has, circles, values of a kind that a component cannot read.
    """

    name: str
    flow: Flow
    inputs: tuple[Input, ...] = ()
    output: str = ""
    sources: str = ""
    doc: str = ""
    _lowered: dict[Config, Lowered] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __init__(
        self,
        name: str,
        flow: Joinable,
        *,
        inputs: Iterable[Input] = (),
        output: str = "",
        sources: str = "",
        doc: str = "",
    ) -> None:
        parsed_flow = Flow.of(flow)
        if not isinstance(name, str) or not name:
            raise GraphError(f"{name!r:.80} is no name of a workflow.", hint="Workflow('name', a >> b)")
        check_names(parsed_flow)
        in_order(parsed_flow)
        values = dict(
            name=name, flow=parsed_flow, output=output or last_of(parsed_flow, f"workflow {name!r}"), sources=sources
        )
        values |= dict(inputs=_inputs(parsed_flow, tuple(inputs)), doc=doc, _lowered={})
        for key, value in values.items():
            object.__setattr__(self, key, value)
        self._check_outputs()
        check_order(self.lower(Config()).traced.template)

    def _check_outputs(self) -> None:
        """Raise GraphError if `output` or `sources` names no component of the flow."""
        names = [one.name for one in self.flow]
        for role, name in (("output", self.output), ("sources", self.sources)):
            if name and name not in names:
                raise GraphError(
                    f"workflow {self.name!r}: {role} names {name!r}, which is no component of its flow.",
                    hint=f"use one of {', '.join(names)}",
                )

    # ------------------------------------------------------------ what it is asked with

    def config(self, values: Mapping[str, Any] | None = None, /, **settings: Any) -> Config:
        """Return the checked settings of a query, given by component and name (see `config_of`).

        Raise `RegistrationError` for unknown settings or wrong values. The workflow is lowered here, so that a
        configuration that cannot run fails now.
        """
        changes: Any = {**(values or {}), **settings} if values is None or isinstance(values, Mapping) else values
        config = config_of(self.flow, changes, self.name)
        self.lower(config)
        return config

    def bind(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of a query, checked. Raises `RegistrationError`."""
        return checked_inputs(self.inputs, inputs, self.name)

    def input_schema(self) -> dict[str, Any]:
        """JSON schema of the inputs: an object with a property each."""
        from teola_plugin.workflow.inputs import REQUIRED

        return {
            "type": "object",
            "title": self.name,
            "properties": {one.name: one.schema() for one in self.inputs},
            "required": [one.name for one in self.inputs if one.default is REQUIRED],
            "additionalProperties": False,
        }

    def config_schema(self) -> dict[str, Any]:
        """JSON schema of what `config` takes: an object of components, each an object of its settings."""
        return config_schema(self.flow)

    # ------------------------------------------------------------ running it

    def deploy(
        self,
        pool: EnginePool,
        *,
        passes: Iterable[Pass | str] | None = None,
        speculate: str = "auto",
        name: str = "",
        config: Mapping[str, Any] | None = None,
    ) -> Deployment:
        """On a pool, local or shared: `.run(inputs)`. `config` changes settings for all of its queries.

        `pool.deployments` has it under the workflow's name, or under `name`. Raises `RegistrationError` for an engine
        that the pool lacks, or that does not do what is asked of it.
        """
        from teola_plugin.workflow.deployment import deployed

        return deployed(self, pool, passes, speculate, name or self.name, self.config(config or {}))

    def lower(self, config: Config) -> Lowered:
        """The template under this configuration; made once, and never with anything of a query in it."""
        lowered = self._lowered.get(config)
        if lowered is None:
            lowered = _lower(self, configured(self.flow, config))
            for other in list(self._lowered)[: 1 - CONFIGURATIONS]:
                self._lowered.pop(other, None)
            self._lowered[config] = lowered
        return lowered

    def forget_configurations(self) -> None:
        """Templates are made anew: those of configurations hold what queries said, prompts among it."""
        self._lowered.clear()

    def in_collections(self, renamed: Callable[[str, str], str]) -> Workflow:
        """The same, whose components write and search in other collections: `renamed(engine, collection)`. Those of
        each query's own stay."""
        options: dict[str, Any] = dict(inputs=self.inputs, output=self.output, sources=self.sources, doc=self.doc)
        return Workflow(self.name, moved(self.flow, renamed), **options)

    def __reduce__(self) -> Any:
        """Pickle the definition only: the lowered form is computed again."""
        options: dict[str, Any] = dict(inputs=self.inputs, output=self.output, sources=self.sources, doc=self.doc)
        return partial(Workflow, self.name, self.flow, **options), ()

    def __str__(self) -> str:
        from teola_plugin.graph import build_pgraph

        return str(build_pgraph(self.lower(Config()).traced.template))


CONFIGURATIONS = 64
"""Configurations of a workflow whose templates are kept."""


def _inputs(flow: Flow, declared: tuple[Input, ...]) -> tuple[Input, ...]:
    """Return the declared inputs, and one for each other name that is read and no component gives."""
    names = {one.name for one in flow.everything()}
    for one in declared:
        check_name(one.name, "input")
        if one.name in names:
            raise GraphError(f"an input and a component share the name {one.name!r}.", hint="rename one of them")
    declared_names = {one.name for one in declared}
    read = [name for name in dict.fromkeys(free_names(flow)) if name not in declared_names]
    for name in read:
        if name in names:
            raise GraphError(
                f"{name!r} is read outside of the component that holds it.",
                hint="read the value of the component that holds it: a Map, a Branch or a Loop",
            )
    return declared + tuple(Input(name, kind_of(_kinds(flow, name))) for name in read)


def _kinds(flow: Flow, name: str) -> list[tuple[Kind, ...]]:
    """Return the kinds that are expected of a value, for each place where it is read."""
    every = flow.everything()
    return [one.kinds(port) for one in every for port, source in one.sources().items() if source == name]


def _lower(workflow: Workflow, flow: Flow) -> Lowered:
    """Return the template of a workflow under one configuration, whose settings `flow` has, and what a result shows."""
    scope = Scope()
    scope.draft.names.add(OUTPUTS)
    scope.values = {one.name: Value(Ref(INPUT, (one.name,)), one.kind) for one in workflow.inputs}
    scope.values[THIS_QUERY] = Value(Ref(INPUT, (THIS_QUERY,)), Kind.TEXT)
    scope.draft.calls[OUTPUTS] = _outputs
    values = scope.lower(flow)
    read = {name for one in flow for name in one.needs()}
    visible = {n: v for n, v in values.items() if n == workflow.output or not (v.kind in _HIDDEN and n in read)}
    inputs = tuple((name, value.ref) for name, value in visible.items())
    output = scope.draft.call(OUTPUTS, _outputs, (), **dict(inputs))
    text = values[workflow.output]
    stores = tuple(
        store for one in flow.everything() for store, collection in one.collections() if collection == PER_QUERY
    )
    return Lowered(
        scope.draft.finish(output, workflow.name),
        workflow.output,
        workflow.sources or _nearest(flow, workflow.output, values),
        text.ref.producer if text.kind is Kind.TEXT and not text.ref.path else "",
        tuple(dict.fromkeys(stores)),
    )


def _outputs(**values: Any) -> dict[str, Any]:
    return values


def _nearest(flow: Flow, output: str, values: Mapping[str, Value]) -> str:
    """The passages that the output rests on: the nearest on the way back."""
    names: Sequence[str] = [output]
    seen: set[str] = set()
    while names:
        for name in names:
            if values[name].kind is Kind.PASSAGES:
                return name
        seen.update(names)
        names = [n for name in names for n in flow[name].needs() if n in values and n not in seen]
    return ""


# ------------------------------------------------------------ checks of a workflow when it is made


def check_names(flow: Flow) -> None:
    """Raises `GraphError` for a name that two components have, also in bodies: settings and results go by names."""
    counts = Counter(one.name for one in flow.everything())
    for name, count in counts.items():
        if count > 1:
            raise GraphError(f"{count} components share the name {name!r}.", hint="rename all but one of them")


def check_order(template: WorkflowTemplate) -> None:
    """Raises `GraphError` for a component that reads what another one writes, where nothing says which comes first:
    a query would give one answer or the other."""
    _check(build_pgraph(template))


def _check(graph: Graph) -> None:
    """Raise GraphError if two primitives write and read one resource in no certain order, also inside fragments."""
    touching = [(p, e) for p in graph for e in p.effects if e.resource != "*"]
    for writer, written in touching:
        for reader, read in touching:
            if not written.writes or read.writes or written.resource != read.resource:
                continue
            first, second = (p.id.partition(".")[0] for p in (writer, reader))
            if writer.id == reader.id:
                if writer.kind is PrimitiveKind.MAP:
                    raise GraphError(
                        f"items of {first} write {written.resource} and read it, side by side, so that what one finds "
                        "depends on how far the others are.",
                        hint=f"write all of it before {first}, or into a collection that it does not search",
                    )
            elif not _in_order(graph, writer, reader):
                raise GraphError(
                    f"{first} writes {written.resource} and {second} reads it, and nothing says which comes first.",
                    hint=f"join them: {first} >> {second}",
                )
    for holder in graph:
        for body in (holder.fragment, holder.otherwise):
            if body is not None:
                _check(body.graph)


def _in_order(graph: Graph, one: Primitive, other: Primitive) -> bool:
    return bool(
        graph.bits[one.id] & graph.ancestor_masks[other.id] or graph.bits[other.id] & graph.ancestor_masks[one.id]
    )
