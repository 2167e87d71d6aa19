"""What the shared pool costs: engines without latency on Ray, beside a bare call of a Ray actor in the same run.

python -m benchmarks.ray_overhead --json
"""

from __future__ import annotations

import argparse
import asyncio
import time
from statistics import median
from typing import Any

from benchmarks.common import arguments, environment, report, summary
from benchmarks.overhead import QUERIES, SIZE, fan_out
from benchmarks.ray_cluster import shared_pool
from teola_plugin import EnginePool
from teola_plugin.graph import Graph, Query
from teola_plugin.observe import progress
from teola_plugin.runtime.conformance import chain

STREAMS = 64
ENGINES = {"embedder": {"kind": "fake"}, "other": {"kind": "fake", "options": {"like": "embedder"}}}


def executed(pool: EnginePool, graph: Graph, queries: int = 1) -> float:
    """Seconds from submitting so many queries at once to the last output."""
    texts = [f"text {i}" for i in range(SIZE)]
    begun = time.perf_counter()
    runs = [pool.runtime.submit(Query({"input": texts}), graph, {}) for _ in range(queries)]
    for run in runs:
        run.output.result(60)
    return time.perf_counter() - begun


def bare_round_trips(calls: int) -> list[float]:
    """Milliseconds of awaited calls of an async actor that does nothing, one after the other."""
    import ray

    class Echo:
        async def echo(self, value: Any) -> Any:
            return value

    actor: Any = ray.remote(Echo).remote()

    async def measure() -> list[float]:
        found = []
        for i in range(calls + 20):
            begun = time.perf_counter()
            await actor.echo.remote(i)
            if i >= 20:
                found.append(1000 * (time.perf_counter() - begun))
        return found

    try:
        return asyncio.run(measure())
    finally:
        ray.kill(actor)


def main(options: argparse.Namespace) -> dict[str, Any]:
    cases: dict[str, tuple[Graph, int]] = {
        "chain": (chain(SIZE, "embedder"), 1),
        "alternating": (chain(SIZE, "embedder", "other"), 1),
        "fan_out": (fan_out(), 1),
        "queries": (chain(SIZE, "embedder"), QUERIES),
        "alternating_queries": (chain(SIZE, "embedder", "other"), QUERIES),
        "load": (chain(SIZE, "embedder"), STREAMS),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    bare: list[float] = []
    with shared_pool(ENGINES) as pool, progress(options.repeats, "Ray") as bar:
        for graph, queries in cases.values():
            executed(pool, graph, queries)  # warm
        for _ in range(options.repeats):  # in turn, so that other work on the machine disturbs all alike
            bare += bare_round_trips(50)
            for name, (graph, queries) in cases.items():
                times[name].append(1000 * executed(pool, graph, queries) / (SIZE * queries))
            bar.advance()
    round_trip = median(bare)
    return {
        "benchmark": "ray_overhead",
        "ms_per_primitive": round(median(times["chain"]), 3),
        "bare_round_trip_ms": round(round_trip, 3),
        "ratio": round(median(times["chain"]) / round_trip, 3),
        "ratio_alternating": round(median(times["alternating"]) / round_trip, 3),
        "ratios": {name: round(median(found) / round_trip, 3) for name, found in times.items()},
        "primitives_per_s": round(1000 / median(times["load"])),
        "per_primitive_ms": {name: summary(found) for name, found in times.items()},
        "bare_ms": summary(bare),
        "repeats": options.repeats,
        "environment": environment(),
    }


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    figures = {"bare call of an actor": result["bare_ms"], **result["per_primitive_ms"]}
    return [
        {"ms a primitive": name, "median": found["median"], "95 %": str(found["interval"]), "n": found["n"]}
        for name, found in figures.items()
    ]


if __name__ == "__main__":
    given = arguments(
        "What the shared pool costs.",
        lambda parser: parser.add_argument("--repeats", type=int, default=15, help="timed rounds"),
    )
    outcome = main(given)
    report(outcome, given, "shared pool on Ray, engines without latency", rows(outcome))
