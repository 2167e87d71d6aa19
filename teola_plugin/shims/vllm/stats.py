"""vLLM's figures after each step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from teola_plugin.shims.vllm.versions import missing

log = logging.getLogger("teola_plugin")
NEEDED = (
    "vllm.v1.metrics.loggers:StatLoggerBase.record",
    "vllm.v1.metrics.stats:SchedulerStats.kv_cache_usage",
)


def lacking() -> tuple[str, ...]:
    """`NEEDED`, as in 0.26 to 0.32: what is not there."""
    return missing(*NEEDED)


def kv_use_loggers(tell: Callable[[float], None]) -> tuple[type, ...]:
    """Return `stat_loggers` for `AsyncLLM`: one that passes on the share (0 to 1) of the KV cache in use.

    vLLM calls the class a factory and makes the object itself. It says that `SchedulerStats` may change; as in 0.26 to
    0.32. Where names are missing there is no logger: the share stays 0, and placement goes by requests alone.
    """
    if lacking():
        return ()
    from vllm.v1.metrics.loggers import StatLoggerBase

    class KvUse(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def log_engine_initialized(self) -> None: ...

        def record(self, scheduler_stats: Any = None, *rest: Any, **more: Any) -> None:
            if scheduler_stats is not None:
                tell(float(scheduler_stats.kv_cache_usage))

    return (KvUse,)


def preemptions(output: Any) -> int:
    """Return how often a request was preempted so far, 0 if that is not known.

    `output`: a `RequestOutput`, with its `RequestStateStats`, as in 0.26 to 0.32.
    """
    return int(getattr(getattr(output, "metrics", None), "num_preemptions", 0))
