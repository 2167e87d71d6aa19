"""Steps in which no token is drafted cost what they cost in vLLM without speculation.

With it vLLM goes through its rejection sampler in every step, a twentieth of the time of a small model's, and asks for
drafts and tells its scheduler of each row that there are none. Beside a model's weights, which go through the caches in
each step, little code is costly: on one core a call that is made once in a step takes five microseconds. So where
it is known that some steps draft nothing, the runner is as without speculation until they are over.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any


def spare(runner: Any) -> None:
    """Hooks of a model runner: `_sample`, `take_draft_token_ids` and, on the CPU, `_prepare_inputs`, `_preprocess`,
    `execute_model` and `sample_tokens`, as in 0.32. Where the names are not there they are as vLLM has them."""
    from vllm.platforms import current_platform

    if getattr(runner, "use_async_scheduling", True):
        return
    hooks = dict[str, Any]()
    if hasattr(runner, "_sample"):
        hooks["_sample"] = _plainly(runner._sample)
    if hasattr(runner, "take_draft_token_ids"):
        hooks["take_draft_token_ids"] = _unless_none(runner.take_draft_token_ids)
    recurrent = getattr(getattr(runner, "model_config", None), "is_hybrid", True)  # its steps differ by their drafts
    if current_platform.is_cpu() and not recurrent and hasattr(runner, "_prepare_inputs"):
        for name in ("_prepare_inputs", "_preprocess"):
            if hasattr(runner, name):
                hooks[name] = _undrafted(runner, getattr(runner, name))
        transfers = getattr(getattr(runner, "vllm_config", None), "kv_transfer_config", True)
        if transfers is None and hasattr(runner, "sample_tokens"):  # a connector is finished behind the drafts
            LeftOut(runner, hooks)
            _ask_only_for_drafts()
    vars(runner).update(hooks)


class LeftOut:
    """Steps that the proposer leaves out. While they last, only `execute_model` is hooked, and looks whether the
    requests are still those for which it said so."""

    def __init__(self, runner: Any, hooks: dict[str, Any]) -> None:
        """`hooks`: those beside these ones, which are added."""
        self._runner, self._hooks, self._proposer = runner, hooks, runner.drafter
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        self._unhooked = {name: getattr(runner, name) for name in (*hooks, "sample_tokens")}
        self._speculation = runner.speculative_config
        self._names: Set[str] | None = None
        """Of the requests in those steps; None while there are no such steps."""
        self._left = 0
        hooks["sample_tokens"] = self.sample
        runner.execute_model = self.execute

    def execute(self, scheduler_output: Any, *more: Any, **named: Any) -> Any:
        if self._names is not None:
            same = scheduler_output.num_scheduled_tokens.keys() == self._names
            if self._left and same and not scheduler_output.scheduled_spec_decode_tokens:
                self._left -= 1
            else:
                self._end()
        return self._execute(scheduler_output, *more, **named)

    def sample(self, grammar_output: Any) -> Any:
        """Of a step of which it was not known; the proposer is asked in it, and says what comes."""
        if self._proposer.leaves_out():
            return _without_speculation(self._runner, self._sample, grammar_output)
        output = self._sample(grammar_output)
        self._left = self._proposer.pause()
        if self._left:
            self._begin()
        return output

    def _begin(self) -> None:
        self._names = frozenset(self._runner.input_batch.req_ids)
        self._runner.speculative_config = None
        vars(self._runner).update(self._unhooked)

    def _end(self) -> None:
        self._names = None
        self._runner.speculative_config = self._speculation
        vars(self._runner).update(self._hooks)
        self._proposer.resume(self._left)


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


def _without_speculation(runner: Any, step: Any, *args: Any, **named: Any) -> Any:
    """What a part of a step does where the runner has no `speculative_config`. No context manager: it is called some
    times in each step."""
    configured, runner.speculative_config = runner.speculative_config, None
    try:
        return step(*args, **named)
    finally:
        runner.speculative_config = configured


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


def _undrafted(runner: Any, prepare: Any) -> Any:
    """`_prepare_inputs(scheduler_output, ...)` or `_preprocess`, as a runner's without `speculative_config` where no
    token is drafted: of each request the last token's logits count, and no token is to be filled in."""

    def prepared(scheduler_output: Any, *more: Any, **named: Any) -> Any:
        if scheduler_output.scheduled_spec_decode_tokens:
            return prepare(scheduler_output, *more, **named)
        return _without_speculation(runner, prepare, scheduler_output, *more, **named)

    return prepared
