"""What is wanted of each primitive: that it is done soon, or that all of its group are (Parrot, OSDI 2024).

Somebody waits for the output, so what it needs is wanted soon. Where several alike calls are put together, nobody
waits for one of them, but for the last: they are a gang, and so is everything that leads to one of them alone. What
several members of a gang need is again waited for. Parrot asks the developer for the objective of the last value;
here it is the one that the plain object waits for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from weakref import WeakKeyDictionary

from teola_plugin.graph import Graph, InstancePath, Primitive, PrimitiveKind

_K = PrimitiveKind


class Objective(Enum):
    """What is wanted of a primitive."""

    LATENCY = "latency"
    """Somebody waits for this very value."""
    THROUGHPUT = "throughput"
    """Values of a gang are put together: only the last of them counts."""
    BACKGROUND = "background"
    """A warm-up: nobody waits for it."""

    # Identity: members are unique, and the hash of the name is slow.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Wanted:
    """The objective of a primitive, and the name of its gang: whoever puts the values of its members together."""

    objective: Objective = Objective.LATENCY
    gang: str = ""

    def inside(self, instance: str, sink: Wanted) -> Wanted:
        """For an instance of the graph that it was deduced in, where `sink` is wanted of the output. Gangs get the
        instance's name before theirs."""
        if self.objective is Objective.LATENCY:
            return sink
        return Wanted(self.objective, InstancePath(instance).child(self.gang) if self.gang else sink.gang)


SINK = Wanted()
"""Of what somebody waits for."""
WARM_UP = Wanted(Objective.BACKGROUND)

_Way = tuple[tuple[str, str], ...]
"""The gangs on the way to the output, outermost first: (who puts together, which member leads there)."""
_Shape = frozenset[tuple[PrimitiveKind, str]]
"""Kind and engine of the engine work that a value comes from last. Values of one shape are alike."""


_known: WeakKeyDictionary[Graph, Mapping[str, Wanted]] = WeakKeyDictionary()


def deduce(graph: Graph) -> Mapping[str, Wanted]:
    """What is wanted of each primitive, by id, if somebody waits for the output. Kept as long as the graph is: one
    e-graph serves many queries."""
    found = _known.get(graph)
    if found is None:
        found = _known[graph] = _deduced(graph)
    return found


def sink_of(gang: str) -> Wanted:
    """What is wanted of the output of a graph whose value is put together with others in this gang; empty for none."""
    return Wanted(Objective.THROUGHPUT, gang) if gang else SINK


def in_gang(name: str, members: str) -> bool:
    """Whether the primitive of that name is of the component `members`, or of those whose names that one leads; all
    are where it is empty."""
    return not members or (name.startswith(members) and name[len(members) : len(members) + 1] in ("", *".#[/"))


def gathered(holder: str, count: int, wanted: Wanted) -> Wanted:
    """What is wanted of the output of an instance, if `count` of them are put together by a holder of which `wanted`
    is wanted."""
    return Wanted(Objective.THROUGHPUT, holder) if count > 1 else wanted


def _deduced(graph: Graph) -> dict[str, Wanted]:
    shapes = _shapes(graph)
    together = {p.id: _put_together(p) for p in graph}
    alike = {name: Counter(shapes[other] for other in members) for name, members in together.items()}
    ways: dict[str, _Way] = {}
    for p in reversed(tuple(graph)):
        shape = shapes[p.id]
        found: _Way | None = () if p.id == graph.output.producer else None
        for child in graph.children(p.id):
            way = ways[child]
            if shape and alike[child][shape] > 1 and p.id in together[child]:
                way = (*way, (child, p.id))
            found = way if found is None else _common(found, way)
        ways[p.id] = found or ()
    return {p.id: _wanted(p, ways[p.id]) for p in graph}


def _wanted(p: Primitive, way: _Way) -> Wanted:
    gang = way[-1][0] if way else ""
    if p.kind is _K.PARTIAL_PREFILLING:
        return Wanted(Objective.BACKGROUND, gang)
    if way:
        return Wanted(Objective.THROUGHPUT, gang)
    if (p.batchable or p.kind is _K.RERANKING) and p.size != 1:  # its own requests are put together
        return Wanted(Objective.THROUGHPUT, p.id)
    return SINK


def _shapes(graph: Graph) -> Mapping[str, _Shape]:
    shapes: dict[str, _Shape] = {}
    nothing: _Shape = frozenset()
    for p in graph:
        if p.on_engine:
            shapes[p.id] = frozenset(((p.kind, p.engine),))
        else:
            shapes[p.id] = nothing.union(*(shapes.get(ref.producer, nothing) for ref in p.refs))
    return shapes


def _put_together(p: Primitive) -> set[str]:
    """Producers whose values `p` puts together. Predictions that a VERIFY compares are not, nor is a stream."""
    if p.kind is _K.VERIFY or p.decodes:
        return set()
    return {ref.producer for ref in p.refs if not ref.external}


def _common(one: _Way, other: _Way) -> _Way:
    """How both begin: what lies on several ways is waited for by whoever is where they part."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return one[:place]
    return min(one, other, key=len)
