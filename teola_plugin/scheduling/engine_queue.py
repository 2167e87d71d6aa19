"""The queue of one engine: queued and running requests, free slots, and the events and instructions of its scheduler.

Apps get weighted fair shares of the engine by start-time fair queueing over units of work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.graph.prefix_blocks import PrefixBlocks
from teola_plugin.scheduling.events import Event, Instruction, Tick
from teola_plugin.scheduling.live_query import Objective

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
    """Requests of one session (a full prefilling and its partial ones) go to one replica."""
    when_idle: bool = False
    """True for a warm-up that can wait for a pause of its engine: it waits until nothing deeper runs."""
    gang: str = ""
    """Name of the primitive that puts the values of several such primitives together. Where they share no prefix, they
    are done sooner on different replicas."""
    objective: Objective = Objective.LATENCY
    remaining: float = 0.0
    """Expected seconds from its beginning to the end of its query, on idle engines; 0 if unknown."""
    left: float | None = None
    """Seconds from `at` until its query should have ended; None if no goal was set. (Clocks of clients differ.)"""

    def with_requests(self, requests: tuple[QueuedRequest, ...]) -> Enqueue:
        """Return a copy with these requests. (`dataclasses.replace` takes five times as long.)"""
        priority = (self.depth, self.app, self.weight, self.session, self.when_idle, self.gang, self.objective)
        times = (self.remaining, self.left)
        return Enqueue(self.at, self.query, self.primitive, self.kind, requests, *priority, *times)


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
    """Queued or running requests are not needed any more; running ones are cancelled at their replica."""

    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DepthChanged(Event):
    """Queued primitives got other depths, or their objectives and gangs became known."""

    query: str
    depths: Mapping[str, int]
    objectives: Mapping[str, tuple[Objective, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplicaUp(Event):
    replica: str


@dataclass(frozen=True, slots=True)
class ReplicaDrained(Event):
    """A replica gets no more requests; those that run there go on."""

    replica: str


@dataclass(frozen=True, slots=True)
class ReplicaDown(Event):
    """A replica died; the driver ends its running requests."""

    replica: str


@dataclass(frozen=True, slots=True)
class CacheEvent(Event):
    """A replica's prefix cache changed, as its engine reports."""

    replica: str


@dataclass(frozen=True, slots=True)
class CacheStored(CacheEvent):
    """The replica's cache holds this prefix."""

    blocks: PrefixBlocks


@dataclass(frozen=True, slots=True)
class CacheRemoved(CacheEvent):
    """The replica's cache keeps only the first `keeps` blocks of this prefix."""

    blocks: PrefixBlocks
    keeps: int = 0


@dataclass(frozen=True, slots=True)
class CacheCleared(CacheEvent):
    """The replica's cache is empty."""


@dataclass(frozen=True, slots=True)
class CacheUse(CacheEvent):
    """Running requests occupy this share (0 to 1) of the replica's cache."""

    share: float


# ---------------------------------------------------------------- out


@dataclass(frozen=True, slots=True)
class RunBatch(Instruction):
    """Execute these requests together on one replica.

    `priorities` are admission numbers, or smaller ones for requests that overtake others (see
    `engine_queue.waiting_number`): the lower, the more urgent.
    """

    replica: str
    batch: int
    requests: tuple[str, ...]
    priorities: tuple[int, ...]
    urgencies: tuple[tuple[int, Objective], ...] = ()
    """Depth and objective of each request, for engines that use more than priorities."""


@dataclass(frozen=True, slots=True)
class CancelRunning(Instruction):
    replica: str
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
    | ReplicaUp
    | ReplicaDrained
    | ReplicaDown
    | CacheEvent
    | Tick
)


MAX_APPS = 1000
MIN_WEIGHT = 1e-6


@dataclass(frozen=True, slots=True)
class Turn:
    """A waiting bucket: its app, and the units that its deepest level takes."""

    app: str
    weight: float
    units: float


