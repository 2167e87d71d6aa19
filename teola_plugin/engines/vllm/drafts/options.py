"""How the user's settings and a request's drafts travel to the proposer, and beside what nothing is drafted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "teola_drafts"
"""Under which a request's drafts travel in `SamplingParams.extra_args`."""
ENV = "TEOLA_DRAFTS"
"""Environment variable by which the proposer gets its settings, as JSON: vLLM makes it with its own configuration."""


def ruled_out(engine_args: Mapping[str, Any]) -> str:
    """The argument of the user's own beside which nothing is drafted; empty for none."""
    taken = [name for name in ("speculative_config", "worker_extension_cls") if name in engine_args]
    return taken[0] if taken else "async_scheduling" if engine_args.get("async_scheduling") else ""
