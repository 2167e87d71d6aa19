"""The requests that a node of a graph and the nodes after it will make, as one template.

Nothing runs. Symbolic values flow through the nodes and the state between them, along the edges. What certainly comes
next starts as soon as its inputs are known, before the barrier at which the original waits. Of the nodes that may come
next, only what costs little starts, or what one arm alone asks for (see `tracer.lookahead`). A node that is not
understood leaves the channels of the state unknown, and what reads them waits for the original.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from langchain_core.runnables import Runnable
from langgraph.constants import END, START

from teola_plugin.graph import INPUT, Component, Ref, Role
from teola_plugin.shims.langgraph import functions_of, injected_arguments
from teola_plugin.tracer.draft import DERIVED, Draft, Names, Span, TraceResult
from teola_plugin.tracer.functions import (
    UNKNOWN_VALUE,
    Fields,
    FindLeaves,
    FunctionInterpreter,
    Instance,
    InstancePerItem,
    ItemList,
    KnownValue,
    Symbol,
    first_parameter,
    materialize,
    summarize_function,
)
from teola_plugin.tracer.functions.frames import find_leaves_called
from teola_plugin.tracer.functions.loops import flatten_field
from teola_plugin.tracer.functions.mutations import Mutations
from teola_plugin.tracer.functions.operations import read_key
from teola_plugin.tracer.functions.pruning import EMPTY_SPAN, prune_body
from teola_plugin.tracer.functions.pure_expressions import STATE, Decide
from teola_plugin.tracer.functions.symbols import Unknown, known_value, to_symbol
from teola_plugin.tracer.langchain.classes import is_search
from teola_plugin.tracer.langchain.trace import FindLeaf, trace_into
from teola_plugin.tracer.langgraph.settings import CALLED_TASK, NODE_CONFIG, NODE_ENVIRONMENT, NODE_RUNTIME, find_rule
from teola_plugin.tracer.langgraph.shape import (
    MESSAGES,
    ROOT,
    Branch,
    GraphShape,
    NodeShape,
    accompanied_nodes,
    back_edges,
    may_interrupt,
    shape_of,
)
from teola_plugin.tracer.langgraph.updates import (
    EMPTY_NODE,
    MAX_DEPTH,
    LoweredNode,
    SymbolicState,
    are_requests,
    updated_value,
)
from teola_plugin.tracer.leaf import is_user_code
from teola_plugin.tracer.lookahead import lookahead_of_arms
from teola_plugin.tracer.report import TraceNode
from teola_plugin.tracer.symbols import Prompted, Record, Value

ARGUMENT = "argument"
"""Key of a template's input: what was sent to the node alone (`Send`)."""
MAX_GRAPH_DEPTH = 3
"""Graphs inside each other whose nodes are read."""
CALLED_GRAPH = "its nodes are read where it is called"
"""The reason in the report's row of a graph that another one calls."""
_UNKNOWN = "unknown"
"""The component that stands for what is not known before the original comes to it."""


def lookahead(
    shape: GraphShape,
    node: str,
    *,
    pushed: bool,
    decide: Decide | None = None,
    find_leaves: FindLeaves | None = None,
    is_async: bool = False,
) -> TraceResult:
    """Return the template of what comes from this node on.

    Its input: `{"state": {channel: value}, "absent": [channel], "argument": ..., "config": ..., "context": ...}`; see
    `settings_of`.

    `pushed`: the node was started by a `Send`, with an argument of its own. `decide` is asked for conditions on the
    input; without it, or if it returns None, both paths stay open. `find_leaves` finds the models and retrievers of the
    user's own whose calls are components, too. `is_async`: see `lower_node`.
    """
    tracer = _LookaheadTracer(shape, back_edges(shape), accompanied_nodes(shape), decide, find_leaves, is_async)
    return tracer.trace(shape.nodes[node], pushed)


# ------------------------------------------------------------ one node


