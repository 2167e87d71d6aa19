"""One node of a graph, walked with symbolic values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from teola_plugin.graph import Component, Role
from teola_plugin.shims.langgraph import functions_of
from teola_plugin.tracer.draft import Draft, Span
from teola_plugin.tracer.langchain.trace import Place, Walk
from teola_plugin.tracer.langgraph.shape import NodeShape
from teola_plugin.tracer.symbols import Record, Value


@dataclass(frozen=True, slots=True)
class Visited:
    """What became of a node."""

    span: Span
    updates: Mapping[str, Value | None] | None
    """What it writes, by channel, None for a value that is not known; None where that is not known at all."""
    goes_on: bool = True
    """Whether the graph goes on by its edges alone."""


def visit_node(draft: Draft, node: NodeShape, given: Value) -> Visited:
    """Adds to the draft what the node will ask engines for. Never raises for what it does not understand."""
    place = Place(path=f"graph.{node.name}", tags=(node.name,), prefix=node.name)
    return _visited(draft, node.bound, given, place)


def visit_path(draft: Draft, path: Any, node: NodeShape, state: Value) -> Visited:
    """The same for what chooses the way behind the node."""
    place = Place(path=f"graph.{node.name}.next", tags=(node.name,), prefix=f"{node.name}.next")
    return _visited(draft, path, state, place)


def _visited(draft: Draft, bound: Any, given: Value, place: Place) -> Visited:
    if functions_of(bound) is not None:
        return _opaque(draft, place)
    value, span = Walk(draft).visit(bound, given, place)
    return Visited(span, value.items if isinstance(value, Record) and value.base is None else None)


def _opaque(draft: Draft, place: Place) -> Visited:
    """User code: nothing is known of what it does, or writes."""
    name = draft.name(place.prefix)
    draft.add(Component(name, Role.OPAQUE, (), scope=place.tags))
    return Visited(Span((name,), (name,)), None)
