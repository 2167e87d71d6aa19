"""The proposer that stock vLLM asks in every step, as a `speculative_config` of method `custom_class` names it.

Rows are requests; those that sample, or are still prefilling, get no draft. Who runs in which row, vLLM does not tell a
proposer: `attach` gives it the model runner (see `shims.vllm.drafts`), and without that nothing is drafted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.engines.vllm.drafts.options import ENV, Drafts
from teola_plugin.engines.vllm.drafts.recent import RecentOutputs, Source
from teola_plugin.engines.vllm.drafts.row import Row
from teola_plugin.shims.vllm import drafts as shim


@dataclass(slots=True)
class _Running:
    row: Row | None
    """None: nothing is drafted for it."""
    source: Source


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
        shim.mend()

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is none; vLLM calls it."""

    def attach(self, runner: shim.Runner) -> None:
        self._runner = runner

    def afford(self, tokens: int) -> None:
        """At most so many drafted tokens in a step, of all rows."""
        self._budget = tokens

    def forget(self, tenant: str | None) -> None:
        """Recent outputs: all of them, or a tenant's."""
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
        names = runner.names()
        most = min(self._most, self._budget // max(1, sum(map(bool, sampled_token_ids))))
        found = []
        for i, new in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[i])
            row = self._row(runner, names[i], i, new, length, token_ids_cpu) if new else None
            room = min(most, self._limit - length - 1)
            found.append(row.draft(room) if row is not None and room > 0 else [])
        return found

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
            row = Row(tokens, asked.prompt, given.get("tokens", ()), recent, self._most)
        self._ended(self._running.get(name))
        self._running[name] = _Running(row, source)
        return row

    def _clean(self, runner: shim.Runner) -> None:
        """What has left is a recent output."""
        for name in [one for one in self._running if not runner.runs(one)]:
            self._ended(self._running.pop(name))

    def _ended(self, one: _Running | None) -> None:
        if one is not None and one.row is not None and self._options.recent:
            self._recent.add(one.source, one.row.output)
