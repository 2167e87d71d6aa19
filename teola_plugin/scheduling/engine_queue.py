"""What waits and what runs at one engine: queued primitives in buckets, running requests, free slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.scheduling.engine_events import Enqueue, QueuedRequest
from teola_plugin.scheduling.fairness import Served
from teola_plugin.scheduling.objectives import Objective


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
    gang: str = ""
    objective: Objective = Objective.LATENCY
    remaining: float = 0.0
    """Expected seconds from its beginning to the end of its query; 0 where nobody knows."""
    due: float | None = None
    """When its query should be over; None where nobody said."""
    overtaken: int = 0
    """Batches that left since its FIFO turn."""
    asked: tuple[QueuedRequest, ...] = ()
    """All its requests, in order: one that is to run again goes back to its place."""
    came: int = 0
    """Number of its query, in the order in which queries came to this engine."""
    least: float = field(init=False)
    """Size of the smallest request it came with."""

    def __post_init__(self) -> None:
        found = self.requests
        self.least = found[0].size if len(found) == 1 else min([request.size for request in found], default=0.0)

    @staticmethod
    def of(event: Enqueue, arrived: int, came: int = 0) -> QueuedPrimitive:
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
            event.gang,
            event.objective,
            event.remaining,
            None if event.left is None else event.at + event.left,
            asked=event.requests,
            came=came,
        )

    def put_back(self, request: str) -> None:
        """A request that has left is queued again, in front of those that came after it."""
        here = {one.id for one in self.requests} | {request}
        self.requests = deque(one for one in self.asked if one.id in here)


@dataclass(slots=True)
class RunningRequest:
    request: str
    query: str
    primitive: str
    depth: int
    size: float
    instance: str
    source: QueuedPrimitive
    """Where it came from, and goes back to if it is to run again."""
    prefilling: bool = True
    """Its slots count against the tick until its first piece comes (LLMs)."""
    number: int | None = None
    """Its place in the line of its instance (see `waiting_number`); None until it has one."""

    @staticmethod
    def of(queued: QueuedPrimitive, request: str, size: float, instance: str) -> RunningRequest:
        return RunningRequest(request, queued.query, queued.primitive, queued.depth, size, instance, queued)


class FreeSlots(Protocol):
    """Free slots, as a policy sees them: those of one instance, or of all together."""

    in_order: bool
    """Whether a request that is not taken holds up the rest of its primitive."""

    @property
    def left(self) -> bool:
        """Whether anything may still be taken."""
        ...

    def take(self, queued: QueuedPrimitive, request: QueuedRequest) -> bool:
        """Takes slots for a request; False if there are none for it."""
        ...


@dataclass(slots=True)
class Slots:
    """Free capacity of one instance in one tick."""

    requests: int
    units: float
    alone: bool
    """Nothing runs there: one request may exceed `units`."""
    in_order: bool = True
    bulk: int = 0
    """Of primitives with more requests than this, small ones share a slot; the requests of others, which somebody may
    be waiting for, take one each, so that batches stay short."""
    least: float = 0
    """No request that may be offered is smaller."""

    def take(self, queued: QueuedPrimitive, request: QueuedRequest) -> bool:
        size = request.size if len(queued.requests) > self.bulk else max(1.0, request.size)
        if self.requests < 1 or (size > self.units and not self.alone):
            return False
        self.requests -= 1
        self.units -= size
        self.alone = False
        return True

    def fits(self, queued: QueuedPrimitive) -> bool:
        """Whether a batch that runs as one takes requests of this primitive: all of them, or, while it is not half
        full, a part."""
        if self.units > self.bulk / 2:
            return True
        least = 0.0 if len(queued.requests) > self.bulk else 1.0
        return sum(max(least, request.size) for request in queued.requests) <= self.units

    @property
    def left(self) -> bool:
        return self.requests > 0 and (self.alone or 0 < self.units >= self.least)


@dataclass(slots=True)
class OnInstance:
    """What runs on one instance. `units` are those of the requests that are `prefilling`."""

    requests: dict[str, RunningRequest] = field(default_factory=dict)
    prefilling: int = 0
    units: float = 0


NOTHING = OnInstance()


@dataclass(slots=True)
class Running:
    """The running requests of one engine, by id, by instance and by query; and what each app was given."""

    now: float = 0.0
    """When the event came that is being handled."""
    by_id: dict[str, RunningRequest] = field(default_factory=dict)
    served: Served = field(default_factory=Served)
    _instances: dict[str, OnInstance] = field(default_factory=dict)
    _queries: dict[str, dict[str, RunningRequest]] = field(default_factory=dict)

    def add(self, running: RunningRequest) -> None:
        self.by_id[running.request] = running
        self._queries.setdefault(running.query, {})[running.request] = running
        here = self._instances.get(running.instance)
        if here is None:
            here = self._instances[running.instance] = OnInstance()
        here.requests[running.request] = running
        here.prefilling += 1
        here.units += running.size

    def remove(self, request: str) -> None:
        """Forget a request, if it runs."""
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
        """Its prompt tokens no longer fill the tick."""
        if running.prefilling:
            running.prefilling = False
            here = self._instances[running.instance]
            here.prefilling -= 1
            here.units -= running.size

    def at(self, instance: str) -> OnInstance:
        return self._instances.get(instance, NOTHING)

    def on(self, instance: str) -> list[RunningRequest]:
        return list(self.at(instance).requests.values())

    def deepest(self, query: str) -> int:
        """Depth of the deepest running primitive of a query; -1 when it has none."""
        return max((r.depth for r in self._queries.get(query, {}).values()), default=-1)

    def longest(self, query: str) -> float:
        """The most expected seconds to the end of a query, from the beginning of what runs of it; 0 for nothing."""
        return max((r.source.remaining for r in self._queries.get(query, {}).values()), default=0.0)

    def holds_back(self, warmup: QueuedPrimitive, instance: str, profile: EngineProfile) -> bool:
        """Whether a warm-up would delay what gates more: a deeper prefilling, or a deeper decoding if the warm-up can
        wait for a pause, or if the two would only take turns. And whether it would delay others by more than its own
        query can gain: each of them loses `interference` of the time that it takes."""
        beside = not profile.takes_turns and not warmup.when_idle
        here = self.at(instance).requests
        own = sum(r.instance == instance for r in self._queries.get(warmup.query, {}).values())
        if profile.interference and profile.interference * (len(here) - own) >= 1:
            return True
        return any(r.depth > warmup.depth and (r.prefilling or not beside) for r in here.values())

    def slots(self, instance: str, profile: EngineProfile) -> Slots:
        here = self.at(instance)
        if profile.batching is Batching.STATIC:
            if here.requests:
                return Slots(0, 0, alone=False)
            efficient = max(1, profile.max_efficient_batch)
            return Slots(max(efficient, profile.max_batch), efficient, alone=True, bulk=efficient)
        units = profile.max_batch - here.units
        return Slots(profile.max_requests - len(here.requests), units, alone=not here.prefilling)


# ------------------------------------------------------------ the order in which instances begin their requests

MAX_NUMBERED_QUERIES = 10_000


class QueryOrder:
    """Numbers queries in the order in which they came to an engine.

    It is not told when a query is over: of very many it forgets the first, which would then count as a new one.
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
    last: int,
    overtakes: Callable[[RunningRequest, RunningRequest], bool],
) -> int:
    """Return the number that a request gets among those that wait at an instance for their prompts to be computed.

    An LLM is given more prompts than it computes at once, so that it is never idle. They wait there in the order of
    their numbers (vLLM's priorities; of equal ones who came first), where a policy no longer chooses. Numbers are given
    once: a request gets `last`, the end of the queue, or one in front of those that it `overtakes`. Warm-ups are not
    looked at: they are behind all others anyway.
    """
    waiting = [
        (other, other.number)
        for other in instance.requests.values()
        if other.prefilling and other.number is not None and other.source.objective is not Objective.BACKGROUND
    ]
    overtaken = [number for other, number in waiting if overtakes(request, other)]
    if not overtaken:
        return last
    kept = max((number for other, number in waiting if not overtakes(request, other)), default=None)
    if kept is None:
        return min(overtaken) - 1
    return kept if max(overtaken) > kept else last
