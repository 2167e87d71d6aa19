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

from teola_plugin.graph import INPUT, Component, Ref, Role
from teola_plugin.shims.langgraph import functions_of
from teola_plugin.tracer.draft import DERIVED, Draft, Span, TraceResult
from teola_plugin.tracer.functions import (
    UNKNOWN_VALUE,
    Fields,
    FindLeaves,
    InstancePerItem,
    Symbol,
    first_parameter,
    materialize,
    summarize_function,
)
from teola_plugin.tracer.functions.loops import flatten_field
from teola_plugin.tracer.functions.mutations import Mutations
from teola_plugin.tracer.functions.pruning import EMPTY_SPAN, prune_body
from teola_plugin.tracer.functions.pure_expressions import Decide
from teola_plugin.tracer.functions.symbols import known_value, to_symbol
from teola_plugin.tracer.langchain.trace import trace_into
from teola_plugin.tracer.langgraph.shape import ROOT, Branch, GraphShape, NodeShape, back_edges
from teola_plugin.tracer.langgraph.updates import updated_value
from teola_plugin.tracer.lookahead import lookahead_of_arms
from teola_plugin.tracer.symbols import Prompted, Record, Value

STATE, ARGUMENT = "state", "argument"
"""Keys of a template's input: the values of the state's channels; what was sent to the node alone (`Send`)."""
MAX_DEPTH = 6
"""Length of the longest path of nodes that is traced after a choice that is not known yet, or round a loop."""
MAX_CERTAIN_DEPTH = 24
"""Length of the longest path of nodes, one after the other, that is traced."""
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
    """Return the template of what comes from this node on. Its input: `{"state": {channel: value}, "argument": ...}`.

    `pushed`: the node was started by a `Send`, with an argument of its own. `decide` is asked for conditions on the
    input; without it, or if it returns None, both paths stay open. `find_leaves` finds the models and retrievers of the
    user's own whose calls are components, too. `is_async`: see `lower_node`.
    """
    return _LookaheadTracer(shape, back_edges(shape), decide, find_leaves, is_async).trace(shape.nodes[node], pushed)


# ------------------------------------------------------------ one node


@dataclass(frozen=True, slots=True)
class LoweredNode:
    """A node, or the function of a conditional edge, after its components were added to a draft."""

    span: Span = EMPTY_SPAN
    updates: Mapping[str, Symbol] | None = None
    """The values that it writes, by channel; None if these are not known."""
    goto: tuple[str, ...] = ()
    """The nodes to which it goes, as far as it names them itself."""
    sends: tuple[InstancePerItem, ...] = ()
    """Tasks that it sends to nodes, one for each item of a list."""
    is_opaque: bool = False
    """True if it runs unknown code, which may take long."""
    mutations: Mutations = field(default_factory=Mutations)
    """The values that it changes in place; channels hold these, too."""


EMPTY_NODE = LoweredNode()


def lower_node(
    draft: Draft,
    bound: Runnable[Any, Any],
    argument: Symbol,
    name: str,
    decide: Decide | None = None,
    find_leaves: FindLeaves | None = None,
    *,
    is_async: bool = False,
) -> LoweredNode:
    """Add to the draft what a node will ask engines for. It may be anything; what is not understood is left out.

    `is_async`: the graph runs on a loop, and the async function of a node that has both.
    """
    functions = functions_of(bound)
    if functions is None:
        value, span = trace_into(draft, bound, _to_value(draft, argument, name), name, f"graph.{name}", {})
        result = to_symbol(value)
        return LoweredNode(span, result.items if isinstance(result, Fields) and result.base is None else None)
    func = (functions.afunc or functions.func) if is_async else (functions.func or functions.afunc)
    parameter = first_parameter(func)
    if not parameter:
        return LoweredNode(is_opaque=True)
    summary = summarize_function(
        func, {parameter: argument}, draft, name, state=parameter, decide=decide, find_leaves=find_leaves
    )
    sent = summary.value
    sends = (sent,) if isinstance(sent, InstancePerItem) and sent.instance.kind.__name__ == "Send" else ()
    is_opaque = summary.runs_user_code and not summary.uses_engines
    return LoweredNode(summary.span, summary.updates, summary.goto, sends, is_opaque, summary.mutations)


