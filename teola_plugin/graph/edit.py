"""The mutable builder of graphs: a pass collects its changes in one, then freezes it."""

from __future__ import annotations

from collections.abc import Iterable

from teola_plugin.errors import GraphError
from teola_plugin.graph.graph import Graph
from teola_plugin.graph.primitive import Primitive
from teola_plugin.graph.refs import Ref


class GraphEdit:
    """A set of changes to a graph, to be frozen into a new graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._before: dict[str, Primitive] = {p.id: p for p in graph}
        self._by_id = dict(self._before)
        self._output = graph.output

    def __getitem__(self, name: str) -> Primitive:
        return self._by_id[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_id

    def add(self, *primitives: Primitive) -> None:
        for p in primitives:
            if p.id in self._by_id:
                raise GraphError(f"primitive {p.id!r} is in the graph already.", hint="choose another id")
            self._by_id[p.id] = p

    def replace(self, primitive: Primitive) -> None:
        """Replace the primitive that has the same id. Raise KeyError if there is none."""
        if primitive.id not in self._by_id:
            raise KeyError(primitive.id)
        self._by_id[primitive.id] = primitive

    def remove(self, name: str) -> None:
        del self._by_id[name]

    def reread(self, old: Ref, new: Ref, only: Iterable[str] | None = None) -> None:
        """Redirect readers of `old`, or of a value inside it, to `new`: all of them, or those in `only`."""

        def redirected(ref: Ref) -> Ref:
            is_inside = ref.producer == old.producer and ref.path[: len(old.path)] == old.path
            return Ref(new.producer, new.path + ref.path[len(old.path) :]) if is_inside else ref

        for name in list(self._by_id) if only is None else list(only):
            p = self._by_id[name]
            inputs = tuple((key, redirected(ref)) for key, ref in p.inputs)
            self.replace(p.with_(inputs=inputs, early=tuple(redirected(ref) for ref in p.early)))
        if only is None:
            self._output = redirected(self._output)

    def freeze(self) -> Graph:
        """Return the new graph: the original object if nothing was changed."""
        if self._output == self._graph.output and self._by_id == self._before:
            return self._graph
        return Graph(self._by_id.values(), self._output, base=self._graph)
