"""The times at which a fake LLM writes tokens: one discrete-event timeline per replica.

One prefilling runs at a time (a GPU's compute is one resource), in admission order with background work last; all
decodings run concurrently at no cost to each other (a decoding step is bound by memory). While a prefilling and
decodings run together, both go at 1 / (1 + interference) of their speed. Events carry their exact times, so a timer
that fires late delays only its own event for the caller. With drafts decodings go in steps, whose duration the profile
gives by the number of drafted tokens and of concurrent decodings.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from teola_plugin.engines.fake.base import FakeBatch
from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Piece, Request

BLOCK = 16
"""Tokens in one block of the prefix cache; only whole blocks are kept."""

_SLACK = 1e-6  # seconds: a timer may fire this early by rounding


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """The part of an event loop that a timeline uses."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer: ...


class Cache(Protocol):
    def cached(self, keys: Sequence[int], prompt_tokens: int) -> int: ...

    def add(self, keys: Sequence[int]) -> None: ...


class DecodingSteps(Protocol):
    """Decoding in steps of several tokens: see `DraftedSteps`."""

    def seconds(self, job: Job, other_jobs: Sequence[Job]) -> float: ...

    def written(self, job: Job) -> int: ...


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way through prefilling and decoding."""

    request: Request
    run: FakeBatch
    keys: tuple[int, ...]
    prompt_tokens: int
    warmup: bool = False
    pieces: list[str] = field(default_factory=list)
    finish_reason: str = "stop"
    stop_sequence: str = ""
    faulty: bool = False
    hangs: bool = False
    cached: int = -1
    """Prompt tokens found in the cache; -1 before its prefilling began."""
    prefilled: int = 0
    written: int = 0
    """Number of tokens that are written."""
    delivered: int = 0
    """Number of tokens that were sent in pieces."""
    steps: int = 0
    prompt: Sequence[str] = ()
    """The tokens of the prompt; like the next two fields, set only where something is drafted."""
    numbers: Sequence[int] = ()
    """The numbers of the tokens in `pieces`."""
    draft: Sequence[int] = ()
    """Numbers of the drafted tokens of the step under way."""
    read_tokens: Sequence[int] | None = None
    """Ascending counts of tokens at which a reader uses the stream; None for every token."""
    read: bool = False
    """True if its stream has a reader."""
    decoding_from: float = 0.0
    """The decoding clock when its decoding began."""
    has_ended: bool = False
    arrived: float = 0.0
    started: float = 0.0
    first: float = 0.0
    end_s: float = 0.0

    @property
    def rank(self) -> tuple[bool, int]:
        return self.request.background, self.request.priority

    @property
    def cuts(self) -> tuple[int, ...]:
        """See `Done.cuts`."""
        return tuple(map(len, self.pieces)) if self.request.late and not self.read else ()

    def stats(self) -> dict[str, float]:
        """Seconds in the queue, in prefilling and in decoding, and the tokens found in the cache."""
        return {
            "queue_s": self.started - self.arrived,
            "prefill_s": self.first - self.started,
            "decode_s": self.end_s - self.first,
            "cached_tokens": float(max(self.cached, 0)),
        }


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The prefilling step that is running: the job's prompt up to `to` tokens, done when the clock shows `due`."""

    job: Job
    to: int
    due: float