def _to_value(draft: Draft, symbol: Symbol, name: str) -> Value:
    """Return the input of a Runnable: references, and dictionaries of references."""
    if isinstance(symbol, Fields):
        return Record({key: _to_value(draft, item, name) for key, item in symbol.items.items()}, symbol.base)
    if isinstance(symbol, Ref | Prompted):
        return symbol
    return (None if symbol is UNKNOWN_VALUE else materialize(draft, symbol, name)) or _add_unknown(draft)


def _add_unknown(draft: Draft) -> Ref:
    if _UNKNOWN not in draft.components:
        draft.add(Component(_UNKNOWN, Role.OPAQUE, ()))
    return Ref(_UNKNOWN)


# ------------------------------------------------------------ the nodes after it


@dataclass(frozen=True, slots=True)
class _SymbolicState:
    """The state of the graph between two nodes: symbols of the channels' values."""

    values: Mapping[str, Symbol]
    is_late: bool = False
    """True if code that may take long runs before the state is there."""
    is_chosen: bool = False
    """True if a conditional edge on the way here may lead elsewhere."""

    @property
    def max_depth(self) -> int:
        """The length of the longest path of nodes that is traced to this state."""
        return MAX_DEPTH if self.is_chosen else MAX_CERTAIN_DEPTH

    def read(self, names: Iterable[str] | None) -> Symbol:
        """Return the input of a node that reads these channels, or the whole state."""
        if names is None:
            return self.values.get(ROOT, UNKNOWN_VALUE)
        return Fields({name: self.values.get(name, UNKNOWN_VALUE) for name in names}, attributes=True)


