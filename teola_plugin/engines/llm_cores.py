"""Where vLLM's CPU build runs: on the cores it was given, and nowhere else.

By itself vLLM pins only the arithmetic. Its scheduler and its worker are two processes that wait for each other in
tight loops, on whichever cores are free, and slow down every other engine of the machine. On one list of cores the
worker therefore moves into the scheduler's process (vLLM's own `uni` executor: nothing is left to spin, a start is 7 s
shorter), and all of vLLM stays on those cores.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from teola_plugin.engines.torch_worker import parse_cores

_SPREAD = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend")


def environment(cores: str | None) -> dict[str, str]:
    """Variables that must be there before torch is imported. `cores` as in `VllmEngine`.

    vLLM's own reason against `uni` on CPUs is that nobody sets these; here somebody does.
    """
    if cores is None:
        return {}
    bind = {"VLLM_CPU_OMP_THREADS_BIND": cores}
    return bind if "|" in cores else bind | {"OMP_NUM_THREADS": str(len(parse_cores(cores)))}


def settle(engine_args: Mapping[str, Any]) -> bool:
    """Put this process and all that it starts on its cores; whether vLLM's worker can live in the scheduler's process.

    For the CPU build, before vLLM is configured.
    """
    cores = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "")
    if not cores[:1].isdigit() or "|" in cores or any(name in engine_args for name in _SPREAD):
        return False
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, parse_cores(cores))
    return os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0") == "0"


def may_fork() -> bool:
    """Whether a process that does arithmetic may be forked from this one: OpenMP's thread pool would not survive."""
    return os.environ.get("OMP_NUM_THREADS") == "1"
