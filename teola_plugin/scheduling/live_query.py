"""The run state of one query: which primitives wait, run or are done. Never kept on the graph itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from teola_plugin.graph import Graph, InstancePath, Primitive, PrimitiveKind, Ref
from teola_plugin.scheduling.depths import Depths
from teola_plugin.scheduling.live_primitive import LivePrimitive, Status
from teola_plugin.scheduling.objectives import Wanted, deduce


class LiveQuery:
    """All live primitives of one query, with edges, depths and reader counts; grows as fragments are spliced in, and
    forgets instances and parts that are over. Nothing here takes longer the wider the query has grown."""

    def __init__(self, query: str, graph: Graph, *, deadline: float | None, ahead: bool) -> None:
        self.id = query
        self.graph = graph
        """As it was planned: without what has been spliced in since."""
        self.output = graph.output
        self.deadline = deadline
        self.ahead = ahead
        self.ended = False
        self._live: dict[str, LivePrimitive] = {}
        self._children: dict[str, list[str]] = {name: list(names) for name, names in graph.successors.items()}
        self._readers: dict[str, set[str]] = {name: set(names) for name, names in graph.read_by.items()}
        self._within: dict[str, list[str]] = {}
        """Ids by the instance or part that they are in, whatever lies between."""
        self._depths = Depths(self._live, self._children)
        wanted, depths, reads = deduce(graph), graph.depths, graph.reads
        for p in graph:
            live = LivePrimitive(p, set(graph.parents(p.id)), reads[p.id], depth=depths[p.id], wanted=wanted[p.id])
            self._put(live)
            if p.early:
                live.instances += map(InstancePath(p.id).instance, range(len(p.early)))
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

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, name: str) -> bool:
        return name in self._live

    def children(self, name: str) -> list[LivePrimitive]:
        return [live for c in self._children.get(name, ()) if (live := self._live.get(c)) is not None]

    def readers(self, name: str) -> list[LivePrimitive]:
        return [c for c in self.children(name) if name in c.reads]

    def within(self, instance: str) -> list[LivePrimitive]:
        """What is in an instance or a part of that name, and in those inside of it."""
        return [live for name in self._within.get(instance, ()) if (live := self._live.get(name)) is not None]

    def deepest(self) -> int:
        """Depth of the deepest primitive that has not ended; 0 when all have."""
        return self._depths.deepest()

    def _put(self, live: LivePrimitive) -> None:
        p = live.primitive
        self._live[p.id] = live
        if p.early:
            live.early = list(p.early)
        for outer in InstancePath(p.id).enclosing():
            self._within.setdefault(outer, []).append(p.id)

    def _insert(self, p: Primitive, parents: Iterable[str]) -> LivePrimitive:
        waits: set[str] = set()
        for producer in parents:
            self._children.setdefault(producer, []).append(p.id)
            made_by = self._live.get(producer)
            if made_by is not None and not made_by.status.ended:
                waits.add(producer)
        reads = p.producers
        for producer in reads:
            self._readers.setdefault(producer, set()).add(p.id)
        live = LivePrimitive(p, waits, reads)
        self._put(live)
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

    def splice(
        self, primitives: Iterable[Primitive], body: Graph, name: str, sink: Wanted, least: int
    ) -> list[LivePrimitive]:
        """Add the primitives of an instance of `body`; `sink` is what is wanted of its output, `least` the depth of
        what leads nowhere. They may read one another in any order."""
        edges = [(p, Graph.edges_into(p)) for p in primitives]
        made = [self._insert(p, parents) for p, parents in edges]
        wanted = deduce(body)
        for live in made:
            inner = InstancePath(live.id).inside(name)
            assert inner is not None, f"{live.id} is not in {name}"
            live.wanted, live.least = wanted[inner].inside(name, sink), least
        own = {live.id for live in made}
        for live, (p, parents) in zip(made, edges, strict=True):
            live.waits |= own.intersection(parents)  # an edge to a later one of the same instance was not ended either
            if p.early:
                self._keep_predictions(live)
        return made

    def hold(self, holder: str, refs: Iterable[Ref]) -> None:
        """The holder reads these values at its end: they are kept until then and count for depth."""
        refs = list(refs)
        self.keep(holder, refs)
        for producer in dict.fromkeys(ref.producer for ref in refs if not ref.external):
            children = self._children.setdefault(producer, [])
            if holder not in children:  # few: who else reads the output of an instance?
                children.append(holder)
                self._depths.leads(producer, holder)

    def released_by(self, name: str) -> list[str]:
        """Producers whose last reader was `name`."""
        gone = []
        for producer in self._reads(self._live[name]):
            readers = self._readers.get(producer)
            if readers is None:
                continue
            readers.discard(name)
            if not readers and producer != self.output.producer:
                del self._readers[producer]
                gone.append(producer)
                if producer not in self._live:
                    self._children.pop(producer, None)
        gone.sort()
        return gone

    @staticmethod
    def _reads(live: LivePrimitive) -> Iterable[str]:
        """Whose values it reads, those of its instances and predictions among them."""
        if not (live.outputs or live.predicted or live.early):
            return live.reads
        held = (ref.producer for ref in (*live.outputs, *live.predicted, *live.early))
        return dict.fromkeys((*live.reads, *held))

    def read(self, name: str) -> bool:
        """Whether anybody is yet to read this value."""
        return name in self._readers

    def redepth(self, made: Sequence[LivePrimitive]) -> dict[str, int]:
        """The depths of what was spliced in, in this order, and of what leads there; returns those that changed for
        primitives at an engine."""
        return self._depths.grown(made)

    def forget(self, name: str) -> list[str]:
        """Drop an instance or a part, if all of it has ended; returns what it made and nobody ever read."""
        inside = self.within(name)
        if not all(live.status.ended for live in inside):
            return []
        unread = [live.id for live in inside if live.status is Status.DONE and not self._children.get(live.id)]
        for live in inside:
            del self._live[live.id]
            self._children.pop(live.id, None)
            for outer in InstancePath(live.id).enclosing():
                if len(outer) >= len(name):
                    self._within.pop(outer, None)
        return unread

    def group(self, leader: str) -> list[LivePrimitive]:
        """The decodings that are served by the request of the prefilling `leader`."""
        found, todo = dict[str, LivePrimitive](), [leader]
        while todo:
            name = todo.pop()
            for child in self.children(name):
                p = child.primitive
                if p.decodes and p.id not in found and name in child.reads:
                    found[p.id] = child
                    todo.append(p.id)
        return list(found.values())
