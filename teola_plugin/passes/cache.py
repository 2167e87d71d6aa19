"""A cache of the optimised graphs of recent templates: a repeated call costs one look-up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from enum import Enum
from threading import Lock
from typing import Any

from teola_plugin.graph import Component, Primitive, Shape, WorkflowTemplate, build_pgraph
from teola_plugin.passes.base import Optimised, PassContext, PassPipeline

MAX_PRIMITIVES = 1 << 18
"""Default bound on the primitives of all cached graphs, those between the p-graph and the e-graph included."""


class GraphCache:
    """A least-recently-used cache of optimised graphs. Safe to use from several threads.

    Two equal templates share an entry, even if they are different objects: the chains that a function builds anew on
    each call are planned once.

    Args:
        pipeline: The passes to apply on a miss.
        capacity: Maximum number of cached plans.
        max_primitives: Maximum number of primitives in all cached graphs; the newest plan is kept even if it is larger.
    """

    def __init__(self, pipeline: PassPipeline, capacity: int = 128, max_primitives: int = MAX_PRIMITIVES) -> None:
        self.pipeline = pipeline
        self.capacity = capacity
        self.max_primitives = max_primitives
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[Hashable, Optimised] = OrderedDict()
        self._structures: OrderedDict[int, _Structure] = OrderedDict()
        """Keys of templates by `id(template)`. Each holds its template, so that its id is not reused."""
        self._primitives = 0
        self._lock = Lock()

    def optimised(
        self,
        template: WorkflowTemplate,
        shape: Shape | None,
        context: PassContext,
        *,
        certain: bool = True,
        open_choices: bool = True,
    ) -> Optimised:
        """Return the e-graph of `template` for queries of this shape.

        Args:
            template: The workflow template to plan.
            shape: Expected number of items by component, None if unknown.
            context: Engine profiles and the speculation setting.
            certain: Include requests of subplans that are certain to be called.
            open_choices: Include requests of subplans that the original may not choose.

        Raises:
            GraphError: The template cannot be built into a p-graph.
            PassError: A pass failed, or the passes did not settle.
        """
        sizes = tuple(sorted((shape or {}).items()))
        key = self._structure(template), certain, open_choices, sizes, context.fingerprint(), self.pipeline.passes
        with self._lock:
            cached = self._entries.get(key)
            if cached is not None:
                self.hits += 1
                self._entries.move_to_end(key)
                return cached
        # Planned outside the lock: two threads may plan the same graph, but no thread waits for another's plan.
        optimised = self.pipeline.run(
            build_pgraph(template.with_lookahead(certain=certain, open_choices=open_choices), shape), context
        )
        with self._lock:
            self.misses += 1
            return self._add(key, optimised)

    def _add(self, key: Hashable, optimised: Optimised) -> Optimised:
        """Add an entry unless another thread added an equal one. Return the entry that the cache now has."""
        entry = self._entries.setdefault(key, optimised)
        if entry is optimised:
            self._primitives += _count_primitives(optimised)
        while len(self._entries) > self.capacity or (self._primitives > self.max_primitives and len(self._entries) > 1):
            self._primitives -= _count_primitives(self._entries.popitem(last=False)[1])
        return entry

    def _structure(self, template: WorkflowTemplate) -> _Structure:
        """Return the key of a template. Computed once while the template is among the recent ones."""
        with self._lock:
            cached = self._structures.get(id(template))
            if cached is not None:
                self._structures.move_to_end(id(template))
                return cached
        structure = _Structure(template)
        with self._lock:
            self._structures[id(template)] = structure
            while len(self._structures) > self.capacity:
                self._structures.popitem(last=False)
        return structure

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._structures.clear()
            self._primitives = 0


class _Structure:
    """A template as a key: two keys are equal if the templates are equal and their options have the same types."""

    __slots__ = ("_hash", "_template", "_types")

    def __init__(self, template: WorkflowTemplate) -> None:
        self._template = template
        try:
            self._types, self._hash = _option_types(template), hash(template)
        except TypeError:  # an option has a type that cannot be compared: the key equals itself only
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
    """Return the types of all options: 1, 1.0 and True are equal, but mean different things in a filter."""
    inner = [body for c in template.components for body in (c.body, c.otherwise) if body is not None]
    nodes: list[Component | Primitive] = [*template.components]
    nodes += [p for c in template.components for p in c.primitives]
    pairs = [pair for node in nodes for pair in (*node.attributes.non_default_items(), *node.options)]
    options = tuple([_types(value) for _, value in pairs])
    return options, tuple([_option_types(body) for body in inner])


def _types(value: Any) -> Hashable:
    """Return the types inside a value. Raise TypeError for a type whose equal values may differ in meaning."""
    if isinstance(value, tuple):
        return type(value), tuple([_types(inner) for inner in value])
    if isinstance(value, frozenset):
        return frozenset([(inner, _types(inner)) for inner in value])
    if value is None or isinstance(value, (str, bytes, int, float, Enum)):
        return type(value).__name__
    raise TypeError(type(value))


def _count_primitives(optimised: Optimised) -> int:
    """Return the number of primitives in all graphs of a plan, those inside fragments not counted."""
    graphs = {id(graph): len(graph) for report in optimised.reports for graph in (report.before, report.after)}
    return sum(graphs.values()) + len(optimised.graph)
