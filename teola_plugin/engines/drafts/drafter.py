"""All running requests: what each of them drafts, how much at which load, and what is kept of those that have ended."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from teola_plugin.engines.drafts.accuracy import AppAccuracy, ForecastRatio
from teola_plugin.engines.drafts.corpus import Corpus
from teola_plugin.engines.drafts.draft_budget import WITH_TEXTS, WITHOUT_TEXTS, ChosenDraft, DraftBudget
from teola_plugin.engines.drafts.draft_lengths import (
    LongestDrafts,
    SharedStepModel,
    StepDurations,
    longest_of_rows,
    unmeasured_longest_drafts,
)
from teola_plugin.engines.drafts.options import Drafts
from teola_plugin.engines.drafts.request_drafter import RequestDrafter

Source = tuple[str, str]
"""App and tenant."""
_MAX_SOURCES = 64
"""Number of sources of which it is remembered how often guesses were right."""
_SAMPLED_REST = 64
"""Number of steps for which a sampled request that runs alone is skipped."""


@dataclass(slots=True)
class DraftedRequest:
    """A request under way, or preempted."""

    row: RequestDrafter | None
    """None: nothing is drafted for it."""
    source: Source
    is_kept: bool = True
    """True if its output becomes a recent one, once it has ended."""


class Drafter:
    """The drafts of all requests of one replica, at most `max_draft` tokens per request and step."""

    def __init__(self, options: Drafts, max_draft: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._options, self._max_draft = options, max_draft
        self._running: dict[str, DraftedRequest] = {}
        self._recent = RecentOutputs(options.recent)
        self._max_step_tokens = options.budget or options.tokens
        self._unmeasured = unmeasured_longest_drafts(max_draft)
        self._longest_drafts: LongestDrafts = ()
        self._model = SharedStepModel(())
        self._forecast_ratio = ForecastRatio()
        self._budget, self._clock = DraftBudget(clock), clock
        self._chosen_drafts: Mapping[int, ChosenDraft] = {}
        """Drafts of this step, by row."""
        self._searched = {WITH_TEXTS: 0, WITHOUT_TEXTS: 0}
        """Numbers of rows that are searched in this step."""
        self._tried = {WITH_TEXTS: 0, WITHOUT_TEXTS: 0}
        """Numbers of those rows that were to draft."""
        self._accuracies: OrderedDict[tuple[Source, bool], AppAccuracy] = OrderedDict()
        self._fixed_length: int | None = None
        self._steps: list[tuple[int, float]] = []
        """Rows and time of each step, during a measurement."""
        self._lone_request, self._lone_rest = "", 0
        """The request that runs alone, and the number of steps for which it is skipped."""

    def set_longest_drafts(self, longest_drafts: LongestDrafts) -> None:
        """Set the measured longest draft of a row by rows in a step, unless the user has set a budget.

        Drafts of one step are no longer weighed against each other, until `set_step_durations` is called.
        """
        self._longest_drafts = () if self._options.budget else longest_drafts
        self._model = SharedStepModel(())
        self._budget.forget()

    def set_step_durations(self, durations: StepDurations) -> None:
        """Set the measured durations of steps by the total of drafted tokens.

        Drafts of one step are then weighed against each other, unless the user has set a budget.
        """
        self._model = SharedStepModel(() if self._options.budget else durations)

    def fix_length(self, tokens: int | None) -> list[tuple[int, float]]:
        """Draft exactly `tokens` tokens for every greedy row, for measurements; None ends this mode.

        Returns the steps since the last call as (rows that produced a token, seconds), for pairs of steps with as many
        rows. With 0 tokens for several rows, rows that are still prefilling are counted, too.
        """
        self._budget.forget()
        self._lone_request = ""
        self._fixed_length, (steps, self._steps) = tokens, (self._steps, [])
        return [(rows, end - start) for (before, start), (rows, end) in pairwise(steps) if rows == before]

    def skip_step(self, names: Sequence[str]) -> bool:
        """Return True if a step of these requests needs no drafts. Counts the step."""
        if self._fixed_length == 0 and len(names) > 1:  # measures steps without drafts: no row is searched
            self._steps.append((len(names), self._clock()))
            return True
        if len(names) == 1:
            self._lone_rest -= 1
            return self._lone_request == names[0] and self._lone_rest >= 0
        return self._budget.skip_step(names)

    def pause(self, names: Sequence[str]) -> int:
        """Return the number of steps of these requests, from the next one on, that need no drafts.

        They count as made, unless `resume` says how many were not.
        """
        if self._fixed_length is not None:
            return 0
        if len(names) == 1:
            steps, self._lone_rest = (max(0, self._lone_rest) if self._lone_request == names[0] else 0), 0
            return steps
        return self._budget.pause(names)

    def resume(self, left: int) -> None:
        """Take back `left` steps of the last pause that were not made, because the requests have changed."""
        self._budget.resume(left)

    def end_step(self, names: Sequence[str], written: Sequence[Sequence[int]]) -> Sequence[int]:
        """Record the end of a step and what each request has written in it.

        Return the rows for which drafts are to be searched. `record_drafts` has to follow.
        """
        rows = sum(map(bool, written))
        if self._fixed_length is not None:
            self._steps.append((rows, self._clock()))
        self._chosen_drafts = {}
        self._searched, self._tried = {WITH_TEXTS: 0, WITHOUT_TEXTS: 0}, {WITH_TEXTS: 0, WITHOUT_TEXTS: 0}
        writing_rows = [i for i, new in enumerate(written) if new]
        if not self._is_shared(rows):
            return writing_rows
        kinds = self._budget.end_step(names, written, self._model)
        searched = [i for i in writing_rows if names[i] not in self._running or self._has_texts(names[i]) in kinds]
        for i in searched:
            self._searched[self._has_texts(names[i])] += 1
        return searched

    def record_drafts(self, names: Sequence[str], rows: int) -> None:
        """Record that all drafts of a step of `rows` rows are known."""
        if len(names) == 1 and self._fixed_length is None:
            self._begin_lone_rest(names[0])
        if self._is_shared(rows):
            rests: dict[bool, list[int]] = {}
            for name in names:
                if name in self._running and (row := self._running[name].row) is not None:
                    rests.setdefault(row.has_texts, []).append(row.rest)
            median_rests = {has_texts: sorted(some)[len(some) // 2] for has_texts, some in rests.items()}
            self._budget.record_drafts(rows, self._chosen_drafts, self._searched, median_rests)

    def _begin_lone_rest(self, name: str) -> None:
        """Skip a request that runs alone while it rests; one that samples for some steps."""
        request = self._running.get(name)
        self._lone_request = name
        if request is None:
            self._lone_rest = 0
        else:
            self._lone_rest = _SAMPLED_REST if request.row is None else request.row.rest

    def _has_texts(self, name: str) -> bool:
        request = self._running.get(name)
        return request is not None and request.row is not None and request.row.has_texts

    def _is_shared(self, rows: int) -> bool:
        """Return True if drafts of a step of `rows` rows are weighed against each other."""
        return bool(self._model) and rows > 1 and self._fixed_length is None

    def forget(self, tenant: str | None) -> None:
        """Forget recent outputs and how often guesses were right, of a tenant or of all if None.

        Outputs of running requests are not kept either.
        """
        for key in [key for key in self._accuracies if tenant in (None, key[0][1])]:
            del self._accuracies[key]
        if tenant is None:
            self._forecast_ratio = ForecastRatio()
            self._budget.forget()
        for request in self._running.values():
            if tenant in (None, request.source[1]):
                request.is_kept = False
                if request.row is not None:
                    request.row.forget()
        self._recent.forget(tenant)

    def is_running(self, name: str) -> bool:
        """Return True if the request has begun and has not ended."""
        return name in self._running

    def running(self, name: str) -> DraftedRequest | None:
        """Return the running or preempted request of this id; None if it has not begun or has ended.

        Engines call this at each decoding step: the request's `row` guesses its next tokens (speculative decoding).
        The `row` is None for a request that samples, for which nothing is drafted.
        """
        return self._running.get(name)

    def begin(
        self,
        name: str,
        source: Source,
        tokens: Sequence[int],
        prompt_tokens: int,
        texts: Sequence[Sequence[int]],
        *,
        greedy: bool,
        is_kept: bool = True,
        max_total: int | None = None,
    ) -> RequestDrafter | None:
        """Begin a request that is new, or that begins again. Return None if it samples: nothing is drafted.

        Args:
            name: Id of the request.
            source: App and tenant.
            tokens: The prompt and what is written already.
            prompt_tokens: Number of tokens of the prompt.
            texts: Texts that the output may repeat, the likeliest first.
            greedy: True if it does not sample.
            is_kept: True if recent outputs are a source, and its output becomes one of them.
            max_total: Maximum number of tokens at the end, with the prompt.
        """
        row = None
        if greedy:
            row = RequestDrafter(
                tokens,
                prompt_tokens,
                texts,
                self._recent.of(source) if self._options.recent and is_kept else None,
                self._max_draft,
                lookup=self._options.lookup,
                app_accuracy=self._app_accuracy(source, bool(texts)),
                forecast_ratio=self._forecast_ratio,
                max_total=max_total,
            )
        self.end(name)
        self._running[name] = DraftedRequest(row, source, is_kept)
        self._budget.begin_request()
        return row

    def _app_accuracy(self, source: Source, has_texts: bool) -> AppAccuracy:
        """Return the accuracy in requests of an app and tenant, separately for those with and without texts."""
        accuracy = self._accuracies.setdefault((source, has_texts), AppAccuracy())
        self._accuracies.move_to_end((source, has_texts))
        if len(self._accuracies) > _MAX_SOURCES:
            self._accuracies.popitem(last=False)
        return accuracy

    def end(self, name: str) -> None:
        """End a request. Its output becomes a recent output."""
        request = self._running.pop(name, None)
        if request is not None and request.row is not None and request.is_kept and self._options.recent:
            self._recent.add(request.source, request.row.output)

    def end_unless(self, runs: Callable[[str], bool]) -> None:
        """End the requests that no longer run."""
        for name in [name for name in self._running if not runs(name)]:
            self.end(name)

    def draft(self, row: RequestDrafter, rows: int, room: int) -> list[int]:
        """Return the draft of a row in a step of `rows` rows, at most `room` tokens; [] if no draft pays."""
        rows = max(1, rows)
        room = min(room, self._max_length(rows))
        if room <= 0:
            return []
        if self._fixed_length is not None:
            return row.first_tokens(room)
        if self._is_shared(rows) and not self._may_try(row.has_texts, rows):
            return []
        return row.draft(room, self._paying_lengths(rows), rows if self._model else 1)

    def _may_try(self, has_texts: bool, rows: int) -> bool:
        """Return True if one more row may draft in this step. Counts it."""
        self._tried[has_texts] += 1
        return self._tried[has_texts] <= self._budget.max_rows(has_texts, rows)

    def choose(self, drafts: Mapping[int, tuple[RequestDrafter, list[int]]], rows: int) -> Mapping[int, list[int]]:
        """Return the drafts of one step of `rows` rows, by row, cut to what pays of them together."""
        if not self._is_shared(rows):
            return {i: draft for i, (_, draft) in drafts.items()}
        candidates, speeds = [row.candidate for row, _ in drafts.values()], self._speeds(rows)
        max_cost = self._budget.max_cost({row.has_texts for row, _ in drafts.values()}, rows)
        slot_reuse = self._budget.slot_reuse(rows)
        lengths = self._model.lengths(candidates, speeds, self._budget.slowdown(rows), max_cost, slot_reuse)
        values = self._model.token_values([candidate.speed for candidate in candidates], speeds, slot_reuse)
        chosen_drafts = zip(drafts.items(), lengths, values, strict=True)
        self._chosen_drafts = {
            i: ChosenDraft(row.has_texts, length, value) for (i, (row, _)), length, value in chosen_drafts if length
        }
        return {i: row.cut(length) for (i, (row, _)), length in zip(drafts.items(), lengths, strict=True)}

    def _speeds(self, rows: int) -> Sequence[float]:
        """Return the tokens per step of all rows.

        Running rows that produced nothing in this step count as well; sampled rows produce one token per step.
        """
        running = [1.0 if request.row is None else request.row.speed for request in self._running.values()][-rows:]
        return [*running, *[1.0] * (rows - len(running))]

    def _paying_lengths(self, rows: int) -> Sequence[int]:
        """Return the numbers of tokens that pay for each of `rows` rows, by the share of right tokens."""
        ignores_others = self._options.budget or self._model
        return longest_of_rows(self._longest_drafts or self._unmeasured, 1 if ignores_others else rows)

    def _max_length(self, rows: int) -> int:
        """Return the maximum number of drafted tokens for each of `rows` rows, whatever is right of them."""
        if self._fixed_length is not None:
            return min(self._max_draft, self._fixed_length)
        if self._longest_drafts or self._model:
            return self._max_draft
        return min(self._max_draft, self._max_step_tokens // rows)


_SEPARATOR = (-1, -2)
"""Tokens between outputs: no model writes them, so no match extends across them."""


class RecentOutputs:
    """The recent outputs of each app and tenant, never a source for another tenant.

    They are bounded in tokens per source and in sources. The oldest are dropped first.
    """

    def __init__(self, max_tokens: int = 16_384, max_sources: int = 64) -> None:
        self._max_tokens, self._max_sources = max_tokens, max_sources
        self._outputs: OrderedDict[Source, tuple[Corpus, deque[Sequence[int]]]] = OrderedDict()

    def of(self, source: Source) -> Corpus | None:
        entry = self._outputs.get(source)
        return None if entry is None else entry[0]

    def add(self, source: Source, output: Sequence[int]) -> None:
        """Add an output that has ended, also one that was cut off."""
        if len(output) < 4 or len(output) > self._max_tokens // 2:
            return
        corpus, outputs = self._outputs.setdefault(source, (Corpus(), deque()))
        self._outputs.move_to_end(source)
        outputs.append(output)
        if len(corpus) + len(output) > self._max_tokens:
            while sum(len(recent) + 2 for recent in outputs) > self._max_tokens // 2:
                outputs.popleft()
            corpus = Corpus()
            for recent in outputs:
                corpus.add((*recent, *_SEPARATOR))
            self._outputs[source] = corpus, outputs
        else:
            corpus.add((*output, *_SEPARATOR))
        while len(self._outputs) > self._max_sources:
            self._outputs.popitem(last=False)

    def forget(self, tenant: str | None = None) -> None:
        """Forget all outputs, or those of a tenant."""
        for source in [source for source in self._outputs if tenant is None or source[1] == tenant]:
            del self._outputs[source]
