"""The cores of vLLM's CPU build: it runs on the cores that were set, and nowhere else.

By itself vLLM pins only the arithmetic. Its scheduler and its worker are two processes that wait for each other in
tight loops, on whichever cores are free, and slow down every other engine of the machine. On one list of cores the
worker therefore moves into the scheduler's process (vLLM's own `uni` executor: nothing is left to spin, a start is 7 s
shorter), and that process stays on those cores.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from teola_plugin.engines.cores import parse_cores
from teola_plugin.shims.vllm import processes

_SPREAD = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend")


def environment(cores: str | None) -> dict[str, str]:
    """Return the variables that must be set before torch is imported. `cores` as in `VllmEngine`."""
    if cores is None:
        return {}
    return processes.bound_to(cores, 0 if "|" in cores else len(parse_cores(cores)))


@contextmanager
def starting(engine_args: Mapping[str, Any]) -> Iterator[bool]:
    """Let all that this process starts meanwhile, vLLM's CPU build, stay on the cores that were set.

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
