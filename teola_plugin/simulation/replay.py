"""Flows under load: engine schedulers, placement and the engines' timelines, driven by one heap of events.

What `run.simulate` does with apps, without their code. Works of a graph are asked for at once when what they wait for
has happened, before the slots of what ended are offered; calls of the plain object a moment after, as in a runtime.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from teola_plugin.engines.fake.llm import PrefixCache
from teola_plugin.engines.fake.timeline import BLOCK, Job, Timeline
from teola_plugin.errors import TeolaError
from teola_plugin.graph import Batching, PrimitiveKind
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Piece
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
from teola_plugin.simulation.cluster import CACHE_TOKENS, Cluster, SimulatedEngine
from teola_plugin.simulation.flows import END, After, Flow, FlowChange, FlowRequest, FlowWork, shared_blocks
from teola_plugin.simulation.meter import Busy, Served
from teola_plugin.simulation.run import Run


@dataclass(frozen=True, slots=True)
class FlowArrival:
    """One query: seconds after the start, the app's name, what it asks of engines, and its goal, if any."""

    at: float
    app: str
    flow: Flow
    goal: float | None = None


def replay(cluster: Cluster, arrivals: Sequence[FlowArrival], progressed: Callable[[], object] = lambda: None) -> Run:
    """Run all queries; the same every time."""
    clock = _Clock()
    served = tuple(Served(one.app, one.at) for one in arrivals)
    ports = {name: _Port(name, engine, clock) for name, engine in cluster.engines.items()}
    for number, one in enumerate(arrivals):
        query = _Query(f"q{number}", one, served[number], ports, clock, progressed)
        clock.call_at(one.at, query.begin)
    clock.run()
    if stuck := [one for one in served if math.isnan(one.ended)]:
        raise TeolaError(
            f"{len(stuck)} queries of the app {stuck[0].app!r} wait for what never happens in their flow.",
            hint="record it again with another seed, or simulate the app itself",
        )
    end = max((one.ended for one in served), default=0.0)
    return Run(
        served,
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
    """Queries at these times (seconds, app) by the flows of their apps in turn, each with prompts of its own.

    `flows`: at least two of each app, recorded with different inputs: what their prompts have in common is what all
    queries have. Raises `ValueError` for fewer.
    """
    if few := [name for name, found in flows.items() if len(found) < 2]:
        raise ValueError(f"the app {few[0]!r} has {len(flows[few[0]])} flow: record two inputs or more")
    shared = {name: shared_blocks(found) for name, found in flows.items()}
    turn = {name: itertools.cycle(found) for name, found in flows.items()}
    arrivals = [
        FlowArrival(at, app, next(turn[app]).of_query(number, shared[app]), (goals or {}).get(app))
        for number, (at, app) in enumerate(times)
    ]
    return replay(cluster, arrivals, progressed)


# ------------------------------------------------------------ time


class _Timer:
    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class _Clock:
    """Events in the order of their times, those of one time in the order in which they were set."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, _Timer]] = []
        self._soon: deque[Callable[[], object]] = deque()
        self._order = itertools.count()

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], object]) -> _Timer:
        timer = _Timer(callback)
        heapq.heappush(self._events, (when, next(self._order), timer))
        return timer

    def call_soon(self, callback: Callable[[], object]) -> None:
        """At this very time, after what is being done."""
        self._soon.append(callback)

    def run(self) -> None:
        while self._events:
            at, _, timer = heapq.heappop(self._events)
            if timer.callback is not None:
                self._now = max(self._now, at)
                timer.callback()
                while self._soon:
                    self._soon.popleft()()


# ------------------------------------------------------------ queries


@dataclass(slots=True)
class _Live:
    """A work of a live query."""

    number: int
    query: _Query
    work: FlowWork
    left: int
    """Requests that have not ended."""
    asked_at: float = -1.0
    started: float = -1.0
    ended: bool = False
    over_at: float = -1.0
    """A warm-up's end."""
    cached: int = 0
    """Of a warm-up's tokens, those that were in the cache before."""
    lost: bool = False
    """Whether it was begun on a guess, and stopped."""
    found: bool = False
    """Whether a prompt has found what a warm-up left in the cache."""


@dataclass(slots=True)
class _Act:
    """What a query does when all that it waits for has happened."""

    missing: set[After]
    do: Callable[[], object]


class _Query:
    def __init__(
        self,
        name: str,
        arrival: FlowArrival,
        served: Served,
        ports: Mapping[str, _Port],
        clock: _Clock,
        progressed: Callable[[], object],
    ) -> None:
        self.name, self.arrival, self.served = name, arrival, served
        self._ports, self._clock, self._progressed = ports, clock, progressed
        self._works: list[_Live] = []
        self._acts: list[_Act] = []
        self._warmed: list[tuple[int, _Live, tuple[int, ...]]] = []
        self._waiting: dict[After, list[_Act]] = {}
        self._used: frozenset[int] = frozenset()
        self._over = False

    def begin(self) -> None:
        flow = self.arrival.flow
        self._works = [_Live(number, self, work, len(work.asks)) for number, work in enumerate(flow.works)]
        self._used = flow.used()
        for live in self._works:
            self._when(live.work.after, partial(self._ask, live))
            for change in live.work.changes:
                self._when(change.after, partial(self._change, live, change))
            if live.work.given_up is not None:
                self._when(live.work.given_up, partial(self._give_up, live))
        self._when(flow.end, partial(self._clock.call_soon, self._end))
        for act in [act for act in self._acts if not act.missing]:
            act.do()

    def _when(self, after: Sequence[After], do: Callable[[], object]) -> None:
        act = _Act(set(after), do)
        self._acts.append(act)
        for news in act.missing:
            self._waiting.setdefault(news, []).append(act)

    def heard(self, work: int) -> tuple[int, ...]:
        """Tokens of a work after which something happens; the first frees the slots of its prompt."""
        return (1, *sorted(token for number, token in self._waiting if number == work and token > 1))

    def news(self, live: _Live, token: int) -> None:
        for act in self._waiting.get((live.number, token), ()):
            if self._over:
                return
            if act.missing:
                act.missing.discard((live.number, token))
                if not act.missing:
                    act.do()

    def _ask(self, live: _Live) -> None:
        live.asked_at = self._clock.time()
        port = self._ports[live.work.engine]
        if live.work.early:
            port.enqueue(live)
        else:
            self._clock.call_soon(partial(port.enqueue, live))

    def lost(self, live: _Live) -> None:
        """What had begun on a guess was stopped, as others came."""
        live.lost = True
        now = self._clock.time()
        self.served.work += now - live.started
        self.served.wasted += now - live.started
        self.served.wasted_tokens += sum(one.prompt for one in live.work.asks)

    def _change(self, live: _Live, change: FlowChange) -> None:
        if live.lost and change.objective is not None:
            live.lost, live.started = False, -1.0
            depth = live.work.depth if change.depth is None else change.depth
            live.work = replace(live.work, depth=depth, objective=change.objective, gang=change.gang)
            self._ask(live)
        elif not live.ended:
            self._ports[live.work.engine].change(live, change)

    def _give_up(self, live: _Live) -> None:
        if not live.ended and live.asked_at >= 0:
            self._ports[live.work.engine].cancel(live)
            self.count(live)

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        self.served.ended = self._clock.time()
        for live in self._works:
            if live.over_at >= 0:
                self.count(live)
            self._give_up(live)
        self._progressed()

    def prefilled(self, live: _Live, job: Job) -> None:
        """It has ended: what a warm-up left in the cache, or found by a prompt because of them (as
        `runtime.warmups.note_use` has it)."""
        if live.work.warmup:
            live.cached = job.cached
            self._warmed.append((job.prompt_tokens, live, job.keys))
            return
        before = 0
        for tokens, one, keys in sorted(self._warmed, key=lambda found: found[0]):
            if one.work.engine == live.work.engine and job.keys[: len(keys)] == keys:
                base = max(before, one.cached)
                one.found |= min(job.cached, tokens) > base
                before = max(before, tokens)

    def count(self, live: _Live) -> None:
        """It has ended, or is given up: what it took. Of a warm-up that has ended nobody knows before the query's
        end whether it was of use."""
        if live.work.warmup and not self._over and not live.ended:
            live.ended, live.over_at = True, self._clock.time()
            return
        live.ended = True
        now = self._clock.time() if live.over_at < 0 else live.over_at
        if live.started >= 0 and not live.lost:
            self.served.queued += live.started - live.asked_at
            self.served.work += now - live.started
            if live.number not in self._used and not live.found:
                self.served.wasted += now - live.started
                self.served.wasted_tokens += sum(one.prompt for one in live.work.asks) - live.cached


# ------------------------------------------------------------ engines


class _Port:
    """One engine: its scheduler, its instances, the requests that are there."""

    def __init__(self, name: str, engine: SimulatedEngine, clock: _Clock) -> None:
        self._clock, self._like = clock, engine.like
        names = tuple(str(number) for number in range(engine.instances))
        placement = None if engine.placement is None else engine.placement(engine.profile)
        self._scheduler = EngineScheduler(engine.profile, names, POLICIES[engine.policy](), placement=placement)
        make = _LlmInstance if engine.like == "llm" else _BatchInstance
        self._instances = {one: make(engine, clock, self) for one in names}
        self._requests: dict[str, tuple[_Live, FlowRequest]] = {}
        self._free_soon: list[str] = []
        self.batches = self.requests = 0
        self.prompted = self.cached = 0
        """Tokens of prompts, and those of them that caches held."""

    @property
    def wants_blocks(self) -> bool:
        return self._scheduler.wants_blocks

    def busy(self, end: float) -> tuple[float, ...]:
        return tuple(instance.busy.until(end) for instance in self._instances.values())

    def enqueue(self, live: _Live) -> None:
        if live.ended:
            return
        work, query = live.work, live.query
        asked = []
        for number, one in enumerate(work.asks):
            name = f"{query.name}.{live.number}.{number}"
            self._requests[name] = (live, one)
            asked.append(QueuedRequest(name, one.size, one.blocks))
        own = f"{query.name}/"
        at, goal = self._clock.time(), query.arrival.goal
        event = Enqueue(
            at,
            query.name,
            str(live.number),
            work.kind,
            tuple(asked),
            work.depth,
            query.arrival.app,
            session=own + work.session if work.session else "",
            when_idle=work.when_idle,
            gang=own + work.gang if work.gang else "",
            objective=work.objective,
            remaining=work.remaining,
            left=None if goal is None else query.arrival.at + goal - at,
        )
        self._handle(event)

    def change(self, live: _Live, change: FlowChange) -> None:
        """More is known of it."""
        name, query = str(live.number), live.query.name
        gang = f"{query}/{change.gang}" if change.gang else ""
        depths = {} if change.depth is None else {name: change.depth}
        wanted = {} if change.objective is None else {name: (change.objective, gang)}
        self._handle(DepthChanged(self._clock.time(), query, depths, wanted))

    def cancel(self, live: _Live) -> None:
        """Its requests are not wanted any more."""
        names = [f"{live.query.name}.{live.number}.{number}" for number in range(len(live.work.asks))]
        here = tuple(name for name in names if name in self._requests)
        if here:
            self._handle(CancelRequests(self._clock.time(), here))
            for name in here:
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
                live, one = self._requests[name]
                if live.started < 0:
                    live.started = now
                batch.append((name, priority, live, one))
            self._instances[order.instance].take(batch)
        elif isinstance(order, CancelRunning):
            for name in order.requests:
                if self._instances[order.instance].drop(name):
                    self._let_go(name)
                    live, _ = self._requests[name]
                    if not live.ended:  # a guess that makes room: it is asked for anew when somebody comes for it
                        live.query.lost(live)

    # ------------------------------------------------------------ what instances say

    def first(self, name: str) -> None:
        self._handle(PrefillEnded(self._clock.time(), name))

    def ended(self, names: Sequence[str]) -> None:
        """Slots come free after those who wait for this have asked for what is next."""
        for name in names:
            self._let_go(name)
        for name in names:
            live, _ = self._requests.pop(name)
            live.left -= 1
            if not live.left and not live.ended:
                live.query.count(live)
                live.query.news(live, END)

    def _let_go(self, name: str) -> None:
        if not self._free_soon:
            self._clock.call_soon(self._free)
        self._free_soon.append(name)

    def _free(self) -> None:
        names, self._free_soon = tuple(self._free_soon), []
        if names:
            self._handle(RequestsEnded(self._clock.time(), names))


Taken = tuple[str, int, "_Live", FlowRequest]
"""(name, priority, work, request)"""


class _BatchInstance:
    """A batch lasts as long as the profile says for its size; a STATIC engine serves one batch at a time."""

    def __init__(self, engine: SimulatedEngine, clock: _Clock, port: _Port) -> None:
        self._profile, self._clock, self._port = engine.profile, clock, port
        self.busy = Busy()
        self._slots = 1 if engine.profile.batching is Batching.STATIC else engine.profile.max_requests
        self._queue: deque[_Batch] = deque()
        self._serving = 0
        self._batches: dict[str, _Batch] = {}

    def take(self, batch: Sequence[Taken]) -> None:
        made = _Batch({name: live.work.kind for name, _, live, _ in batch})
        self._batches.update(dict.fromkeys(made.requests, made))
        self.busy.begin(self._clock.time())
        self._queue.append(made)
        self._next()

    def _next(self) -> None:
        while self._queue and self._serving < self._slots:
            batch = self._queue.popleft()
            if batch.requests:
                self._serving += 1
                kinds = list(batch.requests.values())
                seconds = sum(self._profile.seconds(kind, kinds.count(kind)) for kind in dict.fromkeys(kinds))
                batch.timer = self._clock.call_at(self._clock.time() + seconds, partial(self._done, batch))

    def _done(self, batch: _Batch) -> None:
        names = list(batch.requests)
        self._over(batch)
        for name in names:
            self._batches.pop(name, None)
        self._port.ended(names)

    def _over(self, batch: _Batch) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
            self._serving -= 1
        self.busy.end(self._clock.time())
        self._next()

    def drop(self, name: str) -> bool:
        batch = self._batches.pop(name, None)
        if batch is None:
            return False
        del batch.requests[name]
        if not batch.requests:
            self._over(batch)
        return True


@dataclass(slots=True)
class _Batch:
    requests: dict[str, PrimitiveKind]
    timer: _Timer | None = None


class _LlmInstance:
    """The timeline of a fake LLM, and its prefix cache."""

    def __init__(self, engine: SimulatedEngine, clock: _Clock, port: _Port) -> None:
        profile = engine.profile
        tokens = profile.cache_tokens or CACHE_TOKENS
        cache = PrefixCache(tokens // BLOCK if profile.prefix_caching else 0)
        self._clock, self._port = clock, port
        self._timeline = Timeline(profile, 1.0, cache, self._finished, clock=lambda: clock)
        self._jobs: dict[str, Job] = {}
        self.busy = Busy()

    def take(self, batch: Sequence[Taken]) -> None:
        for name, priority, live, one in batch:
            warmup = live.work.warmup
            request = Request(name, live.work.kind, None, priority=priority, stream=True, background=warmup)
            job = Job(request, _Listener(self._port, live), one.keys, one.prompt, warmup)  # type: ignore[arg-type]
            job.pieces, job.heard = _pieces(one.output), live.query.heard(live.number)
            self._jobs[name] = job
            self.busy.begin(self._clock.time())
            self._timeline.add(job)
        self._timeline.advance()

    def _finished(self, job: Job) -> None:
        name = job.request.id
        del self._jobs[name]
        self.busy.end(self._clock.time())
        listener: Any = job.run
        listener.live.query.prefilled(listener.live, job)
        if not job.warmup:
            self._port.prompted += job.prompt_tokens
            self._port.cached += job.cached
            listener.live.query.served.first_token = job.first
        self._port.ended((name,))

    def drop(self, name: str) -> bool:
        job = self._jobs.pop(name, None)
        if job is None:
            return False
        self.busy.end(self._clock.time())
        self._timeline.remove(job)
        return True


@dataclass(slots=True)
class _Listener:
    """Hears the tokens of one request, as far as they are told."""

    port: _Port
    live: _Live
    tokens: int = field(default=0)

    def put(self, piece: Piece) -> None:
        self.tokens += len(piece.text)
        if self.tokens == 1:
            self.port.first(piece.request_id)
        self.live.query.news(self.live, self.tokens)


_made: dict[int, list[str]] = {}


def _pieces(tokens: int) -> list[str]:
    """So many tokens of one character."""
    return _made.setdefault(tokens, ["."] * tokens)
