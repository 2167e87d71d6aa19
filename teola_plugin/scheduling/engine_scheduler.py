"""Lower tier: one engine's queue, shared by all queries and apps (paper, section 5.2). Pure: no clock, no I/O."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable

from teola_plugin.errors import ConfigError
from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.scheduling.engine_events import (
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
    Reject,
    RequestsEnded,
    Retried,
    RunBatch,
)
from teola_plugin.scheduling.engine_queue import QueuedPrimitive, Running, RunningRequest
from teola_plugin.scheduling.events import Instructions, Tick
from teola_plugin.scheduling.objectives import Objective
from teola_plugin.scheduling.placement import E2, LeastOutstanding, RequestPlacement
from teola_plugin.scheduling.policies import BatchPolicy, Pick, TopologyAware
from teola_plugin.scheduling.provisional import ProvisionalRequests
from teola_plugin.scheduling.shared_slots import SharedSlots
from teola_plugin.scheduling.validate import VALIDATE, StateCheck, validate_engine_scheduler


class EngineScheduler:
    """Forms batches for the instances of one engine. Slots are never overrun; every request is answered.

    The policy says which request goes next. Where it goes: instances of an engine that keeps nothing are offered the
    queue in turn, the one with the fewest requests first (`LeastOutstanding`); several instances that cache prefixes
    are chosen request by request (`E2`). `placement` overrides that; raises ConfigError where it cannot work.
    """

    def __init__(
        self,
        profile: EngineProfile,
        instances: tuple[str, ...] = ("0",),
        policy: BatchPolicy | None = None,
        placement: LeastOutstanding | RequestPlacement | None = None,
    ) -> None:
        self.profile = profile
        self.policy: BatchPolicy = policy or TopologyAware()
        self.placement: LeastOutstanding = LeastOutstanding()
        self.router: RequestPlacement | None = None
        """Chooses the instance of each request; None where instances are offered the queue in turn."""
        self.instances = list(instances)
        self._automatic = placement is None
        self.queue: list[QueuedPrimitive] = []
        self.running = Running()
        self.provisional = ProvisionalRequests()
        self._arrivals = itertools.count()
        self._batches = itertools.count()
        self._admissions = itertools.count()
        self._check = StateCheck()
        self._handlers: dict[type, Callable[..., Instructions]] = {
            Enqueue: self._enqueue,
            RequestsEnded: self._ended,
            Retried: self._retried,
            PrefillEnded: self._prefilled,
            CancelRequests: self._cancel,
            DepthChanged: self._depths,
            InstanceUp: self._up,
            InstanceDrained: self._drained,
            InstanceDown: self._down,
            CacheStored: self._cache,
            CacheRemoved: self._cache,
            CacheCleared: self._cache,
            CacheUse: self._cache,
            Tick: self._tick,
        }
        if placement is None:
            self._route_if_several()
        elif isinstance(placement, LeastOutstanding):
            self.placement = placement
        else:
            self._route_by(placement)

    @property
    def wants_blocks(self) -> bool:
        """Whether `QueuedRequest.blocks` are of use here."""
        return self.router is not None

    def handle(self, event: EngineEvent) -> Instructions:
        """What to do about `event`: its own consequences first, then the batches that can run now."""
        self.running.now = event.at
        out = self._handlers[type(event)](event)
        if not isinstance(event, CacheEvent):  # those come in numbers, and free no slot
            out += self._offer(event.at) if self.queue else []
            out += self._begin_guesses(event.at) if self.provisional.waiting else []
        if VALIDATE and self._check.due(len(self.queue) + len(self.running.by_id)):
            validate_engine_scheduler(self)
        return out

    def _offer(self, at: float) -> Instructions:
        return self._offer_in_turn() if self.router is None else self._route(self.router, at)

    def _begin_guesses(self, at: float) -> Instructions:
        out: Instructions = []
        while (guess := self.provisional.next(self.queue, self.running)) is not None:
            bisect.insort(self.queue, guess, key=lambda q: q.arrived)
            begun = self._offer(at)
            if self.provisional.put_back(self.queue) or not begun:
                return out + begun
            out += begun
        return out

    def _route_if_several(self) -> None:
        """E2 takes over with the second instance of an engine that caches prefixes."""
        profile = self.profile
        several = len(self.instances) > 1 and profile.batching is Batching.CONTINUOUS and profile.prefix_caching
        if several and self._automatic and self.router is None:
            self._route_by(E2(profile))

    def _route_by(self, router: RequestPlacement) -> None:
        if self.profile.batching is Batching.STATIC:
            raise ConfigError(
                f"{type(router).__name__} places request by request, but a batch of a static engine runs as one.",
                hint="leave out `placement`: instances of a static engine take whole batches in turn",
            )
        self.router = router
        for instance in self.instances:
            router.up(instance)

    # ------------------------------------------------------------ events

    def _enqueue(self, event: Enqueue) -> Instructions:
        limit = self.profile.max_request_size
        too_large = [r for r in event.requests if limit is not None and r.size > limit]
        queued = QueuedPrimitive.of(event, next(self._arrivals))
        for request in too_large:
            queued.requests.remove(request)
        out: Instructions = [Reject(r.id, math.ceil(r.size), limit or 0) for r in too_large]
        if queued.objective is Objective.PROVISIONAL:
            self.provisional.wait(queued)
            return out
        if queued.requests:
            out += self.provisional.make_room(queued, self.running)
            self.running.served.arrive(event.app, waiting=any(q.app == event.app for q in self.queue))
            self.queue.append(queued)
        return out

    def _ended(self, event: RequestsEnded) -> Instructions:
        for request in event.requests:
            self.running.remove(request)
        if self.router is not None:
            self.router.ended(event.at, event.requests)
        return []

    def _retried(self, event: Retried) -> Instructions:
        running = self.running.by_id.get(event.request)
        if running is None:
            return [Dropped((event.request,))]  # every request is answered
        self._ended(RequestsEnded(event.at, (event.request,)))
        queued = running.source
        if not queued.requests:  # it had left the queue
            self.running.served.arrive(queued.app, waiting=any(q.app == queued.app for q in self.queue))
            bisect.insort(self.queue, queued, key=lambda q: q.arrived)
        queued.put_back(event.request)
        return []

    def _prefilled(self, event: PrefillEnded) -> Instructions:
        running = self.running.by_id.get(event.request)
        if running is not None:
            self.running.prefilled(running)
            if self.router is not None:
                self.router.prefilled(event.at, event.request)
        return []

    def _tick(self, event: Tick) -> Instructions:
        if self.router is not None:
            self.router.ended(event.at, ())
        return []

    def _cache(self, event: CacheEvent) -> Instructions:
        if self.router is not None and event.instance in self.instances:
            self.router.cached(event)
        return []

    def _cancel(self, event: CancelRequests) -> Instructions:
        unwanted = set(event.requests)
        dropped = self.provisional.cancelled(unwanted)
        for queued in self.queue:
            dropped += [r.id for r in queued.requests if r.id in unwanted]
            queued.requests = type(queued.requests)(r for r in queued.requests if r.id not in unwanted)
        self.queue = [q for q in self.queue if q.requests]
        out: Instructions = [Dropped(tuple(dropped))] if dropped else []
        here: dict[str, list[str]] = {}
        for request in event.requests:
            if (running := self.running.by_id.get(request)) is not None:
                here.setdefault(running.instance, []).append(request)
        return [*out, *(CancelRunning(instance, tuple(requests)) for instance, requests in here.items())]

    def _depths(self, event: DepthChanged) -> Instructions:
        for queued in self.queue:
            if queued.query == event.query:
                self._stands(queued, event)
        for queued in self.provisional.claimed(event):
            self._stands(queued, event)
            bisect.insort(self.queue, queued, key=lambda q: q.arrived)
        for running in self.running.by_id.values():
            if running.query == event.query:
                running.depth = event.depths.get(running.primitive, running.depth)
                self._stands(running.source, event)  # should it run again
        return []

    @staticmethod
    def _stands(queued: QueuedPrimitive, event: DepthChanged) -> None:
        queued.depth = event.depths.get(queued.primitive, queued.depth)
        if queued.primitive in event.wanted:
            queued.objective, queued.gang = event.wanted[queued.primitive]

    def _up(self, event: InstanceUp) -> Instructions:
        if event.instance not in self.instances:
            self.instances.append(event.instance)
            if self.router is not None:
                self.router.up(event.instance)
            self._route_if_several()
        return []

    def _drained(self, event: InstanceDrained | InstanceDown) -> Instructions:
        self.instances = [i for i in self.instances if i != event.instance]
        self.placement.forget_instance(event.instance)
        if self.router is not None:
            self.router.forget_instance(event.instance)
        return []

    def _down(self, event: InstanceDown) -> Instructions:
        self._drained(event)
        for running in self.running.on(event.instance):
            self.running.remove(running.request)
        return []

    # ------------------------------------------------------------ batches: instances in turn

    def _offer_in_turn(self) -> Instructions:
        out: Instructions = []
        while self.queue:
            batch = self._next_batch()
            if batch is None:
                return out
            out.append(batch)
        return out

    def _next_batch(self) -> RunBatch | None:
        """One batch for the least loaded instance with free slots, or for the home of a waiting session."""
        slots = {i: self.running.slots(i, self.profile) for i in self.instances}
        free = {i: s.requests if s.left else 0 for i, s in slots.items()}
        outstanding = {i: len(self.running.at(i).requests) for i in self.instances}
        for instance in sorted((i for i, n in free.items() if n), key=lambda i: (outstanding[i], i)):
            here = [q for q in self.queue if self._may_run(q, instance, free, outstanding)]
            picked = self.policy.pick(here, self.running, slots[instance]) if here else []
            if picked:
                return self._run_on(instance, picked)
        return None

    def _may_run(
        self, queued: QueuedPrimitive, instance: str, free: dict[str, int], outstanding: dict[str, int]
    ) -> bool:
        if queued.kind is PrimitiveKind.PARTIAL_PREFILLING and self.running.holds_back(queued, instance, self.profile):
            return False
        if not queued.session:
            return True
        return self.placement.choose(free, outstanding, queued.session) == instance

    def _run_on(self, instance: str, picked: list[Pick]) -> RunBatch:
        for queued, request in picked:
            self.placement.remember(queued.session, instance)
            self.running.add(RunningRequest.of(queued, request.id, request.size, instance))
        return self._admit(instance, picked)

    # ------------------------------------------------------------ batches: request by request

    def _route(self, router: RequestPlacement, at: float) -> Instructions:
        """Rounds of the policy over all free slots, until nothing more is taken; then those that wait for a certain
        instance may have the slots that are left."""
        out: Instructions = []
        uncontended = False
        while self.queue:
            slots = SharedSlots(self.profile, self.instances, self.running, router, at, uncontended=uncontended)
            if not slots.left:
                break
            self.policy.pick(self.queue, self.running, slots)
            out += [self._admit(instance, picked) for instance, picked in slots.admitted.items()]
            if uncontended or not (slots.refusals or slots.admitted):
                break
            uncontended = bool(slots.refusals)
        return out

    # ------------------------------------------------------------ what a batch does to the queue

    def _admit(self, instance: str, picked: list[Pick]) -> RunBatch:
        last = -1
        requests, priorities, urgencies = [], [], []
        for queued, request in picked:
            last = max(last, queued.arrived)
            queued.requests.remove(request)
            if queued.objective is not Objective.PROVISIONAL:
                self.running.served.add(queued.app, queued.weight, request.size)
            requests.append(request.id)
            priorities.append(next(self._admissions))
            urgencies.append((queued.depth, queued.objective))
        self.queue = [q for q in self.queue if q.requests]
        for queued in self.queue:
            queued.overtaken += queued.arrived < last
        return RunBatch(instance, next(self._batches), tuple(requests), tuple(priorities), tuple(urgencies))
