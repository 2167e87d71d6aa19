"""Flows under load: engine schedulers, placement and the engines' timelines, driven by one heap of events.

Does what `run.simulate` does with apps, without their code. A graph's works are requested as soon as what they wait for
has happened, before freed slots are offered; calls of the original a moment later, as in a runtime.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from teola_plugin.engines.fake.llm import PrefixCache
from teola_plugin.engines.fake.timeline import BLOCK, Job, Timeline
from teola_plugin.errors import TeolaError
from teola_plugin.graph import Batching, PrimitiveKind
from teola_plugin.requests.payloads import Piece, Request
from teola_plugin.scheduling import POLICIES, EngineScheduler
from teola_plugin.scheduling.engine_queue import (
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
from teola_plugin.simulation.cluster import CACHE_TOKENS, Cluster, SimulatedEngine
from teola_plugin.simulation.event_clock import EventClock, Timer
from teola_plugin.simulation.flows import END, Flow, FlowChange, FlowRequest, shared_blocks
from teola_plugin.simulation.live_flows import FlowArrival, LiveFlow, LiveWork
from teola_plugin.simulation.meter import Busy, QueryOutcome
from teola_plugin.simulation.run import Run

# ------------------------------------------------------------ replicas of engines

AdmittedRequest = tuple[str, int, LiveWork, FlowRequest]
"""(name, priority, work, request)"""


class BatchReplica:
    """A replica whose batches last as long as the profile says; a STATIC engine serves one batch at a time."""

    def __init__(self, engine: SimulatedEngine, clock: EventClock, port: ReplayPort) -> None:
        self._profile, self._clock, self._port = engine.profile, clock, port
        self.busy = Busy()
        self._slots = 1 if engine.profile.batching is Batching.STATIC else engine.profile.max_requests
        self._queue: deque[_Batch] = deque()
        self._running_count = 0
        self._batches: dict[str, _Batch] = {}

    def take(self, batch: Sequence[AdmittedRequest]) -> None:
        """Queue a batch, which runs when a slot is free."""
        new_batch = _Batch({name: live.work.kind for name, _, live, _ in batch})
        self._batches.update(dict.fromkeys(new_batch.requests, new_batch))
        self.busy.begin(self._clock.time())
        self._queue.append(new_batch)
        self._next()

    def _next(self) -> None:
        """Begin queued batches while slots are free; each ends after the seconds that the profile says."""
        while self._queue and self._running_count < self._slots:
            batch = self._queue.popleft()
            if batch.requests:
                self._running_count += 1
                kinds = list(batch.requests.values())
                seconds = sum(self._profile.seconds(kind, kinds.count(kind)) for kind in dict.fromkeys(kinds))
                batch.timer = self._clock.call_at(self._clock.time() + seconds, partial(self._done, batch))

    def _done(self, batch: _Batch) -> None:
        """End a batch whose time is over, and report its requests to the port."""
        names = list(batch.requests)
        self._end_batch(batch)
        for name in names:
            self._batches.pop(name, None)
        self._port.end_requests(names)

    def _end_batch(self, batch: _Batch) -> None:
        """Free the slot of a batch that is done, or that has no request left."""
        if batch.timer is not None:
            batch.timer.cancel()
            self._running_count -= 1
        self.busy.end(self._clock.time())
        self._next()

    def drop(self, name: str) -> bool:
        """Cancel a request. Return False if the replica does not have it."""
        batch = self._batches.pop(name, None)
        if batch is None:
            return False
        del batch.requests[name]
        if not batch.requests:
            self._end_batch(batch)
        return True


@dataclass(slots=True)
class _Batch:
    requests: dict[str, PrimitiveKind]
    timer: Timer | None = None


class LlmReplica:
    """The timeline of a fake LLM, and its prefix cache."""

    def __init__(self, engine: SimulatedEngine, clock: EventClock, port: ReplayPort) -> None:
        profile = engine.profile
        tokens = profile.cache_tokens or CACHE_TOKENS
        cache = PrefixCache(tokens // BLOCK if profile.prefix_caching else 0)
        self._clock, self._port = clock, port
        self._timeline = Timeline(profile, 1.0, cache, self._finished, clock=lambda: clock)
        self._jobs: dict[str, Job] = {}
        self.busy = Busy()

    def take(self, batch: Sequence[AdmittedRequest]) -> None:
        """Add the requests of a batch to the timeline, with the tokens that something waits for."""
        for name, priority, live, flow_request in batch:
            warmup = live.work.warmup
            request = Request(name, live.work.kind, None, priority=priority, stream=True, background=warmup)
            job = Job(
                request,
                _Listener(self._port, live),  # type: ignore[arg-type]
                flow_request.keys,
                flow_request.prompt,
                warmup,
                pieces=_pieces(flow_request.output),
                read_tokens=live.query.awaited_tokens(live.number),
            )
            self._jobs[name] = job
            self.busy.begin(self._clock.time())
            self._timeline.add(job)
        self._timeline.advance()

    def _finished(self, job: Job) -> None:
        """Record a job that the timeline has done: what it found in the cache, its first token, and its end."""
        name = job.request.id
        del self._jobs[name]
        self.busy.end(self._clock.time())
        listener: Any = job.run
        listener.live.query.prefilled(listener.live, job)
        if not job.warmup:
            self._port.prompted += job.prompt_tokens
            self._port.cached += job.cached
            listener.live.query.outcome.first_token = job.first
        self._port.end_requests((name,))

    def drop(self, name: str) -> bool:
        """Cancel a request. Return False if the replica does not have it."""
        job = self._jobs.pop(name, None)
        if job is None:
            return False
        self.busy.end(self._clock.time())
        self._timeline.remove(job)
        return True


@dataclass(slots=True)
class _Listener:
    """Receives the tokens of one request that something waits for."""

    port: ReplayPort
    live: LiveWork
    tokens: int = field(default=0)

    def put(self, piece: Piece) -> None:
        """Count the tokens of a piece. The first one ends the prefilling, and each is reported to the query."""
        self.tokens += len(piece.text)
        if self.tokens == 1:
            self.port.first(piece.request_id)
        self.live.query.news(self.live, self.tokens)


_cached_pieces: dict[int, list[str]] = {}


def _pieces(tokens: int) -> list[str]:
    """Return so many tokens of one character."""
    return _cached_pieces.setdefault(tokens, ["."] * tokens)


# ------------------------------------------------------------ engines


class ReplayPort:
    """One engine: its scheduler, its replicas and its requests."""

    def __init__(self, name: str, engine: SimulatedEngine, clock: EventClock) -> None:
        self._clock, self._like = clock, engine.like
        names = tuple(str(number) for number in range(engine.replicas))
        placement = None if engine.placement is None else engine.placement(engine.profile)
        self._scheduler = EngineScheduler(engine.profile, names, POLICIES[engine.policy](), placement=placement)
        make = LlmReplica if engine.like == "llm" else BatchReplica
        self._replicas = {replica: make(engine, clock, self) for replica in names}
        self._requests: dict[str, tuple[LiveWork, FlowRequest]] = {}
        self._free_soon: list[str] = []
        self.batches = self.requests = 0
        self.prompted = self.cached = 0
        """Tokens of prompts, and those of them that caches held."""

    @property
    def wants_blocks(self) -> bool:
        return self._scheduler.wants_blocks

    def busy(self, end: float) -> tuple[float, ...]:
        return tuple(replica.busy.until(end) for replica in self._replicas.values())

    def enqueue(self, live: LiveWork) -> None:
        """Queue the requests of a work at the engine's scheduler, unless the work was given up before."""
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
        """Carry out an instruction of the scheduler: start a batch at a replica, or cancel requests there."""
        if isinstance(order, RunBatch):
            now = self._clock.time()
            self.batches, self.requests = self.batches + 1, self.requests + len(order.requests)
            batch = []
            for name, priority in zip(order.requests, order.priorities, strict=True):
                live, request = self._requests[name]
                if live.started < 0:
                    live.started = now
                batch.append((name, priority, live, request))
            self._replicas[order.replica].take(batch)
        elif isinstance(order, CancelRunning):
            for name in order.requests:
                if self._replicas[order.replica].drop(name):
                    self._free_later(name)

    # ------------------------------------------------------------ events of replicas

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


