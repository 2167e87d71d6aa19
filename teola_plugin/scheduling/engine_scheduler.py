"""Lower tier: one engine's queue, shared by all queries and apps (paper, section 5.2). Pure: no clock, no I/O.

Batches are formed from the queue: instances take from it in turn, or requests are placed one by one.
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
    InstanceDown,
    InstanceDrained,
    InstanceUp,
    PrefillEnded,
    QueryNumbers,
    QueuedPrimitive,
    QueuedRequest,
    Reject,
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
from teola_plugin.scheduling.validate import VALIDATE, StateCheck, validate_engine_scheduler

_WARM_UP = PrimitiveKind.PARTIAL_PREFILLING
PATIENCE = 20
"""Batches per instance that may overtake a request which waits for a certain instance."""


class SharedSlots:
    """The free slots of all instances of a continuous engine in one round of admissions.

    The policy chooses the request, the placement its instance. A request that is taken is admitted at once: `running`
    is kept up to date.
    """

    in_order = False

    def __init__(
        self,
        profile: EngineProfile,
        instances: Sequence[str],
        running: Running,
        placement: RequestPlacement,
        at: float,
        *,
        uncontended: bool = False,
    ) -> None:
        self.admitted: dict[str, list[tuple[QueuedPrimitive, QueuedRequest]]] = {}
        """The requests that were taken, by instance and in order."""
        self._profile = profile
        self._running = running
        self._placement = placement
        self._open = list(instances)
        self._uncontended = uncontended
        """True once all requests that wanted a slot were offered one."""
        self._reserved: set[str] = set()
        self.refusals = 0
        self._patience = PATIENCE * len(instances)
        self._warm_up: QueuedPrimitive | None = None
        placement.begin_round(at)

    @property
    def left(self) -> bool:
        while self._open:
            on_instance = self._running.at(self._open[-1])
            has_slot = len(on_instance.requests) < self._profile.max_requests and self._open[-1] not in self._reserved
            if has_slot and (not on_instance.prefilling or on_instance.units < self._profile.max_batch):
                return True
            self._open.pop()
        return False

    def take(self, queued: QueuedPrimitive, request: QueuedRequest) -> bool:
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
        choice = self._placement.choose_instance(placement_request, self.fits)
        if choice is None:
            self.refusals += 1
            if urgent and not self._reserved and self._open and self._warm_up is None:
                # It is too large for what is free anywhere: one instance takes nothing else until it fits there.
                self._reserved.add(min(self._open, key=lambda i: (self._running.at(i).units, i)))
            return False
        self._placement.record_sent(placement_request, choice)
        self._running.add(RunningRequest.of(queued, request.id, choice.units, choice.instance))
        self.admitted.setdefault(choice.instance, []).append((queued, request))
        return True

    def may_run(self, queued: QueuedPrimitive) -> bool:
        """Return False for a warm-up that every instance holds back: policies do not see it."""
        if queued.kind is not _WARM_UP:
            return True
        return not all(self._running.holds_back(queued, instance, self._profile) for instance in self._open)

    def fits(self, instance: str, units: int) -> bool:
        """Return True if the instance has a slot for the request that is being placed."""
        on_instance = self._running.at(instance)
        if len(on_instance.requests) >= self._profile.max_requests or instance in self._reserved:
            return False
        if on_instance.prefilling and on_instance.units + units > self._profile.max_batch:
            return False
        return self._warm_up is None or not self._running.holds_back(self._warm_up, instance, self._profile)


class Batches:
    """The queue and the instances of one engine. The policy chooses the next request, the placement its instance.

    Instances of an engine that keeps nothing take from the queue in turn, the one with the fewest requests first
    (`LeastOutstanding`). Where several instances cache prefixes, each request is placed on its own (`E2`). `placement`
    overrides that; raises ConfigError where it cannot work.
    """

    def __init__(
        self,
        profile: EngineProfile,
        instances: tuple[str, ...],
        policy: BatchPolicy | None,
        placement: LeastOutstanding | RequestPlacement | None,
    ) -> None:
        self.profile = profile
        self.policy: BatchPolicy = policy or TopologyAware()
        self.placement: LeastOutstanding = LeastOutstanding()
        self.router: RequestPlacement | None = None
        """Chooses the instance of each request; None where instances take from the queue in turn."""
        self.instances = list(instances)
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
        """Place requests by E2 once an engine that caches prefixes has a second instance."""
        profile = self.profile
        several = len(self.instances) > 1 and profile.batching is Batching.CONTINUOUS and profile.prefix_caching
        if several and self._automatic and self.router is None:
            self._use_router(E2(profile))

    def _use_router(self, router: RequestPlacement) -> None:
        if self.profile.batching is Batching.STATIC:
            raise ConfigError(
                f"{type(router).__name__} places request by request, but a batch of a static engine runs as one.",
                hint="leave out `placement`: instances of a static engine take whole batches in turn",
            )
        self.router = router
        for instance in self.instances:
            router.add_instance(instance)

    # ------------------------------------------------------------ instances in turn

    def _serve_instances_in_turn(self) -> Instructions:
        batches: Instructions = []
        while self.queue:
            batch = self._next_batch()
            if batch is None:
                return batches
            batches.append(batch)
        return batches

    def _next_batch(self) -> RunBatch | None:
        """Return one batch for the least loaded instance with free slots, or for the home of a waiting session."""
        slots = {i: self.running.slots(i, self.profile) for i in self.instances}
        free = {i: s.requests if s.left else 0 for i, s in slots.items()}
        outstanding = {i: len(self.running.at(i).requests) for i in self.instances}
        for instance in sorted((i for i, n in free.items() if n), key=lambda i: (outstanding[i], i)):
            eligible = [
                q
                for q in self.queue
                if (not q.session and q.kind is not _WARM_UP) or self._may_run(q, instance, free, outstanding)
            ]
            picked = self.policy.pick(eligible, self.running, slots[instance]) if eligible else []
            if picked:
                for queued, request in picked:
                    self.placement.remember(queued.session, instance)
                    self.running.add(RunningRequest.of(queued, request.id, request.size, instance))
                return self._admit(instance, picked)
        return None

    def _may_run(
        self, queued: QueuedPrimitive, instance: str, free: dict[str, int], outstanding: dict[str, int]
    ) -> bool:
        if queued.kind is _WARM_UP and self.running.holds_back(queued, instance, self.profile):
            return False
        if not queued.session:
            return True
        return self.placement.choose(free, outstanding, queued.session) == instance

    # ------------------------------------------------------------ request by request

    def _place_requests(self, router: RequestPlacement, at: float) -> Instructions:
        """Run rounds of the policy over all free slots until nothing more is taken.

        A last round offers the slots that are left to requests that wait for a certain instance.
        """
        batches: Instructions = []
        uncontended = False
        while self.queue:
            slots = SharedSlots(self.profile, self.instances, self.running, router, at, uncontended=uncontended)
            if not slots.left:
                break
            eligible = [queued for queued in self.queue if slots.may_run(queued)]
            if not eligible:
                break
            self.policy.pick(eligible, self.running, slots)
            batches += [self._admit(instance, picked) for instance, picked in slots.admitted.items()]
            if uncontended or not (slots.refusals or slots.admitted):
                break
            uncontended = bool(slots.refusals)
        return batches

    # ------------------------------------------------------------ admission

    def _admit(self, instance: str, picked: list[Pick]) -> RunBatch:
        newest_arrival = -1
        requests, priorities, urgencies = [], [], []
        for queued, request in picked:
            newest_arrival = max(newest_arrival, queued.arrival_number)
            queued.requests.remove(request)
            self.running.served_units.add(queued.app, queued.weight, request.size)
            requests.append(request.id)
            priorities.append(self._queue_number(queued, request.id, instance))
            urgencies.append((queued.depth, queued.objective))
        self.queue = [q for q in self.queue if q.requests]
        for queued in self.queue:
            if queued.arrival_number >= newest_arrival:  # the queue is in order
                break
            queued.overtaken += 1
        return RunBatch(instance, next(self._batches), tuple(requests), tuple(priorities), tuple(urgencies))

    def _queue_number(self, queued: QueuedPrimitive, request: str, instance: str) -> int:
        """Give a request its number in the queue of its instance if it is an LLM request, else its admission number."""
        running, number = self.running.by_id[request], next(self._admissions)
        if queued.kind in LLM_KINDS:
            number = waiting_number(running, self.running.at(instance), number, self.policy.overtakes)
        running.number = number
        return number


class EngineScheduler(Batches):
    """Forms batches for the instances of one engine (see `Batches`) as events come.

    Slots are never overrun, and every request is answered. Raises ConfigError where `placement` cannot work.
    """

    def __init__(
        self,
        profile: EngineProfile,
        instances: tuple[str, ...] = ("0",),
        policy: BatchPolicy | None = None,
        placement: LeastOutstanding | RequestPlacement | None = None,
    ) -> None:
        super().__init__(profile, instances, policy, placement)
        self._arrivals = itertools.count()
        self._query_numbers = QueryNumbers()
        self._check = StateCheck()
        self._handlers: dict[type, Callable[..., Instructions]] = {
            Enqueue: self._enqueue,
            RequestsEnded: self._end_requests,
            Retried: self._retried,
            PrefillEnded: self._prefilled,
            CancelRequests: self._cancel,
            DepthChanged: self._depths,
            InstanceUp: self._up,
            InstanceDrained: self._remove_instance,
            InstanceDown: self._remove_instance,
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
            instructions += (
                self._serve_instances_in_turn() if router is None else self._place_requests(router, event.at)
            )
        if VALIDATE and self._check.due(len(self.queue) + len(self.running.by_id)):
            validate_engine_scheduler(self)
        return instructions

    # ------------------------------------------------------------ events

    def _enqueue(self, event: Enqueue) -> Instructions:
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
        for request in event.requests:
            self.running.remove(request)
        if self.router is not None:
            self.router.record_ended(event.at, event.requests)
        return []

    def _retried(self, event: Retried) -> Instructions:
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
        running = self.running.by_id.get(event.request)
        if running is not None:
            self.running.prefilled(running)
            if self.router is not None:
                self.router.record_prefilled(event.at, event.request)
        return []

    def _tick(self, event: Tick) -> Instructions:
        if self.router is not None:
            self.router.record_ended(event.at, ())
        return []

    def _cache(self, event: CacheEvent) -> Instructions:
        if self.router is not None and event.instance in self.instances:
            self.router.record_cache_event(event)
        return []

    def _cancel(self, event: CancelRequests) -> Instructions:
        unwanted = set(event.requests)
        dropped: list[str] = []
        for queued in self.queue:
            dropped += [r.id for r in queued.requests if r.id in unwanted]
            queued.requests = type(queued.requests)(r for r in queued.requests if r.id not in unwanted)
        self.queue = [q for q in self.queue if q.requests]
        instructions: Instructions = [Dropped(tuple(dropped))] if dropped else []
        by_instance: dict[str, list[str]] = {}
        for request in event.requests:
            if (running := self.running.by_id.get(request)) is not None:
                by_instance.setdefault(running.instance, []).append(request)
        return [
            *instructions,
            *(CancelRunning(instance, tuple(requests)) for instance, requests in by_instance.items()),
        ]

    def _depths(self, event: DepthChanged) -> Instructions:
        for queued in self.queue:
            if queued.query == event.query:
                self._update_standing(queued, event)
        for running in self.running.by_id.values():
            if running.query == event.query:
                running.depth = event.depths.get(running.primitive, running.depth)
                self._update_standing(running.source, event)  # should it run again
        return []

    @staticmethod
    def _update_standing(queued: QueuedPrimitive, event: DepthChanged) -> None:
        queued.depth = event.depths.get(queued.primitive, queued.depth)
        if queued.primitive in event.objectives:
            queued.objective, queued.gang = event.objectives[queued.primitive]

    def _up(self, event: InstanceUp) -> Instructions:
        if event.instance not in self.instances:
            self.instances.append(event.instance)
            if self.router is not None:
                self.router.add_instance(event.instance)
            self._route_if_several()
        return []

    def _remove_instance(self, event: InstanceDrained | InstanceDown) -> Instructions:
        self.instances = [i for i in self.instances if i != event.instance]
        self.placement.forget_instance(event.instance)
        if self.router is not None:
            self.router.forget_instance(event.instance)
        if isinstance(event, InstanceDown):
            for request in list(self.running.at(event.instance).requests):
                self.running.remove(request)
        return []
