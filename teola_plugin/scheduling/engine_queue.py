"""Queued and running requests of one engine, and its free slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.scheduling.engine_events import Enqueue, QueuedRequest
from teola_plugin.scheduling.fairness import ServedUnits
from teola_plugin.scheduling.objectives import Objective


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
        requests, due = deque(event.requests), None if event.left is None else event.at + event.left
        position = event.query, event.primitive, event.kind, requests, event.depth, arrival_number
        terms = (
            event.app,
            event.weight,
            event.session,
            event.when_idle,
            event.gang,
            event.objective,
            event.remaining,
            due,
        )
        fields = (*position, *terms)
        return QueuedPrimitive(*fields, all_requests=event.requests, query_number=query_number)

    def put_back(self, request: str) -> None:
        """Queue a request again that had left, in front of those that came after it."""
        queued_ids = {other.id for other in self.requests} | {request}
        self.requests = deque(other for other in self.all_requests if other.id in queued_ids)


@dataclass(slots=True)
class RunningRequest:
    """A request that an instance has been given."""

    request: str
    query: str
    primitive: str
    depth: int
    size: float
    instance: str
    source: QueuedPrimitive
    """The queued primitive that it came from, and goes back to if it is to run again."""
    prefilling: bool = True
    """True until its first piece comes (LLMs): its prompt takes units of the tick."""
    number: int | None = None
    """Its place in the queue of its instance (see `waiting_number`); None until it has one."""

    @staticmethod
    def of(queued: QueuedPrimitive, request: str, size: float, instance: str) -> RunningRequest:
        return RunningRequest(request, queued.query, queued.primitive, queued.depth, size, instance, queued)


class FreeSlots(Protocol):
    """Free slots as a policy sees them: those of one instance, or of all together."""

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
    """The free capacity of one instance in one tick."""

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
class OnInstance:
    """The requests that run on one instance. `units` are those of the requests that are `prefilling`."""

    requests: dict[str, RunningRequest] = field(default_factory=dict)
    prefilling: int = 0
    units: float = 0


EMPTY_INSTANCE = OnInstance()


@dataclass(slots=True)
class Running:
    """The running requests of one engine, by id, by instance and by query, and the units that each app got."""

    now: float = 0.0
    """Time of the event that is being handled."""
    by_id: dict[str, RunningRequest] = field(default_factory=dict)
    served_units: ServedUnits = field(default_factory=ServedUnits)
    _instances: dict[str, OnInstance] = field(default_factory=dict)
    _queries: dict[str, dict[str, RunningRequest]] = field(default_factory=dict)

    def add(self, running: RunningRequest) -> None:
        self.by_id[running.request] = running
        self._queries.setdefault(running.query, {})[running.request] = running
        on_instance = self._instances.get(running.instance)
        if on_instance is None:
            on_instance = self._instances[running.instance] = OnInstance()
        on_instance.requests[running.request] = running
        on_instance.prefilling += 1
        on_instance.units += running.size

    def remove(self, request: str) -> None:
        """Remove a request, if it runs."""
        running = self.by_id.pop(request, None)
        if running is None:
            return
        self.prefilled(running)
        del self._instances[running.instance].requests[request]
        of_query = self._queries[running.query]
        del of_query[request]
        if not of_query:
            del self._queries[running.query]

    def prefilled(self, running: RunningRequest) -> None:
        """Record that a request's prompt is computed: it no longer takes units of the tick."""
        if running.prefilling:
            running.prefilling = False
            on_instance = self._instances[running.instance]
            on_instance.prefilling -= 1
            on_instance.units -= running.size

    def at(self, instance: str) -> OnInstance:
        return self._instances.get(instance, EMPTY_INSTANCE)

    def deepest(self, query: str) -> int:
        """Return the depth of the deepest running primitive of a query; -1 if none runs."""
        return max((r.depth for r in self._queries.get(query, {}).values()), default=-1)

    def longest(self, query: str) -> float:
        """Return the longest expected time, in seconds, from the beginning of a running primitive to the end of its
        query; 0 if none runs."""
        return max((r.source.remaining for r in self._queries.get(query, {}).values()), default=0.0)

    def holds_back(self, warmup: QueuedPrimitive, instance: str, profile: EngineProfile) -> bool:
        """Return True if a warm-up must wait, because it would delay requests that gate more.

        That is a deeper prefilling; a deeper decoding if the warm-up can wait for a pause, or if the two would only
        take turns; and other requests in general if they would lose more time together than the warm-up takes, as each
        loses the profile's `interference` of it.
        """
        shares_capacity = not profile.takes_turns and not warmup.when_idle
        neighbours = self.at(instance).requests
        own_count = sum(r.instance == instance for r in self._queries.get(warmup.query, {}).values())
        if profile.interference and profile.interference * (len(neighbours) - own_count) >= 1:
            return True
        return any(r.depth > warmup.depth and (r.prefilling or not shares_capacity) for r in neighbours.values())

    def slots(self, instance: str, profile: EngineProfile) -> Slots:
        on_instance = self.at(instance)
        if profile.batching is Batching.STATIC:
            if on_instance.requests:
                return Slots(0, 0, is_idle=False)
            efficient = max(1, profile.max_efficient_batch)
            return Slots(max(efficient, profile.max_batch), efficient, is_idle=True, bulk=efficient)
        units = profile.max_batch - on_instance.units
        return Slots(profile.max_requests - len(on_instance.requests), units, is_idle=not on_instance.prefilling)


# ------------------------------------------------------------ the order in which instances begin their requests

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
    instance: OnInstance,
    next_number: int,
    overtakes: Callable[[RunningRequest, RunningRequest], bool],
) -> int:
    """Return the number that a request gets in the queue of an instance.

    An LLM is given more prompts than it computes at once, so that it is never idle. They wait there in the order of
    their numbers (vLLM's priorities; equal ones by arrival), where a policy no longer chooses. Numbers are given once:
    a request gets `next_number`, the end of the queue, or a number in front of those that it `overtakes`. Warm-ups are
    left out: they are behind all others anyway.
    """
    waiting = [
        (other, other.number)
        for other in instance.requests.values()
        if other.prefilling and other.number is not None and other.source.objective is not Objective.BACKGROUND
    ]
    overtaken = [number for other, number in waiting if overtakes(request, other)]
    if not overtaken:
        return next_number
    last_not_overtaken = max((number for other, number in waiting if not overtakes(request, other)), default=None)
    if last_not_overtaken is None:
        return min(overtaken) - 1
    return last_not_overtaken if max(overtaken) > last_not_overtaken else next_number
