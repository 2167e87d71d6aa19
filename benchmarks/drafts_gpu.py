"""Drafts on a CUDA machine: whether they pay beside vLLM's asynchronous scheduling, and what half precision changes.

What `benchmarks.drafts` asks of the bundled model, or of another one, in float32 and in bfloat16: without drafts, where
vLLM schedules asynchronously, and with them, where it cannot. In float32 outputs are the same; in bfloat16 some may
differ where two tokens are as good as equal: `plain differ` says how many do without drafts, by the batch alone.

    python -m benchmarks.drafts_gpu --json

With `--cpu` it runs on vLLM's CPU build instead: a trial, whose times say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from typing import Any

from benchmarks.common import arguments, environment, report
from benchmarks.drafts import at_load, copied, started
from benchmarks.gpu_check import hardware
from teola_plugin.engines.model_cache import llm_folder

TYPES = ("float32", "bfloat16")


async def run(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    device, cores = hardware(options.cpu), "0" if options.cpu else None
    for dtype in TYPES:
        if options.only not in dtype:
            continue
        args = {"dtype": dtype, "max_model_len": 2048, "kv_cache_memory_bytes": (256 << 20) if options.cpu else 4 << 30}
        pairs = partial(started, options.model or str(llm_folder()), cores, args, drafts={})
        measured = await copied(pairs, options.repeats)
        alone, plain = measured.alone, sum(row["plain differ"] for row in measured.load)
        found[dtype] = {
            "speedup_lookup": alone.speedup(["answer", "refine"], "lookup"),
            "speedup_graph": alone.speedup(["refine"], "graph"),
            "worst_at_load": min(at_load(measured).values()),
            "drafted_differ": measured.differ - plain,
            "plain_differ": plain,
            "cases": [alone.row(kind) for kind in measured.kinds],
            "load": measured.load,
        }
    equal = "float32" not in found or not found["float32"]["drafted_differ"]
    facts = {"model": options.model or "bundled", "repeats": options.repeats, "environment": environment()}
    return {"benchmark": "drafts_gpu", "hardware": device, "float32_equal": equal, "types": found, **facts}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="pairs of engines of each model")
    parser.add_argument("--model", default="", help="a path or hub id (default: the bundled one)")
    parser.add_argument("--only", default="", help="only types whose name contains this")
    parser.add_argument("--cpu", action="store_true", help="on vLLM's CPU build")


def rows(outcome: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": name, **{key: value for key, value in one.items() if not isinstance(value, list)}}
        for name, one in outcome["types"].items()
    ]


if __name__ == "__main__":
    wanted = arguments("Drafts on a CUDA machine, beside asynchronous scheduling.", _options)
    result = asyncio.run(run(wanted))
    report(result, wanted, "with drafts, times as fast", rows(result))
