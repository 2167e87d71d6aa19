"""The run state of one query: which primitives wait, run or have ended. It is never kept on the graph itself.

Each primitive has an objective (Parrot, OSDI 2024): that it is done soon, or that all of its gang are. The app waits
for the output, so the primitives before the output are wanted soon. Where several calls of one kind are put together,
nobody waits for one of them, but for the last: they are a gang, and so is everything that leads to one of them alone.
A primitive that several members of a gang need is waited for again. Parrot asks the developer for the objective of the
last value; here it is the value that the original waits for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from weakref import WeakKeyDictionary

from teola_plugin.graph import Graph, InstancePath, Primitive, PrimitiveKind, Ref

_K = PrimitiveKind


class Objective(Enum):
    """The aim that a primitive is scheduled for."""

    LATENCY = "latency"
    """The app waits for this very value."""
    THROUGHPUT = "throughput"
    """The values of a gang are put together: only the last of them counts."""
    BACKGROUND = "background"
    """A warm-up: nobody waits for it."""

    # Members are unique, so identity will do: the hash of the name is slow.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class GangObjective:
    """The objective of a primitive, and the name of its gang: the primitive that puts the members' values together."""

    objective: Objective = Objective.LATENCY
    gang: str = ""

    def inside(self, instance: str, output: GangObjective) -> GangObjective:
        """Return the objective for an instance of the graph that this one was deduced in.

        `output` is the objective of the instance's output. Names of gangs are prefixed with the instance's name.
        """
        if self.objective is Objective.LATENCY:
            return output
        return GangObjective(self.objective, InstancePath(instance).child(self.gang) if self.gang else output.gang)


AWAITED = GangObjective()
"""The objective of a value that the app waits for."""
WARM_UP = GangObjective(Objective.BACKGROUND)

_GangPath = tuple[tuple[str, str], ...]
"""The gangs between a primitive and the output, outermost first: (gang, member that leads there)."""
_Shape = frozenset[tuple[PrimitiveKind, str]]
"""Kind and engine of the last engine primitives that a value comes from. Values of one shape may form a gang."""


_cached_objectives: WeakKeyDictionary[Graph, Mapping[str, GangObjective]] = WeakKeyDictionary()


def deduce_objectives(graph: Graph) -> Mapping[str, GangObjective]:
    """Return the objective of each primitive, by id, if the app waits for the graph's output.

    The result is kept as long as the graph is, since one e-graph serves many queries.
    """
    objectives = _cached_objectives.get(graph)
    if objectives is None:
        objectives = _cached_objectives[graph] = _compute_objectives(graph)
    return objectives


def in_gang(name: str, members: str) -> bool:
    """Return True if the primitive `name` is the component `members` or inside it, or if `members` is empty."""
    return not members or (name.startswith(members) and name[len(members) : len(members) + 1] in ("", *".#[/"))


def _compute_objectives(graph: Graph) -> dict[str, GangObjective]:
    """Deduce the objective of each primitive of a graph: from the output backwards, by what puts its value together."""
    shapes = _shapes(graph)
    merged: dict[str, set[str]] = {p.id: set() for p in graph}
    for p in graph:
        if p.kind is not _K.VERIFY and not p.decodes:  # these compare or stream values: they put none together
            merged[p.id] = {ref.producer for ref in p.refs if not ref.external}
    shape_counts = {name: Counter(shapes[other] for other in members) for name, members in merged.items()}
    paths: dict[str, _GangPath] = {}
    for p in reversed(tuple(graph)):
        shape = shapes[p.id]
        gang_path: _GangPath | None = () if p.id == graph.output.producer else None
        for child in graph.children(p.id):
            child_path = paths[child]
            if shape and shape_counts[child][shape] > 1 and p.id in merged[child]:
                child_path = (*child_path, (child, p.id))
            gang_path = child_path if gang_path is None else _common_prefix(gang_path, child_path)
        paths[p.id] = gang_path or ()
    return {p.id: _objective(p, paths[p.id]) for p in graph}


def _objective(p: Primitive, gang_path: _GangPath) -> GangObjective:
    """Return the objective of a primitive by its kind and by the gangs between it and the output."""
    gang = gang_path[-1][0] if gang_path else ""
    if p.kind is _K.PARTIAL_PREFILLING:
        return GangObjective(Objective.BACKGROUND, gang)
    if gang_path:
        return GangObjective(Objective.THROUGHPUT, gang)
    if (p.batchable or p.kind is _K.RERANKING) and p.size != 1:  # its own requests are put together
        return GangObjective(Objective.THROUGHPUT, p.id)
    return AWAITED


