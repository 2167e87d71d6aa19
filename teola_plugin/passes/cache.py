"""Optimised graphs of recent templates, so that a repeated call pays for a look-up only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock

from teola_plugin.graph import Shape, WorkflowTemplate, build_pgraph
from teola_plugin.passes.base import Optimised, PassContext, PassPipeline


class GraphCache:
    """The least recently used go first. Safe to use from several threads.

    Templates count as the same when they are the same object: an entry keeps its template alive, so an identity is
    never taken over by another one.
    """

    def __init__(self, pipeline: PassPipeline, capacity: int = 128) -> None:
        self.pipeline = pipeline
        self.capacity = capacity
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[Hashable, tuple[WorkflowTemplate, Optimised]] = OrderedDict()
        self._lock = Lock()

    def optimised(self, template: WorkflowTemplate, shape: Shape | None, context: PassContext) -> Optimised:
        """The e-graph of `template` for queries of this shape. Raises `GraphError` and `PassError` as its makers do."""
        key = id(template), tuple(sorted((shape or {}).items())), context.fingerprint(), self.pipeline.passes
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self.hits += 1
                self._entries.move_to_end(key)
                return found[1]
        # Made outside the lock: two threads may make the same graph, none waits for another's.
        made = self.pipeline.run(build_pgraph(template, shape), context)
        with self._lock:
            self.misses += 1
            _, kept = self._entries.setdefault(key, (template, made))
            while len(self._entries) > self.capacity:
                self._entries.popitem(last=False)
        return kept

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
