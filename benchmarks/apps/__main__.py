"""Five applications, one query at a time: accelerated, as they are, and by the paper's baselines, on the same engines.

Engines are fakes that take as long as RTX 3090s (`profiles.rtx3090`; two instances of each LLM; a search and a tool of
0.5 s, which is a guess), in wall-clock time. Every scheme gets the same queries, each with caches and collections
emptied before it; who is first alternates; answers and sources are compared.

    python -m benchmarks.apps --ground profile --json
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from benchmarks.apps.inputs import given
from benchmarks.apps.schemes import APPS, SCHEMES, Ask, Scheme, Told
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
        return _summed(_runs(app, cases, queries))
    finally:
        for _, pool, _ in cases:
            pool.close()


def _runs(app: str, cases: list[Case], queries: int) -> list[dict[str, tuple[float, Told]]]:
    """By query and scheme. The first query is not counted: it plans."""
    found = []
    for number in range(queries + 1):
        asked = given(app, number)
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
    chosen = [name for name in APPS if options.only in name]
    apps = {name: measure(name, options.queries, options.scale) for name in chosen}
    ratios = [one["median"] for app in apps.values() for one in app["speedup_low"].values()]
    return {
        "benchmark": "apps",
        "environment": environment(),
        "ground": options.ground,
        "scale": options.scale,
        "load": "one query at a time",
        "worst_ratio": min(ratios),
        "answers_equal": all(app["answers_equal"] for app in apps.values()),
        "apps": apps,
    }


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ground", choices=("profile",), default="profile", help="engines that sleep by a profile")
    parser.add_argument("--queries", type=int, default=3, help="of each scheme")
    parser.add_argument("--scale", type=float, default=1.0, help="latencies, times this; 1 is an RTX 3090")
    parser.add_argument("--only", default="", help="only applications whose name contains this")


def main() -> None:
    options = arguments(__doc__ or "", _options)
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
