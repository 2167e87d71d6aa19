"""The simulator against the wall clock: the same arrivals, on engines that sleep and in virtual time.

Three apps at two rates, accelerated, with profiles of RTX 3090s. What the wall clock has on top is what processors do:
planning, scheduling, the apps' own code. Also: queries simulated a second, of processor time.

    python -m benchmarks.simulator --json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from langchain_core.runnables import Runnable

from benchmarks.common import arguments, environment, report
from benchmarks.rag import apps
from teola_plugin import EnginePool, accelerate
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.observe.progress import progress
from teola_plugin.simulation import Cluster, Run, arriving, figures, on_the_clock, poisson, simulate

CHUNKS, TOKENS = 64, 60
RATES = (0.3, 0.9)
"""Queries a second: mostly one at a time, and several."""
CLUSTER = Cluster.of(rtx3090(), replicas={"llm": 2}, output_tokens=TOKENS)
APPS: dict[str, Callable[[apps.Bench, int], Runnable[Any, Any]]] = {
    "advanced RAG": apps.advanced_rag,
    "naive RAG": apps.naive_rag,
    "retrieve and answer": apps.retrieve_and_answer,
}


def maker(name: str, *, fast: bool) -> Callable[[EnginePool], Any]:
    """The app on a pool; whoever uploads nothing finds the document there."""

    async def make(pool: EnginePool) -> Any:
        bench = apps.Bench(pool, apps.Observed())
        chain = APPS[name](bench, TOKENS)
        if name == "retrieve and answer":
            await bench.indexer().ainvoke(apps.document(chunks=CHUNKS))
        return (accelerate(chain, pool=pool) if fast else chain).ainvoke

    return make


def questions(count: int) -> list[dict[str, str]]:
    document = apps.document(chunks=CHUNKS)
    return [{"question": f"{apps.QUESTION} Part {number}.", "document": document} for number in range(count)]


def compare(name: str, rate: float, queries: int, seed: int, *, fast: bool) -> dict[str, Any]:
    """One app at one rate, both ways."""
    made = {name: maker(name, fast=fast)}
    arrivals = arriving(poisson(rate, seed), {name: questions(queries)}, queries)
    begun = time.process_time()
    virtual = told(simulate(CLUSTER, made, arrivals, seed=seed))
    took = time.process_time() - begun
    wall = told(on_the_clock(CLUSTER, made, arrivals))
    return {
        "app": name,
        "way": "accelerated" if fast else "plain",
        "rate": rate,
        "queries": queries,
        "simulated": virtual,
        "wall": wall,
        "off": {key: round(virtual[key] / wall[key] - 1, 4) for key in ("mean", "p95")},
        "simulated_per_cpu_s": round(queries / took, 1),
    }


def told(run: Run) -> dict[str, float]:
    if any(one.error for one in run.queries):
        raise SystemExit(next(one.error for one in run.queries if one.error))
    found: dict[str, float] = figures(run, dict.fromkeys(APPS, 1.0))["latency"]
    return found


def main(options: argparse.Namespace) -> dict[str, Any]:
    cases = [(name, rate) for name in APPS if options.only in name for rate in RATES]
    found = []
    compare("retrieve and answer", 20.0, 2, 0, fast=True)  # imports and first-use costs, untimed
    with progress(len(cases), "apps at rates, in real time") as bar:
        for name, rate in cases:
            bar.describe(f"{name}, {rate:g} a second")
            found.append(compare(name, rate, options.queries, options.seed, fast=not options.plain))
            bar.advance()
    return {
        "benchmark": "simulator",
        "worst_off": max(abs(off) for one in found for off in one["off"].values()),
        "cases": found,
        "seed": options.seed,
        "environment": environment(),
    }


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "app": f"{one['app']}, {one['rate']:g}/s",
            "mean, s: wall": one["wall"]["mean"],
            "simulated": one["simulated"]["mean"],
            "p95, s: wall": one["wall"]["p95"],
            "simulated ": one["simulated"]["p95"],
            "off": f"{100 * one['off']['mean']:+.1f} % {100 * one['off']['p95']:+.1f} %",
            "queries/s": one["simulated_per_cpu_s"],
        }
        for one in result["cases"]
    ]


if __name__ == "__main__":
    given = arguments(
        "The simulator against the wall clock.",
        lambda parser: (
            parser.add_argument("--queries", type=int, default=40, help="of each app at each rate"),
            parser.add_argument("--seed", type=int, default=1, help="of the arrivals"),
            parser.add_argument("--only", default="", help="only apps whose name contains this"),
            parser.add_argument("--plain", action="store_true", help="the apps as they are, not accelerated"),
        ),
    )
    outcome = main(given)
    report(outcome, given, "simulated and on the wall clock", rows(outcome))
