"""From a node that begins: what it, and the nodes that come behind it, will ask engines for, as one template.

Nothing runs. Symbolic values flow through the nodes and the state between them, along the edges. What is surely next
is asked for as soon as its inputs are known, before the barrier that the plain graph waits at. Of what may be next only
what costs little is, or what one arm alone asks for (`arms`). A node that is not understood leaves the channels
of the state unknown, and what reads them waits for the plain graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from teola_plugin.graph import INPUT, Component, Ref, Role
from teola_plugin.tracer.draft import DERIVED, Draft, Span, TraceResult
from teola_plugin.tracer.functions import (
    UNKNOWN_VALUE,
    Fields,
    Instance,
    ItemList,
    SendPerItem,
    Spread,
    Symbol,
    materialize,
)
from teola_plugin.tracer.functions.loops import flatten_field
from teola_plugin.tracer.functions.pruning import prune_body
from teola_plugin.tracer.functions.pure_expressions import Decide
from teola_plugin.tracer.functions.symbols import known_value
from teola_plugin.tracer.langgraph.node import NOTHING, UNKNOWN, Visited, unknown, visit
from teola_plugin.tracer.langgraph.shape import ROOT, Branch, GraphShape, NodeShape, Update, backwards
from teola_plugin.tracer.lookahead import lookahead_of_arms

STATE, ARGUMENT = "state", "argument"
"""Keys of a template's input: the values of the state's channels; what was sent to the node alone (`Send`)."""
FURTHEST = 6
"""Nodes, one behind the other, that are looked at."""


@dataclass(frozen=True, slots=True)
class _State:
    """Symbols of the channels' values."""

    values: Mapping[str, Symbol]
    late: bool = False
    """Whether code that may take long runs before it is there."""

    def read(self, names: Iterable[str] | None) -> Symbol:
        """The input of a node that reads these."""
        if names is None:
            return self.values.get(ROOT, UNKNOWN_VALUE)
        return Fields({name: self.values.get(name, UNKNOWN_VALUE) for name in names}, attributes=True)


