"""Batch policies against each other, in virtual time: hops, seconds, deadlines, and the paper's baselines.

Three apps share a cluster of RTX 3090s: advanced RAG, with long refinements; a short one that retrieves and answers;
and reports, of four notes on long texts beside a draft that is improved twice: few long hops beside many short ones.
All policies meet the same arrivals. A query's goal is five times what it takes alone.

    python -m benchmarks.policies --json
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from benchmarks.common import arguments, environment, report, summary
from benchmarks.rag import apps
from teola_plugin import EnginePool, accelerate
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.observe.progress import progress
from teola_plugin.scheduling import POLICIES
from teola_plugin.simulation import Arrival, Cluster, arriving, figures, poisson, run_alone, simulate

CHUNKS, TOKENS, SLO = 32, 60, 5.0
RATES = (0.2, 0.35, 0.5)


def reports(bench: apps.Bench, tokens: int) -> Runnable[Any, Any]:
    llm = bench.model(tokens)

    def ask(prompt: str) -> Runnable[Any, str]:
        return ChatPromptTemplate.from_template(prompt) | llm | StrOutputParser()

    notes = {f"note{i}": ask("{question} " + f"as text {i} has it: " + "some long text " * 450) for i in range(4)}
    return (
        RunnablePassthrough.assign(**notes)
        | RunnablePassthrough.assign(draft=ask("Draft: {question}"))
        | RunnablePassthrough.assign(better=ask("Improve: {draft}"))
        | RunnablePassthrough.assign(best=ask("Improve again: {better}"))
        | ask("Report on {note0} {note1} {note2} {note3} {best}")
    )


APPS: dict[str, Callable[[apps.Bench, int], Runnable[Any, Any]]] = {
    "advanced RAG": apps.advanced_rag,
    "retrieve and answer": apps.retrieve_and_answer,
    "report": reports,
}
"""Alike in number."""
OURS = "topology-aware"


def cluster() -> Cluster:
    """One LLM that prefills 512 tokens at a time for at most 8 requests: a scheduler has something to decide."""
    machine = rtx3090()
    return Cluster.of({**machine, "llm": replace(machine["llm"], max_batch=512, max_requests=8)}, output_tokens=TOKENS)


def maker(name: str) -> Callable[[EnginePool], Any]:
    async def make(pool: EnginePool) -> Any:
        bench = apps.Bench(pool, apps.Observed())
        if name == "retrieve and answer":
            await bench.indexer().ainvoke(apps.document(chunks=CHUNKS))
        return accelerate(APPS[name](bench, TOKENS), pool=pool, app=name).ainvoke

    return make


def arrivals(rate: float, queries: int, seed: int) -> list[Arrival]:
    document = apps.document(chunks=CHUNKS)
    asked = [{"question": f"{apps.QUESTION} Part {number}.", "document": document} for number in range(queries)]
    return arriving(poisson(rate, seed), dict.fromkeys(APPS, asked), queries, seed=seed)


def job(idle: dict[str, float], queries: int, case: tuple[str, float, int]) -> dict[str, Any]:
    """One policy at one rate with one seed."""
    policy, rate, seed = case
    goals = {name: SLO * seconds for name, seconds in idle.items()}
    makes = {name: maker(name) for name in APPS}
    run = simulate(cluster().under(policy), makes, arrivals(rate, queries, seed), seed=seed, goals=goals)
    if any(one.error for one in run.queries):
        raise SystemExit(next(one.error for one in run.queries if one.error))
    return figures(run, idle, slo=SLO)


def main(options: argparse.Namespace) -> dict[str, Any]:
    first = {name: Arrival(0.0, name, arrivals(1.0, 1, 0)[0].value) for name in APPS}
    idle = {name: run_alone(cluster(), {name: maker(name)}, [one])[0].seconds for name, one in first.items()}
    cases = [(policy, rate, seed) for policy in POLICIES for rate in RATES for seed in range(options.seeds)]
    context = multiprocessing.get_context("spawn")
    with progress(len(cases), "runs") as bar, ProcessPoolExecutor(options.workers, context) as processes:
        found = []
        for one in processes.map(partial(job, idle, options.queries), cases):
            found.append(one)
            bar.advance()
    runs = dict(zip(cases, found, strict=True))
    return {
        "benchmark": "policies",
        "idle_s": {name: round(seconds, 4) for name, seconds in idle.items()},
        "cases": [told(runs, policy, rate, range(options.seeds)) for rate in RATES for policy in POLICIES],
        "queries": options.queries,
        "seeds": options.seeds,
        "environment": environment(),
    }


def told(runs: dict[Any, dict[str, Any]], policy: str, rate: float, seeds: Sequence[int]) -> dict[str, Any]:
    """A policy at a rate: over the seeds, and its mean latency times topology-aware's, seed by seed."""
    own = [runs[policy, rate, seed] for seed in seeds]
    base = [runs[OURS, rate, seed] for seed in seeds]
    pairs = list(zip(own, base, strict=True))
    return {
        "policy": policy,
        "rate": rate,
        **{key: round(fmean(one["latency"][key] for one in own), 3) for key in ("mean", "p50", "p95", "p99")},
        "within_slo": round(fmean(one["within_slo"] for one in own), 4),
        "goodput": round(fmean(one["goodput"] for one in own), 4),
        "mean_by_app": {name: round(fmean(one["apps"][name]["latency"]["mean"] for one in own), 3) for name in APPS},
        "mean_ratio": summary([a["latency"]["mean"] / b["latency"]["mean"] for a, b in pairs], digits=3),
        "p99_ratio": summary([a["latency"]["p99"] / b["latency"]["p99"] for a, b in pairs], digits=3),
    }


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "rate": f"{one['rate']:g}/s",
            "policy": one["policy"],
            "mean, s": one["mean"],
            "p95": one["p95"],
            "p99": one["p99"],
            "in time": f"{one['within_slo']:.0%}",
            "mean, times topology-aware": one["mean_ratio"]["median"],
            "interval": str(one["mean_ratio"]["interval"]),
        }
        for one in result["cases"]
    ]


if __name__ == "__main__":
    given = arguments(
        "Batch policies against each other, in virtual time.",
        lambda parser: (
            parser.add_argument("--queries", type=int, default=150, help="of each run"),
            parser.add_argument("--seeds", type=int, default=5, help="runs of each policy at each rate"),
            parser.add_argument("--workers", type=int, default=2, help="processes side by side"),
        ),
    )
    outcome = main(given)
    report(outcome, given, "policies on one cluster, three apps", rows(outcome))