class Timeline:
    """Owns the jobs of one replica. `finished(job)` is called at the time of a job's end.

    With `steps` a step may write several tokens, and lasts as long as they say; without, each token comes when the
    profile's curve says.
    """

    def __init__(
        self,
        profile: EngineProfile,
        slow: float,
        cache: Cache,
        finished: Callable[[Job], None],
        steps: DecodingSteps | None = None,
        clock: Callable[[], Clock] = asyncio.get_running_loop,
        *,
        tells_first: bool = False,
    ) -> None:
        """`tells_first`: send the first token even if the stream has no reader."""
        self._tells_first = tells_first
        self._clock = clock
        self._profile, self._slow, self._cache, self._finished = profile, slow, cache, finished
        self._steps = steps
        self._waiting: list[tuple[tuple[bool, int], int, Job]] = []
        self._decoding: list[tuple[float, int, Job]] = []
        self._chunk: _Chunk | None = None
        self._running = 0
        self._now = 0.0
        self._prefill_clock = 0.0
        self._decode_clock = 0.0
        self._order = count()
        self._timer: Timer | None = None
        self._advancing = False

    def add(self, job: Job) -> None:
        """Queue a job now; `advance()` afterwards."""
        self._catch_up()
        job.arrived = self._clock().time()
        job.read = job.read or job.request.stream
        heapq.heappush(self._waiting, (job.rank, next(self._order), job))

    def remove(self, job: Job) -> None:
        """Forget a job, wherever it is."""
        if job.has_ended:
            return
        self._catch_up()
        job.has_ended = True
        if job.cached >= 0:
            self._running -= 1
        if self._chunk is not None and self._chunk.job is job:
            self._chunk = None
        self._waiting = [entry for entry in self._waiting if entry[2] is not job]
        self._decoding = [entry for entry in self._decoding if entry[2] is not job]
        heapq.heapify(self._waiting)
        heapq.heapify(self._decoding)
        self.advance()

    def announce_reader(self, job: Job) -> None:
        """Send a stream from now on, beginning with the tokens that were written meanwhile."""
        if job.has_ended or job.read:
            return
        self._catch_up()
        job.read = True
        if self._steps is None and any(entry[2] is job for entry in self._decoding):
            self._decoding = [entry for entry in self._decoding if entry[2] is not job]
            heapq.heapify(self._decoding)
            job.written = self._written(job)
            self._await_token(job)
        for piece in job.pieces[job.delivered : job.written]:
            job.run.put(Piece(job.request.id, piece))
        job.delivered = job.written
        self.advance()

    def _written(self, job: Job) -> int:
        """Return the number of tokens that are due by now, at most all but the last."""
        passed, last = self._decode_clock - job.decoding_from, len(job.pieces) - 1
        due = self._profile.seconds
        return next(
            (n for n in range(job.written, last) if self._slow * due(PrimitiveKind.DECODING, n + 1) > passed), last
        )

    def advance(self) -> None:
        """Handle all events that are due, and set the timer for the next one.

        Call it on the loop after each change. A call from within an event returns at once, since the outer call goes
        on.
        """
        if self._advancing:  # a job's end changed the timeline: the outer call continues
            return
        self._catch_up()
        self._arm()

    def _catch_up(self) -> None:
        """Run the events up to the loop's time, each at its own time."""
        if self._advancing:
            return
        self._advancing = True
        try:
            until = self._clock().time()
            if not (self._chunk or self._decoding):
                self._now = until
            self._begin_prefill()
            while (at := self._next_event()) is not None and at <= until + _SLACK:
                self._move_to(at)
                self._handle_event()
                self._begin_prefill()
            self._move_to(max(until, self._now))
        finally:
            self._advancing = False

    def _arm(self) -> None:
        """Set the timer of the loop for the next event, in place of the earlier one."""
        if self._timer is not None:
            self._timer.cancel()
        at = self._next_event()
        self._timer = None if at is None else self._clock().call_at(at, self.advance)

    @property
    def _rate(self) -> float:
        is_shared = self._chunk is not None and bool(self._decoding)
        return 1.0 / (1.0 + self._profile.interference) if is_shared else 1.0

    def _next_event(self) -> float | None:
        """Return the time of the next event on the loop's clock; None if nothing runs."""
        left = [self._chunk.due - self._prefill_clock] if self._chunk else []
        if self._decoding:
            left.append(self._decoding[0][0] - self._decode_clock)
        return self._now + max(0.0, min(left)) / self._rate if left else None

    def _move_to(self, at: float) -> None:
        """Move the timeline to a time: prefilling and decoding have gone on since, at the rate of that interval."""
        passed = (at - self._now) * self._rate
        if self._chunk is not None:
            self._prefill_clock += passed
        if self._decoding:
            self._decode_clock += passed
        self._now = at

    def _handle_event(self) -> None:
        """Handle the event that is due: the end of a prefilling step, or of a decoding step."""
        chunk = self._chunk
        prefill_left = chunk.due - self._prefill_clock if chunk else float("inf")
        decode_left = self._decoding[0][0] - self._decode_clock if self._decoding else float("inf")
        if chunk is not None and prefill_left <= decode_left:
            self._chunk = None
            self._end_chunk(chunk)
        else:
            self._end_step(heapq.heappop(self._decoding)[2])

    def _begin_prefill(self) -> None:
        """Start the next prefilling in the queue if none runs and the replica has room for another request."""
        while self._chunk is None and self._waiting:
            if self._waiting[0][2].cached < 0 and self._running >= self._profile.max_requests:
                return
            self._begin_chunk(heapq.heappop(self._waiting)[2])

    def _begin_chunk(self, job: Job) -> None:
        """Begin to prefill a job's prompt after what the cache has.

        Warm-ups and background work are prefilled in chunks of `warmup_chunk` tokens, so that others can come between.
        """
        if job.cached < 0:
            self._running += 1
            job.started = self._now
            job.cached = job.prefilled = self._cache.cached(job.keys, job.prompt_tokens)
        to = job.prompt_tokens
        if job.warmup or job.request.background:
            to = min(to, job.prefilled + self._profile.warmup_chunk)
        due = (
            self._prefill_clock
            + self._prefill_seconds(to - job.cached)
            - self._prefill_seconds(job.prefilled - job.cached)
        )
        self._chunk = _Chunk(job, to, due)

    def _end_chunk(self, chunk: _Chunk) -> None:
        """End a prefilling step: cache its blocks, then queue the rest of the prompt, start decoding or end the job."""
        job = chunk.job
        job.prefilled = chunk.to
        self._cache.add(job.keys[: chunk.to // BLOCK])
        if job.prefilled < job.prompt_tokens:
            heapq.heappush(self._waiting, (job.rank, next(self._order), job))
            return
        job.first = self._now
        if job.hangs:
            return
        if job.warmup or not job.pieces:
            self._end_job(job)
            return
        job.decoding_from = self._decode_clock
        self._await_token(job)

    def _await_token(self, job: Job) -> None:
        """Schedule the next token that is read: without a reader, the last one, and the first one if `tells_first`.

        With drafts, schedule the next step.
        """
        if self._steps is not None:
            due = self._decode_clock + self._slow * self._steps.seconds(job, [one for *_, one in self._decoding])
        else:
            token = job.written + self._tokens_to_next_read(job)
            due = job.decoding_from + self._slow * self._profile.seconds(PrimitiveKind.DECODING, token)
        heapq.heappush(self._decoding, (due, next(self._order), job))

    def _delivers_next(self, job: Job) -> bool:
        """Return True if a piece is sent for the next token."""
        return job.read or (self._tells_first and not job.written)

    def _tokens_to_next_read(self, job: Job) -> int:
        """Return the number of tokens until the next one that is read."""
        if job.read_tokens is None:
            return 1 if self._delivers_next(job) else len(job.pieces) - job.written
        return next((token for token in job.read_tokens if token > job.written), len(job.pieces)) - job.written

    def _end_step(self, job: Job) -> None:
        """Write the tokens of a decoding step, and send them if they are read; plan the next step or end the job."""
        new = self._tokens_to_next_read(job)
        if self._steps is not None:
            new = self._steps.written(job)
            job.steps += 1
        if self._delivers_next(job):
            job.run.put(Piece(job.request.id, "".join(job.pieces[job.delivered : job.written + new])))
            job.delivered = job.written + new
        job.written += new
        if job.written < len(job.pieces):
            self._await_token(job)
        else:
            self._end_job(job)

    def _end_job(self, job: Job) -> None:
        """End a job now, and report it by `finished`."""
        job.has_ended = True
        job.end_s = self._now
        self._running -= 1
        self._finished(job)

    def _prefill_seconds(self, tokens: int) -> float:
        return self._slow * self._profile.seconds(PrimitiveKind.PREFILLING, tokens) if tokens > 0 else 0.0
