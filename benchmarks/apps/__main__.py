"""Five applications, one query at a time: accelerated, as they are, and by the paper's baselines, on the same engines.

Engines are fakes that take as long as RTX 3090s (`profiles.rtx3090`; two instances of each LLM; a search and a tool of
0.5 s, which is a guess), in wall-clock time. Every scheme gets the same queries, each with caches and collections
emptied before it; who is first alternates; answers and sources are compared.

    python -m benchmarks.apps --ground profile --json
    python -m benchmarks.apps --ground real --json

`real` takes small models of this machine: it shows that answers are equal, and what all of it costs there.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from typing import Any

from benchmarks.apps import real
from benchmarks.apps.pipelines import human
from benchmarks.apps.real import RealPools
from benchmarks.apps.schemes import APPS, SCHEMES, Ask, Scheme, Told, left_out
from benchmarks.common import arguments, environment, report, summary
from benchmarks.rag.apps import document
from examples.apps.runner import fresh
from teola_plugin import EnginePool

PARAGRAPHS = {"naive_rag": 50, "advanced_rag": 50, "contextual_retrieval": 6}
"""Of an upload, two chunks each. Contextual retrieval asks its model about every chunk."""
Case = tuple[Scheme, EnginePool, Ask]


def given(app: str, number: int) -> dict[str, Any]:
    """The input of one query."""
    question = f"What does report {number} say about the terms that have to change first?"
    if app == "agent":
        return human(question)
    if app == "search_engine":
        return {"question": question}
    return {"question": question, "document": document(number, PARAGRAPHS[app])}


async def timed(pool: EnginePool, ask: Ask, asked: dict[str, Any]) -> tuple[float, Told]:
    begun = time.perf_counter()
    told = await ask(asked)
    return time.perf_counter() - begun, told


def measure(app: str, queries: int, scale: float) -> dict[str, Any]:
    """Seconds by scheme, and how many times as long as accelerated: of each query, summed up."""
    cases: list[Case] = []
    try:
        for scheme in SCHEMES:
            if scheme.takes(app):
                pool = scheme.pool(scale).start()
                cases.append((scheme, pool, scheme.ask(APPS[app], pool)))
        return _summed(_runs(cases, [given(app, number) for number in range(queries + 1)]))
    finally:
        for _, pool, _ in cases:
            pool.close()


def measure_real(app: str, queries: int, pools: RealPools) -> dict[str, Any]:
    """The same on real engines."""
    cases: list[Case] = []
    for scheme in SCHEMES:
        if scheme.takes(app):
            pool = pools.of(scheme)
            cases.append((scheme, pool, scheme.ask(APPS[app], pool, proxy="llm")))
    return _summed(_runs(cases, [real.given(app, number) for number in range(queries + 1)]))


def _runs(cases: list[Case], inputs: list[dict[str, Any]]) -> list[dict[str, tuple[float, Told]]]:
    """By query and scheme. The first query is not counted: it plans, and warms up."""
    found = []
    for number, asked in enumerate(inputs):
        turn = number % len(cases)
        row = {}
        for scheme, pool, ask in cases[turn:] + cases[:turn]:
            fresh(pool)
            row[scheme.name] = asyncio.run(timed(pool, ask, asked))
        found.append(row)
    return found[1:]


def _summed(runs: list[dict[str, tuple[float, Told]]]) -> dict[str, Any]:
    own = "accelerated"
    names = list(runs[0])
    return {
        "answers_equal": all(told == row[own][1] for row in runs for _, told in row.values()),
        "seconds": {name: summary([row[name][0] for row in runs]) for name in sorted(names)},
        "speedup_low": {
            name: summary([row[name][0] / row[own][0] for row in runs]) for name in sorted(names) if name != own
        },
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    apps = _apps([name for name in APPS if options.only in name], options)
    ratios = [one["median"] for app in apps.values() for one in app["speedup_low"].values()]
    return {
        "benchmark": "apps",
        "environment": environment(),
        "ground": options.ground,
        "scale": options.scale if options.ground == "profile" else None,
        "load": "one query at a time",
        "worst_ratio": min(ratios),
        "answers_equal": all(app["answers_equal"] for app in apps.values()),
        "apps": apps,
    }


def _apps(chosen: list[str], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    if options.ground == "profile":
        return {name: measure(name, options.queries, options.scale) for name in chosen}
    pools = RealPools()
    try:
        return {name: measure_real(name, options.queries, pools) for name in chosen}
    finally:
        pools.close()


def _options(parser: argparse.ArgumentParser) -> None:
    told = "engines that sleep by a profile, or real ones of this machine"
    parser.add_argument("--ground", choices=("profile", "real"), default="profile", help=told)
    parser.add_argument("--queries", type=int, default=3, help="of each scheme")
    parser.add_argument("--scale", type=float, default=1.0, help="latencies, times this; 1 is an RTX 3090")
    parser.add_argument("--only", default="", help="only applications whose name contains this")


def main() -> None:
    options = arguments(__doc__ or "", _options)
    for line in left_out():
        print(line, file=sys.stderr)
    result = run(options)
    rows = [
        {
            "app": app,
            "scheme": name,
            "seconds": one["median"],
            "times": found["speedup_low"].get(name, {}).get("median"),
        }
        for app, found in result["apps"].items()
        for name, one in found["seconds"].items()
    ]
    report(result, options, f"one query at a time, answers equal: {result['answers_equal']}", rows)


if __name__ == "__main__":
    main()