def lower_node(
    draft: Draft,
    bound: Runnable[Any, Any],
    argument: Symbol,
    name: str,
    decide: Decide | None = None,
    find_leaves: FindLeaves | None = None,
    *,
    is_async: bool = False,
    depth: int = 0,
    has_settings: bool = True,
    has_environment: bool = False,
    reads_tasks: bool = True,
) -> LoweredNode:
    """Add to the draft what a node will ask engines for. It may be anything; what is not understood is left out.

    `is_async`: the graph runs on a loop, and the async function of a node that has both. `depth`: the number of graphs
    around the graph of the node. `has_settings`: the input of the template has the node's settings. `has_environment`:
    it has the environment variables, too, and no code before the node may have changed them. `reads_tasks`: tasks that
    the node calls run, as no cache has their results.
    """
    functions = functions_of(bound)
    if functions is None:
        if (
            lowered := _lower_graph(draft, bound, argument, name, find_leaves, is_async, depth, has_settings)
        ) is not None:
            return lowered
        location, first_new = f"graph.{name}", len(draft.components)
        find_leaf = None if find_leaves is None else find_leaves(bound, location, {}, None)
        value, span = trace_into(
            draft, bound, _to_value(draft, argument, name), name, location, {}, find_leaf=find_leaf
        )
        result = to_symbol(value)
        updates = result.items if isinstance(result, Fields) and result.base is None else None
        new_components = list(draft.components.values())[first_new:]
        return LoweredNode(span, updates, runs_user_code=any(map(_is_user_code, new_components)))
    func = (functions.afunc or functions.func) if is_async else (functions.func or functions.afunc)
    parameter = first_parameter(func)
    if not parameter:
        return LoweredNode(is_opaque=True, runs_user_code=True, pauses=may_interrupt(func))
    called_graphs: list[LoweredNode] = []

    def lower_graph(
        interpreter: FunctionInterpreter, graph: Runnable[Any, Any], graph_input: Symbol, is_async: bool
    ) -> Symbol | None:
        """Add what a graph that the node's function calls is certain to ask for. Return its result; None if unknown."""
        find = find_leaves_called(find_leaves, is_async)
        lowered = _lower_graph(interpreter.draft, graph, graph_input, interpreter.name, find, is_async, depth)
        if lowered is None:
            return None
        called_graphs.append(lowered)
        interpreter.append_span(lowered.span)
        interpreter.mutations.update(lowered.mutations)
        if lowered.runs_user_code:
            interpreter.add_user_code()
        return lowered.value

    settings = {"config": NODE_CONFIG, "runtime": NODE_RUNTIME} if has_settings else {}
    injected = {key: settings.get(key, UNKNOWN_VALUE) for key in injected_arguments(bound)}
    summary = summarize_function(
        func,
        {**injected, parameter: argument},
        draft,
        name,
        state=parameter,
        decide=decide,
        find_leaves=find_leaves,
        find_method=partial(find_rule, has_settings=has_settings, reads_tasks=reads_tasks),
        lower_graph=lower_graph,
        environment=NODE_ENVIRONMENT if has_settings and has_environment else None,
    )
    tasks = summary.value
    sends = (tasks,) if isinstance(tasks, InstancePerItem) and tasks.instance.kind.__name__ == "Send" else ()
    is_opaque = summary.runs_user_code and not summary.uses_engines
    return LoweredNode(
        summary.span,
        summary.updates,
        summary.goto,
        sends,
        is_opaque,
        summary.mutations,
        summary.runs_user_code,
        may_interrupt(func) or any(one.pauses for one in called_graphs),
        summary.changes_objects or any(one.changes_objects for one in called_graphs),
        summary.value,
    )


