"""Five applications: accelerated, as they are, and by the paper's baselines, on the same engines.

Engines are fakes that take as long as RTX 3090s (`profiles.rtx3090`; two replicas of each LLM; a search and a tool of
0.5 s, which is a guess), in wall-clock time. Every scheme gets the same queries, each with caches and collections
emptied before it; who is first alternates; answers and sources are compared.

    python -m benchmarks.apps --ground profile --json
    python -m benchmarks.apps --ground real --json

`real` takes small models of this machine: it shows that answers are equal, and what all of it costs there.

That is one query at a time. Under load, in virtual time: Poisson arrivals at several rates, the same for every scheme
(see `load`). Each run is kept in `--folder`, so that what is interrupted goes on where it was.

    python -m benchmarks.apps --ground simulated --json --workers 3
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.apps import load, real
from benchmarks.apps.inputs import given
from benchmarks.apps.loaded import LEVEL, SHARE, SLO, application
from benchmarks.apps.real import RealPools
from benchmarks.apps.schemes import APPS, SCHEMES, Ask, Scheme, Told, left_out
from benchmarks.common import arguments, environment, report, summary
from examples.apps.runner import fresh
from teola_plugin import EnginePool

Case = tuple[Scheme, EnginePool, Ask]


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
    return loaded(options) if options.ground == "simulated" else one_at_a_time(options)


def one_at_a_time(options: argparse.Namespace) -> dict[str, Any]:
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


def loaded(options: argparse.Namespace) -> dict[str, Any]:
    queries = options.queries or 400
    cells = load.run(load.cells(options.seeds, queries, options.only), Path(options.folder), options.workers)
    apps = {name: application(cells, name) for name in APPS if options.only in name}
    return {
        "worst_ratio": min((app["worst_ratio"] for app in apps.values()), key=lambda one: one["median"]),
        "ratios": sum(app["ratios"] for app in apps.values()),
        "behind": sum(len(app["behind"]) for app in apps.values()),
        "behind_is": f"ratios, of the mean or the 99th percentile, whose interval begins below {LEVEL:g}",
        "benchmark": "apps",
        "ground": options.ground,
        "load": "Poisson arrivals, the same for every scheme",
        "seeds": list(range(1, options.seeds + 1)),
        "queries_per_rate": queries * options.seeds,
        "goodput_is": f"the highest rate at which {SHARE:.0%} of the queries take at most {SLO:g} times what the plain "
        "object takes alone; the highest rate measured where that was never missed",
        "environment": environment(),
        "apps": apps,
    }


def _apps(chosen: list[str], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    queries = options.queries or 3
    if options.ground == "profile":
        return {name: measure(name, queries, options.scale) for name in chosen}
    pools = RealPools()
    try:
        return {name: measure_real(name, queries, pools) for name in chosen}
    finally:
        pools.close()


def _options(parser: argparse.ArgumentParser) -> None:
    told = "engines that sleep by a profile, real ones of this machine, or load in virtual time"
    parser.add_argument("--ground", choices=("profile", "real", "simulated"), default="profile", help=told)
    parser.add_argument("--queries", type=int, default=0, help="of each scheme (3), simulated: of each run (400)")
    parser.add_argument("--scale", type=float, default=1.0, help="latencies, times this; 1 is an RTX 3090")
    parser.add_argument("--only", default="", help="only applications whose name contains this")
    parser.add_argument("--seeds", type=int, default=8, help="simulated: runs at each rate")
    parser.add_argument("--workers", type=int, default=3, help="simulated: processes")
    parser.add_argument(
        "--folder",
        default="out/apps",
        help="simulated: where runs that are done are kept; empty it when code has changed",
    )


def main() -> None:
    options = arguments(__doc__ or "", _options)
    for line in left_out():
        print(line, file=sys.stderr)
    result = run(options)
    if options.ground == "simulated":
        report(result, options, f"under load; worst ratio {result['worst_ratio']['median']}", _rows_loaded(result))
        return
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


def _rows_loaded(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "app": app,
            "scheme": name,
            "times, low": found["speedup_low"].get(name, {}).get("median", 1.0),
            "times, high": found["speedup_high"].get(name, {}).get("median", 1.0),
            "goodput": goodput,
        }
        for app, found in result["apps"].items()
        for name, goodput in found["goodput"].items()
    ]


if __name__ == "__main__":
    main()
