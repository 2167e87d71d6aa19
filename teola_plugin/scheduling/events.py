"""What goes into the schedulers (events) and what comes out (instructions). All frozen, all with plain data.

Schedulers do no I/O and read no clock: every event carries the time (`at`, seconds on the runtime's clock), and
`WakeAt` asks to be called again. A driver carries instructions out and feeds the outcomes back as events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from teola_plugin.graph import Graph, Primitive, PrimitiveKind, Ref
from teola_plugin.graph.prefix_blocks import PrefixBlocks
from teola_plugin.scheduling.objectives import Objective


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at `at`."""

    at: float


@dataclass(frozen=True, slots=True)
class Instruction:
    """Something the driver has to do."""


@dataclass(frozen=True, slots=True)
class WakeAt(Instruction):
    """Send a `Tick` at this time (or later)."""

    at: float


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed."""


# ---------------------------------------------------------------- graph scheduler: in


@dataclass(frozen=True, slots=True)
class QueryEvent(Event):
    query: str


@dataclass(frozen=True, slots=True)
class Admit(QueryEvent):
    """A query with its e-graph. With `ahead`, another party (the plain object) ends the query by `Close`."""

    graph: Graph
    deadline: float | None = None
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class PrimitiveEvent(QueryEvent):
    primitive: str


@dataclass(frozen=True, slots=True)
class Started(PrimitiveEvent):
    """Its first request left the queue of the engine."""


@dataclass(frozen=True, slots=True)
class Finished(PrimitiveEvent):
    """Its value is in the query's store."""


@dataclass(frozen=True, slots=True)
class Unused(PrimitiveEvent):
    """It will have no value and needs none: a partial decoding beyond the last item, a cancelled warm-up."""


@dataclass(frozen=True, slots=True)
class PrimitiveFailed(PrimitiveEvent):
    """It failed for good: what can be retried was retried request by request before."""


@dataclass(frozen=True, slots=True)
class Expanded(PrimitiveEvent):
    """Answer to `Expand`: the number of items (MAP, FOLD), 1 or 0 for another round or arm (LOOP, BRANCH).

    `matches[i]` is the prediction that equals item i, or None (MAP).
    """

    count: int
    matches: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class ItemClosed(PrimitiveEvent):
    """A splittable decoding without planned parts closed an item; its value is stored under `value`."""

    index: int
    value: str


@dataclass(frozen=True, slots=True)
class PartBegun(QueryEvent):
    """The plain object begins a part that could not be planned before: its e-graph joins the query's."""

    name: str
    graph: Graph
    value: str
    """Where its input is stored."""


@dataclass(frozen=True, slots=True)
class PartEnded(QueryEvent):
    """The plain object has the part's value: whatever is left of its primitives is dropped."""

    name: str


@dataclass(frozen=True, slots=True)
class CancelQuery(QueryEvent):
    """The caller gave up."""


@dataclass(frozen=True, slots=True)
class Close(QueryEvent):
    """The plain object has its answer: whatever is left of an `ahead` query is dropped."""


# ---------------------------------------------------------------- graph scheduler: out


@dataclass(frozen=True, slots=True)
class QueryInstruction(Instruction):
    query: str


@dataclass(frozen=True, slots=True)
class Dispatch(QueryInstruction):
    """Hand the primitive to its engine's scheduler. `group` are the decodings that its request also serves."""

    primitive: Primitive
    depth: int
    group: tuple[Primitive, ...] = ()


@dataclass(frozen=True, slots=True)
class RunCall(QueryInstruction):
    """Run client code that is pure (CALL, AGGREGATE, CHUNKING, CONDITION, VERIFY) and store its value."""

    primitive: Primitive


@dataclass(frozen=True, slots=True)
class Await(QueryInstruction):
    """User code whose turn it is (OPAQUE, TOOL): run it, or wait until the plain object has run it."""

    primitive: Primitive


@dataclass(frozen=True, slots=True)
class Expand(QueryInstruction):
    """Read what decides how a fragment is instantiated, and answer with `Expanded`."""

    primitive: Primitive
    reads: Ref
    predicted: tuple[Ref, ...] = ()


@dataclass(frozen=True, slots=True)
class Collect(QueryInstruction):
    """Store the value of a fragment's holder: the list of `refs` (MAP) or the single one of them (others)."""

    primitive: str
    refs: tuple[Ref, ...]
    single: bool = False


@dataclass(frozen=True, slots=True)
class Release(QueryInstruction):
    """Nobody reads this value any more."""

    producer: str


@dataclass(frozen=True, slots=True)
class Cancel(QueryInstruction):
    """Stop work on a dispatched primitive; nobody needs it."""

    primitive: str


@dataclass(frozen=True, slots=True)
class Reprioritise(QueryInstruction):
    """Depths of dispatched primitives that have changed."""

    depths: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class End(QueryInstruction):
    """The query is over: `done`, `failed` (by `primitive`), `cancelled`, `timeout` or `closed`."""

    outcome: str
    output: Ref | None = None
    primitive: str = ""


# ---------------------------------------------------------------- engine scheduler: in


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

    def holding(self, requests: tuple[QueuedRequest, ...]) -> Enqueue:
        """The same with these requests. (`dataclasses.replace` takes five times as long.)"""
        about = (self.depth, self.app, self.weight, self.session, self.when_idle, self.gang, self.objective)
        return Enqueue(self.at, self.query, self.primitive, self.kind, requests, *about)


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


# ---------------------------------------------------------------- engine scheduler: out


@dataclass(frozen=True, slots=True)
class RunBatch(Instruction):
    """Execute these requests together on one instance. Of `priorities`, lower ones are more urgent.

    They are admission sequence numbers, later by a lag for members of a gang.
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


Instructions = list[Instruction]
GraphEvent = QueryEvent | Tick
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
