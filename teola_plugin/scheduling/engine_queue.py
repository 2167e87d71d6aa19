"""What waits and what runs at one engine: queued primitives in buckets, running requests, free slots."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.scheduling.events import Enqueue, QueuedRequest


@dataclass(slots=True)
class QueuedPrimitive:
    """A primitive whose requests are not all running yet."""

    query: str
    primitive: str
    kind: PrimitiveKind
    requests: deque[QueuedRequest]
    depth: int
    arrived: int
    """Arrival number: FIFO order."""
    app: str = "default"
    weight: float = 1.0
    session: str = ""
    when_idle: bool = False
    overtaken: int = 0
    """Batches that left since its FIFO turn."""

    @staticmethod
    def of(event: Enqueue, arrived: int) -> QueuedPrimitive:
        return QueuedPrimitive(
            event.query,
            event.primitive,
            event.kind,
            deque(event.requests),
            event.depth,
            arrived,
            event.app,
            event.weight,
            event.session,
            event.when_idle,
        )


@dataclass(slots=True)
class RunningRequest:
    request: str
    query: str
    primitive: str
    depth: int
    size: int
    instance: str
    prefilling: bool = True
    """Its slots count against the tick until its first piece comes (LLMs)."""


@dataclass(slots=True)
class Slots:
    """Free capacity of one instance in one tick."""

    requests: int
    units: int
    alone: bool
    """Nothing runs there: one request may exceed `units`."""

    def take(self, size: int) -> bool:
        """Takes a request of this size if it fits."""
        if self.requests < 1 or (size > self.units and not self.alone):
            return False
        self.requests -= 1
        self.units -= size
        self.alone = False
        return True

    @property
    def left(self) -> bool:
        return self.requests > 0 and (self.units > 0 or self.alone)


@dataclass(slots=True)
class Running:
    """The running requests of one engine, by id."""

    by_id: dict[str, RunningRequest] = field(default_factory=dict)

    def on(self, instance: str) -> list[RunningRequest]:
        return [r for r in self.by_id.values() if r.instance == instance]

    def deepest(self, query: str) -> int:
        """Depth of the deepest running primitive of a query; -1 when it has none."""
        return max((r.depth for r in self.by_id.values() if r.query == query), default=-1)

    def holds_back(self, warmup: QueuedPrimitive, instance: str, profile: EngineProfile) -> bool:
        """Whether a warm-up would delay what gates more: a deeper prefilling, or a deeper decoding if the warm-up can
        wait for a pause, or if the two would only take turns."""
        beside = not profile.takes_turns and not warmup.when_idle
        return any(r.depth > warmup.depth and (r.prefilling or not beside) for r in self.on(instance))

    def slots(self, instance: str, profile: EngineProfile) -> Slots:
        here = self.on(instance)
        if profile.batching is Batching.STATIC:
            free = 0 if here else max(1, profile.max_efficient_batch)
            return Slots(free, free, alone=not here)
        units = profile.max_batch - sum(r.size for r in here if r.prefilling)
        return Slots(profile.max_requests - len(here), units, alone=not any(r.prefilling for r in here))