@dataclass(slots=True)
class ServedUnits:
    """Units that each app got, divided by its weight: its virtual time. An app that returns gets no credit for its
    absence."""

    _virtual_times: dict[str, float] = field(default_factory=dict)
    _virtual_now: float = 0.0
    """The virtual time of the app that was served last, before it was served."""

    def arrive(self, app: str, *, waiting: bool) -> None:
        """Record that work of an app arrives. `waiting` is True if the app has other work queued, so that it may lag
        behind."""
        if not waiting:
            self._virtual_times[app] = max(self._virtual_now, self._virtual_times.get(app, 0.0))

    def add(self, app: str, weight: float, units: float) -> None:
        """Count units that an app has got from the engine, divided by its weight: apps with less are served next."""
        before = self._virtual_times.get(app, self._virtual_now)
        self._virtual_now = max(self._virtual_now, before)
        self._virtual_times[app] = before + units / max(weight, MIN_WEIGHT)
        if len(self._virtual_times) > MAX_APPS:  # apps with the least are treated like new ones
            most_served = sorted(self._virtual_times, key=self._virtual_times.__getitem__)[MAX_APPS // 2 :]
            self._virtual_times = {name: self._virtual_times[name] for name in most_served}

    def virtual_times(self, apps: Iterable[str]) -> dict[str, float]:
        return {app: self._virtual_times.get(app, self._virtual_now) for app in apps}


def serve_in_turn(
    turns: Mapping[str, Turn], virtual_times: dict[str, float], apps: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield the names of buckets in the order in which they are served, and keep `virtual_times` up to date.

    Next is always the first bucket of the app with the least virtual time, so an app of twice the weight gets twice the
    units. `apps` are the buckets' apps, for `turns` that are made only when they are looked at.
    """
    waiting: dict[str, deque[str]] = {}
    for name, app_name in ({name: turn.app for name, turn in turns.items()} if apps is None else apps).items():
        waiting.setdefault(app_name, deque()).append(name)
    while waiting:
        app = min(waiting, key=virtual_times.__getitem__)
        name = waiting[app].popleft()
        turn = turns[name]  # read before the caller takes from the bucket
        yield name
        virtual_times[app] += turn.units / max(turn.weight, MIN_WEIGHT)
        if not waiting[app]:
            del waiting[app]


@dataclass(slots=True)
class QueuedPrimitive:
    """A primitive some of whose requests are not running yet."""

    query: str
    primitive: str
    kind: PrimitiveKind
    requests: deque[QueuedRequest]
    depth: int
    arrival_number: int
    """Its place in the order of arrival."""
    app: str = "default"
    weight: float = 1.0
    session: str = ""
    when_idle: bool = False
    gang: str = ""
    objective: Objective = Objective.LATENCY
    remaining: float = 0.0
    """Expected seconds from its beginning to the end of its query; 0 if unknown."""
    due: float | None = None
    """When its query should have ended; None if no goal was set."""
    overtaken: int = 0
    """Batches with younger requests that left before it did."""
    all_requests: tuple[QueuedRequest, ...] = ()
    """All its requests in order: one that is to run again goes back to its place."""
    query_number: int = 0
    """Its query's place in the order in which queries came to this engine."""
    smallest_request: float = field(init=False)
    """Size of the smallest request that it came with."""

    def __post_init__(self) -> None:
        sizes = [request.size for request in self.requests]
        self.smallest_request = sizes[0] if len(sizes) == 1 else min(sizes, default=0.0)

    @staticmethod
    def of(event: Enqueue, arrival_number: int, query_number: int = 0) -> QueuedPrimitive:
        """Create the queue's entry for a primitive that arrives at the engine.

        `arrival_number` and `query_number`: its place, and that of its query, in the order of arrival.
        """
        requests, due = deque(event.requests), None if event.left is None else event.at + event.left
        position = event.query, event.primitive, event.kind, requests, event.depth, arrival_number
        priority = (
            event.app,
            event.weight,
            event.session,
            event.when_idle,
            event.gang,
            event.objective,
            event.remaining,
            due,
        )
        fields = (*position, *priority)
        return QueuedPrimitive(*fields, all_requests=event.requests, query_number=query_number)

    def put_back(self, request: str) -> None:
        """Queue a request again that had left, in front of those that came after it."""
        queued_ids = {other.id for other in self.requests} | {request}
        self.requests = deque(other for other in self.all_requests if other.id in queued_ids)


@dataclass(slots=True)
class RunningRequest:
    """A request that a replica has been given."""

    request: str
    query: str
    primitive: str
    depth: int
    size: float
    replica: str
    source: QueuedPrimitive
    """The queued primitive that it came from, and goes back to if it is to run again."""
    prefilling: bool = True
    """True until its first piece comes (LLMs): its prompt takes units of the tick."""
    number: int | None = None
    """Its place in the queue of its replica (see `waiting_number`); None until it has one."""

    @staticmethod
    def of(queued: QueuedPrimitive, request: str, size: float, replica: str) -> RunningRequest:
        return RunningRequest(request, queued.query, queued.primitive, queued.depth, size, replica, queued)


class FreeSlots(Protocol):
    """Free slots as a policy sees them: those of one replica, or of all together."""

    in_order: bool
    """True if a request that does not fit holds up the rest of its primitive."""

    @property
    def left(self) -> bool:
        """True if another request may fit."""
        ...

    def take(self, queued: QueuedPrimitive, request: QueuedRequest) -> bool:
        """Take slots for a request. Return False if there are none for it."""
        ...


@dataclass(slots=True)
class Slots:
    """The free capacity of one replica in one tick."""

    requests: int
    units: float
    is_idle: bool
    """True if nothing runs there: then one request may exceed `units`."""
    in_order: bool = True
    bulk: int = 0
    """Small requests of a primitive with more requests than this share a slot. The requests of others, for which
    somebody may be waiting, take one each, so that batches stay short."""
    smallest_request: float = 0
    """Size of the smallest request on offer."""

    def take(self, queued: QueuedPrimitive, request: QueuedRequest) -> bool:
        """Take slots of the replica for a request. Return False if it does not fit; an idle replica takes one of any
        size."""
        size = request.size if len(queued.requests) > self.bulk else max(1.0, request.size)
        if self.requests < 1 or (size > self.units and not self.is_idle):
            return False
        self.requests -= 1
        self.units -= size
        self.is_idle = False
        return True

    def fits(self, queued: QueuedPrimitive) -> bool:
        """Return True if a batch that runs as a whole may take requests of this primitive: if all of them fit, or the
        batch is not half full."""
        if self.units > self.bulk / 2:
            return True
        min_size = 0.0 if len(queued.requests) > self.bulk else 1.0
        return sum(max(min_size, request.size) for request in queued.requests) <= self.units

    @property
    def left(self) -> bool:
        return self.requests > 0 and (self.is_idle or 0 < self.units >= self.smallest_request)


@dataclass(slots=True)
class OnReplica:
    """The requests that run on one replica. `units` are those of the requests that are `prefilling`."""

    requests: dict[str, RunningRequest] = field(default_factory=dict)
    prefilling: int = 0
    units: float = 0


EMPTY_REPLICA = OnReplica()


@dataclass(slots=True)
class Running:
    """The running requests of one engine, by id, by replica and by query, and the units that each app got."""

    now: float = 0.0
    """Time of the event that is being handled."""
    by_id: dict[str, RunningRequest] = field(default_factory=dict)
    served_units: ServedUnits = field(default_factory=ServedUnits)
    _replicas: dict[str, OnReplica] = field(default_factory=dict)
    _queries: dict[str, dict[str, RunningRequest]] = field(default_factory=dict)

    def add(self, running: RunningRequest) -> None:
        """Count a request as running, by its id, its query and its replica. Its prompt is yet to be computed."""
        self.by_id[running.request] = running
        self._queries.setdefault(running.query, {})[running.request] = running
        on_replica = self._replicas.get(running.replica)
        if on_replica is None:
            on_replica = self._replicas[running.replica] = OnReplica()
        on_replica.requests[running.request] = running
        on_replica.prefilling += 1
        on_replica.units += running.size

    def remove(self, request: str) -> None:
        """Remove a request, if it runs."""
        running = self.by_id.pop(request, None)
        if running is None:
            return
        self.prefilled(running)
        del self._replicas[running.replica].requests[request]
        of_query = self._queries[running.query]
        del of_query[request]
        if not of_query:
            del self._queries[running.query]

    def prefilled(self, running: RunningRequest) -> None:
        """Record that a request's prompt is computed: it no longer takes units of the tick."""
        if running.prefilling:
            running.prefilling = False
            on_replica = self._replicas[running.replica]
            on_replica.prefilling -= 1
            on_replica.units -= running.size

    def at(self, replica: str) -> OnReplica:
        return self._replicas.get(replica, EMPTY_REPLICA)

    def deepest(self, query: str) -> int:
        """Return the depth of the deepest running primitive of a query; -1 if none runs."""
        return max((r.depth for r in self._queries.get(query, {}).values()), default=-1)

    def longest(self, query: str) -> float:
        """Return the longest expected time, in seconds, from the beginning of a running primitive to the end of its
        query; 0 if none runs."""
        return max((r.source.remaining for r in self._queries.get(query, {}).values()), default=0.0)

    def holds_back(self, warmup: QueuedPrimitive, replica: str, profile: EngineProfile) -> bool:
        """Return True if a warm-up must wait, because it would delay requests that gate more.

        That is a deeper prefilling; a deeper decoding if the warm-up can wait for a pause, or if the two would only
        take turns; and other requests in general if they would lose more time together than the warm-up takes, as each
        loses the profile's `interference` of it.
        """
        shares_capacity = not profile.takes_turns and not warmup.when_idle
        neighbours = self.at(replica).requests
        own_count = sum(r.replica == replica for r in self._queries.get(warmup.query, {}).values())
        if profile.interference and profile.interference * (len(neighbours) - own_count) >= 1:
            return True
        return any(r.depth > warmup.depth and (r.prefilling or not shares_capacity) for r in neighbours.values())

    def slots(self, replica: str, profile: EngineProfile) -> Slots:
        """Return the free slots of a replica, as its engine batches: none while a static one runs a batch."""
        on_replica = self.at(replica)
        if profile.batching is Batching.STATIC:
            if on_replica.requests:
                return Slots(0, 0, is_idle=False)
            efficient = max(1, profile.max_efficient_batch)
            return Slots(max(efficient, profile.max_batch), efficient, is_idle=True, bulk=efficient)
        units = profile.max_batch - on_replica.units
        return Slots(profile.max_requests - len(on_replica.requests), units, is_idle=not on_replica.prefilling)


# ------------------------------------------------------------ the order in which replicas begin their requests

MAX_NUMBERED_QUERIES = 10_000


class QueryNumbers:
    """Numbers queries in the order in which they came to an engine.

    It does not learn when a query ends: of more than `MAX_NUMBERED_QUERIES` it forgets the first, which then counts as
    new.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._next = 0

    def number(self, query: str) -> int:
        """Return the number of a query, a new one for an unknown query."""
        number = self._numbers.get(query)
        if number is None:
            number = self._numbers[query] = self._next
            self._next += 1
            if len(self._numbers) > MAX_NUMBERED_QUERIES:
                del self._numbers[next(iter(self._numbers))]
        return number


def waiting_number(
    request: RunningRequest,
    replica: OnReplica,
    next_number: int,
    overtakes: Callable[[RunningRequest, RunningRequest], bool],
) -> int:
    """Return the number that a request gets in the queue of a replica.

    An LLM is given more prompts than it computes at once, so that it is never idle. They wait there in the order of
    their numbers (vLLM's priorities; equal ones by arrival), where a policy no longer chooses. Numbers are given once:
    a request gets `next_number`, the end of the queue, or a number in front of those that it `overtakes`. Warm-ups are
    left out: they are behind all others anyway.
    """
    waiting = [
        (other, other.number)
        for other in replica.requests.values()
        if other.prefilling and other.number is not None and other.source.objective is not Objective.BACKGROUND
    ]
    overtaken = [number for other, number in waiting if overtakes(request, other)]
    if not overtaken:
        return next_number
    last_not_overtaken = max((number for other, number in waiting if not overtakes(request, other)), default=None)
    if last_not_overtaken is None:
        return min(overtaken) - 1
    return last_not_overtaken if max(overtaken) > last_not_overtaken else next_number
