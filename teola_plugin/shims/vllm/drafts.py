"""Where drafts meet vLLM: the proposer's settings, the model runner, and what the CPU build gets wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from teola_plugin.shims.vllm.versions import missing

log = logging.getLogger("vllm.teola_plugin")

NEEDED = (
    "vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer",
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc",
)
"""Without these nothing is drafted."""
_ATTACHED = "teola_attached"
"""Attribute of a model runner whose proposer knows it."""


def lacking() -> tuple[str, ...]:
    """Return the names of `NEEDED` that the installed vLLM lacks: custom proposers came with 0.22, PR 39487."""
    return missing(*NEEDED)


def arguments(tokens: int, proposer: str, worker: str) -> dict[str, Any]:
    """Return the arguments of `AsyncEngineArgs` for a proposer of ours.

    They set the most tokens that it drafts, methods of the worker, and counts of what was accepted
    (`per_request_spec_decode_metrics`; without it, as before 0.31, there are none).
    """
    from vllm import AsyncEngineArgs

    metrics = {"per_request_spec_decode_metrics": "summary"}
    return {
        "speculative_config": {"method": "custom_class", "model": proposer, "num_speculative_tokens": tokens},
        "worker_extension_cls": worker,
        **{name: value for name, value in metrics.items() if name in AsyncEngineArgs.__dataclass_fields__},
    }


def verified(output: Any) -> tuple[int, int]:
    """Return the tokens drafted and accepted for a request, of its last `CompletionOutput`, else (0, 0)."""
    metrics = getattr(output, "spec_decode_metrics", None)
    if metrics is None:
        return 0, 0
    return int(metrics.num_draft_tokens), sum(accepted * steps for accepted, steps in enumerate(metrics.histogram))


def max_draft_tokens(vllm_config: Any) -> int:
    """Return the most tokens that may be drafted in a step: `num_speculative_tokens`, as in vLLM 0.26 to 0.32."""
    return int(vllm_config.speculative_config.num_speculative_tokens)


def longest(vllm_config: Any) -> int:
    """`max_model_len`: no row has more tokens."""
    return int(vllm_config.model_config.max_model_len)


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The parameters of a request that decide whether and what is drafted for it."""

    greedy: bool
    prompt: int
    """Tokens of its prompt."""
    extra: Mapping[str, Any]
    """What came with it: `SamplingParams.extra_args`, which is `vllm_xargs` of a request over HTTP."""
    ends: int | None = None
    """Tokens that it has at most in the end, those of its prompt among them; None where nobody says so."""


class Runner:
    """A view of vLLM's model runner for a proposer: `input_batch.req_ids` and `requests`, as in 0.26 to 0.32."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def names(self) -> Sequence[str]:
        """Return the names of the requests in each row, as they are when drafts are asked for."""
        names: Sequence[str] = self._runner.input_batch.req_ids
        return names

    def runs(self, name: str) -> bool:
        """Return True for a request that runs, also while it waits, preempted."""
        return name in self._runner.requests

    def request_facts(self, name: str) -> RequestFacts:
        """Return the parameters of a request; of a sampled one, which has no drafts, if it is unknown."""
        state = self._runner.requests.get(name)
        params = None if state is None else state.sampling_params
        if params is None:
            return RequestFacts(False, 0, {})
        greedy, prompt = params.temperature < 1e-5, len(state.prompt_token_ids or ())
        max_tokens = getattr(params, "max_tokens", None)
        ends = None if max_tokens is None else prompt + max_tokens
        return RequestFacts(greedy, prompt, params.extra_args or {}, ends)


def proposer_of(worker: Any) -> Any:
    """`model_runner.drafter` of a worker, as in 0.26 to 0.32. Raises AttributeError without it."""
    return worker.model_runner.drafter


def attach(worker: Any) -> bool:
    """Give the proposer the runner that calls it. Return False where the runner is not as expected.

    Then nothing is drafted. The second time with the same runner nothing is done: its steps would be counted twice.
    """
    runner = worker.model_runner
    needed_attributes = ("requests", "input_batch", "drafter")
    if not all(hasattr(runner, name) for name in needed_attributes) or not hasattr(runner.input_batch, "req_ids"):
        return False
    if not getattr(runner, _ATTACHED, False):
        runner.drafter.attach(Runner(runner))
        spare(runner)
        setattr(runner, _ATTACHED, True)
    return True


def warm(worker: Any, sizes: Iterable[int], seconds: float) -> bool:
    """Prepare steps of these numbers of tokens, one after the other, for so many seconds.

    vLLM's CPU build does that when a
    size first comes (`_dummy_run` of the model runner, `compute_logits` of its model, as in 0.26 to 0.32). Nothing
    elsewhere, nor where a model has several workers, which have to do the same: one may run out of time first. False
    while requests run: then it is still to be done.
    """
    from vllm.platforms import current_platform

    runner, until = worker.model_runner, time.perf_counter() + seconds
    max_tokens = getattr(getattr(runner, "scheduler_config", None), "max_num_batched_tokens", 0)
    workers = getattr(getattr(runner, "parallel_config", None), "world_size_across_dp", 0)
    if workers != 1 or not current_platform.is_cpu() or not hasattr(runner, "_dummy_run"):
        return True
    if getattr(runner, "requests", True):
        return False
    for size in sizes:
        if size > max_tokens or time.perf_counter() > until:
            break
        try:
            hidden, _ = runner._dummy_run(size)
            runner.model.compute_logits(hidden[:size])  # each drafted token's are needed, not the last ones alone
        except Exception as error:  # whatever a model's runner minds: steps are slower when they first come, as ever
            log.debug("teola: steps are not prepared (%s)", error)
            break
    return True


def encoder(vllm_config: Any) -> Callable[[str], Sequence[int]]:
    """The tokenizer of the model, without special tokens: `cached_tokenizer_from_config`, as in 0.26 to 0.32. In one
    process with the engine it is that of its grammars, elsewhere it is loaded once more. Raises what that raises,
    `ValueError` where there is to be none."""
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
    if tokenizer is None:
        raise ValueError("vLLM runs without a tokenizer")
    fast = getattr(tokenizer, "backend_tokenizer", None)  # a third of the time
    if fast is not None:
        return lambda text: list(fast.encode(text, add_special_tokens=False).ids)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def mend() -> None:
    """Correct vLLM's errors beside drafts, in this process: `rejection_sampler`'s functions, as in 0.26 to 0.32."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.apply_sampling_constraints = _unless_empty(rejection_sampler.apply_sampling_constraints)
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = _expanded


