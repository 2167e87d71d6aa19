"""The proposer for a vLLM server that the user starts: `vllm serve` with two flags, see docs/drafts.md.

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
    """A `DraftProposer` if this vLLM is as expected; nothing is drafted if it is not."""

    def __init__(self, vllm_config: Any) -> None:
        self._proposer: _ForgettingProposer | None = None
        lacking = shim.lacking()
        if lacking:
            self._switch_off(f"this vLLM has no {', '.join(lacking)}")
            return
        try:
            self._proposer = _ForgettingProposer(vllm_config)
        except Exception as error:
            self._switch_off(f"{type(error).__name__}: {error}")

    def _switch_off(self, reason: str) -> None:
        self._proposer = None
        log.warning("teola: %s: nothing is drafted", reason)

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no model. vLLM calls this."""

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
            except Exception as error:  # ours, or of another version of vLLM: no answer may fail because of it
                self._switch_off(f"{type(error).__name__}: {error}")
        return [[] for _ in sampled_token_ids]


class _ForgettingProposer(DraftProposer):
    """A proposer that forgets outputs if a request says so: a server's clients have no other means."""

    def _begin(self, runner: shim.Runner, name: str, tokens: list[int]) -> Any:
        """Begin a request that is new; first forget recent outputs, of a tenant or of all, if the request says so."""
        extra = runner.request_facts(name).extra
        if extra.get(FORGET_ALL):
            self.forget(None)
        elif tenant := extra.get(FORGET_TENANT):
            self.forget(str(tenant))
        return super()._begin(runner, name, tokens)
