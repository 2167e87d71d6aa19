"""The proposer that stock vLLM calls in every step, as a `speculative_config` of method `custom_class` names it.

Rows are requests; those that sample, or are still prefilling, get no draft. vLLM does not tell a proposer which request
runs in which row: `attach` gives it the model runner (see `shims.vllm.drafts`), and without that nothing is drafted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from teola_plugin.engines.drafts.draft_lengths import UNMEASURED_DURATIONS, LongestDrafts, StepDurations
from teola_plugin.engines.drafts.drafter import Drafter
from teola_plugin.engines.drafts.followed_texts import encode_with_gaps
from teola_plugin.engines.drafts.options import Drafts
from teola_plugin.engines.drafts.request_drafter import RequestDrafter
from teola_plugin.engines.vllm.drafts.options import ENV, DraftTexts
from teola_plugin.graph import GAP
from teola_plugin.shims.vllm import drafts as shim

Encode = Callable[[str], Sequence[int]]
_MAX_FORMS = 1024
"""Maximum number of texts with gaps whose tokens are cached."""


class DraftProposer:
    """Drafts of all running requests. In the process of vLLM's worker, on its one thread."""

    def __init__(self, vllm_config: Any) -> None:
        self._encode = TextEncoder(shim.encoder(vllm_config))
        self._limit = shim.longest(vllm_config)
        self._runner: shim.Runner | None = None
        self._drafter = Drafter(Drafts(**json.loads(os.environ.get(ENV, "{}"))), shim.max_draft_tokens(vllm_config))
        self._drafter.set_step_durations(UNMEASURED_DURATIONS)
        shim.mend()

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no model. vLLM calls this."""

    def attach(self, runner: shim.Runner) -> None:
        """Set the view of vLLM's model runner, which tells the request of each row. Nothing is drafted before.

        `shims.vllm.drafts.attach` calls this in vLLM's worker, once per model runner.
        """
        self._runner = runner

    def set_longest_drafts(self, longest_drafts: LongestDrafts) -> None:
        """See `Drafter.set_longest_drafts`."""
        self._drafter.set_longest_drafts(longest_drafts)

    def set_step_durations(self, durations: StepDurations) -> None:
        """See `Drafter.set_step_durations`."""
        self._drafter.set_step_durations(durations)

    def fix_length(self, tokens: int | None) -> list[tuple[int, float]]:
        """See `Drafter.fix_length`."""
        return self._drafter.fix_length(tokens)

    def forget(self, tenant: str | None) -> None:
        """See `Drafter.forget`."""
        self._drafter.forget(tenant)

    def pause(self) -> int:
        """Return the number of next steps of the running requests that need no drafts. See `Drafter.pause`."""
        return 0 if self._runner is None else self._drafter.pause(self._runner.names())

    def resume(self, left: int) -> None:
        """See `Drafter.resume`."""
        self._drafter.resume(left)

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: Any
    ) -> list[list[int]]:
        """Return the drafts, one list per row, each of at most `num_speculative_tokens` tokens.

        Args:
            sampled_token_ids: Tokens that each row has written in this step.
            num_tokens_no_spec: Number of tokens that each row has now.
            token_ids_cpu: Those tokens.
        """
        runner = self._runner
        if runner is None:
            return [[] for _ in sampled_token_ids]
        names = runner.names()
        if self._drafter.skip_step(names):
            return [[] for _ in sampled_token_ids]
        searched = self._drafter.end_step(names, sampled_token_ids)
        if not all(self._drafter.is_running(names[i]) for i in searched):
            self._drafter.end_unless(runner.runs)
        drafts, rows = dict[int, tuple[RequestDrafter, list[int]]](), sum(map(bool, sampled_token_ids))
        for i in searched:
            length = int(num_tokens_no_spec[i])
            row = self._updated_row(runner, names[i], i, sampled_token_ids[i], length, token_ids_cpu)
            if row is not None and (draft := self._drafter.draft(row, rows, self._limit - length - 1)):
                drafts[i] = row, draft
        cut_drafts = self._drafter.choose(drafts, rows) if drafts else {}
        self._drafter.record_drafts(names, rows)
        return [cut_drafts.get(i, []) for i in range(len(sampled_token_ids))]

    def _updated_row(
        self, runner: shim.Runner, name: str, i: int, new: Sequence[int], length: int, tokens: Any
    ) -> RequestDrafter | None:
        """Return the row, grown by all that it has written since its last search; None if it samples or rests."""
        request = self._drafter.running(name)
        if request is None:
            return self._begin(runner, name, tokens[i, :length].tolist())
        row = request.row
        if row is None:
            return None
        if len(row) + len(new) > length:
            return self._begin(runner, name, tokens[i, :length].tolist())
        if len(row) + len(new) < length:  # it was skipped for some steps
            new = tokens[i, len(row) : length].tolist()
        if row.rests(new):
            return None
        row.grow(new)
        return row

    def _begin(self, runner: shim.Runner, name: str, tokens: list[int]) -> RequestDrafter | None:
        """Begin a request that is new here, or that was preempted and comes again."""
        facts = runner.request_facts(name)
        draft_texts = DraftTexts.of(facts.extra)
        return self._drafter.begin(
            name,
            draft_texts.source,
            tokens,
            facts.prompt,
            EncodedTexts(draft_texts.texts, self._encode) if facts.greedy else (),
            greedy=facts.greedy,
            is_kept=draft_texts.is_kept,
            max_total=facts.ends,
        )


class TextEncoder:
    """An encoder with the model's tokenizer. The tokens of texts with gaps are cached, as these texts recur."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._forms: dict[str, Sequence[int]] = {}

    def __call__(self, text: str) -> Sequence[int]:
        """Return the tokens of a text; () if the tokenizer rejects it."""
        try:
            return self._encode_form(text) if GAP in text else self._encode(text)
        except Exception:  # tokenizers have errors of their own; a request without drafts is none
            return ()

    def _encode_form(self, text: str) -> Sequence[int]:
        """Return the tokens of a text with gaps, from the cache if the text occurred before."""
        tokens = self._forms.get(text)
        if tokens is None:
            if len(self._forms) >= _MAX_FORMS:
                self._forms.clear()
            tokens = self._forms[text] = encode_with_gaps(text, GAP, self._encode)
        return tokens


class EncodedTexts(Sequence[Sequence[int]]):
    """The tokens of each text, encoded whenever an item is read."""

    def __init__(self, texts: Sequence[str], encode: Encode) -> None:
        self._texts, self._encode = texts, encode

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, at: int) -> Sequence[int]: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Sequence[int]]: ...
    def __getitem__(self, at: int | slice) -> Sequence[int] | Sequence[Sequence[int]]:
        if isinstance(at, slice):
            return EncodedTexts(self._texts[at], self._encode)
        return self._encode(self._texts[at])

    def __iter__(self) -> Iterator[Sequence[int]]:
        return map(self._encode, self._texts)