def _unless_empty(constrain: Any) -> Any:
    """`apply_sampling_constraints` where a step has drafted rows without a single token (a grammar refused them all)
    and a sampled row with `top_k`: vLLM takes the maximum of nothing, and its engine dies. There is nothing to do."""

    def constrained(logits: Any, cu_num_draft_tokens: Any, sampling_metadata: Any) -> Any:
        return constrain(logits, cu_num_draft_tokens, sampling_metadata) if logits.shape[0] else logits

    return constrained


def _expanded(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """`expand_batch_to_tokens` by torch: [batch] to [tokens], each value as often as its row has tokens, which
    `cu_num_tokens` counts up.

    `cpu_triton_utils._expand_kernel_impl` writes into a copy where a tensor is not int64 (0.26 to 0.32): temperatures
    of a batch in which a sampled request stands beside drafted ones are then what was in memory, and greedy rows are
    sampled. Equal to the original where that is right.
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    repeated = torch.repeat_interleave(x, counts.to(torch.int64), output_size=num_tokens)
    return (
        torch.where(repeated == replace_from, torch.full_like(repeated, replace_to), repeated)
        if replace_from != replace_to
        else repeated
    )


# ------------------------------------------------------------ steps without drafts
#
# A step in which no token is drafted costs what it costs in vLLM without speculation. With speculation vLLM goes
# through its rejection sampler in every step, prepares more, asks for drafts, and tells its scheduler of each row that
# there are none: of a small model a tenth of the time. Beside the weights, which go through the caches in each step,
# little code is costly: on one core a call that is made once in a step takes five microseconds.


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
        runner._sample = _sample_without_metadata(runner._sample)
    if hasattr(runner, "take_draft_token_ids"):
        runner.take_draft_token_ids = _none_if_all_empty(runner.take_draft_token_ids)


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
        """Run a step of the model, as without speculation if the scheduler sends no drafted token. Replaces
        `execute_model`."""
        self._asks = not self._left or not self._continues_pause(scheduler_output.num_scheduled_tokens.keys())
        if not scheduler_output.scheduled_spec_decode_tokens:
            self._runner.speculative_config = None
        output = self._execute(scheduler_output, *more, **named)
        if output is not None:  # nothing is sampled
            self._runner.speculative_config = self._speculation
        return output

    def sample(self, grammar_output: Any) -> Any:
        """Sample the step's tokens, then let the proposer draft for the next one. Replaces `sample_tokens`."""
        plain = self._runner.speculative_config is None
        output = self._sample(grammar_output)
        self._runner.speculative_config = self._speculation
        if self._asks:
            if plain:
                self._ask(output)
            if left := self._proposer.pause():
                self._left, self._names = left, frozenset(self._runner.input_batch.req_ids)
        return output

    def _continues_pause(self, names: Set[str]) -> bool:
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
        UniProcExecutor.take_draft_token_ids = _take_only_if_drafted(take)


def _take_only_if_drafted(take: Any) -> Any:
    """Wrap the executor's `take_draft_token_ids`: return None without asking the worker if nothing was drafted."""

    def take_if_drafted(executor: Any) -> Any:
        """Return the drafts of the last step; None, without asking the worker, if the model runner has none."""
        try:
            drafted = executor.driver_worker.worker.model_runner._draft_token_req_ids
        except AttributeError:  # another version's
            drafted = True
        return take(executor) if drafted else None

    take_if_drafted.__wrapped__ = take  # type: ignore[attr-defined]
    return take_if_drafted


def _sample_without_metadata(sample: Any) -> Any:
    """`_sample(logits, spec_decode_metadata)`, as without metadata where it has no drafted token."""

    def sampled(logits: Any, spec_decode_metadata: Any) -> Any:
        none = spec_decode_metadata is None or not any(spec_decode_metadata.num_draft_tokens)
        return sample(logits, None if none else spec_decode_metadata)

    return sampled


def _none_if_all_empty(take: Any) -> Any:
    """`take_draft_token_ids()`: None where all drafts are empty. The scheduler would take from each request the drafts
    that it has; a request that has run has none any more (`Scheduler.schedule` takes them with it)."""

    def take_unless_empty() -> Any:
        drafts = take()
        return drafts if drafts is not None and any(map(len, drafts.draft_token_ids)) else None

    return take_unless_empty
