"""A fake LLM: answers are a pure function of the prompt, latencies those of a profile."""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from teola_plugin.engines import profiles
from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.drafts.draft_lengths import longest_drafts
from teola_plugin.engines.drafts.drafter import Drafter
from teola_plugin.engines.drafts.followed_texts import encode_with_gaps
from teola_plugin.engines.drafts.options import Drafts, drafts_of
from teola_plugin.engines.drafts.request_drafter import RequestDrafter
from teola_plugin.engines.fake.base import NO_FAULTS, FakeBatch, FakeEngine, Faults, split_tokens
from teola_plugin.engines.fake.timeline import BLOCK, Job, Timeline
from teola_plugin.errors import EngineError, RequestTooLarge
from teola_plugin.graph import GAP, LLM_KINDS, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Done, Generate, Generation, Prompt, Request, Sampling, Warmed, Warmup

Answer = Callable[[Prompt, Sampling], str]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Tokens written so far by requests that have ended, in how many steps, and what was drafted for them."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


class FakeLLM(FakeEngine):
    """A fake LLM with continuous batching, a prefix cache, and prefilling that slows decoding (see `Timeline`).

    `answer` gives the text, cut at `sampling.max_tokens` tokens and at its stop strings. By default it is made of
    words that depend on the prompt and the sampling alone, or is JSON that follows `sampling.json_schema`.
    `cache_tokens` bounds the prefix cache (least recently used blocks go first).

    `drafts`: `auto` drafts if the profile has a number of drafted tokens, `off` never, and options as those of a
    `VllmEngine` with any profile. Drafts are looked up as by a `VllmEngine`, in the fake's own tokens. Only tokens that
    `answer` gives are accepted, so that texts do not depend on drafts. A step lasts `EngineProfile.step(drafted,
    batch)` seconds, or as long as without drafts if that was not measured.

    `tells_first`: send the first token even if the stream has no reader, as a `VllmEngine` does. It ends the
    prefilling, so that the scheduler may send the next request. Otherwise only the end is reported.
    """

    kinds = LLM_KINDS
    tells_cached = True

    def __init__(
        self,
        name: str = "llm",
        profile: EngineProfile | None = None,
        answer: Answer | None = None,
        *,
        faults: Faults = NO_FAULTS,
        cache_tokens: int = 65_536,
        drafts: str | Mapping[str, Any] | Drafts = "auto",
        tells_first: bool = True,
    ) -> None:
        profile = profile or profiles.noop()["llm"]
        options = _drafts(drafts, profile)
        super().__init__(name, replace(profile, drafts=options.tokens if options is not None else 0), faults)
        self._answer = answer or default_answer
        self._cache = PrefixCache(cache_tokens // BLOCK if self._profile.prefix_caching else 0)
        self._drafts = None if options is None else DraftedSteps(options, self._profile)
        self.takes_late_readers = tells_first
        self._timeline = Timeline(
            self._profile, self.faults.slow, self._cache, self._finished, self._drafts, tells_first=tells_first
        )
        self._jobs: dict[str, Job] = {}
        self._decoded = Decoded()

    @property
    def decoded(self) -> Decoded:
        """The figures since the start, or the last `reset`."""
        return self._decoded

    def _work(self, run: FakeBatch) -> None:
        """Add the requests of a batch to the timeline as jobs. A request with a bad payload fails alone."""
        for request in list(run.pending.values()):
            try:
                job = self._job(request, run)
            except EngineError as error:
                run.fail(request.id, error)
            except Exception as error:
                run.fail(request.id, self._bad(request, error))
            else:
                self._jobs[request.id] = job
                self._timeline.add(job)
        self._timeline.advance()

    def _job(self, request: Request, run: FakeBatch) -> Job:
        """Return the job of a request: its prompt's length and cache keys, and the tokens that it will write.

        A request with a fault writes only the first half of them. Raise `RequestTooLarge`.
        """
        payload: Generate | Warmup = request.payload
        if isinstance(payload, Warmup):
            tokens = self._fitting(split_tokens(payload.prompt.known_prefix()), request)
            return Job(request, run, self._cache.keys(tokens, request.tenant), len(tokens), warmup=True)
        tokens = self._fitting(split_tokens(payload.prompt.flat()), request)
        job = Job(request, run, self._cache.keys(tokens, request.tenant), len(tokens))
        job.pieces, job.finish_reason, job.stop_sequence = self._pieces(payload, len(tokens))
        if self._has_fault(request, run):
            job.pieces, job.faulty = job.pieces[: len(job.pieces) // 2], True
        job.hangs = self.faults.hits(self.faults.hang_on, request)
        if self._drafts is not None:
            job.prompt = tokens
        return job

    def _fitting(self, tokens: list[str], request: Request) -> list[str]:
        """Return the tokens of a prompt unchanged. Raise `RequestTooLarge` if they leave no room in the model's
        context."""
        limit = self._profile.max_request_size
        if limit is not None and len(tokens) >= limit:
            raise RequestTooLarge(
                f"engine {self.name!r}: the prompt of request {request.id} has {len(tokens)} tokens; "
                f"its context has room for {limit}.",
                engine=self.name,
                hint="shorten the prompt, or pass fewer documents",
            )
        return tokens

    def _pieces(self, payload: Generate, prompt_tokens: int) -> tuple[list[str], str, str]:
        """Return the tokens of the answer, the reason of its end, and the stop string at which it ends, if any."""
        text = self._answer(payload.prompt, payload.sampling)
        ends = [(at, stop) for stop in payload.sampling.stop if (at := text.find(stop)) >= 0]
        end, stop_sequence = min(ends, default=(len(text), ""))
        pieces = split_tokens(text[:end])
        limit = payload.sampling.max_tokens
        if self._profile.max_request_size is not None:
            limit = min(limit, self._profile.max_request_size - prompt_tokens)
        return (pieces[:limit], "length", "") if len(pieces) > limit else (pieces, "stop", stop_sequence)

    def _finished(self, job: Job) -> None:
        """Deliver the result of a job. The timeline calls this at its last token, or the end of a warm-up."""
        self._jobs.pop(job.request.id, None)
        drafted, accepted = self._count(job)
        if job.faulty or (job.warmup and self._has_fault(job.request, job.run)):
            self._inject_fault(job.request, job.run)
        else:
            stats = job.stats() | ({"drafted": drafted, "accepted": accepted} if self._drafts is not None else {})
            job.run.put(Done(job.request.id, self._generated(job, drafted, accepted), stats, cuts=job.cuts))

    def _count(self, job: Job) -> tuple[int, int]:
        """Count a job that has ended. Return its numbers of drafted and accepted tokens."""
        drafted, accepted = (0, 0) if self._drafts is None else self._drafts.end(job)
        before, tokens = self._decoded, len(job.pieces)
        self._decoded = Decoded(
            before.tokens + tokens,
            before.steps + (tokens if self._drafts is None else job.steps),
            before.drafted + drafted,
            before.accepted + accepted,
        )
        return drafted, accepted

    def _generated(self, job: Job, drafted: int, accepted: int) -> Generation | Warmed:
        """Return the value of a job that has ended, with the counts of tokens."""
        if job.warmup:
            is_cached = job.cached >= (job.prompt_tokens - 1) // BLOCK * BLOCK  # the last token is always computed
            return Warmed(job.prompt_tokens, job.prompt_tokens if is_cached and job.cached else max(0, job.cached))
        text = "".join(job.pieces)
        tokens = len(job.pieces)
        counts = (job.prompt_tokens, tokens, job.cached, drafted, accepted)
        return Generation(text, job.finish_reason, *counts, stop_sequence=job.stop_sequence)

    def announce_reader(self, request_id: str) -> None:
        """Send the pieces of a request from now on."""
        if (job := self._jobs.get(request_id)) is not None:
            self._timeline.announce_reader(job)

    def _drop(self, request_id: str, error: EngineError, run: FakeBatch) -> None:
        """End an unfinished request with an error, and remove its job from the timeline."""
        super()._drop(request_id, error, run)
        job = self._jobs.pop(request_id, None)
        if job is not None:
            if self._drafts is not None:
                self._drafts.end(job)
            self._timeline.remove(job)

    def size(self, request: Request) -> int:
        payload: Generate | Warmup = request.payload
        return max(1, len(payload.prompt.known_prefix()) // 4)

    def load(self) -> EngineLoad:
        """Return the running requests, the use of the KV cache from 0 to 1, and the tokens that each app holds."""
        jobs, kv_tokens = list(self._jobs.values()), dict[str, int]()
        for job in jobs:
            if job.cached >= 0 and not job.warmup:
                kv_tokens[job.request.app] = kv_tokens.get(job.request.app, 0) + job.prefilled + job.written
        used = sum(job.prompt_tokens for job in jobs)
        return EngineLoad(self._unfinished(), min(1.0, used / max(1, self._cache.limit * BLOCK)), kv_tokens)

    async def reset(self) -> None:
        """Empty the prefix cache, and forget outputs to draft from."""
        self._cache.clear()
        self._decoded = Decoded()
        if self._drafts is not None:
            self._drafts.forget(None)

    async def forget(self, tenant: str) -> None:
        """Stop drafting from texts that this tenant's requests have produced so far."""
        if self._drafts is not None:
            self._drafts.forget(tenant)


def _drafts(setting: str | Mapping[str, Any] | Drafts, profile: EngineProfile) -> Drafts | None:
    """Return the draft options, None for no drafts. Raise ConfigError or RegistrationError for invalid ones."""
    options = drafts_of(setting)
    if setting != "auto" or options is None:
        return options
    return replace(options, tokens=profile.drafts) if profile.drafts else None


class PrefixCache:
    """Hash chains of whole blocks, least recently used first. Tenants share nothing."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def keys(self, tokens: Sequence[str], tenant: str) -> tuple[int, ...]:
        """Return a key for each whole block, which stands for the block and all before it."""
        if not self.limit:
            return ()
        block_keys, key = [], hash(tenant)
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = hash((key, *tokens[start : start + BLOCK]))
            block_keys.append(key)
        return tuple(block_keys)

    def cached(self, keys: Sequence[int], prompt_tokens: int) -> int:
        """Return the number of cached tokens. The last token of a prompt is always computed."""
        blocks = 0
        for key in keys:
            if key not in self._blocks:
                break
            self._blocks.move_to_end(key)
            blocks += 1
        return min(blocks, max(0, prompt_tokens - 1) // BLOCK) * BLOCK

    def add(self, keys: Sequence[int]) -> None:
        """Add blocks, or mark them as just used; remove the least recently used ones beyond the limit."""
        for key in keys:
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self.limit:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


def default_answer(prompt: Prompt, sampling: Sampling) -> str:
    """Return words, or JSON by the schema: a pure function of the prompt and its sampling."""
    how = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed)
    seed = f"{prompt.flat()}\0{'' if sampling.greedy else how}"
    if sampling.json_schema:
        return json.dumps(_json_value(json.loads(sampling.json_schema), seed))
    natural = 16 + hashlib.blake2b(seed.encode(), digest_size=1).digest()[0] % 48
    return answer_words(seed, sampling.max_tokens if sampling.ignore_eos else natural)


def answer_words(seed: str, tokens: int) -> str:
    """Return words of exactly `tokens` tokens, drawn from the seed. A shorter text is a prefix of a longer one."""
    words: list[str] = []
    for at in range(0, tokens, 32):
        digest = hashlib.blake2b(f"{at}\0{seed}".encode()).digest()
        words += (_WORDS[digest[i] % len(_WORDS)] for i in range(min(32, tokens - at)))
    return " ".join(words)


_WORDS = re.findall(
    r"\S+",
    """
    able area army atom band bank base beam bell bird boat book cave city coal coat corn crop dawn deal desk door
    dust east edge farm film fire fish flag fort gain gate gold hand harp hill home iron jury king lake lamp land
    leaf line lion mail mark mill moon note oak park path plan rain ring road sail salt sand ship
    """,
)


def _json_value(schema: dict[str, Any], seed: str) -> Any:
    """Return a value that satisfies a JSON schema and depends on nothing but the schema and the seed."""
    if "enum" in schema:
        return schema["enum"][hashlib.blake2b(seed.encode(), digest_size=1).digest()[0] % len(schema["enum"])]
    kind = schema.get("type", "string")
    if kind == "array":
        width = schema.get("maxItems", schema.get("minItems", 3))
        return [_json_value(schema.get("items", {}), f"{seed}\0{i}") for i in range(width)]
    if kind == "object":
        return {key: _json_value(part, f"{seed}\0{key}") for key, part in schema.get("properties", {}).items()}
    if kind in ("integer", "number"):
        return hashlib.blake2b(seed.encode(), digest_size=1).digest()[0] % 10
    return True if kind == "boolean" else answer_words(seed, 8)


class DraftedSteps:
    """Decoding in steps, each of which verifies a draft; `Timeline` asks it how long they take and what they write.

    As on vLLM, a draft follows what a request has written, so that its first step writes one token. The one difference
    is in a batch: there all requests begin their steps together, here each has its own, as long as one of the batch
    with the mean of what its requests have drafted.
    """

    def __init__(self, options: Drafts, profile: EngineProfile) -> None:
        self._profile = profile
        self._drafter = Drafter(options, profile.drafts)
        self._drafter.set_longest_drafts(longest_drafts(profile, profile.drafts))
        self._numbers: dict[str, int] = {}
        """The numbers of the tokens seen so far."""

    def end(self, job: Job) -> tuple[int, int]:
        """End a request that is complete or was cut off. Return its numbers of drafted and accepted tokens."""
        running = self._drafter.running(job.request.id)
        self._drafter.end(job.request.id)
        return (running.row.drafted, running.row.accepted) if running is not None and running.row else (0, 0)

    def forget(self, tenant: str | None) -> None:
        """Stop drafting from texts of a tenant's requests, or of all requests if `tenant` is None."""
        self._drafter.forget(tenant)

    def seconds(self, job: Job, other_jobs: Sequence[Job]) -> float:
        """Draft for the next step of a job. Return its duration in seconds with the other jobs that decode."""
        rows = len(other_jobs) + 1
        if not job.written:
            self._begin_request(job)
        job.draft = self._guess(job, rows) if job.written else []
        if not self._profile.verifying:
            curve = self._profile.seconds
            return curve(PrimitiveKind.DECODING, job.written + 1) - curve(PrimitiveKind.DECODING, job.written)
        return self._profile.step(sum(len(one.draft) for one in (job, *other_jobs)) / rows, rows)

    def _begin_request(self, job: Job) -> None:
        """Register a request with the drafter when its first step begins, with the texts that its output may repeat."""
        request, prompt = job.request, self._numbered(job.prompt)
        job.numbers = self._numbered(job.pieces)
        greedy = request.payload.sampling.greedy
        texts = [encode_with_gaps(text, GAP, self._encoded) for text in request.drafts] if greedy else []
        self._drafter.begin(request.id, (request.app, request.tenant), prompt, len(prompt), texts, greedy=greedy)

    def _guess(self, job: Job, rows: int) -> list[int]:
        """Return the tokens to draft in a step of a job; [] if the request is not drafted for."""
        row, limit = self._row(job), self._profile.max_request_size
        if row is None:
            return []
        room = self._profile.drafts if limit is None else limit - len(row) - 1
        return self._drafter.draft(row, rows, room)

    def written(self, job: Job) -> int:
        """Return the number of tokens of the step that ends: the right ones of the draft, and one more."""
        next_tokens = job.numbers[job.written : job.written + len(job.draft) + 1]
        agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(job.draft, next_tokens, strict=False)))
        written = next_tokens[: agreed + 1]
        row = self._row(job)
        if row is not None:
            row.grow(written)
        return len(written)

    def _row(self, job: Job) -> RequestDrafter | None:
        running = self._drafter.running(job.request.id)
        return None if running is None else running.row

    def _encoded(self, text: str) -> list[int]:
        return self._numbered(split_tokens(text))

    def _numbered(self, tokens: Sequence[str]) -> list[int]:
        numbers = self._numbers
        return [numbers.setdefault(token, len(numbers)) for token in tokens]
