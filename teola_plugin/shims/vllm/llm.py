"""Starting vLLM's asynchronous engine from its own configuration, and reading what was decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.errors import EngineUnavailable
from teola_plugin.shims.vllm.versions import BEYOND, OLDEST, missing

NEEDED = (
    "vllm.engine.arg_utils:AsyncEngineArgs.create_engine_config",
    "vllm.v1.engine.async_llm:AsyncLLM.from_vllm_config",
    "vllm.v1.engine.async_llm:AsyncLLM.errored",
    "vllm.v1.engine.async_llm:AsyncLLM.get_tokenizer",
    "vllm.v1.engine.async_llm:AsyncLLM.reset_prefix_cache",
    "vllm.usage.usage_lib:UsageContext.ENGINE_CONTEXT",
    "vllm.platforms:current_platform.is_cpu",
    "vllm.config:StructuredOutputsConfig",
)
"""Without these no engine can be made."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that vLLM decided for a model: sizes in tokens, requests and blocks."""

    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    block_size: int
    blocks: int
    """Blocks of the KV cache; 0 before the engine has measured its memory."""
    dtype: str


@dataclass(frozen=True, slots=True)
class Platform:
    cpu: bool
    device: str
    """`cpu`, `cuda`, ..."""
    gpu: str = ""
    """The card's name, on CUDA."""


def check_needed(engine: str) -> None:
    """`NEEDED`, as in vLLM 0.26 to 0.32. Raises `EngineUnavailable` with the names that are missing."""
    if lacking := missing(*NEEDED):
        version_range = f">={OLDEST[0]}.{OLDEST[1]},<{BEYOND[0]}.{BEYOND[1]}"
        raise EngineUnavailable(
            f"the installed vLLM has no {', '.join(lacking)}.", engine=engine, hint=f"pip install 'vllm{version_range}'"
        )


def platform() -> Platform:
    """`vllm.platforms.current_platform`, as in 0.26 to 0.32; `check_needed` refuses a vLLM without it."""
    from vllm.platforms import current_platform

    gpu = str(current_platform.get_device_name()) if current_platform.is_cuda() else ""
    return Platform(bool(current_platform.is_cpu()), str(current_platform.device_type), gpu)


def engine_config(args: Mapping[str, Any]) -> Any:
    """vLLM's `VllmConfig` of arguments of `AsyncEngineArgs`.

    `AsyncEngineArgs.create_engine_config` takes no dictionary for `structured_outputs_config` in 0.26 to 0.32, as it
    does for other configurations: `vllm.config.StructuredOutputsConfig` is made of it here. `check_needed` refuses a
    vLLM without these names.
    """
    from vllm import AsyncEngineArgs
    from vllm.config import StructuredOutputsConfig
    from vllm.usage.usage_lib import UsageContext

    arguments = dict(args)
    if isinstance(structured := arguments.get("structured_outputs_config"), dict):
        arguments["structured_outputs_config"] = StructuredOutputsConfig(**structured)
    return AsyncEngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)


def make(config: Any, stat_loggers: Sequence[Any]) -> Any:
    """An `AsyncLLM` of a configuration: `AsyncLLM.from_vllm_config` of `vllm.v1.engine.async_llm`, as in 0.26 to 0.32.

    vLLM's API makes an engine of arguments only, which leaves no moment between its configuration and its processes.
    `check_needed` refuses a vLLM without it.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_vllm_config(config, stat_loggers=list(stat_loggers), disable_log_stats=True)


def limits(config: Any) -> Limits:
    """Fields of `VllmConfig`: `model_config`, `scheduler_config`, `cache_config`, as in 0.26 to 0.32.

    Raises AttributeError where one is gone: an engine whose limits nobody knows is not started.
    """
    return Limits(
        max_model_len=int(config.model_config.max_model_len),
        max_num_seqs=int(config.scheduler_config.max_num_seqs),
        max_batched_tokens=int(config.scheduler_config.max_num_batched_tokens),
        block_size=int(config.cache_config.block_size),
        blocks=int(config.cache_config.num_gpu_blocks or 0),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
    )


def limits_of(llm: Any) -> Limits:
    """Return the limits of a running engine: `AsyncLLM.vllm_config`, as in 0.26 to 0.32.

    Raise AttributeError where it is gone.
    """
    return limits(llm.vllm_config)


def token_prompt(ids: list[int], salt: str) -> dict[str, Any]:
    """A prompt as vLLM's renderer hands it on: `vllm.inputs.engine.TokensInput`, a dictionary of type `token`.

    As in 0.26 to 0.32; without the type vLLM would take it for a prompt of a caller, and log that those are deprecated.
    `prompt_token_ids` and `cache_salt` are API. `salt` keeps the prefixes of one tenant apart from those of others.
    """
    prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": ids}
    return prompt | {"cache_salt": salt} if salt else prompt
