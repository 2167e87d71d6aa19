"""The free slots of all instances together: the policy says which request goes next, the placement where it goes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.scheduling.engine_events import QueuedRequest
from teola_plugin.scheduling.engine_queue import OnInstance, QueuedPrimitive, Running, RunningRequest
from teola_plugin.scheduling.placement import Asked, RequestPlacement

PATIENCE = 20
"""Batches per instance that may overtake a request which waits for a certain instance."""


class SharedSlots:
    """One round of admissions to a continuous engine. What is taken runs at once: `running` is kept up to date."""

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
        """By instance, in the order in which they were taken."""
        self._profile = profile
        self._running = running
        self._placement = placement
        self._open = list(instances)
        self._uncontended = uncontended
        """Whether all that wanted a slot have been asked."""
        self._reserved: set[str] = set()
        self.refusals = 0
        self._patience = PATIENCE * len(instances)
        self._warm_up: QueuedPrimitive | None = None
        placement.begin(at)

    @property
    def left(self) -> bool:
        while self._open and not self._has_slots(self._open[-1]):
            self._open.pop()
        return bool(self._open)

    def take(self, queued: QueuedPrimitive, request: QueuedRequest) -> bool:
        self._warm_up = queued if queued.kind is PrimitiveKind.PARTIAL_PREFILLING else None
        urgent = queued.overtaken >= self._patience
        asked = Asked(
            request.id,
            math.ceil(request.size),
            request.blocks,
            queued.session,
            queued.gang,
            urgent,
            self._warm_up is not None,
            self._uncontended,
        )
        placed = self._placement.place(asked, self.fits)
        if placed is None:
            self.refusals += 1
            if urgent and not self._reserved:
                self._reserve()
            return False
        self._placement.sent(asked, placed)
        self._running.add(RunningRequest.of(queued, request.id, placed.units, placed.instance))
        self.admitted.setdefault(placed.instance, []).append((queued, request))
        return True

    def may_run(self, queued: QueuedPrimitive) -> bool:
        """Whether it has to wait for no more than a slot: warm-ups that every instance holds back are no policy's
        concern."""
        if queued.kind is not PrimitiveKind.PARTIAL_PREFILLING:
            return True
        return not all(self._running.holds_back(queued, instance, self._profile) for instance in self._open)

    def fits(self, instance: str, units: int) -> bool:
        """Whether the instance has a slot for the request that is being taken."""
        here = self._running.at(instance)
        if len(here.requests) >= self._profile.max_requests or instance in self._reserved:
            return False
        if here.prefilling and here.units + units > self._profile.max_batch:
            return False
        return self._warm_up is None or not self._running.holds_back(self._warm_up, instance, self._profile)

    def _has_slots(self, instance: str) -> bool:
        here: OnInstance = self._running.at(instance)
        if len(here.requests) >= self._profile.max_requests or instance in self._reserved:
            return False
        return not here.prefilling or here.units < self._profile.max_batch

    def _reserve(self) -> None:
        """A request that has waited long enough is too large for what is free anywhere: one instance takes nothing
        more until it fits there."""
        if self._open and self._warm_up is None:
            self._reserved.add(min(self._open, key=lambda i: (self._running.at(i).units, i)))
