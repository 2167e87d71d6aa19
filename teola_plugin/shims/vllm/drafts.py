"""Where drafts meet vLLM: the proposer's settings, the model runner, and what the CPU build gets wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.shims.vllm.undrafted import spare
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
    """Those of `NEEDED` that the installed vLLM does not have: custom proposers came with 0.22, PR 39487."""
    return missing(*NEEDED)


def arguments(tokens: int, proposer: str, worker: str) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs`: a proposer of ours, at most so many tokens, methods of the worker, and counts of
    what was accepted (`per_request_spec_decode_metrics`; without it, as before 0.31, nobody tells)."""
    from vllm import AsyncEngineArgs

    told = {"per_request_spec_decode_metrics": "summary"}
    return {
        "speculative_config": {"method": "custom_class", "model": proposer, "num_speculative_tokens": tokens},
        "worker_extension_cls": worker,
        **{name: value for name, value in told.items() if name in AsyncEngineArgs.__dataclass_fields__},
    }


def verified(output: Any) -> tuple[int, int]:
    """Tokens drafted and accepted for a request, of its last `CompletionOutput`; (0, 0) where nobody tells."""
    told = getattr(output, "spec_decode_metrics", None)
    if told is None:
        return 0, 0
    return int(told.num_draft_tokens), sum(accepted * steps for accepted, steps in enumerate(told.histogram))


def drafted_tokens(vllm_config: Any) -> int:
    """`num_speculative_tokens`, as in 0.26 to 0.32."""
    return int(vllm_config.speculative_config.num_speculative_tokens)


def longest(vllm_config: Any) -> int:
    """`max_model_len`: no row has more tokens."""
    return int(vllm_config.model_config.max_model_len)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request was made with."""

    greedy: bool
    prompt: int
    """Tokens of its prompt."""
    extra: Mapping[str, Any]
    """What came with it: `SamplingParams.extra_args`, which is `vllm_xargs` of a request over HTTP."""
    ends: int | None = None
    """Tokens that it has at most in the end, those of its prompt among them; None where nobody says so."""


class Runner:
    """What of vLLM's model runner a proposer needs: `input_batch.req_ids` and `requests`, as in 0.26 to 0.32."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def names(self) -> Sequence[str]:
        """Of the requests in each row, as they are when drafts are asked for."""
        names: Sequence[str] = self._runner.input_batch.req_ids
        return names

    def runs(self, name: str) -> bool:
        """Also where it waits, preempted."""
        return name in self._runner.requests

    def asked(self, name: str) -> Asked:
        """Sampled, and with logprobs, nothing is drafted. An unknown one is taken for sampled."""
        state = self._runner.requests.get(name)
        params = None if state is None else state.sampling_params
        if params is None:
            return Asked(False, 0, {})
        greedy, prompt = params.temperature < 1e-5, len(state.prompt_token_ids or ())
        most = getattr(params, "max_tokens", None)
        return Asked(greedy, prompt, params.extra_args or {}, None if most is None else prompt + most)


def proposer_of(worker: Any) -> Any:
    """`model_runner.drafter` of a worker, as in 0.26 to 0.32. Raises AttributeError without it."""
    return worker.model_runner.drafter


def attach(worker: Any) -> bool:
    """The proposer gets the runner that asks it. False where the runner is not as expected: then nothing is drafted.
    The second time with the same runner nothing is done: its steps would be counted twice."""
    runner = worker.model_runner
    wanted = ("requests", "input_batch", "drafter")
    if not all(hasattr(runner, name) for name in wanted) or not hasattr(runner.input_batch, "req_ids"):
        return False
    if not getattr(runner, _ATTACHED, False):
        runner.drafter.attach(Runner(runner))
        spare(runner)
        setattr(runner, _ATTACHED, True)
    return True


def warm(worker: Any, sizes: Iterable[int], seconds: float) -> bool:
    """Steps of so many tokens are prepared, one size after the other, for so long: vLLM's CPU build does that when a
    size first comes (`_dummy_run` of the model runner, `compute_logits` of its model, as in 0.26 to 0.32). Nothing
    elsewhere, nor where a model has several workers, which have to do the same: one may run out of time first. False
    while requests run: then it is still to be done.
    """
    from vllm.platforms import current_platform

    runner, until = worker.model_runner, time.perf_counter() + seconds
    most = getattr(getattr(runner, "scheduler_config", None), "max_num_batched_tokens", 0)
    workers = getattr(getattr(runner, "parallel_config", None), "world_size_across_dp", 0)
    if workers != 1 or not current_platform.is_cpu() or not hasattr(runner, "_dummy_run"):
        return True
    if getattr(runner, "requests", True):
        return False
    for size in sizes:
        if size > most or time.perf_counter() > until:
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
    """What vLLM gets wrong beside drafts, in this process: `rejection_sampler`'s functions, as in 0.26 to 0.32."""
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
    made = torch.repeat_interleave(x, counts.to(torch.int64), output_size=num_tokens)
    return (
        torch.where(made == replace_from, torch.full_like(made, replace_to), made)
        if replace_from != replace_to
        else made
    )
