"""The proposer that stock vLLM asks in every step, as a `speculative_config` of method `custom_class` names it.

Rows are requests; those that sample, or are still prefilling, get no draft. Who runs in which row, vLLM does not tell a
proposer: `attach` gives it the model runner (see `shims.vllm.drafts`), and without that nothing is drafted.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from teola_plugin.engines.vllm.drafts.lengths import Lengths, longest_drafts, unmeasured
from teola_plugin.engines.vllm.drafts.options import ENV, Drafts
from teola_plugin.engines.vllm.drafts.recent import RecentOutputs, Source
from teola_plugin.engines.vllm.drafts.row import Row
from teola_plugin.shims.vllm import drafts as shim


@dataclass(slots=True)
class _Running:
    row: Row | None
    """None: nothing is drafted for it."""
    source: Source
    kept: bool = True
    """Whether its output is a recent one, once it has ended."""


class DraftProposer:
    """Drafts of all running requests. In the process of vLLM's worker, on its one thread."""

    def __init__(self, vllm_config: Any) -> None:
        self._options = Drafts(**json.loads(os.environ.get(ENV, "{}")))
        self._most = shim.drafted_tokens(vllm_config)
        self._limit = shim.longest(vllm_config)
        self._runner: shim.Runner | None = None
        self._running: dict[str, _Running] = {}
        self._recent = RecentOutputs(self._options.recent)
        self._budget = self._options.budget or self._options.tokens
        self._unmeasured = unmeasured(self._most)
        self._lengths: Lengths = ()
        self._fixed: int | None = None
        self._steps: list[tuple[int, float]] = []
        """Rows and time of each step, while it is measured."""
        shim.mend()

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is none; vLLM calls it."""

    def attach(self, runner: shim.Runner) -> None:
        self._runner = runner

    def afford(self, lengths: Lengths) -> None:
        """The longest draft of a row by rows in a step, as measured. A budget that the user has given holds instead."""
        self._lengths = () if self._options.budget else lengths

    def fix(self, tokens: int | None) -> list[tuple[int, float]]:
        """For measuring: every greedy row gets a draft of so many tokens, which are hardly right. None: as ever.

        Returns the steps since the last such word, (rows that wrote something, seconds), where the step before had as
        many.
        """
        self._fixed, (steps, self._steps) = tokens, (self._steps, [])
        return [(rows, then - at) for (before, at), (rows, then) in pairwise(steps) if rows == before]

    def forget(self, tenant: str | None) -> None:
        """Recent outputs: all of them, or a tenant's; those of requests that run are not kept either."""
        for one in self._running.values():
            if tenant in (None, one.source[1]):
                one.kept = False
                if one.row is not None:
                    one.row.forget()
        self._recent.forget(tenant)

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: Any
    ) -> list[list[int]]:
        """Drafts, one list a row, each of at most `num_speculative_tokens` tokens; empty where there is none.

        `sampled_token_ids`: what each row has written in this step; `num_tokens_no_spec`, `token_ids_cpu`: how many
        tokens each row has now, and which.
        """
        runner = self._runner
        if runner is None:
            return [[] for _ in sampled_token_ids]
        names, rows = runner.names(), max(1, sum(map(bool, sampled_token_ids)))
        if self._fixed is not None:
            self._steps.append((rows, time.perf_counter()))
        longest, most = self._longest(rows), self._most_of_one(rows)
        found, lengths = [], num_tokens_no_spec[: len(sampled_token_ids)].tolist()
        for i, (new, length) in enumerate(zip(sampled_token_ids, lengths, strict=True)):
            row = self._row(runner, names[i], i, new, length, token_ids_cpu) if new else None
            room = min(most, self._limit - length - 1)
            found.append(self._draft(row, longest, room) if row is not None and room > 0 else [])
        return found

    def _longest(self, rows: int) -> Sequence[int]:
        """Tokens that pay for each of so many rows, by the share of them that is right."""
        return longest_drafts(self._lengths or self._unmeasured, 1 if self._options.budget else rows)

    def _most_of_one(self, rows: int) -> int:
        """Tokens that may be drafted for one row among so many, whatever is right of them."""
        if self._fixed is not None:
            return min(self._most, self._fixed)
        return self._most if self._lengths else min(self._most, self._budget // rows)

    def _draft(self, row: Row, longest: Sequence[int], room: int) -> list[int]:
        return row.draft(longest, room) if self._fixed is None else row.first_tokens(room)

    def _row(self, runner: shim.Runner, name: str, i: int, new: Sequence[int], length: int, tokens: Any) -> Row | None:
        known = self._running.get(name)
        if known is not None and (known.row is None or len(known.row) + len(new) == length):
            if known.row is not None:
                known.row.grow(new)
            return known.row
        return self._begin(runner, name, tokens[i, :length].tolist())

    def _begin(self, runner: shim.Runner, name: str, tokens: list[int]) -> Row | None:
        """A request that is new here, or that was preempted and comes again."""
        asked = runner.asked(name)
        given = asked.given or {}
        self._clean(runner)
        source = str(given.get("app", "")), str(given.get("tenant", ""))
        row = None
        if asked.greedy:
            recent = self._recent.of(source) if self._options.recent else None
            texts = given.get("tokens", ())
            row = Row(tokens, asked.prompt, texts, recent, self._most, lookup=self._options.lookup)
        self._ended(self._running.get(name))
        self._running[name] = _Running(row, source)
        return row

    def _clean(self, runner: shim.Runner) -> None:
        """What has left is a recent output."""
        for name in [one for one in self._running if not runner.runs(one)]:
            self._ended(self._running.pop(name))

    def _ended(self, one: _Running | None) -> None:
        if one is not None and one.row is not None and one.kept and self._options.recent:
            self._recent.add(one.source, one.row.output)
