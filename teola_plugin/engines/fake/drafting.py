"""Drafts of a fake LLM: guessed by the code that guesses for vLLM, kept where the fake would write them anyway."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from teola_plugin.engines.drafts.draft_lengths import longest_drafts
from teola_plugin.engines.drafts.drafter import Drafter
from teola_plugin.engines.drafts.followed_texts import encode_with_gaps
from teola_plugin.engines.drafts.options import Drafts
from teola_plugin.engines.drafts.request_drafter import RequestDrafter
from teola_plugin.engines.fake.base import split_tokens
from teola_plugin.engines.fake.timeline import Job
from teola_plugin.graph import GAP, EngineProfile, PrimitiveKind


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
        """Of the tokens seen so far."""

    def end(self, job: Job) -> tuple[int, int]:
        """End a request that is complete or was cut off. Return its numbers of drafted and accepted tokens."""
        running = self._drafter.running(job.request.id)
        self._drafter.end(job.request.id)
        return (running.row.drafted, running.row.accepted) if running is not None and running.row else (0, 0)

    def forget(self, tenant: str | None) -> None:
        """Stop drafting from texts of a tenant's requests, or of all requests if `tenant` is None."""
        self._drafter.forget(tenant)

    def seconds(self, job: Job, others: Sequence[Job]) -> float:
        """Drafts for its next step, and says how long that lasts beside the others that decode."""
        rows = len(others) + 1
        if not job.sent:
            self._begin(job)
        job.draft = self._guess(job, rows) if job.sent else []
        if not self._profile.verifying:
            curve = self._profile.seconds
            return curve(PrimitiveKind.DECODING, job.sent + 1) - curve(PrimitiveKind.DECODING, job.sent)
        return self._profile.step(sum(len(one.draft) for one in (job, *others)) / rows, rows)

    def _begin(self, job: Job) -> None:
        request, prompt = job.request, self._numbered(job.prompt)
        job.numbers = self._numbered(job.pieces)
        greedy = request.payload.sampling.greedy
        texts = [encode_with_gaps(text, GAP, self._encoded) for text in request.drafts] if greedy else []
        self._drafter.begin(request.id, (request.app, request.tenant), prompt, len(prompt), texts, greedy=greedy)

    def _guess(self, job: Job, rows: int) -> list[int]:
        row, limit = self._row(job), self._profile.max_request_size
        if row is None:
            return []
        room = self._profile.drafts if limit is None else limit - len(row) - 1
        return self._drafter.draft(row, rows, room)

    def written(self, job: Job) -> int:
        """Tokens of the step that ends: those of the draft that it would write, and one more."""
        wanted = job.numbers[job.sent : job.sent + len(job.draft) + 1]
        agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(job.draft, wanted, strict=False)))
        written = wanted[: agreed + 1]
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