# ------------------------------------------------------------ replays


def replay(cluster: Cluster, arrivals: Sequence[FlowArrival], progressed: Callable[[], object] = lambda: None) -> Run:
    """Run all queries; the result is the same every time."""
    clock = EventClock()
    queries = tuple(QueryOutcome(arrival.app, arrival.at) for arrival in arrivals)
    ports = {name: ReplayPort(name, engine, clock) for name, engine in cluster.engines.items()}
    for number, arrival in enumerate(arrivals):
        query = LiveFlow(f"q{number}", arrival, queries[number], ports, clock, progressed)
        clock.call_at(arrival.at, query.begin)
    clock.run()
    if stuck := [query for query in queries if math.isnan(query.ended_at)]:
        raise TeolaError(
            f"{len(stuck)} queries of the app {stuck[0].app!r} wait for what never happens in their flow.",
            hint="record it again with another seed, or simulate the app itself",
        )
    end = max((query.ended_at for query in queries), default=0.0)
    return Run(
        queries,
        {name: port.busy(end) for name, port in ports.items()},
        end,
        {name: port.requests / port.batches for name, port in ports.items() if port.batches},
        {name: port.cached / port.prompted for name, port in ports.items() if port.prompted},
    )


def replayed(
    cluster: Cluster,
    flows: Mapping[str, Sequence[Flow]],
    times: Iterable[tuple[float, str]],
    *,
    goals: Mapping[str, float] | None = None,
    progressed: Callable[[], object] = lambda: None,
) -> Run:
    """Run queries at these times (seconds, app) by the flows of their apps in turn, each with prompts of its own.

    `flows` has at least two of each app, recorded with different inputs: what their prompts have in common is what all
    queries share. Raises `ValueError` for fewer.
    """
    if too_few := [name for name, recorded in flows.items() if len(recorded) < 2]:
        raise ValueError(f"the app {too_few[0]!r} has {len(flows[too_few[0]])} flow: record two inputs or more")
    shared = {name: shared_blocks(recorded) for name, recorded in flows.items()}
    turn = {name: itertools.cycle(recorded) for name, recorded in flows.items()}
    arrivals = [
        FlowArrival(at, app, next(turn[app]).of_query(number, shared[app]), (goals or {}).get(app))
        for number, (at, app) in enumerate(times)
    ]
    return replay(cluster, arrivals, progressed)
