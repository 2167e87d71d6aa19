"""Engines in a replay: the real scheduler of each, its instances, and its requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teola_plugin.scheduling import POLICIES, EngineScheduler
from teola_plugin.scheduling.engine_events import (
    CancelRequests,
    CancelRunning,
    DepthChanged,
    Enqueue,
    PrefillEnded,
    QueuedRequest,
    RequestsEnded,
    RunBatch,
)
from teola_plugin.scheduling.events import Instruction
from teola_plugin.simulation.cluster import SimulatedEngine
from teola_plugin.simulation.event_clock import EventClock
from teola_plugin.simulation.flows import END, FlowChange, FlowRequest
from teola_plugin.simulation.live_flows import LiveWork
from teola_plugin.simulation.replay_instances import BatchInstance, LlmInstance


class ReplayPort:
    """One engine: its scheduler, its instances and its requests."""

    def __init__(self, name: str, engine: SimulatedEngine, clock: EventClock) -> None:
        self._clock, self._like = clock, engine.like
        names = tuple(str(number) for number in range(engine.instances))
        placement = None if engine.placement is None else engine.placement(engine.profile)
        self._scheduler = EngineScheduler(engine.profile, names, POLICIES[engine.policy](), placement=placement)
        make = LlmInstance if engine.like == "llm" else BatchInstance
        self._instances = {instance: make(engine, clock, self) for instance in names}
        self._requests: dict[str, tuple[LiveWork, FlowRequest]] = {}
        self._free_soon: list[str] = []
        self.batches = self.requests = 0
        self.prompted = self.cached = 0
        """Tokens of prompts, and those of them that caches held."""

    @property
    def wants_blocks(self) -> bool:
        return self._scheduler.wants_blocks

    def busy(self, end: float) -> tuple[float, ...]:
        return tuple(instance.busy.until(end) for instance in self._instances.values())

    def enqueue(self, live: LiveWork) -> None:
        if live.has_ended:
            return
        work, query = live.work, live.query
        requests = []
        for number, request in enumerate(work.asks):
            name = f"{query.name}.{live.number}.{number}"
            self._requests[name] = (live, request)
            requests.append(QueuedRequest(name, request.size, request.blocks))
        prefix = f"{query.name}/"
        at, goal = self._clock.time(), query.arrival.goal
        event = Enqueue(
            at,
            query.name,
            str(live.number),
            work.kind,
            tuple(requests),
            work.depth,
            query.arrival.app,
            session=prefix + work.session if work.session else "",
            when_idle=work.when_idle,
            gang=prefix + work.gang if work.gang else "",
            objective=work.objective,
            remaining=work.remaining,
            left=None if goal is None else query.arrival.at + goal - at,
        )
        self._handle(event)

    def change(self, live: LiveWork, change: FlowChange) -> None:
        """Report a work's new depth or objective to the scheduler."""
        name, query = str(live.number), live.query.name
        gang = f"{query}/{change.gang}" if change.gang else ""
        depths = {} if change.depth is None else {name: change.depth}
        objectives = {} if change.objective is None else {name: (change.objective, gang)}
        self._handle(DepthChanged(self._clock.time(), query, depths, objectives))

    def cancel(self, live: LiveWork) -> None:
        """Cancel the requests of a work that is not needed any more."""
        names = [f"{live.query.name}.{live.number}.{number}" for number in range(len(live.work.asks))]
        existing = tuple(name for name in names if name in self._requests)
        if existing:
            self._handle(CancelRequests(self._clock.time(), existing))
            for name in existing:
                self._requests.pop(name, None)

    def _handle(self, event: Any) -> None:
        for order in self._scheduler.handle(event):
            self._carry_out(order)

    def _carry_out(self, order: Instruction) -> None:
        if isinstance(order, RunBatch):
            now = self._clock.time()
            self.batches, self.requests = self.batches + 1, self.requests + len(order.requests)
            batch = []
            for name, priority in zip(order.requests, order.priorities, strict=True):
                live, request = self._requests[name]
                if live.started < 0:
                    live.started = now
                batch.append((name, priority, live, request))
            self._instances[order.instance].take(batch)
        elif isinstance(order, CancelRunning):
            for name in order.requests:
                if self._instances[order.instance].drop(name):
                    self._free_later(name)

    # ------------------------------------------------------------ events of instances

    def first(self, name: str) -> None:
        self._handle(PrefillEnded(self._clock.time(), name))

    def end_requests(self, names: Sequence[str]) -> None:
        """Record that requests ended. Their slots come free after the works that wait for this were requested."""
        for name in names:
            self._free_later(name)
        for name in names:
            live, _ = self._requests.pop(name)
            live.unfinished -= 1
            if not live.unfinished and not live.has_ended:
                live.query.count(live)
                live.query.news(live, END)

    def _free_later(self, name: str) -> None:
        if not self._free_soon:
            self._clock.call_soon(self._free)
        self._free_soon.append(name)

    def _free(self) -> None:
        names, self._free_soon = tuple(self._free_soon), []
        if names:
            self._handle(RequestsEnded(self._clock.time(), names))
