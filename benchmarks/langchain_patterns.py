"""Cookbook patterns, plain and accelerated: on a pool, on the user's own models, and on a pool's model with own stores.

Engines and models take as long as RTX 3090s (`profiles.rtx3090`), times `--scale`, in wall-clock time. The order
alternates, caches are emptied before each run, answers are compared. A speed-up is over the better plain way; what is
possible, on a pool, follows from the data dependencies alone (`langchain.bounds`). On one's own models it is over the
plain sync way (`langchain.own_bounds`), and so is the share of it that a sync caller gets.

    python -m benchmarks.langchain_patterns --json
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

from langchain_core.runnables import Runnable

from benchmarks.common import arguments, environment, pattern_options, report, summary
from benchmarks.langchain.bounds import BOUNDS, Costs
from benchmarks.langchain.cookbook import PATTERNS, Pattern
from benchmarks.langchain.kits import Kit, mixed_kit, own_kit, pool_kit
from benchmarks.langchain.own_bounds import OWN_BOUNDS, Took
from teola_plugin import accelerate
from teola_plugin.engines import profiles

KITS: dict[str, Callable[[Any], Kit]] = {"pool": pool_kit, "mixed": mixed_kit, "own": own_kit}
PLAIN = ("plain sync", "plain async")
WAYS = (*PLAIN, "auto async", "auto sync", "all async", "all sync")


def objects(pattern: Pattern, kit: Kit) -> dict[str, Runnable[Any, Any]]:
    """The plain chain and the accelerated ones."""
    plain = pattern.make(kit)
    pool, threads = kit.pool, kit.concurrent
    made = {mode: accelerate(plain, pool=pool, concurrent=threads, speculate=mode) for mode in ("auto", "all")}
    return {"plain": plain, **made}


def timed(runner: asyncio.Runner, kit: Kit, chain: Runnable[Any, Any], given: Any, way: str) -> tuple[float, Any]:
    """One call. The loop of the async ways is there before and after it."""
    kit.fresh()
    gc.collect()
    start = time.perf_counter()
    if way.endswith(" sync"):
        found = chain.invoke(given)
    else:
        found = runner.run(chain.ainvoke(given))
    return time.perf_counter() - start, found


def measure(runner: asyncio.Runner, name: str, pattern: Pattern, kit: Kit, repeats: int) -> dict[str, Any]:
    """Seconds of every way. Raises when the answers differ."""
    chains = objects(pattern, kit)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    first: Any = None
    gc.collect()
    gc.freeze()  # what is there already need not be looked through before every run
    for i in range(repeats if pattern.gain else 2 * repeats):
        for way in WAYS[:: 1 if i % 2 == 0 else -1]:
            took, found = timed(runner, kit, chains[way.split()[0]], pattern.given, way)
            seconds[way].append(took)
            first = found if first is None else first
            if shown(found) != shown(first):
                raise SystemExit(f"{name} ({kit.name}), {way}: the answers differ: {found} and {first}")
    return figures(name, pattern, kit, seconds)


def shown(found: Any) -> str:
    """What the user sees; messages of a history have ids that differ in the plain object, too."""
    return str({k: v for k, v in found.items() if k != "chat_history"} if isinstance(found, dict) else found)


def figures(name: str, pattern: Pattern, kit: Kit, seconds: dict[str, list[float]]) -> dict[str, Any]:
    middle = {way: median(times) for way, times in seconds.items()}
    better = min(middle[way] for way in PLAIN)
    row: dict[str, Any] = {
        "pattern": name,
        "objects": kit.name,
        "speedup": round(better / middle["auto async"], 3),
        "speedup_sync": round(better / middle["auto sync"], 3),
        "speedup_all": round(better / middle["all async"], 3),
        "speedup_all_sync": round(better / middle["all sync"], 3),
        "nothing_to_gain": not pattern.gain,
        "seconds": {way: summary(times) for way, times in seconds.items()},
    }
    if not pattern.gain:
        pairs = {way: zip(seconds[f"auto {way}"], seconds[f"plain {way}"], strict=True) for way in ("async", "sync")}
        behind = {way: summary([1000 * (a - p) for a, p in pair], digits=2) for way, pair in pairs.items()}
        row["behind_ms"] = max(one["median"] for one in behind.values())
        row["behind"] = behind
    return row


def main(options: argparse.Namespace) -> dict[str, Any]:
    quiet()
    machine = profiles.scaled(profiles.rtx3090(), options.scale)
    started, cases = time.perf_counter(), []
    with asyncio.Runner() as runner:
        for kind in options.objects.split(","):
            kit = KITS[kind](machine)
            for name, pattern in PATTERNS.items():
                if options.only in name:
                    warm_up(runner, pattern, KITS[kind](profiles.scaled(profiles.rtx3090(), 0.0)))
                    cases.append(measure(runner, name, pattern, kit, options.repeats))
                    if kit.pool is not None and name in BOUNDS:
                        cases[-1]["possible"] = possible(cases[-1], BOUNDS[name](Costs(machine)))
                    elif kit.slow is not None and name in OWN_BOUNDS:
                        cases[-1] |= of_sync_callers(cases[-1], own_bound(runner, name, pattern, kit))
            if kit.pool is not None:
                kit.pool.close()
    return {
        "benchmark": "langchain_patterns",
        "speedup": {kind: {c["pattern"]: c["speedup"] for c in cases if c["objects"] == kind} for kind in KITS},
        "possible": {c["pattern"]: c["possible"] for c in cases if "possible" in c and c["objects"] != "own"},
        "share_of_possible": {c["pattern"]: c["share_of_possible"] for c in cases if "share_of_possible" in c},
        "behind_ms": max((c["behind_ms"] for c in cases if c["nothing_to_gain"]), default=None),
        "cases": cases,
        "profile": "rtx3090",
        "scale": options.scale,
        "repeats": options.repeats,
        "took_s": round(time.perf_counter() - started, 1),
        "environment": environment(),
    }


def own_bound(runner: asyncio.Runner, name: str, pattern: Pattern, kit: Kit) -> float:
    """Seconds, by what each call of a plain run took."""
    assert kit.slow is not None
    kit.slow.clear()
    timed(runner, kit, pattern.make(kit), pattern.given, "plain sync")
    return OWN_BOUNDS[name](Took(kit))


def of_sync_callers(case: dict[str, Any], bound: float) -> dict[str, float]:
    """Over the plain sync call: what is possible, what the accelerated one gives, and the share of it."""
    plain, fast = (case["seconds"][way]["median"] for way in ("plain sync", "auto sync"))
    found = {"possible": round(plain / bound, 3), "speedup_over_sync": round(plain / fast, 3)}
    gained = (plain / fast - 1) / (plain / bound - 1) if plain / bound >= 1.05 else None
    return found if gained is None else {**found, "share_of_possible": round(gained, 2)}


def possible(case: dict[str, Any], bound: float) -> float:
    least: float = min(case["seconds"][way]["median"] for way in PLAIN)
    return round(least / bound, 3)


def warm_up(runner: asyncio.Runner, pattern: Pattern, kit: Kit) -> None:
    """Imports and first-use costs of every way, untimed."""
    for way, chain in ((way, objects(pattern, kit)[way.split()[0]]) for way in WAYS):
        timed(runner, kit, chain, pattern.given, way)
    if kit.pool is not None:
        kit.pool.close()


def quiet() -> None:
    """Some of what cookbooks use is deprecated, and says so with every call; the imports turn such warnings on."""
    import langchain_classic.chains  # noqa: F401
    import langgraph.graph  # noqa: F401

    warnings.simplefilter("ignore")
    logging.getLogger("langchain_core").setLevel(logging.ERROR)


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "pattern": case["pattern"],
            "objects": case["objects"],
            **{way + " s": case["seconds"][way]["median"] for way in PLAIN},
            "auto": case["speedup"],
            "auto sync": case["speedup_sync"],
            "all": case["speedup_all"],
            "all sync": case["speedup_all_sync"],
            "possible": case.get("possible", ""),
            "share": case.get("share_of_possible", ""),
            "behind ms": case.get("behind_ms", ""),
        }
        for case in result["cases"]
    ]


if __name__ == "__main__":
    given = arguments("Cookbook patterns: plain against accelerated.", lambda p: pattern_options(p, ",".join(KITS)))
    outcome = main(given)
    report(outcome, given, f"cookbook patterns, RTX 3090 profile times {given.scale}", rows(outcome))
