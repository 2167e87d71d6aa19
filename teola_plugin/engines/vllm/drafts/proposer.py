"""The proposer that stock vLLM asks in every step, as a `speculative_config` of method `custom_class` names it.

Rows are requests; those that sample, or are still prefilling, get no draft. Who runs in which row, vLLM does not tell a
proposer: `attach` gives it the model runner (see `shims.vllm.drafts`), and without that nothing is drafted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from teola_plugin.engines.drafts.drafter import Drafter
from teola_plugin.engines.drafts.lengths import Lengths
from teola_plugin.engines.drafts.options import Drafts
from teola_plugin.engines.drafts.row import Row
from teola_plugin.engines.drafts.together import UNMEASURED, Steps
from teola_plugin.engines.vllm.drafts.options import ENV, Told
from teola_plugin.engines.vllm.drafts.texts import Encoded, Encoder
from teola_plugin.shims.vllm import drafts as shim


class DraftProposer:
    """Drafts of all running requests. In the process of vLLM's worker, on its one thread."""

    def __init__(self, vllm_config: Any) -> None:
        self._encode = Encoder(shim.encoder(vllm_config))
        self._limit = shim.longest(vllm_config)
        self._runner: shim.Runner | None = None
        self._drafter = Drafter(Drafts(**json.loads(os.environ.get(ENV, "{}"))), shim.drafted_tokens(vllm_config))
        self._drafter.weigh(UNMEASURED)
        shim.mend()

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is none; vLLM calls it."""

    def attach(self, runner: shim.Runner) -> None:
        self._runner = runner

    def afford(self, lengths: Lengths) -> None:
        """See `Drafter.afford`."""
        self._drafter.afford(lengths)

    def weigh(self, steps: Steps) -> None:
        """See `Drafter.weigh`."""
        self._drafter.weigh(steps)

    def fix(self, tokens: int | None) -> list[tuple[int, float]]:
        """See `Drafter.fix`."""
        return self._drafter.fix(tokens)

    def forget(self, tenant: str | None) -> None:
        """See `Drafter.forget`."""
        self._drafter.forget(tenant)

    def pause(self) -> int:
        """Steps of the requests that run, from the next one on, in which nothing is drafted. See `Drafter.pause`."""
        return 0 if self._runner is None else self._drafter.pause(self._runner.names())

    def resume(self, left: int) -> None:
        """See `Drafter.resume`."""
        self._drafter.resume(left)

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
        if self._drafter.leaves_out(names):
            return [[] for _ in sampled_token_ids]
        looked = self._drafter.step(names, sampled_token_ids)
        if not all(self._drafter.knows(names[i]) for i in looked):
            self._drafter.end_unless(runner.runs)
        drafts, rows = dict[int, tuple[Row, list[int]]](), sum(map(bool, sampled_token_ids))
        for i in looked:
            length = int(num_tokens_no_spec[i])
            row = self._row(runner, names[i], i, sampled_token_ids[i], length, token_ids_cpu)
            if row is not None and (draft := self._drafter.draft(row, rows, self._limit - length - 1)):
                drafts[i] = row, draft
        weighed = self._drafter.weighed(drafts, rows) if drafts else {}
        self._drafter.looked(names, rows)
        return [weighed.get(i, []) for i in range(len(sampled_token_ids))]

    def _row(self, runner: shim.Runner, name: str, i: int, new: Sequence[int], length: int, tokens: Any) -> Row | None:
        """The row, grown by what it has written since it was looked at; None where it samples, or rests."""
        known = self._drafter.running(name)
        if known is None:
            return self._begin(runner, name, tokens[i, :length].tolist())
        row = known.row
        if row is None:
            return None
        if len(row) + len(new) > length:
            return self._begin(runner, name, tokens[i, :length].tolist())
        if len(row) + len(new) < length:  # it was not looked at for some steps
            new = tokens[i, len(row) : length].tolist()
        if row.rests(new):
            return None
        row.grow(new)
        return row

    def _begin(self, runner: shim.Runner, name: str, tokens: list[int]) -> Row | None:
        """A request that is new here, or that was preempted and comes again."""
        facts = runner.request_facts(name)
        told = Told.of(facts.extra)
        texts = Encoded(told.texts, self._encode) if facts.greedy else ()
        return self._drafter.begin(
            name, told.source, tokens, facts.prompt, texts, greedy=facts.greedy, kept=told.kept, ends=facts.ends
        )