def _shapes(graph: Graph) -> Mapping[str, _Shape]:
    """Return, by primitive, the kinds and engines of the last engine primitives that its value comes from."""
    shapes: dict[str, _Shape] = {}
    no_shape: _Shape = frozenset()
    for p in graph:
        if p.on_engine:
            shapes[p.id] = frozenset(((p.kind, p.engine),))
        else:
            shapes[p.id] = no_shape.union(*(shapes.get(ref.producer, no_shape) for ref in p.refs))
    return shapes


def _common_prefix(first: _GangPath, second: _GangPath) -> _GangPath:
    """Return the gangs that both paths begin with: where they part, that primitive is waited for."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return first[:index]
    return min(first, second, key=len)


class Status(Enum):
    """The state of a primitive of a live query."""

    WAITING = "waiting"
    READY = "ready"
    """Dispatched to its engine or to the client; not known to have started."""
    RUNNING = "running"
    EXPANDING = "expanding"
    """A holder of a fragment whose instances are at work."""
    DONE = "done"
    FAILED = "failed"
    DROPPED = "dropped"
    """Cancelled, unused or cut off by a failure: it never gets a value."""

    def __init__(self, name: str) -> None:
        self.has_ended = name in ("done", "failed", "dropped")
        self.active = name in ("ready", "running")


@dataclass(slots=True, eq=False)
class LivePrimitive:
    """The run state of one primitive of a live query."""

    primitive: Primitive
    waits: set[str]
    """Ids of the producers and predecessors that have not ended."""
    reads: tuple[str, ...] = ()
    """Producers of the values that it reads."""
    status: Status = Status.WAITING
    depth: int = 0
    base_depth: int = 0
    """Depth that it has at least: the distance from the end of its part to the end of the query."""
    outputs: list[Ref] = field(default_factory=list)
    """Holders of fragments: the outputs of the instances, in item order."""
    collects: set[str] = field(default_factory=set)
    """Holders of fragments: the producers of those outputs. A holder gets no value if one of these has none."""
    predicted: list[Ref] = field(default_factory=list)
    """MAP: the items that its early instances work on, kept until they were compared with the real ones."""
    speculative_outputs: list[Ref] = field(default_factory=list)
    """MAP: outputs of the instances that were made before the items were known, planned and grown ones. BRANCH: outputs
    of the arms that began before one was chosen."""
    instances: list[str] = field(default_factory=list)
    """Holders of fragments: names of the instances that were spliced in."""
    gang_objective: GangObjective = AWAITED
    id: str = field(init=False)
    """That of the primitive."""

    def __post_init__(self) -> None:
        self.id = self.primitive.id


def optional_edge(reader: Primitive, producer: Primitive) -> bool:
    """Return True if `reader` can do without the value of `producer`: a prediction, an early instance, a warm-up."""
    if reader.kind is PrimitiveKind.VERIFY:
        actual = reader.input("actual")
        return actual is None or actual.producer != producer.id
    if reader.decodes and producer.kind is PrimitiveKind.PARTIAL_DECODING:
        return True  # fewer items than planned: the stream goes on all the same
    for _, ref in reader.inputs:
        if ref.producer == producer.id:
            return False
    if producer.speculative or producer.kind is PrimitiveKind.PARTIAL_PREFILLING:
        return True
    return any(ref.producer == producer.id for ref in reader.speculative_refs)


class Depths:
    """The longest paths from each primitive to a sink, kept right as a query grows.

    Depths never decrease, because edges are only added.
    """

    def __init__(self, live: dict[str, LivePrimitive], children: dict[str, list[str]]) -> None:
        self._live, self._children = live, children
        self._raised_depths: dict[str, int] = {}
        """New depths, greater than the present ones, that were not yet passed on to the parents; by primitive."""
        self._raised_queue: list[tuple[int, str]] = []
        """Those primitives by their present depth, in a heap: a primitive is deeper than those that it leads to."""
        self._deepest_first: list[tuple[int, str]] | None = None
        """Primitives that have not ended in a heap, deepest first; None until `deepest` is called."""

    def add_primitives(self, new_primitives: Sequence[LivePrimitive]) -> dict[str, int]:
        """Compute the depths of primitives that were spliced in, and of all that leads to them.

        `new_primitives` are in an order in which nothing leads to an earlier one. Returns the depths that changed of
        primitives that an engine has.
        """
        for live in reversed(new_primitives):
            child_depths = [child.depth for name in self._children.get(live.id, ()) if (child := self._live.get(name))]
            live.depth = max(live.base_depth, 1 + max(child_depths, default=-1))
        for live in new_primitives:
            self._raise_parents(live)
        changed: dict[str, int] = {}
        while self._raised_queue:
            _, name = heappop(self._raised_queue)
            depth, live_primitive = self._raised_depths.pop(name, 0), self._live.get(name)
            if live_primitive is None or depth <= live_primitive.depth:
                continue
            live_primitive.depth = depth
            self._raise_parents(live_primitive)
            if live_primitive.status.active and live_primitive.primitive.on_engine:
                changed[name] = depth
        return changed

    def _raise_parents(self, live: LivePrimitive) -> None:
        """Raise the depths of whatever leads to a primitive whose depth was set."""
        if self._deepest_first is not None:
            heappush(self._deepest_first, (-live.depth, live.id))
        for parent in Graph.edges_into(live.primitive):
            self.raise_depth(parent, live.depth + 1)
        for ref in live.outputs:
            self.raise_depth(ref.producer, live.depth + 1)
        for ref in live.speculative_outputs:
            self.raise_depth(ref.producer, live.depth + 1)

    def raise_depth(self, name: str, depth: int) -> None:
        """Record that a primitive is at least this deep. `add_primitives` passes that on to what leads to it."""
        live = self._live.get(name)
        if live is None or depth <= live.depth:
            return
        if name not in self._raised_depths:
            heappush(self._raised_queue, (live.depth, name))
        self._raised_depths[name] = max(depth, self._raised_depths.get(name, 0))

    def deepest(self) -> int:
        """Return the depth of the deepest primitive that has not ended; 0 if all have."""
        if self._deepest_first is None:
            self._deepest_first = [(-live.depth, live.id) for live in self._live.values()]
            heapify(self._deepest_first)
        while self._deepest_first:
            depth, name = self._deepest_first[0]
            live = self._live.get(name)
            if live is not None and not live.status.has_ended and live.depth == -depth:
                return -depth
            heappop(self._deepest_first)
        return 0


class LiveQuery:
    """The live primitives of one query, with edges, depths and reader counts.

    It grows as fragments are spliced in, and forgets instances and parts that have ended. No operation takes longer the
    wider the query has grown.
    """

    def __init__(self, query: str, graph: Graph, *, deadline: float | None, original_runs: bool) -> None:
        self.id = query
        self.graph = graph
        """The graph as it was planned: without what has been spliced in since."""
        self.output = graph.output
        self.deadline = deadline
        self.original_runs = original_runs
        """True if the original app runs too: then it ends the query by `Close`."""
        self.has_ended = False
        self._live: dict[str, LivePrimitive] = {}
        self._children: dict[str, list[str]] = {name: list(names) for name, names in graph.successors.items()}
        self._readers: dict[str, set[str]] = {name: set(names) for name, names in graph.read_by.items()}
        self._within: dict[str, list[str]] = {}
        """Ids of primitives by each instance or part that contains them, directly or not."""
        self._depths = Depths(self._live, self._children)
        objectives, depths, reads = deduce_objectives(graph), graph.depths, graph.reads
        for p in graph:
            live = LivePrimitive(
                p, set(graph.parents(p.id)), reads[p.id], depth=depths[p.id], gang_objective=objectives[p.id]
            )
            self._put(live)
            if p.speculative_refs:
                live.instances += map(InstancePath(p.id).instance, range(len(p.speculative_refs)))
                self._keep_predictions(live)

    def __getitem__(self, name: str) -> LivePrimitive:
        return self._live[name]

    def get(self, name: str) -> LivePrimitive | None:
        return self._live.get(name)

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
        """Return the primitives of the instance or part with this name, and of those inside it."""
        return [live for name in self._within.get(instance, ()) if (live := self._live.get(name)) is not None]

    def deepest(self) -> int:
        """Return the depth of the deepest primitive that has not ended; 0 if all have."""
        return self._depths.deepest()

    def _put(self, live: LivePrimitive) -> None:
        """Add a live primitive, and list it under each instance that contains it."""
        p = live.primitive
        self._live[p.id] = live
        if p.speculative_refs:
            live.speculative_outputs = list(p.speculative_refs)
        for outer in InstancePath(p.id).enclosing():
            self._within.setdefault(outer, []).append(p.id)

    def _insert(self, p: Primitive, parents: Iterable[str]) -> LivePrimitive:
        """Add a primitive that is spliced in, with its edges. It waits for those of its parents that have not ended."""
        waits: set[str] = set()
        for producer in parents:
            self._children.setdefault(producer, []).append(p.id)
            live_producer = self._live.get(producer)
            if live_producer is not None and not live_producer.status.has_ended:
                waits.add(producer)
        reads = p.producers
        for producer in reads:
            self._readers.setdefault(producer, set()).add(p.id)
        live = LivePrimitive(p, waits, reads)
        self._put(live)
        return live

    def _keep_predictions(self, live: LivePrimitive) -> None:
        """Keep the values that the planned early instances of a MAP were made for until its VERIFY has read them."""
        items = live.primitive.input("items")
        verify = self._live.get(items.producer) if items is not None else None
        if verify is not None and verify.primitive.kind is PrimitiveKind.VERIFY:
            live.predicted = [ref for key, ref in verify.primitive.inputs if key.startswith("predicted")]
            self.keep(live.id, live.predicted)

    def keep(self, holder: str, refs: Iterable[Ref]) -> None:
        """Record that the holder will read these values: they are not released before it ends."""
        for ref in refs:
            self._readers.setdefault(ref.producer, set()).add(holder)

    def splice(
        self, primitives: Iterable[Primitive], body: Graph, name: str, output_objective: GangObjective, base_depth: int
    ) -> list[LivePrimitive]:
        """Add the primitives of an instance of `body`, which may read one another in any order, and return them.

        `output_objective` is the objective of the instance's output, `base_depth` the depth of those that lead nowhere.
        """
        edges = [(p, Graph.edges_into(p)) for p in primitives]
        new_primitives = [self._insert(p, parents) for p, parents in edges]
        objectives = deduce_objectives(body)
        for live in new_primitives:
            inner = InstancePath(live.id).inside(name)
            assert inner is not None, f"{live.id} is not in {name}"
            live.gang_objective, live.base_depth = objectives[inner].inside(name, output_objective), base_depth
        new_ids = {live.id for live in new_primitives}
        for live, (p, parents) in zip(new_primitives, edges, strict=True):
            live.waits |= new_ids.intersection(
                parents
            )  # later primitives of the instance did not exist when it was inserted
            if p.speculative_refs:
                self._keep_predictions(live)
        return new_primitives

    def hold(self, holder: str, refs: Iterable[Ref]) -> None:
        """Record that the holder reads these values when it ends: they are kept until then and count for depth."""
        refs = list(refs)
        self.keep(holder, refs)
        for producer in dict.fromkeys(ref.producer for ref in refs if not ref.external):
            children = self._children.setdefault(producer, [])
            if holder not in children:  # a short list: hardly anybody else reads the output of an instance
                children.append(holder)
                self._depths.raise_depth(producer, self._live[holder].depth + 1)

    def released_by(self, name: str) -> list[str]:
        """Remove a reader, and return the producers whose values nobody reads any more."""
        unread = []
        for producer in self._reads(self._live[name]):
            readers = self._readers.get(producer)
            if readers is None:
                continue
            readers.discard(name)
            if not readers and producer != self.output.producer:
                del self._readers[producer]
                unread.append(producer)
                if producer not in self._live:
                    self._children.pop(producer, None)
        unread.sort()
        return unread

    @staticmethod
    def _reads(live: LivePrimitive) -> Iterable[str]:
        """Return the producers of all values that a primitive reads, those of its instances and predictions too."""
        if not (live.outputs or live.predicted or live.speculative_outputs):
            return live.reads
        instance_producers = (ref.producer for ref in (*live.outputs, *live.predicted, *live.speculative_outputs))
        return dict.fromkeys((*live.reads, *instance_producers))

    def has_readers(self, name: str) -> bool:
        """Return True if anybody is yet to read this value."""
        return name in self._readers

    def update_depths(self, new_primitives: Sequence[LivePrimitive]) -> dict[str, int]:
        """Compute the depths of spliced primitives, in this order, and of all that leads to them.

        Returns the depths that changed of primitives that an engine has.
        """
        return self._depths.add_primitives(new_primitives)

    def forget(self, name: str) -> list[str]:
        """Drop an instance or a part if all of it has ended; return the producers of values that nobody ever read."""
        inside = self.within(name)
        if not all(live.status.has_ended for live in inside):
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
        """Return the decodings that are served by the request of the prefilling `leader`."""
        decodings, producers = dict[str, LivePrimitive](), [leader]
        while producers:
            name = producers.pop()
            for child in self.children(name):
                p = child.primitive
                if p.decodes and p.id not in decodings and name in child.reads:
                    decodings[p.id] = child
                    producers.append(p.id)
        return list(decodings.values())
