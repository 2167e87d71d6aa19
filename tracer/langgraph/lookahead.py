"""From a node that begins: what it, and the nodes that come behind it, will ask engines for, as one template.

Nothing runs. Symbolic values flow through the nodes and the state between them, along the edges. What is surely next
is asked for as soon as its inputs are known, before the barrier that the plain graph waits at. Of what may be next only
what costs little is, or what one arm alone asks for (`begun_early`). A node that is not understood leaves the channels
of the state unknown, and what reads them waits for the plain graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from langchain_core.messages import BaseMessage

from teola_plugin.graph import INPUT, Component, Ref, Role, on_loop
from teola_plugin.tracer.draft import Draft, Span, Traced
from teola_plugin.tracer.langchain.lookahead import begun_early
from teola_plugin.tracer.langgraph.node import Visited, visit_node, visit_path
from teola_plugin.tracer.langgraph.shape import ROOT, GraphShape, NodeShape
from teola_plugin.tracer.symbols import Record, Value

STATE, ARGUMENT = "state", "argument"
"""Keys of a template's input: the values of the state's channels; what was sent to the node alone (`Send`)."""
FURTHEST = 6
"""Nodes, one behind the other, that are looked at."""


@dataclass(frozen=True, slots=True)
class _State:
    """Symbolic values of the channels; None for one that nobody can tell."""

    values: Mapping[str, Value | None]

    def read(self, names: tuple[str, ...] | None, unknown: Callable[[], Ref]) -> Value:
        """The input of a node that reads these."""
        if names is None:
            return self.values.get(ROOT) or unknown()
        return Record({name: self.values.get(name) or unknown() for name in names})


@dataclass(slots=True)
class _Lookahead:
    shape: GraphShape
    names: set[str] = field(default_factory=set)

    def template(self, start: NodeShape, pushed: bool) -> Traced:
        draft = Draft(names=self.names)
        state = _State({name: Ref(INPUT).at(STATE).at(name) for name in self.shape.updates})
        given = Ref(INPUT).at(ARGUMENT) if pushed else state.read(start.reads, partial(_unknown, draft))
        self._visit(draft, start, given, state, (), pushed=pushed)
        return draft.finished(Ref(INPUT), start.name)

    def _visit(
        self,
        draft: Draft,
        node: NodeShape,
        given: Value,
        state: _State,
        before: tuple[str, ...],
        *,
        pushed: bool = False,
    ) -> Span:
        """Components of a node and of those behind it; `before` are the nodes on the way to it."""
        made = visit_node(draft, node, given)
        if node.pauses or not made.goes_on:
            return made.span
        after = self._updated(draft, node, state, made, alone=not pushed)
        on_the_way = (*before, node.name)
        for branch in node.branches:
            chosen = visit_path(
                draft, branch.path, node, after.read(tuple(self.shape.updates), partial(_unknown, draft))
            )
            _then(draft, made.span, chosen.span)
            self._arms(draft, branch.ends, after, on_the_way)
        for name in node.then:
            if (follower := self._follower(name, on_the_way)) is not None:
                given = after.read(follower.reads, partial(_unknown, draft))
                _then(draft, made.span, self._visit(draft, follower, given, after, on_the_way))
        return made.span

    def _follower(self, name: str, before: tuple[str, ...]) -> NodeShape | None:
        node = self.shape.nodes.get(name)
        return None if node is None or node.skippable or name in before or len(before) >= FURTHEST else node

    def _arms(self, draft: Draft, ends: tuple[str, ...] | None, state: _State, before: tuple[str, ...]) -> None:
        """Of the nodes that may be chosen, what may begin before one is."""
        arms = [node for name in ends or () if (node := self._follower(name, before)) is not None]
        drafts = [Draft(names=self.names) for _ in arms]
        for arm, own in zip(arms, drafts, strict=True):
            self._visit(own, arm, state.read(arm.reads, partial(_unknown, own)), state, before)
        for component in begun_early(drafts, certain=False):
            draft.add(component)
        for own in drafts:
            draft.calls |= own.calls
            draft.lists |= {name: how for name, how in own.lists.items() if name in draft.components}

    def _updated(self, draft: Draft, node: NodeShape, state: _State, made: Visited, *, alone: bool) -> _State:
        """The state behind a node. Of one of several that run side by side, what it adds is not all that is added."""
        if made.updates is None:
            return _State({})
        values = dict(state.values)
        for name, value in made.updates.items():
            if name in values:
                values[name] = self._channel(draft, node, name, values[name], value) if alone else None
        return _State(values)

    def _channel(self, draft: Draft, node: NodeShape, name: str, old: Value | None, new: Value | None) -> Value | None:
        how = self.shape.updates[name]
        if how == "replace" or new is None:
            return new if how == "replace" else None
        if how == "unknown" or old is None:
            return None
        made = draft.name(f"{node.name}.{name}")
        pair = {"old": draft.real(old, made, ()), "new": draft.real(new, made, ())}
        return draft.call(made, on_loop(_appended), (), **pair)


def _unknown(draft: Draft) -> Ref:
    """What nobody can tell before the plain graph has come there."""
    name = "unknown"
    if name not in draft.components:
        draft.add(Component(name, Role.OPAQUE, ()))
    return Ref(name)


def _appended(old: Any, new: Any) -> list[Any]:
    """As `operator.add` of lists and `add_messages` of new messages do, up to the messages' ids."""
    return [*old, *([new] if isinstance(new, BaseMessage) else new)]


def _then(draft: Draft, first: Span, second: Span) -> None:
    draft.order += [(tail, head) for tail in first.tails for head in second.heads]


def lookahead(shape: GraphShape, node: str, *, pushed: bool) -> Traced:
    """The template of what comes from this node on. Its input: `{"state": {channel: value}, "argument": ...}`."""
    return _Lookahead(shape).template(shape.nodes[node], pushed)
