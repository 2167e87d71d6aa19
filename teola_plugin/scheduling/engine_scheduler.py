"""Lower tier: one engine's queue, shared by all queries and apps (paper, section 5.2). Pure: no clock, no I/O."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.scheduling.engine_queue import QueuedPrimitive, Running, RunningRequest
from teola_plugin.scheduling.events import (
    CancelRequests,
    CancelRunning,
    DepthChanged,
    Dropped,
    EngineEvent,
    Enqueue,
    InstanceDown,
    InstanceDrained,
    InstanceUp,
    Instructions,
    PrefillEnded,
    Reject,
    RequestsEnded,
    RunBatch,
    Tick,
)
from teola_plugin.scheduling.placement import LeastOutstanding
from teola_plugin.scheduling.policies import BatchPolicy, Pick, TopologyAware


class EngineScheduler:
    """Forms batches for the instances of one engine. Slots are never overrun; every request is answered."""

    def __init__(
        self, profile: EngineProfile, instances: tuple[str, ...] = ("0",), policy: BatchPolicy | None = None
    ) -> None:
        self.profile = profile
        self.policy: BatchPolicy = policy or TopologyAware()
        self.placement = LeastOutstanding()
        self.instances = list(instances)
        self.queue: list[QueuedPrimitive] = []
        self.running = Running()
        self._arrivals = itertools.count()
        self._batches = itertools.count()
        self._admissions = itertools.count()
        self._handlers: dict[type, Callable[..., Instructions]] = {
            Enqueue: self._enqueue,
            RequestsEnded: self._ended,
            PrefillEnded: self._prefilled,
            CancelRequests: self._cancel,
            DepthChanged: self._depths,
            InstanceUp: self._up,
            InstanceDrained: self._drained,
            InstanceDown: self._down,
            Tick: lambda event: [],
        }

    def handle(self, event: EngineEvent) -> Instructions:
        """What to do about `event`: its own consequences first, then the batches that can run now."""
        return self._handlers[type(event)](event) + self._form_batches()

    # ------------------------------------------------------------ events

    def _enqueue(self, event: Enqueue) -> Instructions:
        limit = self.profile.max_request_size
        too_large = [r for r in event.requests if limit is not None and r.size > limit]
        queued = QueuedPrimitive.of(event, next(self._arrivals))
        for request in too_large:
            queued.requests.remove(request)
        if queued.requests:
            self.queue.append(queued)
        return [Reject(r.id, r.size, limit or 0) for r in too_large]

    def _ended(self, event: RequestsEnded) -> Instructions:
        for request in event.requests:
            self.running.by_id.pop(request, None)
        return []

    def _prefilled(self, event: PrefillEnded) -> Instructions:
        running = self.running.by_id.get(event.request)
        if running is not None:
            running.prefilling = False
        return []

    def _cancel(self, event: CancelRequests) -> Instructions:
        unwanted = set(event.requests)
        dropped = []
        for queued in self.queue:
            dropped += [r.id for r in queued.requests if r.id in unwanted]
            queued.requests = type(queued.requests)(r for r in queued.requests if r.id not in unwanted)
        self.queue = [q for q in self.queue if q.requests]
        out: Instructions = [Dropped(tuple(dropped))] if dropped else []
        for instance in self.instances:
            here = tuple(r.request for r in self.running.on(instance) if r.request in unwanted)
            if here:
                out.append(CancelRunning(instance, here))
        return out

    def _depths(self, event: DepthChanged) -> Instructions:
        for queued in self.queue:
            if queued.query == event.query:
                queued.depth = event.depths.get(queued.primitive, queued.depth)
        for running in self.running.by_id.values():
            if running.query == event.query:
                running.depth = event.depths.get(running.primitive, running.depth)
        return []

    def _up(self, event: InstanceUp) -> Instructions:
        if event.instance not in self.instances:
            self.instances.append(event.instance)
        return []

    def _drained(self, event: InstanceDrained) -> Instructions:
        self.instances = [i for i in self.instances if i != event.instance]
        self.placement.forget_instance(event.instance)
        return []

    def _down(self, event: InstanceDown) -> Instructions:
        self.instances = [i for i in self.instances if i != event.instance]
        self.placement.forget_instance(event.instance)
        for running in self.running.on(event.instance):
            del self.running.by_id[running.request]
        return []

    # ------------------------------------------------------------ batches

    def _form_batches(self) -> Instructions:
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
        outstanding = {i: len(self.running.on(i)) for i in self.instances}
        for instance in sorted((i for i, n in free.items() if n), key=lambda i: (outstanding[i], i)):
            here = [q for q in self.queue if self._may_run(q, instance, free, outstanding)]
            picked = self.policy.pick(here, self.running, slots[instance]) if here else []
            if picked:
                return self._admit(picked, instance)
        return None

    def _may_run(
        self, queued: QueuedPrimitive, instance: str, free: dict[str, int], outstanding: dict[str, int]
    ) -> bool:
        if queued.kind is PrimitiveKind.PARTIAL_PREFILLING and self.running.holds_back(queued, instance, self.profile):
            return False
        if not queued.session:
            return True
        return self.placement.choose(free, outstanding, queued.session) == instance

    def _admit(self, picked: list[Pick], instance: str) -> RunBatch:
        last = max(queued.arrived for queued, _ in picked)
        requests, priorities = [], []
        for queued, request in picked:
            queued.requests.remove(request)
            self.placement.remember(queued.session, instance)
            self.running.by_id[request.id] = RunningRequest(
                request.id, queued.query, queued.primitive, queued.depth, request.size, instance
            )
            requests.append(request.id)
            priorities.append(next(self._admissions))
        self.queue = [q for q in self.queue if q.requests]
        for queued in self.queue:
            queued.overtaken += queued.arrived < last
        return RunBatch(instance, next(self._batches), tuple(requests), tuple(priorities))
