"""Steps in which no token is drafted cost what they cost in vLLM without speculation.

With it vLLM goes through its rejection sampler in every step, prepares more, asks for drafts, and tells its scheduler
of each row that there are none: of a small model a tenth of the time. Beside the weights, which go through the caches
in each step, little code is costly: on one core a call that is made once in a step takes five microseconds.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any


def spare(runner: Any) -> None:
    """Hooks of a model runner: `take_draft_token_ids`, of its executor, too, and on the CPU `execute_model` and
    `sample_tokens`, elsewhere `_sample`, as in 0.32. Where the names are not there they are as vLLM has them."""
    from vllm.platforms import current_platform

    if getattr(runner, "use_async_scheduling", True):
        return
    recurrent = getattr(getattr(runner, "model_config", None), "is_hybrid", True)  # its steps differ by their drafts
    if current_platform.is_cpu() and not recurrent and all(hasattr(runner, name) for name in _STEP):
        PlainSteps(runner)
        _ask_only_for_drafts()
    elif hasattr(runner, "_sample"):
        runner._sample = _plainly(runner._sample)
    if hasattr(runner, "take_draft_token_ids"):
        runner.take_draft_token_ids = _unless_none(runner.take_draft_token_ids)


_STEP = ("execute_model", "sample_tokens", "_draft_token_ids", "_draft_token_req_ids")


class PlainSteps:
    """Steps without a drafted token are those of a runner without `speculative_config`. The proposer is asked behind
    them, as vLLM asks a `custom_class` behind those with drafts, unless it has said that it need not be."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._proposer, self._speculation = runner, runner.drafter, runner.speculative_config
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        self._left, self._names = 0, frozenset[str]()
        """Steps of these requests in which it need not be."""
        self._asks = True
        """Whether it is in this one."""
        runner.execute_model, runner.sample_tokens = self.execute, self.sample

    def execute(self, scheduler_output: Any, *more: Any, **named: Any) -> Any:
        self._asks = not self._left or not self._goes_on(scheduler_output.num_scheduled_tokens.keys())
        if not scheduler_output.scheduled_spec_decode_tokens:
            self._runner.speculative_config = None
        output = self._execute(scheduler_output, *more, **named)
        if output is not None:  # nothing is sampled
            self._runner.speculative_config = self._speculation
        return output

    def sample(self, grammar_output: Any) -> Any:
        plain = self._runner.speculative_config is None
        output = self._sample(grammar_output)
        self._runner.speculative_config = self._speculation
        if self._asks:
            if plain:
                self._ask(output)
            if left := self._proposer.pause():
                self._left, self._names = left, frozenset(self._runner.input_batch.req_ids)
        return output

    def _goes_on(self, names: Set[str]) -> bool:
        """Counts a step that is left out, or says that the others are not made."""
        if names == self._names:
            self._left -= 1
            return True
        left, self._left = self._left, 0
        self._proposer.resume(left)
        return False

    def _ask(self, output: Any) -> None:
        """`propose_draft_token_ids` of a runner, for a `custom_class`."""
        batch, written = self._runner.input_batch, getattr(output, "sampled_token_ids", ())
        if len(written) == len(batch.req_ids) > 0:
            drafts = self._proposer.propose(written, batch.num_tokens_no_spec, batch.token_ids_cpu)
            if any(drafts):
                self._runner._draft_token_ids, self._runner._draft_token_req_ids = drafts, batch.req_ids.copy()


def _ask_only_for_drafts() -> None:
    """`UniProcExecutor.take_draft_token_ids`, which asks the worker by name in each step, where `_draft_token_req_ids`
    of its model runner says that there are some: the runner looks there itself, as in 0.32."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    take = getattr(UniProcExecutor, "take_draft_token_ids", None)
    if take is not None and not hasattr(take, "__wrapped__"):
        UniProcExecutor.take_draft_token_ids = _if_there_are(take)


def _if_there_are(take: Any) -> Any:
    def taken(executor: Any) -> Any:
        try:
            drafted = executor.driver_worker.worker.model_runner._draft_token_req_ids
        except AttributeError:  # another version's
            drafted = True
        return take(executor) if drafted else None

    taken.__wrapped__ = take  # type: ignore[attr-defined]
    return taken


def _plainly(sample: Any) -> Any:
    """`_sample(logits, spec_decode_metadata)`, as without metadata where it has no drafted token."""

    def sampled(logits: Any, spec_decode_metadata: Any) -> Any:
        none = spec_decode_metadata is None or not any(spec_decode_metadata.num_draft_tokens)
        return sample(logits, None if none else spec_decode_metadata)

    return sampled


def _unless_none(take: Any) -> Any:
    """`take_draft_token_ids()`: None where all drafts are empty. The scheduler would take from each request the drafts
    that it has; a request that has run has none any more (`Scheduler.schedule` takes them with it)."""

    def taken() -> Any:
        found = take()
        return found if found is not None and any(map(len, found.draft_token_ids)) else None

    return taken
