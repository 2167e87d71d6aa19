"""The run state of one query: which primitives wait, run or are done. Never kept on the graph itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from teola_plugin.graph import Graph, Primitive, PrimitiveKind, Ref
from teola_plugin.scheduling.objectives import SINK, Wanted, deduce


class Status(Enum):
    WAITING = "waiting"
    READY = "ready"
    """Handed to its engine or to the client, not started as far as known."""
    RUNNING = "running"
    EXPANDING = "expanding"
    """A fragment's holder whose instances are at work."""
    DONE = "done"
    FAILED = "failed"
    DROPPED = "dropped"
    """Cancelled, unused or cut off by a failure: it never gets a value."""

    @property
    def ended(self) -> bool:
        return self in (Status.DONE, Status.FAILED, Status.DROPPED)

    @property
    def active(self) -> bool:
        return self in (Status.READY, Status.RUNNING)


@dataclass(slots=True)
class LivePrimitive:
    """One primitive of a live query."""

    primitive: Primitive
    waits: set[str]
    """Producers and predecessors that have not ended."""
    status: Status = Status.WAITING
    depth: int = 0
    outputs: list[Ref] = field(default_factory=list)
    """Holders: outputs of the instances, in item order."""
    predicted: list[Ref] = field(default_factory=list)
    """MAP: the items its early instances work on; kept until they have been compared with the real ones."""
    early: list[Ref] = field(default_factory=list)
    """MAP: outputs of the instances made before the items were known, planned and grown."""
    wanted: Wanted = SINK

    @property
    def id(self) -> str:
        return self.primitive.id


def optional_edge(reader: Primitive, producer: Primitive) -> bool:
    """Whether `reader` can do without a value of `producer`: a prediction, an early instance, a warm-up."""
    if reader.kind is PrimitiveKind.VERIFY:
        actual = reader.input("actual")
        return actual is None or actual.producer != producer.id
    if reader.decodes and producer.kind is PrimitiveKind.PARTIAL_DECODING:
        return True  # fewer items than planned: the stream goes on all the same
    if any(ref.producer == producer.id for _, ref in reader.inputs):
        return False
    early = any(ref.producer == producer.id for ref in reader.early)
    return early or producer.kind is PrimitiveKind.PARTIAL_PREFILLING or producer.tentative


class LiveQuery:
    """All live primitives of one query, with edges, depths and reader counts; grows as fragments are spliced in."""

    def __init__(self, query: str, graph: Graph, *, deadline: float | None, ahead: bool) -> None:
        self.id = query
        self.output = graph.output
        self.deadline = deadline
        self.ahead = ahead
        self.ended = False
        self._live: dict[str, LivePrimitive] = {}
        self._children: dict[str, list[str]] = {}
        self._readers: dict[str, set[str]] = {}
        wanted = deduce(graph)
        for p in graph:
            live = self._insert(p)
            live.depth, live.wanted = graph.depths[p.id], wanted[p.id]
            if p.early:
                self._keep_predictions(live)

    def __getitem__(self, name: str) -> LivePrimitive:
        return self._live[name]

    def get(self, name: str) -> LivePrimitive | None:
        return self._live.get(name)

    @property
    def primitives(self) -> int:
        """How many there are."""
        return len(self._live)

    def __iter__(self) -> Iterator[LivePrimitive]:
        return iter(list(self._live.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._live

    def children(self, name: str) -> list[LivePrimitive]:
        return [self._live[c] for c in self._children.get(name, ())]

    def readers(self, name: str) -> list[LivePrimitive]:
        return [c for c in self.children(name) if any(r.producer == name for r in c.primitive.refs)]

    def _insert(self, p: Primitive) -> LivePrimitive:
        waits: set[str] = set()
        for producer in Graph.edges_into(p):
            self._children.setdefault(producer, []).append(p.id)
            made_by = self._live.get(producer)
            if made_by is not None and not made_by.status.ended:
                waits.add(producer)
        for ref in p.refs:
            self._readers.setdefault(ref.producer, set()).add(p.id)
        live = LivePrimitive(p, waits, early=list(p.early))
        self._live[p.id] = live
        return live

    def _keep_predictions(self, live: LivePrimitive) -> None:
        """The values that the planned early instances of a MAP were made for: what its VERIFY reads."""
        items = live.primitive.input("items")
        verify = self._live.get(items.producer) if items is not None else None
        if verify is not None and verify.primitive.kind is PrimitiveKind.VERIFY:
            live.predicted = [ref for key, ref in verify.primitive.inputs if key.startswith("predicted")]
            self.keep(live.id, live.predicted)

    def keep(self, holder: str, refs: Iterable[Ref]) -> None:
        """The holder reads these values some time: they are not released before it ends."""
        for ref in refs:
            self._readers.setdefault(ref.producer, set()).add(holder)

    def splice(self, primitives: Iterable[Primitive], body: Graph, name: str, sink: Wanted) -> list[LivePrimitive]:
        """Add the primitives of an instance of `body`; `sink` is what is wanted of its output. They may read one
        another in any order."""
        made = [self._insert(p) for p in primitives]
        wanted = deduce(body)
        for live in made:
            live.wanted = wanted[live.id.removeprefix(f"{name}/")].inside(name, sink)
        own = {live.id for live in made}
        for live in made:  # an edge to a later one of the same instance was not ended either
            live.waits |= {x for x in Graph.edges_into(live.primitive) if x in own}
            if live.primitive.early:
                self._keep_predictions(live)
        return made

    def hold(self, holder: str, refs: Iterable[Ref]) -> None:
        """The holder reads these values at its end: they are kept until then and count for depth."""
        refs = list(refs)
        self.keep(holder, refs)
        for ref in refs:
            if not ref.external:
                self._children.setdefault(ref.producer, []).append(holder)

    def released_by(self, name: str) -> list[str]:
        """Producers whose last reader was `name`."""
        gone = []
        live = self._live[name]
        for producer in {ref.producer for ref in (*live.primitive.refs, *live.outputs, *live.predicted, *live.early)}:
            readers = self._readers.get(producer)
            if readers is None:
                continue
            readers.discard(name)
            if not readers and producer != self.output.producer:
                del self._readers[producer]
                gone.append(producer)
        return sorted(gone)

    def redepth(self) -> dict[str, int]:
        """Compute all depths anew; returns those that changed for primitives at an engine."""
        fresh: dict[str, int] = {}

        order = self._topological()
        for name in reversed(order):
            fresh[name] = 1 + max((fresh[c] for c in self._children.get(name, ()) if c in fresh), default=-1)
        changed = {}
        for name, depth in fresh.items():
            live = self._live[name]
            if live.depth != depth:
                live.depth = depth
                if live.status.active and live.primitive.on_engine:
                    changed[name] = depth
        return changed

    def _topological(self) -> list[str]:
        degree = dict.fromkeys(self._live, 0)
        for children in self._children.values():
            for c in children:
                degree[c] += 1
        for producer, children in self._children.items():
            if producer not in self._live:
                for c in children:
                    degree[c] -= 1
        ready = [name for name, count in degree.items() if not count]
        order = []
        while ready:
            name = ready.pop()
            order.append(name)
            for c in self._children.get(name, ()):
                degree[c] -= 1
                if not degree[c]:
                    ready.append(c)
        return order

    def group(self, leader: str) -> list[LivePrimitive]:
        """The decodings that are served by the request of the prefilling `leader`."""
        found, todo = [], [leader]
        while todo:
            for reader in self.readers(todo.pop()):
                if reader.primitive.decodes and reader not in found:
                    found.append(reader)
                    todo.append(reader.id)
        return found