@dataclass(slots=True)
class _Lookahead:
    shape: GraphShape
    backwards: Mapping[str, frozenset[str]]
    """Arms that go round once more are not guessed at: the round before has to show that it was not enough."""
    decide: Decide | None = None
    """Decides conditions on the state that is there."""
    names: set[str] = field(default_factory=set)

    def template(self, start: NodeShape, pushed: bool) -> TraceResult:
        draft = Draft(names=self.names)
        state = _State({name: Ref(INPUT).at(STATE).at(name) for name in self.shape.updates})
        given = Ref(INPUT).at(ARGUMENT) if pushed else state.read(start.reads)
        self._visit(draft, start, given, state, (), pushed=pushed)
        return draft.finish(Ref(INPUT), start.name)

    def _visit(
        self,
        draft: Draft,
        node: NodeShape,
        given: Symbol,
        state: _State,
        before: tuple[str, ...],
        *,
        pushed: bool = False,
    ) -> Span:
        """Components of a node and of those behind it; `before` are the nodes on the way to it."""
        if node.bound is None:
            made, after = NOTHING, state
        else:
            made = visit(draft, node.bound, given, node.name, self.decide)
            after = self._updated(state, made, alone=not pushed)
            if state.late:
                _waits(draft)
        if node.pauses:
            return made.span
        way = (*before, node.name)
        if pushed:
            return made.span  # the others that were sent beside it have to come, too
        for name in (*node.then, *made.goto):
            self._certain(draft, made.span, name, after, way)
        for branch in node.branches:
            if branch.path is None and made.goto:
                continue  # its command says where it goes
            self._branch(draft, made.span, node, branch, after, way)
        if not before and UNKNOWN in draft.components:  # at least what is asked for here comes before it is known
            draft.order += [(tail, UNKNOWN) for tail in made.span.tails]
        return made.span

    def _certain(
        self, draft: Draft, span: Span, name: str, state: _State, before: tuple[str, ...], *, again: bool = False
    ) -> None:
        """`again`: it is known that the graph goes there, also where it has been there before."""
        follower = self._follower(name, () if again and len(before) < FURTHEST else before)
        if follower is not None:
            _then(draft, span, self._visit(draft, follower, state.read(follower.reads), state, before))

    def _branch(
        self, draft: Draft, span: Span, node: NodeShape, branch: Branch, state: _State, before: tuple[str, ...]
    ) -> None:
        if branch.path is not None:
            chosen = visit(draft, branch.path, state.read(self.shape.updates), f"{node.name}.next", self.decide)
            _then(draft, span, chosen.span)
            for sent in chosen.sent:
                self._sent(draft, _wider(span, chosen.span), sent, state, before)
            if chosen.sent:
                return
            if chosen.goto:
                for name in chosen.goto:
                    self._certain(draft, _wider(span, chosen.span), branch.node(name), state, before, again=True)
                return
        arms = [name for name in branch.nodes if name not in self.backwards[node.name]]
        self._arms(draft, arms, state, before)

    def _sent(self, draft: Draft, span: Span, sent: SendPerItem, state: _State, before: tuple[str, ...]) -> None:
        """One task for each item: a MAP of what the node asks for, and then what comes behind all of them."""
        target = known_value(sent.send.fields.get("node", UNKNOWN_VALUE))[1]
        node = self._follower(target, before) if isinstance(target, str) else None
        items = materialize(draft, sent.items, f"{target}.items")
        if node is None or items is None:
            return
        body = draft.body()
        made = visit(body, node.bound, sent.send.fields.get("arg", UNKNOWN_VALUE), node.name)
        updates = self._appended(body, made, node.name)
        output = prune_body(body, updates, set())
        here, after = span, _State({**state.values, **dict.fromkeys(made.updates or (), UNKNOWN_VALUE)})
        if output is not None:
            name = draft.name(f"{node.name}.each", *DERIVED)
            inputs = (("items", items), *sent.captures.items())
            draft.absorb(body)
            each = draft.add(Component(name, Role.MAP, inputs, body=body.template(output[0], name)))
            here = Span((name,), (name,))
            _then(draft, span, here)
            if output[1]:
                after = self._gathered(state, after, made, each)
        if made.updates is not None and not node.pauses:
            for name in node.then:
                self._certain(draft, here, name, after, (*before, node.name))

    def _appended(self, body: Draft, made: Visited, name: str) -> Ref | None:
        """What a task adds to lists of the state, by channel; None where that is not all known."""
        added = {key: one for key, one in (made.updates or {}).items() if self.shape.updates.get(key) == "append"}
        return materialize(body, Fields(added), name) if added else None

    def _gathered(self, state: _State, after: _State, made: Visited, each: Ref) -> _State:
        """The state behind tasks that add to lists: in the order in which they were sent, whichever ends first."""
        values = dict(after.values)
        for key in made.updates or ():
            if self.shape.updates.get(key) == "append":
                values[key] = _channel("append", state.values.get(key, UNKNOWN_VALUE), flatten_field(each, key))
        return _State(values)

    def _follower(self, name: str, before: tuple[str, ...]) -> NodeShape | None:
        node = self.shape.nodes.get(name)
        return None if node is None or node.skippable or name in before or len(before) >= FURTHEST else node

    def _arms(self, draft: Draft, names: Iterable[str], state: _State, before: tuple[str, ...]) -> None:
        """Of the nodes that may be chosen, what may begin before one is."""
        arms = [node for name in names if (node := self._follower(name, before)) is not None]
        drafts = [Draft(names=self.names) for _ in arms]
        for arm, own in zip(arms, drafts, strict=True):
            self._visit(own, arm, state.read(arm.reads), state, before)
        for component in lookahead_of_arms(drafts, partial(unknown, draft), draft):
            draft.add(component)
        for own in drafts:
            draft.adopt_calls(own)

    def _updated(self, state: _State, made: Visited, *, alone: bool) -> _State:
        """The state behind a node. Of one of several that run side by side, what it adds is not all that is added."""
        late = state.late or made.opaque
        if made.updates is None:
            return _State({}, late)
        values = {name: UNKNOWN_VALUE if made.in_place.has_inside(one) else one for name, one in state.values.items()}
        for name, new in made.updates.items():
            how = self.shape.updates.get(name)
            if how is not None:
                values[name] = _channel(how, values.get(name, UNKNOWN_VALUE), new) if alone else UNKNOWN_VALUE
        return _State(values, late)


def _channel(how: Update, old: Symbol, new: Symbol) -> Symbol:
    """What a channel holds after an update. Messages have ids in the plain graph, which no prompt shows."""
    if how == "replace":
        return new
    if how == "unknown" or old is UNKNOWN_VALUE:
        return UNKNOWN_VALUE
    before = old.items if isinstance(old, ItemList) else (Spread(old),)
    if isinstance(new, ItemList):
        return ItemList((*before, *new.items))
    return ItemList((*before, new if isinstance(new, Instance) else Spread(new)))


def _waits(draft: Draft) -> None:
    """What a node's code gives comes behind other code, which may take long."""
    for name, c in draft.components.items():
        if c.role is Role.OPAQUE and not c.attributes.slow:
            draft.components[name] = replace(c, attributes=c.attributes.with_(slow=True))


def _wider(first: Span, second: Span) -> Span:
    """The second, which came behind the first; the first where there is nothing of the second."""
    return second if second.heads else first


def _then(draft: Draft, first: Span, second: Span) -> None:
    draft.order += [(tail, head) for tail in first.tails for head in second.heads]


def lookahead(shape: GraphShape, node: str, *, pushed: bool, decide: Decide | None = None) -> TraceResult:
    """The template of what comes from this node on. Its input: `{"state": {channel: value}, "argument": ...}`.

    `decide` is asked for conditions on that input; without it, or by its None, both ways are open.
    """
    return _Lookahead(shape, backwards(shape), decide).template(shape.nodes[node], pushed)
