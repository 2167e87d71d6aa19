"""The proposer for a vLLM server that somebody else starts: `vllm serve` with two flags, see docs/drafts.md.

Whatever goes wrong, the server serves, without drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from teola_plugin.engines.vllm.drafts.proposer import DraftProposer
from teola_plugin.requests.draft_texts import FORGET_ALL, FORGET_TENANT
from teola_plugin.shims.vllm import drafts as shim

log = logging.getLogger("vllm.teola_plugin")


class ServerProposer:
    """A `DraftProposer` where this vLLM is as expected; nothing is drafted where it is not."""

    def __init__(self, vllm_config: Any) -> None:
        self._proposer: _OnServer | None = None
        lacking = shim.lacking()
        if lacking:
            self._off(f"this vLLM has no {', '.join(lacking)}")
            return
        try:
            self._proposer = _OnServer(vllm_config)
        except Exception as error:
            self._off(f"{type(error).__name__}: {error}")

    def _off(self, why: str) -> None:
        self._proposer = None
        log.warning("teola: %s: nothing is drafted", why)

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is none; vLLM calls it."""

    def attach(self, runner: shim.Runner) -> None:
        if self._proposer is not None:
            self._proposer.attach(runner)

    def forget(self, tenant: str | None) -> None:
        if self._proposer is not None:
            self._proposer.forget(tenant)

    def pause(self) -> int:
        """See `DraftProposer.pause`."""
        return 0 if self._proposer is None else self._proposer.pause()

    def resume(self, left: int) -> None:
        """See `DraftProposer.resume`."""
        if self._proposer is not None:
            self._proposer.resume(left)

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: Any
    ) -> list[list[int]]:
        """See `DraftProposer.propose`."""
        if self._proposer is not None:
            try:
                return self._proposer.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            except Exception as error:  # ours, or a vLLM of another form: nobody's answer is to fail of it
                self._off(f"{type(error).__name__}: {error}")
        return [[] for _ in sampled_token_ids]


class _OnServer(DraftProposer):
    """Some requests ask that outputs be forgotten: a server has no other way that is open to its clients."""

    def _begin(self, runner: shim.Runner, name: str, tokens: list[int]) -> Any:
        extra = runner.request_facts(name).extra
        if extra.get(FORGET_ALL):
            self.forget(None)
        elif tenant := extra.get(FORGET_TENANT):
            self.forget(str(tenant))
        return super()._begin(runner, name, tokens)
