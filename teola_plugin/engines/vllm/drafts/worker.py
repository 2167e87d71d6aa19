"""Methods that are added to vLLM's worker (`worker_extension_cls=WORKER`) and called by name over `collective_rpc`."""

from __future__ import annotations

import logging
from itertools import islice
from typing import Any

from teola_plugin.engines.drafts.draft_lengths import LongestDrafts, StepDurations, step_sizes
from teola_plugin.shims.vllm import drafts as shim

WORKER = f"{__name__}.DraftsWorker"
PROPOSER = "teola_plugin.engines.vllm.drafts.proposer.DraftProposer"
ATTACH = "teola_attach_drafts"
SET_LONGEST_DRAFTS = "teola_set_longest_drafts"
SET_STEP_DURATIONS = "teola_set_step_durations"
FIX_LENGTH = "teola_fix_draft_length"
FORGET = "teola_forget_drafts"
_SIZES_ALONE = range(2, 18)
"""Tokens of a step of one row, with drafts as long as they are by default."""
_NUMBER_OF_SHARED_SIZES, _WARM_UP_S = 14, 0.5
"""Number of prepared sizes of steps of several rows, 192 tokens at most; seconds for all of them, once."""
log = logging.getLogger("vllm.teola_plugin")
"""A child of vLLM's logger, with its handlers and level."""


class DraftsWorker:
    """Methods of the worker. Their names begin with `teola_`: vLLM refuses names that it has itself."""

    teola_warm = False
    """True once sizes of steps are prepared."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. The model runner is attached to the proposer: on a server no other code does that."""
        super().__setattr__(name, value)
        if name == "model_runner" and value is not None and not shim.attach(self):
            log.warning("teola: this vLLM's model runner has another form than expected: nothing is drafted")

    def teola_attach_drafts(self) -> bool:
        """Attach the model runner to the proposer. Return False if this vLLM has none."""
        return shim.attach(self)

    def teola_set_longest_drafts(self, longest_drafts: LongestDrafts) -> None:
        shim.proposer_of(self).set_longest_drafts(longest_drafts)

    def teola_set_step_durations(self, durations: StepDurations) -> None:
        """Set the durations, and prepare the sizes of steps that drafts may lead to, small ones first."""
        shim.proposer_of(self).set_step_durations(durations)
        if durations and not self.teola_warm:
            sizes = sorted({*_SIZES_ALONE, *islice(step_sizes(), _NUMBER_OF_SHARED_SIZES)})
            self.teola_warm = shim.warm(self, sizes, _WARM_UP_S)

    def teola_fix_draft_length(self, tokens: int | None) -> list[tuple[int, float]]:
        """Fix the length of drafts. Return the steps since the last call as (rows, seconds)."""
        steps: list[tuple[int, float]] = shim.proposer_of(self).fix_length(tokens)
        return steps

    def teola_forget_drafts(self, tenant: str | None) -> None:
        """Forget all that was learned, or what was learned from a tenant."""
        shim.proposer_of(self).forget(tenant)
