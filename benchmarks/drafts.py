"""Decoding with drafts on real vLLM: milliseconds a token without, by lookup, by lookup and graph.

Engines of each model, one with drafts and two without, answer in turn. The bundled model, which was trained to
answer with the words of its passages, writes answers from a passage and refinements of those with another one, over
texts that drafting was tuned with and over others, held out. A model with random weights, whose texts hardly repeat
anything, is asked where there is nothing to copy; with drafts that mislead; and with right ones for every other
request. One request at a time, 4 and 16 at once, each kind by itself and mixed. Ratios are of runs side by side, one
for each repeat, which starts its engines anew; the median counts. Several at once are compared with both engines
without drafts, in the mean, and those with each other: so far are the ratios of equal engines from 1. The second model
has three times as many, of two to four times as many rounds: where nothing is to be gained, small differences count.
All engines take their memory in huge pages where the system has them: two equal ones differ less then, as less depends
on where it lies.

    python -m benchmarks.drafts --json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.common import arguments, environment, print_table, report
from benchmarks.draft_cases import CONTROL, Case, Engines, ask, copying, fresh
from benchmarks.draft_load import Load
from benchmarks.draft_runs import OneByOne, Plan, proposing_us
from teola_plugin.engines.bundled import llama
from teola_plugin.engines.model_cache import llm_folder
from teola_plugin.engines.vllm import VllmEngine
from teola_plugin.graph import EngineProfile

ROUNDS, ROUNDS_WRITTEN = {4: 4, 16: 4}, {4: 8, 16: 16}
"""By number at once, in each repeat, with the first model and with the second: one of the latter with 16 at once lasts
a second, half as long as with 4, and anything else on the machine shows."""
LOADED = 16
"""Cases of a kind with several at once."""
MORE = 3
"""Times as many repeats with the model that copies nothing: equal engines are some hundredths apart."""
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Of torch, and of what else allocates, in the processes of all engines."""

Pairs = Callable[[], AbstractAsyncContextManager[Engines]]
"""Starts a pair of engines."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one model was asked."""

    alone: OneByOne
    kinds: Sequence[str]
    load: Sequence[dict[str, Any]]
    profile: EngineProfile

    @property
    def differ(self) -> int:
        at_load: int = sum(row.get("differ", 0) for row in self.load)
        return self.alone.differ + at_load


async def copied(pairs: Pairs, repeats: int) -> Measured:
    """Answers, refinements, and both at once."""
    return await measured(pairs, _copied, repeats, ROUNDS)


async def written(pairs: Pairs, repeats: int) -> Measured:
    """Texts that repeat hardly anything."""
    return await measured(pairs, _written, repeats, ROUNDS_WRITTEN)


async def _copied(plain: VllmEngine) -> tuple[Plan, Plan]:
    cases = await copying(plain)
    ways: dict[str, Sequence[str]] = {
        kind: ("lookup", "graph") if kind.endswith("refine") else ("lookup",) for kind in cases
    }
    ways |= {"answer": ("lookup", "recent"), "refine": ("lookup", "graph", "recent")}
    answers, refines = cases["answer"][:LOADED], cases["refine"][:LOADED]
    mixed = [case for pair in zip(answers, refines, strict=True) for case in pair]
    loaded = {"answer": answers, "refine": refines, "answers and refinements": mixed}
    at_load = {kind: ("lookup", CONTROL) if kind == "answer" else ("lookup", "graph", CONTROL) for kind in loaded}
    return Plan(cases, ways), Plan(loaded, at_load)


async def _written(plain: VllmEngine) -> tuple[Plan, Plan]:
    cases = await fresh(plain)
    ways = {kind: ("lookup",) if kind == "nothing to copy" else ("graph",) for kind in cases}
    return Plan(cases, ways), Plan(cases, {kind: (*some, CONTROL) for kind, some in ways.items()})


async def measured(
    pairs: Pairs, plans: Callable[[VllmEngine], Awaitable[tuple[Plan, Plan]]], repeats: int, rounds: Mapping[int, int]
) -> Measured:
    """`plans`: what is asked one at a time, and what several at once. `rounds`: by number at once."""
    async with pairs() as engines:
        one, many = await plans(engines.plain)
        alone, load = OneByOne(one), Load(many, {kind: await _texts(engines, many.cases[kind]) for kind in many.cases})
    for number in range(repeats):
        async with pairs() as engines:
            profile = await engines.drafting.measure()
            await alone.repeat(engines, number)
            await load.repeat(engines, rounds)
    rows = [alone.load_row(kind) for kind in many.cases if kind in one.cases]
    return Measured(alone, list(one.cases), [*rows, *load.rows()], profile)