def _lower_graph(
    draft: Draft,
    graph: Any,
    argument: Symbol,
    name: str,
    find_leaves: FindLeaves | None,
    is_async: bool,
    depth: int,
    has_settings: bool = False,
) -> LoweredNode | None:
    """Add to the draft what a graph that code or a node calls is certain to ask for. Its updates are what it returns.

    Return None for an object that is no graph, or whose input is not known.
    """
    shape = shape_of(graph) if depth < MAX_GRAPH_DEPTH else None
    if shape is None or shape.keeps_state:
        return None
    row = TraceNode(f"graph.{name}", type(graph).__name__, "lowered", reason=CALLED_GRAPH)
    if shape.is_function:
        (node,) = shape.nodes.values()
        if node.skippable:
            return None
        draft.nodes.append(row)
        options: Any = {"depth": depth + 1, "has_settings": has_settings, "reads_tasks": not shape.caches_tasks}
        lowered = lower_node(draft, node.bound, argument, name, None, find_leaves, is_async=is_async, **options)
        pauses = lowered.pauses or node.pauses or isinstance(lowered.value, Instance)  # a `Command` goes anywhere
        return replace(lowered, goto=(), sends=(), pauses=pauses)
    if not isinstance(argument, Fields | Ref):
        return None
    graph_input = argument if isinstance(argument, Fields) else Fields({}, argument)
    values: dict[str, Symbol] = {}
    for channel, rule in shape.update_rules.items():
        initial: Symbol = UNKNOWN_VALUE if rule in ("replace", "unknown") else ItemList(())
        is_given = channel in shape.inputs and (channel in graph_input.items or graph_input.base is not None)
        update = read_key(graph_input, KnownValue(channel)) if is_given else None
        values[channel] = initial if update is None else updated_value(rule, initial, update)
    options = {"prefix": name, "depth": depth + 1, "has_settings": has_settings}
    edges = back_edges(shape), accompanied_nodes(shape)
    tracer = _LookaheadTracer(shape, *edges, None, find_leaves, is_async, draft.names, **options)
    draft.nodes.append(row)
    end = tracer.trace_inside(draft, SymbolicState(values))
    updates = None if end is None else {name: end.values.get(name, UNKNOWN_VALUE) for name in shape.outputs}
    return LoweredNode(
        Span(tracer.heads, tracer.tails),
        updates,
        mutations=tracer.mutations,
        runs_user_code=tracer.runs_user_code or end is None,
        pauses=tracer.pauses or any(map(_may_pause, shape.nodes.values())),
        changes_objects=tracer.changes_objects,
        value=UNKNOWN_VALUE if updates is None else Fields(updates),
    )


def _may_pause(node: NodeShape) -> bool:
    """Return True if a graph may be interrupted at a node."""
    return node.pauses or node.skippable or any(map(may_interrupt, functions_of(node.bound) or ()))


def calls_graphs_or_tasks(plan: TraceResult) -> bool:
    """Return True if a plan goes on into graphs or tasks, of which some may have ended when a call is resumed."""
    return any(row.reason in (CALLED_GRAPH, CALLED_TASK) for row in plan.report)


def _to_value(draft: Draft, symbol: Symbol, name: str) -> Value:
    """Return the input of a Runnable: references, and dictionaries of references."""
    if isinstance(symbol, Fields):
        return Record({key: _to_value(draft, item, name) for key, item in symbol.items.items()}, symbol.base)
    if isinstance(symbol, Ref | Prompted):
        return symbol
    return (None if isinstance(symbol, Unknown) else materialize(draft, symbol, name)) or _add_unknown(draft)


def _add_unknown(draft: Draft) -> Ref:
    if _UNKNOWN not in draft.components:
        draft.add(Component(_UNKNOWN, Role.OPAQUE, ()))
    return Ref(_UNKNOWN)


# ------------------------------------------------------------ the nodes after it


