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
    """One request of a queued primitive: its id and the slots it takes (prompt tokens; elsewhere 1, or less for a
    short text)."""

    id: str
    size: float = 1
    blocks: PrefixBlocks = ()
    """Its prompt, as `block_hashes` names it; empty where placement has no use for it."""


@dataclass(frozen=True, slots=True)
class Enqueue(Event):
    """A primitive for this engine, with its requests."""

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
    """A warm-up for which its engine will have time: it waits until nothing deeper runs."""
    gang: str = ""
    """Primitives whose values are put together: apart, where they share no prefix, they are done sooner."""
    objective: Objective = Objective.LATENCY
    remaining: float = 0.0
    """Expected seconds from its beginning to the end of its query, on idle engines; 0 where nobody knows."""
    left: float | None = None
    """Seconds from `at` until its query should be over; None where nobody said. (Clocks of clients differ.)"""

    def holding(self, requests: tuple[QueuedRequest, ...]) -> Enqueue:
        """The same with these requests. (`dataclasses.replace` takes five times as long.)"""
        about = (self.depth, self.app, self.weight, self.session, self.when_idle, self.gang, self.objective)
        times = (self.remaining, self.left)
        return Enqueue(self.at, self.query, self.primitive, self.kind, requests, *about, *times)


@dataclass(frozen=True, slots=True)
class RequestsEnded(Event):
    """Running requests ended, well or badly: their slots are free."""

    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Retried(Event):
    """A running request failed and is to run again: it is queued with all that is known of it, where it stood."""

    request: str


@dataclass(frozen=True, slots=True)
class PrefillEnded(Event):
    """The first piece of a running request came: its prompt tokens no longer fill the tick."""

    request: str


@dataclass(frozen=True, slots=True)
class CancelRequests(Event):
    """Forget these requests; those running are cancelled at their instance."""

    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DepthChanged(Event):
    """Depths of queued primitives that have changed; objectives and gangs that have become known."""

    query: str
    depths: Mapping[str, int]
    wanted: Mapping[str, tuple[Objective, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InstanceUp(Event):
    instance: str


@dataclass(frozen=True, slots=True)
class InstanceDrained(Event):
    """The instance gets no more work; what runs there ends as it would."""

    instance: str


@dataclass(frozen=True, slots=True)
class InstanceDown(Event):
    """The instance died; its running requests are ended by the driver."""

    instance: str


@dataclass(frozen=True, slots=True)
class CacheEvent(Event):
    """News of an instance's prefix cache, where its engine publishes them."""

    instance: str


@dataclass(frozen=True, slots=True)
class CacheStored(CacheEvent):
    """The instance's cache holds this prefix."""

    blocks: PrefixBlocks


@dataclass(frozen=True, slots=True)
class CacheRemoved(CacheEvent):
    """Of this prefix the instance's cache keeps the first `keeps` blocks only."""

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
    """Execute these requests together on one instance. Of `priorities`, lower ones are more urgent.

    They are numbers of admissions, or of those that are overtaken (see `engine_queue.waiting_number`).
    """

    instance: str
    batch: int
    requests: tuple[str, ...]
    priorities: tuple[int, ...]
    urgencies: tuple[tuple[int, Objective], ...] = ()
    """Depth and objective of each, for an engine that looks further than priorities."""


@dataclass(frozen=True, slots=True)
class CancelRunning(Instruction):
    instance: str
    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dropped(Instruction):
    """Queued requests that were cancelled before they ran."""

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
