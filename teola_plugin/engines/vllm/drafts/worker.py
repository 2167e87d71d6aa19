"""What vLLM's worker can be asked for by name, over `collective_rpc`: `worker_extension_cls=WORKER`."""

from __future__ import annotations

import logging
from itertools import islice
from typing import Any

from teola_plugin.engines.drafts.lengths import Lengths
from teola_plugin.engines.drafts.together import Steps, sizes
from teola_plugin.shims.vllm import drafts as shim

WORKER = f"{__name__}.DraftsWorker"
PROPOSER = "teola_plugin.engines.vllm.drafts.proposer.DraftProposer"
ATTACH = "teola_attach_drafts"
AFFORD = "teola_afford_drafts"
WEIGH = "teola_weigh_drafts"
FIX = "teola_fix_drafts"
FORGET = "teola_forget_drafts"
_ALONE = range(2, 18)
"""Tokens of a step of one row, with drafts as long as they are by default."""
_TOGETHER, _WARM_S = 14, 0.5
"""Sizes of steps of several rows, 192 tokens at most; seconds for all of them, once."""
log = logging.getLogger("vllm.teola_plugin")
"""Below vLLM's own, whose handlers and level it has."""


class DraftsWorker:
    """Methods of the worker. Names begin with `teola_`: vLLM refuses those that it has itself."""

    teola_warm = False
    """Whether sizes of steps are prepared."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Once the worker has its model runner, the proposer gets that: on a server nobody else says so."""
        super().__setattr__(name, value)
        if name == "model_runner" and value is not None and not shim.attach(self):
            log.warning("teola: this vLLM's model runner is not as expected: nothing is drafted")

    def teola_attach_drafts(self) -> bool:
        """The proposer gets the model runner. False where this vLLM has none to attach."""
        return shim.attach(self)

    def teola_afford_drafts(self, lengths: Lengths) -> None:
        shim.proposer_of(self).afford(lengths)

    def teola_weigh_drafts(self, steps: Steps) -> None:
        """Sizes of steps that drafts may lead to are prepared, small ones first."""
        shim.proposer_of(self).weigh(steps)
        if steps and not self.teola_warm:
            self.teola_warm = shim.warm(self, sorted({*_ALONE, *islice(sizes(), _TOGETHER)}), _WARM_S)

    def teola_fix_drafts(self, tokens: int | None) -> list[tuple[int, float]]:
        """Steps since the last such word: rows, seconds."""
        steps: list[tuple[int, float]] = shim.proposer_of(self).fix(tokens)
        return steps

    def teola_forget_drafts(self, tenant: str | None) -> None:
        """Forget all that was learned, or what was learned from a tenant."""
        shim.proposer_of(self).forget(tenant)
