"""How one engine's queue becomes batches: instances are offered it in turn, or requests are placed one by one."""

from __future__ import annotations

import itertools

from teola_plugin.errors import ConfigError
from teola_plugin.graph import LLM_KINDS, Batching, EngineProfile, PrimitiveKind
from teola_plugin.scheduling.engine_events import RunBatch
from teola_plugin.scheduling.engine_queue import QueuedPrimitive, Running, RunningRequest, waiting_number
from teola_plugin.scheduling.events import Instructions
from teola_plugin.scheduling.placement import E2, LeastOutstanding, RequestPlacement
from teola_plugin.scheduling.policies import BatchPolicy, Pick, TopologyAware
from teola_plugin.scheduling.shared_slots import SharedSlots

_WARM_UP = PrimitiveKind.PARTIAL_PREFILLING


class Batches:
    """The queue and the instances of one engine. The policy says which request goes next, the placement where it goes:
    instances of an engine that keeps nothing are offered the queue in turn, the one with the fewest requests first
    (`LeastOutstanding`); several instances that cache prefixes are chosen request by request (`E2`). `placement`
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
        """Chooses the instance of each request; None where instances are offered the queue in turn."""
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
            self._route_by(placement)

    @property
    def wants_blocks(self) -> bool:
        """Whether `QueuedRequest.blocks` are of use here."""
        return self.router is not None

    def _offer(self, at: float) -> Instructions:
        return self._offer_in_turn() if self.router is None else self._route(self.router, at)

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

    # ------------------------------------------------------------ instances in turn

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
            here = [
                q
                for q in self.queue
                if (not q.session and q.kind is not _WARM_UP) or self._may_run(q, instance, free, outstanding)
            ]
            picked = self.policy.pick(here, self.running, slots[instance]) if here else []
            if picked:
                return self._run_on(instance, picked)
        return None

    def _may_run(
        self, queued: QueuedPrimitive, instance: str, free: dict[str, int], outstanding: dict[str, int]
    ) -> bool:
        if queued.kind is _WARM_UP and self.running.holds_back(queued, instance, self.profile):
            return False
        if not queued.session:
            return True
        return self.placement.choose(free, outstanding, queued.session) == instance

    def _run_on(self, instance: str, picked: list[Pick]) -> RunBatch:
        for queued, request in picked:
            self.placement.remember(queued.session, instance)
            self.running.add(RunningRequest.of(queued, request.id, request.size, instance))
        return self._admit(instance, picked)

    # ------------------------------------------------------------ request by request

    def _route(self, router: RequestPlacement, at: float) -> Instructions:
        """Rounds of the policy over all free slots, until nothing more is taken; then those that wait for a certain
        instance may have the slots that are left."""
        out: Instructions = []
        uncontended = False
        while self.queue:
            slots = SharedSlots(self.profile, self.instances, self.running, router, at, uncontended=uncontended)
            if not slots.left:
                break
            here = [queued for queued in self.queue if slots.may_run(queued)]
            if not here:
                break
            self.policy.pick(here, self.running, slots)
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
            self.running.served.add(queued.app, queued.weight, request.size)
            requests.append(request.id)
            priorities.append(self._number(queued, request.id, instance))
            urgencies.append((queued.depth, queued.objective))
        self.queue = [q for q in self.queue if q.requests]
        for queued in self.queue:
            if queued.arrived >= last:  # the queue is in order
                break
            queued.overtaken += 1
        return RunBatch(instance, next(self._batches), tuple(requests), tuple(priorities), tuple(urgencies))

    def _number(self, queued: QueuedPrimitive, request: str, instance: str) -> int:
        """Its place in the line of the instance, if it is an LLM; others have none."""
        running, number = self.running.by_id[request], next(self._admissions)
        if queued.kind in LLM_KINDS:
            number = waiting_number(running, self.running.at(instance), number, self.policy.passes)
        running.number = number
        return number
