"""Lower tier: one engine's queue, shared by all queries and apps (paper, section 5.2). Pure: no clock, no I/O."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable

from teola_plugin.graph import EngineProfile
from teola_plugin.scheduling.batches import Batches
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
)
from teola_plugin.scheduling.engine_queue import QueryNumbers, QueuedPrimitive
from teola_plugin.scheduling.events import Instructions, Tick
from teola_plugin.scheduling.placement import LeastOutstanding, RequestPlacement
from teola_plugin.scheduling.policies import BatchPolicy
from teola_plugin.scheduling.validate import VALIDATE, StateCheck, validate_engine_scheduler


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