@dataclass(slots=True)
class _LookaheadTracer:
    """A walk along the edges of a graph."""

    shape: GraphShape
    back_edges: Mapping[str, frozenset[str]]
    """Arms that go round a loop once more: they are not started early, as the last round may have been enough."""
    accompanied: frozenset[str]
    """Nodes that may run beside others: what comes after them waits for those, too."""
    decide: Decide | None = None
    find_leaves: FindLeaves | None = None
    is_async: bool = False
    names: set[str] = field(default_factory=set)
    prefix: str = ""
    """The beginning of components' names; empty for those of the graph that runs."""
    depth: int = 0
    """The number of graphs around this one. Of a graph inside another, only certain calls are added."""
    has_settings: bool = True
    """True if the graph's settings are those in the template's input."""
    heads: Names = ()
    """The first components that are certain."""
    tails: Names = ()
    """The last ones."""
    mutations: Mutations = field(default_factory=Mutations)
    """The values that certain nodes change in place."""
    runs_user_code: bool = False
    """True if certain nodes run code that may do anything."""
    pauses: bool = False
    """True if a certain node may interrupt the graph."""
    changes_objects: bool = False
    """True if a certain node changes attributes or items of objects."""
    ends: list[SymbolicState] = field(default_factory=list)
    """The state at the certain end of the graph, if that was reached."""

    def trace_inside(self, draft: Draft, state: SymbolicState) -> SymbolicState | None:
        """Add all that a call of the graph with this state is certain to ask for. Return the state at its end."""
        first_nodes = self.shape.first_nodes
        if START in first_nodes:
            self._add_node(draft, self.shape.nodes[START], UNKNOWN_VALUE, state, ())
        else:
            for name in sorted(first_nodes):
                self._add_successor(draft, EMPTY_SPAN, name, state, (), runs_alone=len(first_nodes) == 1)
        return self.ends[0] if len(self.ends) == 1 else None

    def trace(self, start: NodeShape, pushed: bool) -> TraceResult:
        """Return the template of what a task of this node, and the nodes after it, will ask engines for."""
        draft = Draft(names=self.names)
        state = SymbolicState({name: Ref(INPUT).at(STATE).at(name) for name in self.shape.update_rules})
        argument = Ref(INPUT).at(ARGUMENT) if pushed else state.read(start.reads)
        runs_alone = start.name not in self.accompanied
        self._add_node(draft, start, argument, state, (), pushed=pushed, runs_alone=runs_alone)
        return draft.finish(Ref(INPUT), start.name)

    def _add_node(
        self,
        draft: Draft,
        node: NodeShape,
        argument: Symbol,
        state: SymbolicState,
        path: tuple[str, ...],
        *,
        previous: Span = EMPTY_SPAN,
        pushed: bool = False,
        runs_alone: bool = True,
    ) -> None:
        """Add a node and those after it. Unless it `runs_alone` in its superstep, these are only nodes that wait for
        no other.

        `path` is the path of nodes to it. `previous`: the last components before it.
        """
        if node.bound is None:
            lowered, next_state = EMPTY_NODE, state
        else:
            bound, messages = node.bound, state.values.get(MESSAGES, UNKNOWN_VALUE)
            if self.depth and node.model_chain is not None and are_requests(messages):
                bound, argument = node.model_chain, Fields({MESSAGES: messages})
            lowered = self._lower(draft, bound, argument, node.name)
            next_state = self._state_after(state, lowered, runs_alone=not pushed)
            if state.is_late:
                _mark_slow(draft)
        _add_order(draft, previous, lowered.span)
        span = lowered.span if lowered.span.heads else previous
        next_path, names = (*path, node.name), tuple(dict.fromkeys((*node.successors, *lowered.goto)))
        if node.pauses or lowered.is_barrier or pushed:
            if runs_alone and not (lowered.changes_objects or pushed or self.depth):
                self._add_arms(draft, names, next_state, next_path, runs_alone=True, only_prompts=True)
            return
        if not runs_alone:
            if len(names) == 1 and not node.branches and not self.shape.is_entered_from_others(names[0], node):
                own_state = self._without_foreign_channels(next_state, next_path)
                if own_state is not None:
                    self._add_successor(draft, span, names[0], own_state, next_path, runs_alone=False)
            return
        branches = [one for one in node.branches if one.path is not None or not lowered.goto]  # a `Command` says where
        if set(names) <= {END} and not branches and not node.joins:
            self.ends.append(next_state)
        runs_alone = len(names) + len(branches) == 1
        for name in names:
            self._add_successor(draft, span, name, next_state, next_path, runs_alone=runs_alone)
        for branch in branches:
            self._add_branch(draft, span, node, branch, next_state, next_path, runs_alone=runs_alone)
        if not path and _UNKNOWN in draft.components:  # at least the requests of this node come before it is known
            draft.order += [(tail, _UNKNOWN) for tail in lowered.span.tails]

    def _lower(self, draft: Draft, bound: Runnable[Any, Any], argument: Symbol, name: str) -> LoweredNode:
        """Add a node that is certain to run, or may be chosen: in a graph inside another, the former alone."""
        name = f"{self.prefix}.{name}" if self.prefix else name
        lowered = lower_node(
            draft,
            bound,
            argument,
            name,
            self.decide,
            self._find_leaves(),
            is_async=self.is_async,
            depth=self.depth,
            has_settings=self.has_settings,
            has_environment=not self.runs_user_code,
            reads_tasks=not self.shape.caches_tasks,
        )
        self.heads, self.tails = self.heads or lowered.span.heads, lowered.span.tails or self.tails
        self.mutations.update(lowered.mutations)
        self.runs_user_code = self.runs_user_code or lowered.runs_user_code
        self.pauses = self.pauses or lowered.pauses
        self.changes_objects = self.changes_objects or lowered.changes_objects
        return lowered

    def _find_leaves(self) -> FindLeaves | None:
        """Return what finds leaves in the next node: no searches behind code that may have written to their store."""
        find_leaves = self.find_leaves
        if find_leaves is None or not self.runs_user_code:
            return find_leaves

        def find(runnable: Runnable[Any, Any], location: str, kwargs: Mapping[str, Any], form: bool | None) -> FindLeaf:
            find_leaf = find_leaves(runnable, location, kwargs, form)
            return lambda node, bound, path: None if is_search(node) else find_leaf(node, bound, path)

        return find

    def _without_foreign_channels(self, state: SymbolicState, path: tuple[str, ...]) -> SymbolicState | None:
        """Return the state without the channels that nodes may write which run beside those on the path.

        Return None if one of these nodes is a barrier.
        """
        values = dict(state.values)
        for name in self.accompanied.difference(path):
            node = self.shape.nodes[name]
            lowered = lower_node(Draft(), node.bound, state.read(node.reads), name, depth=MAX_GRAPH_DEPTH)
            if lowered.is_barrier:
                return None
            self.runs_user_code = self.runs_user_code or lowered.runs_user_code
            unknown = values if lowered.updates is None else lowered.updates
            values |= dict.fromkeys(unknown, UNKNOWN_VALUE)
        return replace(state, values=values)

    def _add_successor(
        self,
        draft: Draft,
        span: Span,
        name: str,
        state: SymbolicState,
        path: tuple[str, ...],
        *,
        allow_repeat: bool = False,
        runs_alone: bool = True,
    ) -> None:
        """Add the node that certainly comes next; one that is on the path already only if `allow_repeat`."""
        is_repeated = allow_repeat and len(path) < MAX_DEPTH
        successor = self._successor(name, () if is_repeated else path, state.max_depth)
        if successor is not None:
            argument = state.read(successor.reads)
            self._add_node(draft, successor, argument, state, path, previous=span, runs_alone=runs_alone)

    def _successor(self, name: str, path: tuple[str, ...], max_depth: int = MAX_DEPTH) -> NodeShape | None:
        node = self.shape.nodes.get(name)
        return None if node is None or node.skippable or name in path or len(path) >= max_depth else node

    def _add_branch(
        self,
        draft: Draft,
        span: Span,
        node: NodeShape,
        branch: Branch,
        state: SymbolicState,
        path: tuple[str, ...],
        *,
        runs_alone: bool,
    ) -> None:
        """Add what comes after a conditional edge: the chosen nodes if the choice is known, else what any arm may need.

        `runs_alone`: no other node runs in the same superstep.
        """
        if branch.path is not None:
            chooser = self._lower(draft, branch.path, state.read(self.shape.update_rules), f"{node.name}.next")
            _add_order(draft, span, chooser.span)
            last_span = chooser.span if chooser.span.heads else span
            if chooser.is_barrier:
                return
            for send in chooser.sends:
                self._add_sent_tasks(draft, last_span, send, state, path)
            if chooser.sends:
                return
            if chooser.goto:
                goes_alone = runs_alone and len(chooser.goto) == 1
                if goes_alone and branch.node_for(chooser.goto[0]) == END:
                    self.ends.append(state)
                for name in chooser.goto:
                    target = branch.node_for(name)
                    self._add_successor(draft, last_span, target, state, path, allow_repeat=True, runs_alone=goes_alone)
                return
        if self.depth:
            return
        arms = [name for name in branch.nodes if name not in self.back_edges[node.name]]
        self._add_arms(draft, arms, state, path, runs_alone=runs_alone)

    def _add_arms(
        self,
        draft: Draft,
        names: Iterable[str],
        state: SymbolicState,
        path: tuple[str, ...],
        *,
        runs_alone: bool,
        only_prompts: bool = False,
    ) -> None:
        """Add what may start early of the nodes that may come next: with `only_prompts`, the beginnings of prompts."""
        arms = [node for name in names if (node := self._successor(name, path)) is not None]
        arm_drafts = [draft.new_body() for _ in arms]
        state = replace(state, is_chosen=True)
        for arm, arm_draft in zip(arms, arm_drafts, strict=True):
            self._add_node(arm_draft, arm, state.read(arm.reads), state, path, runs_alone=runs_alone)
        unknown = partial(_add_unknown, draft)
        for component in lookahead_of_arms(arm_drafts, unknown, draft, only_prompts=only_prompts):
            draft.add(component)
        for arm_draft in arm_drafts:
            draft.adopt_calls(arm_draft)

    def _add_sent_tasks(
        self, draft: Draft, span: Span, send: InstancePerItem, state: SymbolicState, path: tuple[str, ...]
    ) -> None:
        """Add a MAP of what the node asks for, with one task for each item, and then what comes after all tasks."""
        target = known_value(send.instance.fields.get("node", UNKNOWN_VALUE))[1]
        node = self._successor(target, path) if isinstance(target, str) else None
        items = materialize(draft, send.items, f"{target}.items")
        if node is None or items is None:
            return
        body = draft.new_body()
        argument = send.instance.fields.get("arg", UNKNOWN_VALUE)
        lowered = lower_node(
            body,
            node.bound,
            argument,
            node.name,
            find_leaves=self._find_leaves(),
            is_async=self.is_async,
            has_settings=False,
            reads_tasks=not self.shape.caches_tasks,
        )
        updates = lowered.updates or {}
        appended = {key: item for key, item in updates.items() if self.shape.update_rules.get(key) == "append"}
        self.runs_user_code = self.runs_user_code or lowered.runs_user_code
        result = materialize(body, Fields(appended), node.name) if appended else None
        output = prune_body(body, result, set(), has_user_code=lowered.runs_user_code)
        values = {**state.values, **dict.fromkeys(updates, UNKNOWN_VALUE)}
        if output is not None:
            body_output, is_complete = output
            name = draft.name(f"{node.name}.each", *DERIVED)
            inputs = (("items", items), *send.captures.items())
            draft.absorb(body)
            tasks = draft.add(Component(name, Role.MAP, inputs, body=body.template(body_output, name)))
            previous, span = span, Span((name,), (name,))
            _add_order(draft, previous, span)
            for key in appended if is_complete else ():  # lists grow in the order of the items, whichever ends first
                old = state.values.get(key, UNKNOWN_VALUE)
                values[key] = updated_value("append", old, flatten_field(tasks, key))
        if lowered.updates is not None and not (node.pauses or lowered.is_barrier):
            for name in node.successors:
                self._add_successor(draft, span, name, SymbolicState(values), (*path, node.name))

    def _state_after(self, state: SymbolicState, lowered: LoweredNode, *, runs_alone: bool) -> SymbolicState:
        """Return the state after a node. Unless it runs alone, others may update the same channels."""
        is_late = state.is_late or lowered.is_opaque
        if lowered.updates is None:
            return SymbolicState({}, is_late, state.is_chosen)
        values = {
            name: UNKNOWN_VALUE if lowered.mutations.has_inside(value) else value
            for name, value in state.values.items()
        }
        updates = lowered.updates
        if ROOT in self.shape.update_rules:  # the state is one value, which a node returns whole
            is_known = updates and self.shape.update_rules[ROOT] == "replace"
            updates = {ROOT: Fields(updates) if is_known else UNKNOWN_VALUE}
        for name, new in updates.items():
            rule = self.shape.update_rules.get(name)
            if rule is not None:
                old = values.get(name, UNKNOWN_VALUE)
                values[name] = updated_value(rule, old, new) if runs_alone else UNKNOWN_VALUE
        return SymbolicState(values, is_late, state.is_chosen)


def _add_order(draft: Draft, first: Span, second: Span) -> None:
    draft.order += [(tail, head) for tail in first.tails for head in second.heads]


def _is_user_code(component: Component) -> bool:
    bodies = [body for body in (component.body, component.otherwise) if body is not None]
    is_inside = any(_is_user_code(inner) for body in bodies for inner in body.components)
    return is_inside or is_user_code(component)


def _mark_slow(draft: Draft) -> None:
    """Mark the code of nodes as slow, because it comes after other code that may take long."""
    for name, c in draft.components.items():
        if c.role is Role.OPAQUE and not c.attributes.slow:
            draft.components[name] = replace(c, attributes=c.attributes.with_(slow=True))