@dataclass(slots=True)
class _LookaheadTracer:
    """A walk along the edges of a graph."""

    shape: GraphShape
    back_edges: Mapping[str, frozenset[str]]
    """Arms that go round a loop once more: they are not started early, as the last round may have been enough."""
    decide: Decide | None = None
    find_leaves: FindLeaves | None = None
    is_async: bool = False
    names: set[str] = field(default_factory=set)

    def trace(self, start: NodeShape, pushed: bool) -> TraceResult:
        draft = Draft(names=self.names)
        state = _SymbolicState({name: Ref(INPUT).at(STATE).at(name) for name in self.shape.update_rules})
        argument = Ref(INPUT).at(ARGUMENT) if pushed else state.read(start.reads)
        self._add_node(draft, start, argument, state, (), pushed=pushed)
        return draft.finish(Ref(INPUT), start.name)

    def _add_node(
        self,
        draft: Draft,
        node: NodeShape,
        argument: Symbol,
        state: _SymbolicState,
        path: tuple[str, ...],
        *,
        previous: Span = EMPTY_SPAN,
        pushed: bool = False,
    ) -> None:
        """Add a node and those after it.

        `path` is the path of nodes to it. `previous`: the last components before it.
        """
        if node.bound is None:
            lowered, next_state = EMPTY_NODE, state
        else:
            lowered = self._lower(draft, node.bound, argument, node.name)
            next_state = self._state_after(state, lowered, runs_alone=not pushed)
            if state.is_late:
                _mark_slow(draft)
        _add_order(draft, previous, lowered.span)
        span = lowered.span if lowered.span.heads else previous
        if node.pauses or pushed:  # pushed: what comes next waits for the other tasks that were sent, too
            return
        next_path = (*path, node.name)
        for name in (*node.successors, *lowered.goto):
            self._add_successor(draft, span, name, next_state, next_path)
        for branch in node.branches:
            if branch.path is None and lowered.goto:
                continue  # its command says where it goes
            self._add_branch(draft, span, node, branch, next_state, next_path)
        if not path and _UNKNOWN in draft.components:  # at least the requests of this node come before it is known
            draft.order += [(tail, _UNKNOWN) for tail in lowered.span.tails]

    def _lower(self, draft: Draft, bound: Runnable[Any, Any], argument: Symbol, name: str) -> LoweredNode:
        return lower_node(draft, bound, argument, name, self.decide, self.find_leaves, is_async=self.is_async)

    def _add_successor(
        self,
        draft: Draft,
        span: Span,
        name: str,
        state: _SymbolicState,
        path: tuple[str, ...],
        *,
        allow_repeat: bool = False,
    ) -> None:
        """Add the node that certainly comes next; one that is on the path already only if `allow_repeat`."""
        is_repeated = allow_repeat and len(path) < MAX_DEPTH
        successor = self._successor(name, () if is_repeated else path, state.max_depth)
        if successor is not None:
            self._add_node(draft, successor, state.read(successor.reads), state, path, previous=span)

    def _successor(self, name: str, path: tuple[str, ...], max_depth: int = MAX_DEPTH) -> NodeShape | None:
        node = self.shape.nodes.get(name)
        return None if node is None or node.skippable or name in path or len(path) >= max_depth else node

    def _add_branch(
        self,
        draft: Draft,
        span: Span,
        node: NodeShape,
        branch: Branch,
        state: _SymbolicState,
        path: tuple[str, ...],
    ) -> None:
        if branch.path is not None:
            chooser = self._lower(draft, branch.path, state.read(self.shape.update_rules), f"{node.name}.next")
            _add_order(draft, span, chooser.span)
            last_span = chooser.span if chooser.span.heads else span
            for send in chooser.sends:
                self._add_sent_tasks(draft, last_span, send, state, path)
            if chooser.sends:
                return
            for name in chooser.goto:
                self._add_successor(draft, last_span, branch.node_for(name), state, path, allow_repeat=True)
            if chooser.goto:
                return
        arms = [name for name in branch.nodes if name not in self.back_edges[node.name]]
        self._add_arms(draft, arms, state, path)

    def _add_arms(self, draft: Draft, names: Iterable[str], state: _SymbolicState, path: tuple[str, ...]) -> None:
        """Add what may start early of the nodes that may be chosen."""
        arms = [node for name in names if (node := self._successor(name, path)) is not None]
        arm_drafts = [draft.body() for _ in arms]
        state = replace(state, is_chosen=True)
        for arm, arm_draft in zip(arms, arm_drafts, strict=True):
            self._add_node(arm_draft, arm, state.read(arm.reads), state, path)
        for component in lookahead_of_arms(arm_drafts, partial(_add_unknown, draft), draft):
            draft.add(component)
        for arm_draft in arm_drafts:
            draft.adopt_calls(arm_draft)

    def _add_sent_tasks(
        self, draft: Draft, span: Span, send: InstancePerItem, state: _SymbolicState, path: tuple[str, ...]
    ) -> None:
        """Add a MAP of what the node asks for, with one task for each item, and then what comes after all tasks."""
        target = known_value(send.instance.fields.get("node", UNKNOWN_VALUE))[1]
        node = self._successor(target, path) if isinstance(target, str) else None
        items = materialize(draft, send.items, f"{target}.items")
        if node is None or items is None:
            return
        body = draft.body()
        argument = send.instance.fields.get("arg", UNKNOWN_VALUE)
        lowered = lower_node(
            body, node.bound, argument, node.name, find_leaves=self.find_leaves, is_async=self.is_async
        )
        updates = lowered.updates or {}
        appended = {key: item for key, item in updates.items() if self.shape.update_rules.get(key) == "append"}
        output = prune_body(body, materialize(body, Fields(appended), node.name) if appended else None, set())
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
        if lowered.updates is not None and not node.pauses:
            for name in node.successors:
                self._add_successor(draft, span, name, _SymbolicState(values), (*path, node.name))

    def _state_after(self, state: _SymbolicState, lowered: LoweredNode, *, runs_alone: bool) -> _SymbolicState:
        """Return the state after a node. Unless it runs alone, others may update the same channels."""
        is_late = state.is_late or lowered.is_opaque
        if lowered.updates is None:
            return _SymbolicState({}, is_late, state.is_chosen)
        values = {
            name: UNKNOWN_VALUE if lowered.mutations.has_inside(value) else value
            for name, value in state.values.items()
        }
        for name, new in lowered.updates.items():
            rule = self.shape.update_rules.get(name)
            if rule is not None:
                old = values.get(name, UNKNOWN_VALUE)
                values[name] = updated_value(rule, old, new) if runs_alone else UNKNOWN_VALUE
        return _SymbolicState(values, is_late, state.is_chosen)


def _add_order(draft: Draft, first: Span, second: Span) -> None:
    draft.order += [(tail, head) for tail in first.tails for head in second.heads]


def _mark_slow(draft: Draft) -> None:
    """Mark the code of nodes as slow, because it comes after other code that may take long."""
    for name, c in draft.components.items():
        if c.role is Role.OPAQUE and not c.attributes.slow:
            draft.components[name] = replace(c, attributes=c.attributes.with_(slow=True))
