"""The run state of one primitive of a live query."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from teola_plugin.graph import Primitive, PrimitiveKind, Ref
from teola_plugin.scheduling.objectives import SINK, Wanted


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

    def __init__(self, name: str) -> None:
        self.ended = name in ("done", "failed", "dropped")
        self.active = name in ("ready", "running")


@dataclass(slots=True, eq=False)
class LivePrimitive:
    """One primitive of a live query."""

    primitive: Primitive
    waits: set[str]
    """Producers and predecessors that have not ended."""
    reads: tuple[str, ...] = ()
    """Whose values it reads."""
    status: Status = Status.WAITING
    depth: int = 0
    least: int = 0
    """What its depth is counted from: how far the end of its part is from the end of the query."""
    outputs: list[Ref] = field(default_factory=list)
    """Holders: outputs of the instances, in item order."""
    collects: set[str] = field(default_factory=set)
    """Who makes them: it has no value without any of these."""
    predicted: list[Ref] = field(default_factory=list)
    """MAP: the items its early instances work on; kept until they have been compared with the real ones."""
    early: list[Ref] = field(default_factory=list)
    """MAP: outputs of the instances made before the items were known, planned and grown. BRANCH: of arms that began
    before one was chosen."""
    instances: list[str] = field(default_factory=list)
    """Holders: names of the instances that were spliced in."""
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
    for _, ref in reader.inputs:
        if ref.producer == producer.id:
            return False
    if producer.tentative or producer.kind is PrimitiveKind.PARTIAL_PREFILLING:
        return True
    return any(ref.producer == producer.id for ref in reader.early)
