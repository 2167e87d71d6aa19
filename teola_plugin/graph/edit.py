"""The one mutable builder of graphs. One pass owns one edit, then freezes it."""

from __future__ import annotations

from collections.abc import Iterable

from teola_plugin.errors import GraphError
from teola_plugin.graph.graph import Graph
from teola_plugin.graph.primitive import Primitive
from teola_plugin.graph.refs import Ref


class GraphEdit:
    """Changes to a graph, collected, then frozen into a new one."""

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
        """Put `primitive` in the place of the one with its id."""
        if primitive.id not in self._by_id:
            raise KeyError(primitive.id)
        self._by_id[primitive.id] = primitive

    def remove(self, name: str) -> None:
        del self._by_id[name]

    def reread(self, old: Ref, new: Ref, only: Iterable[str] | None = None) -> None:
        """Readers of `old` (a producer's whole value or below it) read `new` instead."""
        for name in list(self._by_id) if only is None else list(only):
            p = self._by_id[name]

            def moved(ref: Ref) -> Ref:
                within = ref.producer == old.producer and ref.path[: len(old.path)] == old.path
                return Ref(new.producer, new.path + ref.path[len(old.path) :]) if within else ref

            self.replace(
                p.with_(inputs=tuple((k, moved(r)) for k, r in p.inputs), early=tuple(moved(r) for r in p.early))
            )
        if only is None and self._output.producer == old.producer and self._output.path[: len(old.path)] == old.path:
            self._output = Ref(new.producer, new.path + self._output.path[len(old.path) :])

    def freeze(self) -> Graph:
        """The new graph; the very same object when nothing was changed."""
        if self._output == self._graph.output and self._by_id == self._before:
            return self._graph
        return Graph(self._by_id.values(), self._output, base=self._graph)
