"""What vLLM asks of the cards it runs on, and how it is told which they are and how much it may take."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from teola_plugin.engines.devices.budget import Demand, Grant
from teola_plugin.engines.devices.cards import VISIBLE, visible_as
from teola_plugin.engines.devices.weights import weight_bytes
from teola_plugin.engines.vllm.args import stored_as_float32

_SHARDS = ("tensor_parallel_size", "pipeline_parallel_size")
_COPIES = ("data_parallel_size",)


def demand_of(engine: str, model: str, engine_args: Mapping[str, Any], cores: str | None) -> Demand:
    """`cores`: those of the CPU build, which needs no card."""
    if cores is not None:
        return Demand(engine, "cpu", fills=True)
    said = engine_args.get("gpu_memory_utilization")
    return Demand(
        engine,
        cards=card_count(engine_args),
        share=None if said is None else float(said),
        needs=_least(model, engine_args),
        fills=True,
    )


def card_count(engine_args: Mapping[str, Any]) -> int:
    """GPUs that vLLM takes on this machine."""
    return prod(int(engine_args.get(name) or 1) for name in (*_SHARDS, *_COPIES))


def _least(model: str, engine_args: Mapping[str, Any]) -> int:
    """Bytes of a card: its part of the weights, and the KV cache where its size was said."""
    shards = prod(int(engine_args.get(name) or 1) for name in _SHARDS)
    weights = 0 if engine_args.get("cpu_offload_gb") else (weight_bytes(model) or 0)
    if stored_as_float32(model) and engine_args.get("dtype") != "float32":
        weights //= 2  # vLLM rounds them as it loads
    return weights // shards + int(engine_args.get("kv_cache_memory_bytes") or 0)


def budgeted(engine_args: Mapping[str, Any], given: Grant | None) -> dict[str, Any]:
    """The arguments, with the share that was granted where none was said."""
    share = {} if given is None or given.share is None else {"gpu_memory_utilization": given.share}
    return share | dict(engine_args)


def environment(given: Grant | None) -> dict[str, str]:
    """vLLM takes the first cards that it sees: others are the only ones that it gets to see."""
    indices = () if given is None else given.indices
    return {} if indices == tuple(range(len(indices))) else {VISIBLE: ",".join(visible_as(indices))}
