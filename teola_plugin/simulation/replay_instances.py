"""Instances of engines in a replay: batches and tokens take as long as the profile says."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.fake.llm import PrefixCache
from teola_plugin.engines.fake.timeline import BLOCK, Job, Timeline
from teola_plugin.graph import Batching, PrimitiveKind
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Piece
from teola_plugin.simulation.cluster import CACHE_TOKENS, SimulatedEngine
from teola_plugin.simulation.event_clock import EventClock, Timer
from teola_plugin.simulation.flows import FlowRequest
from teola_plugin.simulation.live_flows import LiveWork
from teola_plugin.simulation.meter import Busy

if TYPE_CHECKING:
    from teola_plugin.simulation.replay_ports import ReplayPort

AdmittedRequest = tuple[str, int, LiveWork, FlowRequest]
"""(name, priority, work, request)"""


class BatchInstance:
    """An instance whose batches last as long as the profile says; a STATIC engine serves one batch at a time."""

    def __init__(self, engine: SimulatedEngine, clock: EventClock, port: ReplayPort) -> None:
        self._profile, self._clock, self._port = engine.profile, clock, port
        self.busy = Busy()
        self._slots = 1 if engine.profile.batching is Batching.STATIC else engine.profile.max_requests
        self._queue: deque[_Batch] = deque()
        self._running_count = 0
        self._batches: dict[str, _Batch] = {}

    def take(self, batch: Sequence[AdmittedRequest]) -> None:
        new_batch = _Batch({name: live.work.kind for name, _, live, _ in batch})
        self._batches.update(dict.fromkeys(new_batch.requests, new_batch))
        self.busy.begin(self._clock.time())
        self._queue.append(new_batch)
        self._next()

    def _next(self) -> None:
        while self._queue and self._running_count < self._slots:
            batch = self._queue.popleft()
            if batch.requests:
                self._running_count += 1
                kinds = list(batch.requests.values())
                seconds = sum(self._profile.seconds(kind, kinds.count(kind)) for kind in dict.fromkeys(kinds))
                batch.timer = self._clock.call_at(self._clock.time() + seconds, partial(self._done, batch))

    def _done(self, batch: _Batch) -> None:
        names = list(batch.requests)
        self._end_batch(batch)
        for name in names:
            self._batches.pop(name, None)
        self._port.end_requests(names)

    def _end_batch(self, batch: _Batch) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
            self._running_count -= 1
        self.busy.end(self._clock.time())
        self._next()

    def drop(self, name: str) -> bool:
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


class LlmInstance:
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
        for name, priority, live, flow_request in batch:
            warmup = live.work.warmup
            request = Request(name, live.work.kind, None, priority=priority, stream=True, background=warmup)
            job = Job(request, _Listener(self._port, live), flow_request.keys, flow_request.prompt, warmup)  # type: ignore[arg-type]
            job.pieces, job.read_tokens = _pieces(flow_request.output), live.query.awaited_tokens(live.number)
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
        self._port.end_requests((name,))

    def drop(self, name: str) -> bool:
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
        self.tokens += len(piece.text)
        if self.tokens == 1:
            self.port.first(piece.request_id)
        self.live.query.news(self.live, self.tokens)


_cached_pieces: dict[int, list[str]] = {}


def _pieces(tokens: int) -> list[str]:
    """Return so many tokens of one character."""
    return _cached_pieces.setdefault(tokens, ["."] * tokens)
