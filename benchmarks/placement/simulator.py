"""Instances of an LLM in virtual time, under an `EngineScheduler`.

What is modelled: steps of chunked prefilling (512 tokens, first come, first served) with all decodings in the same
step; a prefix cache of 16-token blocks, least recently used first, where running requests keep theirs; a request
waits while the cache has no room for it. A step lasts as Preble's model of Mistral-7B on an A6000 says. What is not:
the network, the scheduler's own time, tokenising, and queues that are ordered by cached prefixes.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from teola_plugin.graph import Batching, Curve, EngineProfile, PrimitiveKind
from teola_plugin.scheduling import EngineScheduler, PrefixBlocks
from teola_plugin.scheduling.engine_events import Enqueue, PrefillEnded, QueuedRequest, RequestsEnded, RunBatch
from teola_plugin.scheduling.events import Instruction

BLOCK = 16
CHUNK = 512
"""Prompt tokens in a step (Preble's `chunk_prefill_budget`)."""
CACHE_TOKENS = 198_516
"""Keys and values that fit beside Mistral-7B on an A6000 (Preble)."""


@dataclass(slots=True, eq=False)
class Job:
    """A request. Times in seconds; sizes in tokens."""

    name: str
    arrives: float
    tokens: int
    blocks: PrefixBlocks
    output: int = 1
    left: int = 0
    """Prompt tokens to be computed."""
    made: int = 0
    """Output tokens."""
    cached: int = 0
    first_token: float = 0.0
    ended: float = 0.0


def step_seconds(tokens: int, context: int, chunks: Iterable[tuple[int, int]] = ()) -> float:
    """One step: `tokens` in all, `context` tokens attended to; `chunks` as (tokens, end in its prompt).

    Preble publishes a parabola for 192 to 384 tokens whose rounded coefficients are negative at 384; a straight line
    joins the two neighbours here.
    """
    if tokens >= 384:
        linear = 0.10843 * tokens + 4.21
    else:
        linear = 22.0 + max(0, tokens - 192) / 192 * (0.10843 * 384 + 4.21 - 22.0)
    attention = 0.32 if context <= 1024 else 1.86e-4 * context + 0.159
    for new, end in chunks:
        if new * end > 2**20:
            attention += 1.13e-3 * new + 1.75e-3 * end + 2.19e-6 * new * end
    return (linear + attention) / 0.9 / 1000


def prefill_seconds(tokens: int) -> float:
    """A whole prompt on an idle instance."""
    ends = [*range(CHUNK, tokens, CHUNK), tokens]
    return sum(step_seconds(end - at, end, [(end - at, end)]) for at, end in itertools.pairwise([0, *ends]))


def profile(max_batch: int, max_requests: int) -> EngineProfile:
    """What calibrating such an instance would find."""
    sizes = (1, 192, 384, 512, 1024, 2048, 4096, 8192, 16384)
    return EngineProfile(
        {
            PrimitiveKind.PREFILLING: Curve(tuple((size, prefill_seconds(size)) for size in sizes)),
            PrimitiveKind.DECODING: Curve.linear(0.0, step_seconds(1, 2048)),
        },
        batching=Batching.CONTINUOUS,
        max_batch=max_batch,
        max_requests=max_requests,
        prefix_caching=True,
    )


class Cache:
    """Blocks of one instance. Those in use stay; of the others the least recently used goes first."""

    def __init__(self, tokens: int = CACHE_TOKENS) -> None:
        self.capacity = tokens // BLOCK
        self._used: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def hits(self, blocks: PrefixBlocks) -> int:
        """Blocks of the prompt's beginning that are there."""
        for count, block in enumerate(blocks):
            if block not in self._used and block not in self._idle:
                return count
        return len(blocks)

    def take(self, blocks: PrefixBlocks) -> bool:
        """Keep room for all blocks of a prompt; False if running requests leave none."""
        fresh = sum(block not in self._used for block in blocks)
        if self._used and len(self._used) + fresh > self.capacity:
            return False
        for block in blocks:
            self._idle.pop(block, None)
            self._used[block] = self._used.get(block, 0) + 1
        while self._idle and len(self._used) + len(self._idle) > self.capacity:
            self._idle.popitem(last=False)
        return True

    def give_back(self, blocks: PrefixBlocks) -> None:
        for block in reversed(blocks):  # ends of prompts are forgotten before their beginnings
            count = self._used.pop(block) - 1
            if count:
                self._used[block] = count
            else:
                self._idle[block] = None


@dataclass(slots=True)
class Instance:
    """One copy of the engine."""

    cache: Cache = field(default_factory=Cache)
    waiting: deque[Job] = field(default_factory=deque)
    prefilling: list[Job] = field(default_factory=list)
    decoding: list[Job] = field(default_factory=list)
    busy: bool = False

    def step(self) -> tuple[float, list[Job], list[Job]]:
        """(seconds, jobs that get their first token, jobs that get another one); nothing to do: 0 seconds."""
        budget, chunks, firsts = CHUNK, [], []
        for job in self._fill():
            new = min(budget, job.left)
            job.left -= new
            budget -= new
            chunks.append((new, job.tokens - job.left))
            if not job.left:
                firsts.append(job)
            if not budget:
                break
        if not chunks and not self.decoding:
            return 0.0, [], []
        self.prefilling = [job for job in self.prefilling if job.left]
        decoding, self.decoding = self.decoding, self.decoding + firsts
        context = sum(end for _, end in chunks) + sum(job.tokens + job.made for job in decoding)
        return step_seconds(CHUNK - budget + len(decoding), context, chunks), firsts, decoding

    def _fill(self) -> Iterable[Job]:
        """Those that prefill, then those that can begin to."""
        yield from list(self.prefilling)
        while self.waiting:
            job = self.waiting[0]
            found = self.cache.hits(job.blocks)
            if not self.cache.take(job.blocks):
                return
            self.waiting.popleft()
            job.cached = min(found * BLOCK, job.tokens - 1)
            job.left = job.tokens - job.cached
            self.prefilling.append(job)
            yield job


def simulate(
    jobs: Sequence[Job], scheduler: EngineScheduler, progressed: Callable[[], object] = lambda: None
) -> list[Job]:
    """Run all jobs; they come back with their times."""
    instances = {name: Instance() for name in scheduler.instances}
    by_name = {job.name: job for job in jobs}
    order = itertools.count()
    events: list[tuple[float, int, object]] = [(job.arrives, next(order), job) for job in jobs]
    heapq.heapify(events)

    def carry_out(instructions: list[Instruction], at: float) -> None:
        for batch in instructions:
            assert isinstance(batch, RunBatch)
            instances[batch.instance].waiting.extend(by_name[name] for name in batch.requests)
            begin(batch.instance, at)

    def begin(name: str, at: float) -> None:
        here = instances[name]
        if here.busy:
            return
        seconds, firsts, more = here.step()
        if seconds:
            here.busy = True
            heapq.heappush(events, (at + seconds, next(order), (name, firsts, more)))

    def end_step(name: str, at: float, firsts: list[Job], more: list[Job]) -> None:
        here = instances[name]
        here.busy = False
        for job in firsts:
            job.first_token = at
        for job in (*firsts, *more):
            job.made += 1
        ended = [job for job in (*firsts, *more) if job.made >= job.output]
        here.decoding = [job for job in here.decoding if job.made < job.output]
        for job in ended:
            job.ended = at
            here.cache.give_back(job.blocks)
            progressed()
        for job in firsts:
            carry_out(scheduler.handle(PrefillEnded(at, job.name)), at)
        if ended:
            carry_out(scheduler.handle(RequestsEnded(at, tuple(job.name for job in ended))), at)
        begin(name, at)

    while events:
        at, _, event = heapq.heappop(events)
        if isinstance(event, Job):
            request = QueuedRequest(event.name, event.tokens, event.blocks)
            kind = PrimitiveKind.PREFILLING
            carry_out(scheduler.handle(Enqueue(at, event.name, event.name, kind, (request,))), at)
        else:
            assert isinstance(event, tuple)
            name, firsts, more = event
            end_step(name, at, firsts, more)
    return list(jobs)
