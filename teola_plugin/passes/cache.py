"""Optimised graphs of recent templates, so that a repeated call pays for a look-up only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from enum import Enum
from threading import Lock
from typing import Any

from teola_plugin.graph import Component, Primitive, Shape, WorkflowTemplate, build_pgraph
from teola_plugin.passes.base import Optimised, PassContext, PassPipeline

MOST_PRIMITIVES = 1 << 18
"""Of all graphs that are kept, those on the way to the e-graphs included."""


class GraphCache:
    """The least recently used go first. Safe to use from several threads.

    Templates count as the same when they are equal, whatever objects they are: a function that returns a new chain
    each time is planned once. `capacity` plans are kept, fewer if they are large.
    """

    def __init__(self, pipeline: PassPipeline, capacity: int = 128, most: int = MOST_PRIMITIVES) -> None:
        self.pipeline = pipeline
        self.capacity = capacity
        self.most = most
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[Hashable, Optimised] = OrderedDict()
        self._structures: OrderedDict[int, _Structure] = OrderedDict()
        """By the identity of the template, which they keep alive: an identity is never taken over by another one."""
        self._primitives = 0
        self._lock = Lock()

    def optimised(
        self,
        template: WorkflowTemplate,
        shape: Shape | None,
        context: PassContext,
        *,
        certain: bool = True,
        chosen: bool = True,
    ) -> Optimised:
        """The e-graph of `template` for queries of this shape, with or without work for parts that are certain to be
        called, or that are yet to be chosen. Raises `GraphError` and `PassError` as its makers do."""
        sizes = tuple(sorted((shape or {}).items()))
        key = self._structure(template), certain, chosen, sizes, context.fingerprint(), self.pipeline.passes
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self.hits += 1
                self._entries.move_to_end(key)
                return found
        # Made outside the lock: two threads may make the same graph, none waits for another's.
        wanted = template.looking_ahead(certain=certain, chosen=chosen)
        made = self.pipeline.run(build_pgraph(wanted, shape), context)
        with self._lock:
            self.misses += 1
            return self._keep(key, made)

    def _keep(self, key: Hashable, made: Optimised) -> Optimised:
        kept = self._entries.setdefault(key, made)
        if kept is made:
            self._primitives += _weight(made)
        while len(self._entries) > self.capacity or (self._primitives > self.most and len(self._entries) > 1):
            self._primitives -= _weight(self._entries.popitem(last=False)[1])
        return kept

    def _structure(self, template: WorkflowTemplate) -> _Structure:
        """Worked out once for a template that stays."""
        with self._lock:
            found = self._structures.get(id(template))
            if found is not None:
                self._structures.move_to_end(id(template))
                return found
        made = _Structure(template)
        with self._lock:
            self._structures[id(template)] = made
            while len(self._structures) > self.capacity:
                self._structures.popitem(last=False)
        return made

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._structures.clear()
            self._primitives = 0


class _Structure:
    """A template as a key: equal for templates that are equal and say values of the same types."""

    __slots__ = ("_hash", "_template", "_types")

    def __init__(self, template: WorkflowTemplate) -> None:
        self._template = template
        try:
            self._types, self._hash = _option_types(template), hash(template)
        except TypeError:  # an option of a type that is not known here: the same as itself only
            self._types, self._hash = None, id(template)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Structure):
            return NotImplemented
        if self._template is other._template:
            return True
        return self._types is not None and self._types == other._types and self._template == other._template


def _option_types(template: WorkflowTemplate) -> Hashable:
    """1, 1.0 and True are equal, and mean different things in a filter."""
    inner = [body for c in template.components for body in (c.body, c.otherwise) if body is not None]
    every: list[Component | Primitive] = [*template.components]
    every += [p for c in template.components for p in c.primitives]
    said = [(*one.attributes.said(), *one.options) for one in every]
    options = tuple([_types(value) for pairs in said for _, value in pairs])
    return options, tuple([_option_types(body) for body in inner])


def _types(value: Any) -> Hashable:
    """Raises TypeError for what may look equal and not be."""
    if isinstance(value, tuple):
        return type(value), tuple([_types(inner) for inner in value])
    if isinstance(value, frozenset):
        return frozenset([(inner, _types(inner)) for inner in value])
    if value is None or isinstance(value, (str, bytes, int, float, Enum)):
        return type(value).__name__
    raise TypeError(type(value))


def _weight(made: Optimised) -> int:
    """Primitives that a plan holds, inner ones aside."""
    graphs = {id(graph): len(graph) for report in made.reports for graph in (report.before, report.after)}
    return sum(graphs.values()) + len(made.graph)
