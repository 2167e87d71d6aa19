"""LlamaIndex engines: plain `query` and `aquery` against accelerated ones, on a pool.

Engines take as long as RTX 3090s (`profiles.rtx3090`), times `--scale`, in wall-clock time. The order alternates,
caches are emptied before each run, answers and passages are compared. A speed-up is over the better plain way.
`--objects own`: the user's own models, without a pool: sync callers get what async ones have, for all others it shows
what that costs.
`--at-once 8`: eight queries that come together, from threads and on one loop.
`--real`: the paper's two on vLLM, MiniLM and PostgreSQL of this machine.

    python -m benchmarks.llamaindex_patterns --json
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.common import arguments, environment, pattern_options, print_table, report, summary
from benchmarks.langchain.bounds import Costs
from benchmarks.langchain_patterns import WAYS, figures, possible, rows
from benchmarks.llamaindex.answers import answer
from benchmarks.llamaindex.bounds import STEPWISE, stepwise
from benchmarks.llamaindex.engines import PATTERNS, Pattern, shown
from benchmarks.llamaindex.kits import Kit, Sizes, corpus, own_kit, pool_kit
from teola_plugin import accelerate
from teola_plugin.engines import profiles

KITS: dict[str, Callable[[Any, Sizes], Kit]] = {"pool": pool_kit, "own": own_kit}
CROWDS = ("plain threads", "plain loop", "auto threads", "auto loop")
PAPER = ("naive RAG", "advanced RAG", "compact")
"""With `--real`: the two of the paper, and one with nothing to gain."""


def objects(pattern: Pattern, kit: Kit) -> dict[str, Any]:
    """The plain engine and the accelerated ones."""
    plain = pattern.make(kit)
    given: Any = {"pool": kit.pool, "concurrent": kit.concurrent}
    made = {mode: accelerate(plain, speculate=mode, **given) for mode in ("auto", "all")}
    return {"plain": plain, **made}


def timed(runner: asyncio.Runner, kit: Kit, engine: Any, given: str, way: str) -> tuple[float, Any]:
    """One call. The loop of the async ways is there before and after it."""
    kit.fresh()
    gc.collect()
    start = time.perf_counter()
    found = engine.query(given) if way.endswith(" sync") else runner.run(engine.aquery(given))
    return time.perf_counter() - start, shown(found)


def measure(runner: asyncio.Runner, name: str, pattern: Pattern, kit: Kit, repeats: int) -> dict[str, Any]:
    """Seconds of every way. Raises `SystemExit` when the answers differ."""
    engines = objects(pattern, kit)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for way in WAYS:  # first-use costs
        first = timed(runner, kit, engines[way.split()[0]], pattern.given, way)[1]
    gc.collect()
    gc.freeze()  # what is there already need not be looked through before every run
    for i in range(repeats if pattern.gain else 2 * repeats):
        for way in WAYS[:: 1 if i % 2 == 0 else -1]:
            took, found = timed(runner, kit, engines[way.split()[0]], pattern.given, way)
            seconds[way].append(took)
            if found != first:
                raise SystemExit(f"{name} ({kit.name}), {way}: the answers differ: {found} and {first}")
    return figures(name, pattern, kit, seconds)  # type: ignore[arg-type]


def least(name: str, pattern: Pattern, kit: Kit, machine: Any) -> float | None:
    """Seconds that the data dependencies leave at best, for engines whose calls come one after the other."""
    if name not in STEPWISE or kit.pool is None or machine is None:
        return None
    kit.fresh()
    pattern.make(kit).query(pattern.given)
    calls = [(prompt, answer(prompt, Sizes().answer)) for prompt in kit.ledger.prompts]
    return stepwise(Costs(machine), calls, [node.get_content() for node in corpus(Sizes())])


def measure_crowd(runner: asyncio.Runner, name: str, pattern: Pattern, kit: Kit, options: Any) -> dict[str, Any]:
    """Seconds until all of several queries that come at once are answered. Raises `SystemExit` as `measure` does."""
    engines = objects(pattern, kit)
    questions = [f"{number}. {pattern.given}" for number in range(options.at_once)]
    seconds: dict[str, list[float]] = {way: [] for way in CROWDS}
    for way in CROWDS:  # first-use costs
        first = crowd(runner, engines[way.split()[0]], questions, way)
    for i in range(options.repeats):
        for way in CROWDS[:: 1 if i % 2 == 0 else -1]:
            kit.fresh()
            gc.collect()
            start = time.perf_counter()
            found = crowd(runner, engines[way.split()[0]], questions, way)
            seconds[way].append(time.perf_counter() - start)
            if found != first:
                raise SystemExit(f"{name} ({kit.name}), {way}, {options.at_once} at once: the answers differ")
    middle = {way: median(times) for way, times in seconds.items()}
    return {
        "pattern": name,
        "objects": kit.name,
        "speedup": round(min(middle[way] for way in CROWDS[:2]) / min(middle[way] for way in CROWDS[2:]), 3),
        "speedup_on_a_loop": round(middle["plain loop"] / middle["auto loop"], 3),
        "seconds": {way: summary(times) for way, times in seconds.items()},
    }


def crowd(runner: asyncio.Runner, engine: Any, questions: list[str], way: str) -> list[Any]:
    """All at once: from as many threads, or on one loop."""

    async def together() -> list[Any]:
        return await asyncio.gather(*map(engine.aquery, questions))

    if way.endswith(" threads"):
        with ThreadPoolExecutor(len(questions)) as threads:
            return [shown(one) for one in threads.map(engine.query, questions)]
    return [shown(one) for one in runner.run(together())]


def main(options: argparse.Namespace) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    logging.getLogger("llama_index").setLevel(logging.ERROR)
    started, cases, crowds = time.perf_counter(), [], []
    machine = None if options.real else profiles.scaled(profiles.rtx3090(), options.scale)
    with asyncio.Runner() as runner:
        for kit in kits(options, machine):
            with kit.in_force():
                for name, pattern in patterns(kit).items():
                    if options.only in name:
                        cases.append(measure(runner, name, pattern, kit, options.repeats))
                        if bound := least(name, pattern, kit, machine):
                            cases[-1]["possible"] = possible(cases[-1], bound)
                    if options.only in name and options.at_once:
                        crowds.append(measure_crowd(runner, name, pattern, kit, options))
            if kit.pool is not None:
                kit.pool.close()
    names = dict.fromkeys(case["objects"] for case in cases)
    return {
        "benchmark": "llamaindex_patterns",
        "speedup": {kind: {c["pattern"]: c["speedup"] for c in cases if c["objects"] == kind} for kind in names},
        "speedup_sync": {
            kind: {c["pattern"]: c["speedup_sync"] for c in cases if c["objects"] == kind} for kind in names
        },
        "possible": {c["pattern"]: c["possible"] for c in cases if "possible" in c},
        "behind_ms": max((c["behind_ms"] for c in cases if c["nothing_to_gain"]), default=None),
        "cases": cases,
        "at_once": {"queries": options.at_once, "cases": crowds},
        "profile": None if options.real else "rtx3090",
        "scale": options.scale,
        "repeats": options.repeats,
        "took_s": round(time.perf_counter() - started, 1),
        "environment": environment(),
    }


def patterns(kit: Kit) -> dict[str, Pattern]:
    """On real engines some, with a question about the documents that are there."""
    if kit.name != "real":
        return PATTERNS
    from teola_plugin.cli.demo.documents import DEFAULT_QUESTION

    return {name: replace(PATTERNS[name], given=DEFAULT_QUESTION) for name in PAPER}


def kits(options: argparse.Namespace, machine: Any) -> Any:
    """One after the other, since each may have engines running; without a machine the one that this is."""
    if machine is None:
        from benchmarks.llamaindex.real import real_kit

        yield real_kit()
        return
    for kind in options.objects.split(","):
        yield KITS[kind](machine, Sizes())


def crowd_rows(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "pattern": case["pattern"],
            "objects": case["objects"],
            **{way + " s": case["seconds"][way]["median"] for way in CROWDS},
            "speed-up": case["speedup"],
            "over plain loop": case["speedup_on_a_loop"],
        }
        for case in cases
    ]


def _options(parser: argparse.ArgumentParser) -> None:
    pattern_options(parser, "pool")
    parser.add_argument("--at-once", type=int, default=0, help="also so many queries at once, e.g. 8")
    parser.add_argument("--real", action="store_true", help="the paper's two on this machine's own engines")


if __name__ == "__main__":
    given = arguments("LlamaIndex engines: plain against accelerated.", _options)
    outcome = main(given)
    where = "this machine's engines" if given.real else f"RTX 3090 profile times {given.scale}"
    report(outcome, given, f"LlamaIndex engines, {where}", rows(outcome))
    if crowds := outcome["at_once"]["cases"]:
        print_table(f"{given.at_once} queries at once", crowd_rows(crowds))
