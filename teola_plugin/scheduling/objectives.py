"""The objective of each primitive: that it is done soon, or that all of its gang are (Parrot, OSDI 2024).

The app waits for the output, so what the output needs is wanted soon. Where several calls of one kind are put together,
nobody waits for one of them, but for the last: they are a gang, and so is everything that leads to one of them alone.
What several members of a gang need is waited for again. Parrot asks the developer for the objective of the last value;
here it is the value that the original waits for.
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
    gang = gang_path[-1][0] if gang_path else ""
    if p.kind is _K.PARTIAL_PREFILLING:
        return GangObjective(Objective.BACKGROUND, gang)
    if gang_path:
        return GangObjective(Objective.THROUGHPUT, gang)
    if (p.batchable or p.kind is _K.RERANKING) and p.size != 1:  # its own requests are put together
        return GangObjective(Objective.THROUGHPUT, p.id)
    return AWAITED


def _shapes(graph: Graph) -> Mapping[str, _Shape]:
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
