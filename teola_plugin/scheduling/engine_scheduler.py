"""Lower tier: one engine's queue, shared by all queries and apps (paper, section 5.2). Pure: no clock, no I/O.

Batches are formed from the queue: replicas take from it in turn, or requests are placed one by one.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence

from teola_plugin.errors import ConfigError
from teola_plugin.graph import LLM_KINDS, Batching, EngineProfile, PrimitiveKind
from teola_plugin.scheduling.engine_queue import (
    CacheCleared,
    CacheEvent,
    CacheRemoved,
    CacheStored,
    CacheUse,
    CancelRequests,
    CancelRunning,
    DepthChanged,
    Dropped,
    EngineEvent,
    Enqueue,
    PrefillEnded,
    QueryNumbers,
    QueuedPrimitive,
    QueuedRequest,
    Reject,
    ReplicaDown,
    ReplicaDrained,
    ReplicaUp,
    RequestsEnded,
    Retried,
    RunBatch,
    Running,
    RunningRequest,
    waiting_number,
)
from teola_plugin.scheduling.events import Instructions, Tick
from teola_plugin.scheduling.placement import E2, LeastOutstanding, PlacementRequest, RequestPlacement
from teola_plugin.scheduling.policies import BatchPolicy, Pick, TopologyAware
from teola_plugin.scheduling.validate import VALIDATE, CheckInterval, validate_engine_scheduler

_WARM_UP = PrimitiveKind.PARTIAL_PREFILLING
PATIENCE = 20
"""Batches per replica that may overtake a request which waits for a certain replica."""


class SharedSlots:
    """The free slots of all replicas of a continuous engine in one round of admissions.

    The policy chooses the request, the placement its replica. A request that is taken is admitted at once: `running`
    is kept up to date.
    """

    in_order = False

    def __init__(
        self,
        profile: EngineProfile,
        replicas: Sequence[str],
        running: Running,
        placement: RequestPlacement,
        at: float,
        *,
        uncontended: bool = False,
    ) -> None:
        self.admitted: dict[str, list[tuple[QueuedPrimitive, QueuedRequest]]] = {}
        """The requests that were taken, by replica and in order."""
        self._profile = profile
        self._running = running
        self._placement = placement
        self._open = list(replicas)
        self._uncontended = uncontended
        """True once all requests that wanted a slot were offered one."""
        self._reserved: set[str] = set()
        self.refusals = 0
        self._patience = PATIENCE * len(replicas)
        self._warm_up: QueuedPrimitive | None = None
        placement.begin_round(at)

    @property
    def left(self) -> bool:
        """True if any replica has a slot for another request. Replicas that are full are skipped for the rest of the
        round."""
        while self._open:
            on_replica = self._running.at(self._open[-1])
            has_slot = len(on_replica.requests) < self._profile.max_requests and self._open[-1] not in self._reserved
            if has_slot and (not on_replica.prefilling or on_replica.units < self._profile.max_batch):
                return True
            self._open.pop()
        return False

    def take(self, queued: QueuedPrimitive, request: QueuedRequest) -> bool:
        """Place a request on a replica, and count it as running there. Return False if it must wait for a slot.

        A request that has waited for too long reserves a replica, which then takes nothing else.
        """
        self._warm_up = queued if queued.kind is _WARM_UP else None
        urgent = queued.overtaken >= self._patience
        placement_request = PlacementRequest(
            request.id,
            math.ceil(request.size),
            request.blocks,
            queued.session,
            queued.gang,
            urgent,
            self._warm_up is not None,
            self._uncontended,
        )
        choice = self._placement.choose_replica(placement_request, self.fits)
        if choice is None:
            self.refusals += 1
            if urgent and not self._reserved and self._open and self._warm_up is None:
                # It is too large for what is free anywhere: one replica takes nothing else until it fits there.
                self._reserved.add(min(self._open, key=lambda i: (self._running.at(i).units, i)))
            return False
        self._placement.record_sent(placement_request, choice)
        self._running.add(RunningRequest.of(queued, request.id, choice.units, choice.replica))
        self.admitted.setdefault(choice.replica, []).append((queued, request))
        return True

    def may_run(self, queued: QueuedPrimitive) -> bool:
        """Return False for a warm-up that every replica holds back: policies do not see it."""
        if queued.kind is not _WARM_UP:
            return True
        return not all(self._running.holds_back(queued, replica, self._profile) for replica in self._open)

    def fits(self, replica: str, units: int) -> bool:
        """Return True if the replica has a slot for the request that is being placed."""
        on_replica = self._running.at(replica)
        if len(on_replica.requests) >= self._profile.max_requests or replica in self._reserved:
            return False
        if on_replica.prefilling and on_replica.units + units > self._profile.max_batch:
            return False
        return self._warm_up is None or not self._running.holds_back(self._warm_up, replica, self._profile)


class Batches:
    """The queue and the replicas of one engine. The policy chooses the next request, the placement its replica.

    Replicas of an engine that keeps nothing take from the queue in turn, the one with the fewest requests first
    (`LeastOutstanding`). Where several replicas cache prefixes, each request is placed on its own (`E2`). `placement`
    overrides that; raises ConfigError where it cannot work.
    """

    def __init__(
        self,
        profile: EngineProfile,
        replicas: tuple[str, ...],
        policy: BatchPolicy | None,
        placement: LeastOutstanding | RequestPlacement | None,
    ) -> None:
        self.profile = profile
        self.policy: BatchPolicy = policy or TopologyAware()
        self.placement: LeastOutstanding = LeastOutstanding()
        self.router: RequestPlacement | None = None
        """Chooses the replica of each request; None where replicas take from the queue in turn."""
        self.replicas = list(replicas)
        self.queue: list[QueuedPrimitive] = []
        self.running = Running()
        self._automatic = placement is None
        self._batches = itertools.count()
        self._admissions = itertools.count()
        if placement is None:
            self._route_if_several()
        elif isinstance(placement, LeastOutstanding):
            self.placement = placement
        else:
            self._use_router(placement)

    @property
    def wants_blocks(self) -> bool:
        """True if the placement uses `QueuedRequest.blocks`."""
        return self.router is not None

    def _route_if_several(self) -> None:
        """Place requests by E2 once an engine that caches prefixes has a second replica."""
        profile = self.profile
        several = len(self.replicas) > 1 and profile.batching is Batching.CONTINUOUS and profile.prefix_caching
        if several and self._automatic and self.router is None:
            self._use_router(E2(profile))

    def _use_router(self, router: RequestPlacement) -> None:
        """Choose the replica of each request by `router` from now on. Raise ConfigError for a static engine."""
        if self.profile.batching is Batching.STATIC:
            raise ConfigError(
                f"{type(router).__name__} places request by request, but a batch of a static engine runs as one.",
                hint="leave out `placement`: replicas of a static engine take whole batches in turn",
            )
        self.router = router
        for replica in self.replicas:
            router.add_replica(replica)

    # ------------------------------------------------------------ replicas in turn

    def _serve_replicas_in_turn(self) -> Instructions:
        """Form batches for replicas with free slots, the least loaded first, until none takes anything more."""
        batches: Instructions = []
        while self.queue:
            batch = self._next_batch()
            if batch is None:
                return batches
            batches.append(batch)
        return batches

    def _next_batch(self) -> RunBatch | None:
        """Return one batch for the least loaded replica with free slots, or for the home of a waiting session."""
        slots = {i: self.running.slots(i, self.profile) for i in self.replicas}
        free = {i: s.requests if s.left else 0 for i, s in slots.items()}
        outstanding = {i: len(self.running.at(i).requests) for i in self.replicas}
        for replica in sorted((i for i, n in free.items() if n), key=lambda i: (outstanding[i], i)):
            eligible = [
                q
                for q in self.queue
                if (not q.session and q.kind is not _WARM_UP) or self._may_run(q, replica, free, outstanding)
            ]
            picked = self.policy.pick(eligible, self.running, slots[replica]) if eligible else []
            if picked:
                for queued, request in picked:
                    self.placement.remember(queued.session, replica)
                    self.running.add(RunningRequest.of(queued, request.id, request.size, replica))
                return self._admit(replica, picked)
        return None

    def _may_run(
        self, queued: QueuedPrimitive, replica: str, free: dict[str, int], outstanding: dict[str, int]
    ) -> bool:
        """Return True if a primitive may run on this replica now: a warm-up if it delays nothing, a session at its
        home."""
        if queued.kind is _WARM_UP and self.running.holds_back(queued, replica, self.profile):
            return False
        if not queued.session:
            return True
        return self.placement.choose(free, outstanding, queued.session) == replica

    # ------------------------------------------------------------ request by request

    def _place_requests(self, router: RequestPlacement, at: float) -> Instructions:
        """Run rounds of the policy over all free slots until nothing more is taken.

        A last round offers the slots that are left to requests that wait for a certain replica.
        """
        batches: Instructions = []
        uncontended = False
        while self.queue:
            slots = SharedSlots(self.profile, self.replicas, self.running, router, at, uncontended=uncontended)
            if not slots.left:
                break
            eligible = [queued for queued in self.queue if slots.may_run(queued)]
            if not eligible:
                break
            self.policy.pick(eligible, self.running, slots)
            batches += [self._admit(replica, picked) for replica, picked in slots.admitted.items()]
            if uncontended or not (slots.refusals or slots.admitted):
                break
            uncontended = bool(slots.refusals)
        return batches

    # ------------------------------------------------------------ admission

    def _admit(self, replica: str, picked: list[Pick]) -> RunBatch:
        """Remove the picked requests from the queue, and return the batch that gives them to a replica.

        They are counted for their apps, and older primitives that stay in the queue as overtaken.
        """
        newest_arrival = -1
        requests, priorities, urgencies = [], [], []
        for queued, request in picked:
            newest_arrival = max(newest_arrival, queued.arrival_number)
            queued.requests.remove(request)
            self.running.served_units.add(queued.app, queued.weight, request.size)
            requests.append(request.id)
            priorities.append(self._queue_number(queued, request.id, replica))
            urgencies.append((queued.depth, queued.objective))
        self.queue = [q for q in self.queue if q.requests]
        for queued in self.queue:
            if queued.arrival_number >= newest_arrival:  # the queue is in order
                break
            queued.overtaken += 1
        return RunBatch(replica, next(self._batches), tuple(requests), tuple(priorities), tuple(urgencies))

    def _queue_number(self, queued: QueuedPrimitive, request: str, replica: str) -> int:
        """Give a request its number in the queue of its replica if it is an LLM request, else its admission number."""
        running, number = self.running.by_id[request], next(self._admissions)
        if queued.kind in LLM_KINDS:
            number = waiting_number(running, self.running.at(replica), number, self.policy.overtakes)
        running.number = number
        return number


class EngineScheduler(Batches):
    """Forms batches for the replicas of one engine (see `Batches`) as events come.

    Slots are never overrun, and every request is answered. Raises ConfigError where `placement` cannot work.
    """

    def __init__(
        self,
        profile: EngineProfile,
        replicas: tuple[str, ...] = ("0",),
        policy: BatchPolicy | None = None,
        placement: LeastOutstanding | RequestPlacement | None = None,
    ) -> None:
        super().__init__(profile, replicas, policy, placement)
        self._arrivals = itertools.count()
        self._query_numbers = QueryNumbers()
        self._check = CheckInterval()
        self._handlers: dict[type, Callable[..., Instructions]] = {
            Enqueue: self._enqueue,
            RequestsEnded: self._end_requests,
            Retried: self._retried,
            PrefillEnded: self._prefilled,
            CancelRequests: self._cancel,
            DepthChanged: self._depths,
            ReplicaUp: self._up,
            ReplicaDrained: self._remove_replica,
            ReplicaDown: self._remove_replica,
            CacheStored: self._cache,
            CacheRemoved: self._cache,
            CacheCleared: self._cache,
            CacheUse: self._cache,
            Tick: self._tick,
        }

    def handle(self, event: EngineEvent) -> Instructions:
        """Return the instructions that follow from `event`: its own first, then the batches that can run now."""
        self.running.now = event.at
        instructions = self._handlers[type(event)](event)
        if self.queue and not isinstance(event, CacheEvent):  # cache events are many, and free no slot
            router = self.router
            instructions += self._serve_replicas_in_turn() if router is None else self._place_requests(router, event.at)
        if VALIDATE and self._check.is_due(len(self.queue) + len(self.running.by_id)):
            validate_engine_scheduler(self)
        return instructions

    # ------------------------------------------------------------ events

    def _enqueue(self, event: Enqueue) -> Instructions:
        """Add a primitive to the queue. Reject those of its requests that are larger than the engine can ever take."""
        limit = self.profile.max_request_size
        too_large = [r for r in event.requests if limit is not None and r.size > limit]
        queued = QueuedPrimitive.of(event, next(self._arrivals), self._query_numbers.number(event.query))
        for request in too_large:
            queued.requests.remove(request)
        instructions: Instructions = [Reject(r.id, math.ceil(r.size), limit or 0) for r in too_large]
        if queued.requests:
            self.running.served_units.arrive(event.app, waiting=any(q.app == event.app for q in self.queue))
            self.queue.append(queued)
        return instructions

    def _end_requests(self, event: RequestsEnded) -> Instructions:
        """Free the slots of requests that have ended."""
        for request in event.requests:
            self.running.remove(request)
        if self.router is not None:
            self.router.record_ended(event.at, event.requests)
        return []

    def _retried(self, event: Retried) -> Instructions:
        """Put a running request that failed back into the queue, at the place that it had there."""
        running = self.running.by_id.get(event.request)
        if running is None:
            return [Dropped((event.request,))]  # every request is answered
        self._end_requests(RequestsEnded(event.at, (event.request,)))
        queued = running.source
        if not queued.requests:  # it had left the queue
            self.running.served_units.arrive(queued.app, waiting=any(q.app == queued.app for q in self.queue))
            bisect.insort(self.queue, queued, key=lambda q: q.arrival_number)
        queued.put_back(event.request)
        return []

    def _prefilled(self, event: PrefillEnded) -> Instructions:
        """Note that the prompt of a running request is computed: it takes no more units of its replica."""
        running = self.running.by_id.get(event.request)
        if running is not None:
            self.running.prefilled(running)
            if self.router is not None:
                self.router.record_prefilled(event.at, event.request)
        return []

    def _tick(self, event: Tick) -> Instructions:
        """Let the router balance its loads if it is time for that, although no request ends. Return nothing to do."""
        if self.router is not None:
            self.router.record_ended(event.at, ())
        return []

    def _cache(self, event: CacheEvent) -> Instructions:
        if self.router is not None and event.replica in self.replicas:
            self.router.record_cache_event(event)
        return []

    def _cancel(self, event: CancelRequests) -> Instructions:
        """Drop cancelled requests from the queue, and order those that run to be cancelled at their replicas."""
        unwanted = set(event.requests)
        dropped: list[str] = []
        for queued in self.queue:
            dropped += [r.id for r in queued.requests if r.id in unwanted]
            queued.requests = type(queued.requests)(r for r in queued.requests if r.id not in unwanted)
        self.queue = [q for q in self.queue if q.requests]
        instructions: Instructions = [Dropped(tuple(dropped))] if dropped else []
        by_replica: dict[str, list[str]] = {}
        for request in event.requests:
            if (running := self.running.by_id.get(request)) is not None:
                by_replica.setdefault(running.replica, []).append(request)
        return [
            *instructions,
            *(CancelRunning(replica, tuple(requests)) for replica, requests in by_replica.items()),
        ]

    def _depths(self, event: DepthChanged) -> Instructions:
        """Give the queued and running primitives of a query their new depths, objectives and gangs."""
        for queued in self.queue:
            if queued.query == event.query:
                self._update_priority(queued, event)
        for running in self.running.by_id.values():
            if running.query == event.query:
                running.depth = event.depths.get(running.primitive, running.depth)
                self._update_priority(running.source, event)  # should it run again
        return []

    @staticmethod
    def _update_priority(queued: QueuedPrimitive, event: DepthChanged) -> None:
        """Give a queued primitive its new depth, objective and gang, where the event names it; otherwise they stay."""
        queued.depth = event.depths.get(queued.primitive, queued.depth)
        if queued.primitive in event.objectives:
            queued.objective, queued.gang = event.objectives[queued.primitive]

    def _up(self, event: ReplicaUp) -> Instructions:
        """Add a replica that takes work from now on. With a second one, requests may be placed by cached prefixes."""
        if event.replica not in self.replicas:
            self.replicas.append(event.replica)
            if self.router is not None:
                self.router.add_replica(event.replica)
            self._route_if_several()
        return []

    def _remove_replica(self, event: ReplicaDrained | ReplicaDown) -> Instructions:
        """Give a replica no more work. If it is down, forget the requests that ran there: the driver ends them."""
        self.replicas = [i for i in self.replicas if i != event.replica]
        self.placement.forget_replica(event.replica)
        if self.router is not None:
            self.router.forget_replica(event.replica)
        if isinstance(event, ReplicaDown):
            for request in list(self.running.at(event.replica).requests):
                self.running.remove(request)
        return []
