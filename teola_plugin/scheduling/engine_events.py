"""Events and instructions of an engine scheduler: requests, instances, caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from teola_plugin.graph import PrimitiveKind
from teola_plugin.graph.prefix_blocks import PrefixBlocks
from teola_plugin.scheduling.events import Event, Instruction, Tick
from teola_plugin.scheduling.objectives import Objective

# ---------------------------------------------------------------- in


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """One request of a queued primitive: its id and the slots that it takes.

    A prompt takes one slot for each token, any other request 1, or less for a short text.
    """

    id: str
    size: float = 1
    blocks: PrefixBlocks = ()
    """Its prompt as `block_hashes` names it; empty where placement has no use for it."""


@dataclass(frozen=True, slots=True)
class Enqueue(Event):
    """A primitive arrives at this engine, with its requests."""

    query: str
    primitive: str
    kind: PrimitiveKind
    requests: tuple[QueuedRequest, ...]
    depth: int = 0
    app: str = "default"
    weight: float = 1.0
    session: str = ""
    """Requests of one session (a full prefilling and its partial ones) go to one instance."""
    when_idle: bool = False
    """True for a warm-up that can wait for a pause of its engine: it waits until nothing deeper runs."""
    gang: str = ""
    """Name of the primitive that puts the values of several such primitives together. Where they share no prefix, they
    are done sooner on different instances."""
    objective: Objective = Objective.LATENCY
    remaining: float = 0.0
    """Expected seconds from its beginning to the end of its query, on idle engines; 0 if unknown."""
    left: float | None = None
    """Seconds from `at` until its query should have ended; None if no goal was set. (Clocks of clients differ.)"""

    def with_requests(self, requests: tuple[QueuedRequest, ...]) -> Enqueue:
        """Return a copy with these requests. (`dataclasses.replace` takes five times as long.)"""
        terms = (self.depth, self.app, self.weight, self.session, self.when_idle, self.gang, self.objective)
        times = (self.remaining, self.left)
        return Enqueue(self.at, self.query, self.primitive, self.kind, requests, *terms, *times)


@dataclass(frozen=True, slots=True)
class RequestsEnded(Event):
    """Running requests succeeded or failed: their slots are free."""

    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Retried(Event):
    """A running request failed and is to run again: it is queued where it stood, with its former data."""

    request: str


@dataclass(frozen=True, slots=True)
class PrefillEnded(Event):
    """A running request gave its first piece: its prompt tokens no longer take units of the tick."""

    request: str


@dataclass(frozen=True, slots=True)
class CancelRequests(Event):
    """Queued or running requests are not needed any more; running ones are cancelled at their instance."""

    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DepthChanged(Event):
    """Queued primitives got other depths, or their objectives and gangs became known."""

    query: str
    depths: Mapping[str, int]
    objectives: Mapping[str, tuple[Objective, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InstanceUp(Event):
    instance: str


@dataclass(frozen=True, slots=True)
class InstanceDrained(Event):
    """An instance gets no more requests; those that run there go on."""

    instance: str


@dataclass(frozen=True, slots=True)
class InstanceDown(Event):
    """An instance died; the driver ends its running requests."""

    instance: str


@dataclass(frozen=True, slots=True)
class CacheEvent(Event):
    """An instance's prefix cache changed, as its engine reports."""

    instance: str


@dataclass(frozen=True, slots=True)
class CacheStored(CacheEvent):
    """The instance's cache holds this prefix."""

    blocks: PrefixBlocks


@dataclass(frozen=True, slots=True)
class CacheRemoved(CacheEvent):
    """The instance's cache keeps only the first `keeps` blocks of this prefix."""

    blocks: PrefixBlocks
    keeps: int = 0


@dataclass(frozen=True, slots=True)
class CacheCleared(CacheEvent):
    """The instance's cache is empty."""


@dataclass(frozen=True, slots=True)
class CacheUse(CacheEvent):
    """Running requests occupy this share (0 to 1) of the instance's cache."""

    share: float


# ---------------------------------------------------------------- out


@dataclass(frozen=True, slots=True)
class RunBatch(Instruction):
    """Execute these requests together on one instance.

    `priorities` are admission numbers, or smaller ones for requests that overtake others (see
    `engine_queue.waiting_number`): the lower, the more urgent.
    """

    instance: str
    batch: int
    requests: tuple[str, ...]
    priorities: tuple[int, ...]
    urgencies: tuple[tuple[int, Objective], ...] = ()
    """Depth and objective of each request, for engines that use more than priorities."""


@dataclass(frozen=True, slots=True)
class CancelRunning(Instruction):
    instance: str
    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dropped(Instruction):
    """Queued requests were cancelled before they ran."""

    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reject(Instruction):
    """The request is larger than the engine can ever take."""

    request: str
    size: int
    limit: int


EngineEvent = (
    Enqueue
    | RequestsEnded
    | Retried
    | PrefillEnded
    | CancelRequests
    | DepthChanged
    | InstanceUp
    | InstanceDrained
    | InstanceDown
    | CacheEvent
    | Tick
)