async def _texts(engines: Engines, cases: Sequence[Case]) -> Sequence[str]:
    return [(await ask(engines.plain, case, "plain")).value.text for case in cases]


@asynccontextmanager
async def started(
    folder: str,
    cores: str | None,
    engine_args: Mapping[str, Any] | None = None,
    drafts: str | Mapping[str, Any] = "auto",
) -> AsyncIterator[Engines]:
    plain = VllmEngine("plain", folder, cores=cores, engine_args=engine_args, drafts="off")
    drafting = VllmEngine("drafting", folder, cores=cores, engine_args=engine_args, drafts=drafts)
    control = VllmEngine("control", folder, cores=cores, engine_args=engine_args, drafts="off")
    every = plain, drafting, control
    try:
        await asyncio.gather(*(one.start() for one in every))
        yield Engines(*every)
    finally:
        await asyncio.gather(*(one.stop() for one in every))


async def run(options: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    os.environ.update(HUGE_PAGES)
    copies = await copied(partial(started, str(llm_folder()), options.cores), options.repeats)
    writes = await written(partial(started, str(llama.make()), options.cores), MORE * options.repeats)
    return {
        "benchmark": "drafts",
        **_headline(copies, writes),
        "cases": [one.alone.row(kind) for one in (copies, writes) for kind in one.kinds],
        "load": [row for one in (copies, writes) for row in one.load],
        "step_ms": {"bundled": _steps(copies.profile), "random": _steps(writes.profile)},
        "proposing_us": proposing_us(),
        "repeats": options.repeats,
        "took_s": round(time.perf_counter() - began, 1),
        "environment": environment(),
    }


def _headline(copies: Measured, writes: Measured) -> dict[str, Any]:
    """Decoding, one at a time, but for `worst_at_load`: whole requests, the least of all kinds, ways and loads; beside
    it the least and the greatest that two equal engines gave."""
    ratios, equal = at_load(copies, writes), at_load(copies, writes, of_control=True)
    worst = min(ratios, key=lambda name: ratios[name])
    held_out = [kind for kind in copies.kinds if kind.startswith("held out")]
    return {
        "speedup_lookup": copies.alone.speedup(["answer", "refine"], "lookup"),
        "speedup_graph": copies.alone.speedup(["refine"], "graph"),
        "held_out_lookup": copies.alone.speedup(held_out, "lookup"),
        "held_out_graph": copies.alone.speedup(["held out refine"], "graph"),
        "nothing_to_copy": writes.alone.speedup(["nothing to copy"], "lookup"),
        "misled": writes.alone.speedup(["misled"], "graph"),
        "worst_at_load": round(ratios[worst], 3),
        "worst_is": worst,
        "control_at_load": [round(min(equal.values()), 3), round(max(equal.values()), 3)],
        "outputs_equal": not copies.differ + writes.differ,
        "outputs_that_differ": copies.differ + writes.differ,
    }


def at_load(*models: Measured, of_control: bool = False) -> dict[str, float]:
    """By kind, way and number at once: of the ways with drafts, or of the control."""
    return {
        f"{row['kind']}, {way}, {row['at once']} at once": row[f"{way} faster"]
        for one in models
        for row in one.load
        for way in row["ratios"]
        if (way == CONTROL) is of_control
    }


def _steps(profile: EngineProfile) -> dict[str, dict[str, float]]:
    """Milliseconds of a step by requests side by side and by drafted tokens."""
    return {
        str(rows): {str(k): round(1000 * seconds, 3) for k, seconds in curve.points}
        for rows, curve in profile.verifying.items()
    }


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=8, help=f"with the first model; {MORE} times with the second")
    parser.add_argument("--cores", default="0", help="of all engines, which work in turn (CPU builds)")


def _table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in ("ratios", "rounds")} for row in rows]


if __name__ == "__main__":
    wanted = arguments("Decoding with drafts on real vLLM, and without.", _options)
    outcome = asyncio.run(run(wanted))
    report(outcome, wanted, "one at a time: ms a token", _table(outcome["cases"]))
    print_table("several at once", _table(outcome["load"]))
