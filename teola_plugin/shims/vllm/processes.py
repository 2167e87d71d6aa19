"""Which processes vLLM makes, and on which cores: by variables of the environment that it reads where it needs them."""

from __future__ import annotations

import os
from pathlib import Path

BIND = "VLLM_CPU_OMP_THREADS_BIND"
"""Documented: the cores of the CPU build's arithmetic."""
_SOCKETS = "VLLM_RPC_BASE_PATH"
_SEPARATE = "VLLM_ENABLE_V1_MULTIPROCESSING"
_START = "VLLM_WORKER_MULTIPROC_METHOD"


def lacking() -> tuple[str, ...]:
    """Return the variables set here that the installed vLLM (0.26 to 0.32) does not read.

    The start of an engine on CPUs warns of them: vLLM ignores unknown variables, and decides by itself how many
    processes it makes and on which cores. Where the table itself is gone, nothing is known to be missing.
    """
    try:
        from vllm.envs import environment_variables
    except ImportError:
        return ()
    return tuple(name for name in (BIND, _SOCKETS, _SEPARATE, _START) if name not in environment_variables)


def sockets_in(folder: str | Path) -> dict[str, str]:
    """`VLLM_RPC_BASE_PATH`: where vLLM's processes meet. As in 0.26 to 0.32; without it, in the system's temporary
    folder."""
    return {_SOCKETS: str(folder)}


def socket_folder() -> str:
    """Return the folder that `sockets_in` set for this process. Raise KeyError where nobody did."""
    return os.environ[_SOCKETS]


def bound_to(cores: str, count: int) -> dict[str, str]:
    """The CPU build's arithmetic on these cores, in `count` threads (0: as vLLM decides).

    As in 0.26 to 0.32; without it, on any core. vLLM's own reason against `worker_in_core` is that nobody sets both.
    """
    return {BIND: cores} | ({"OMP_NUM_THREADS": str(count)} if count else {})


def in_one() -> dict[str, str]:
    """`VLLM_ENABLE_V1_MULTIPROCESSING=0`, with which `vllm.platforms.cpu` leaves the executor `uni` alone: the worker
    lives in the scheduler's process. As in 0.26 to 0.32; otherwise it has a process of its own, which is slower on one
    core and changes no answer."""
    return {_SEPARATE: "0"}


def worker_in_core() -> bool:
    """Set the variables of `in_one` in this process, unless the user has set them.

    Return True if vLLM's worker is going to live in the process of the engine core.
    """
    for name, value in in_one().items():
        os.environ.setdefault(name, value)
    return os.environ[_SEPARATE] == "0"


def fork_the_core() -> None:
    """`VLLM_WORKER_MULTIPROC_METHOD=fork` for the EngineCore, which then needs no import of vLLM: a start is 6 s
    shorter.

    On CUDA vLLM does so by itself. `vllm.platforms.cpu` of 0.26 to 0.32 sets `spawn` when the engine is configured, for
    the worker's sake (preloaded libraries, OpenMP's variables); so this is called between that and the start, and the
    core itself has `spawn` again. Where vLLM no longer reads the variable, it starts as it does by itself.
    """
    os.environ[_START] = "fork"
    os.register_at_fork(after_in_child=lambda: os.environ.update({_START: "spawn"}))
