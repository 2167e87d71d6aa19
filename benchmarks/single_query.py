"""One query on an idle machine: the plain chain's `ainvoke` against the accelerated one's, and against the bound.

Engines are fakes that take as long as RTX 3090s (`profiles.rtx3090`), in wall-clock time. Before every run prefix
caches are emptied and the collection is dropped; the order alternates; answers are compared.

Then the same on engines that verify drafts, with answers that copy a share of their tokens
(`benchmarks.rag.drafted`), each share in a process of its own at once, as they sleep most of the time; and in virtual
time, with when the first token comes.

    python -m benchmarks.single_query --json
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median
from typing import Any

from langchain_core.runnables import Runnable

from benchmarks.common import arguments, environment, print_table, report, summary
from benchmarks.rag import apps, bound, drafted
from benchmarks.rag.texts import SHARES
from teola_plugin import accelerate
from teola_plugin.engines import profiles
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import EmbedText

Bound = Callable[[bound.Machine, apps.Observed], float]


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[apps.Bench, int], Runnable[Any, str]]
    bound: Bound
    tokens: int

    def repeats(self, wanted: int) -> int:
        """Fewer for long answers, which are mostly decoding and vary least."""
        return {10: wanted, 60: max(1, wanted - 1)}.get(self.tokens, 1)


def parallel_advanced(bench: apps.Bench, tokens: int) -> Runnable[Any, str]:
    return apps.advanced_rag(bench, tokens, parallel=True)


APPS: dict[str, tuple[Callable[[apps.Bench, int], Runnable[Any, str]], Bound]] = {
    "advanced/sequential": (apps.advanced_rag, bound.advanced_rag),
    "advanced/parallel": (parallel_advanced, bound.advanced_rag),
    "naive": (apps.naive_rag, bound.naive_rag),
}
CASES = tuple(Case(name, *found, tokens) for tokens in (10, 60, 200) for name, found in APPS.items())
LONG = ("advanced/parallel/200",)
"""Only with `--all`: 40 s of decoding that show what the other cases with 200 tokens show."""


async def timed(run: Callable[[], Awaitable[str]]) -> tuple[float, str]:
    start = time.perf_counter()
    answer = await run()
    return time.perf_counter() - start, answer


async def measure(case: Case, bench: apps.Bench, repeats: int) -> dict[str, Any]:
    """Medians of both, their ratio, and how far each is from the bound. Raises when the answers differ."""
    chain = case.make(bench, case.tokens)
    fast = accelerate(chain, pool=bench.pool)
    given = {"question": apps.QUESTION, "document": apps.document()}
    seconds: dict[str, list[float]] = {"plain": [], "accelerated": []}
    answers: set[str] = set()
    least = 0.0
    for i in range(case.repeats(repeats)):
        for kind in ("plain", "accelerated")[:: 1 if i % 2 == 0 else -1]:
            await asyncio.to_thread(bench.fresh)
            runnable = chain if kind == "plain" else fast
            took, answer = await timed(lambda: runnable.ainvoke(given))  # noqa: B023 - awaited at once
            seconds[kind].append(took)
            answers.add(answer)
            if kind == "plain":
                least = case.bound(bound.Machine(bench.pool.profiles), bench.observed)
    if len(answers) != 1:
        raise SystemExit(f"{case.name}, {case.tokens} tokens: the answers differ: {answers}")
    return figures(case, seconds, least)


def figures(case: Case, seconds: dict[str, list[float]], least: float) -> dict[str, Any]:
    plain, accelerated = median(seconds["plain"]), median(seconds["accelerated"])
    return {
        "app": case.name,
        "answer_tokens": case.tokens,
        "speedup": round(plain / accelerated, 3),
        "possible": round(plain / least, 3),
        "over_bound": round(accelerated / least, 3),
        "bound_s": round(least, 4),
        "plain_s": summary(seconds["plain"]),
        "accelerated_s": summary(seconds["accelerated"]),
        "same_answers": True,
    }


async def nothing_to_gain(bench: apps.Bench, repeats: int) -> dict[str, Any]:
    """Milliseconds by which the accelerated chain is behind where every step needs the one before."""
    chain = apps.retrieve_and_answer(bench, 10)
    fast = accelerate(chain, pool=bench.pool)
    given = {"question": apps.QUESTION}
    behind, plain = [], []
    await asyncio.to_thread(bench.fresh)
    await bench_corpus(bench)
    for i in range(max(6, 4 * repeats)):
        took: dict[str, float] = {}
        for kind in ("plain", "accelerated")[:: 1 if i % 2 == 0 else -1]:
            await asyncio.to_thread(bench.pool.reset)
            runnable = chain if kind == "plain" else fast
            took[kind], _ = await timed(lambda: runnable.ainvoke(given))  # noqa: B023 - awaited at once
        behind.append(1000 * (took["accelerated"] - took["plain"]))
        plain.append(1000 * took["plain"])
    return {"behind_ms": summary(behind, digits=2), "plain_ms": summary(plain, digits=2)}


async def bench_corpus(bench: apps.Bench) -> None:
    """A small collection that is there before the query comes."""
    await bench.indexer().ainvoke(apps.document(chunks=16))
    await bench.pool.call(PrimitiveKind.EMBEDDING, "embedder", [EmbedText("warm")])


def chosen(options: argparse.Namespace) -> list[Case]:
    names = {case: f"{case.name}/{case.tokens}" for case in CASES}
    skipped = () if options.all or options.only else LONG
    return [case for case, name in names.items() if options.only in name and name not in skipped]


@dataclass(frozen=True)
class Wanted:
    """What one process is to do: names, as bound methods and closures do not travel."""

    share: float
    cases: tuple[tuple[str, int], ...]
    scale: float
    repeats: int


def drafted_rows(wanted: Wanted) -> list[dict[str, Any]]:
    """A row for each case, in wall-clock time."""
    return asyncio.run(_drafted_rows(wanted))


async def _drafted_rows(wanted: Wanted) -> list[dict[str, Any]]:
    machine, found = profiles.scaled(profiles.rtx3090(), wanted.scale), []
    for name, tokens in wanted.cases:
        repeats = wanted.repeats if tokens == 10 else max(1, wanted.repeats - 1) if tokens == 60 else 1
        found.append(await drafted.row(name, *APPS[name], tokens, wanted.share, machine, repeats))
    return found


def virtual_rows(wanted: Wanted) -> list[dict[str, Any]]:
    """The same in virtual time, with when the first token comes."""
    machine = profiles.rtx3090()
    return [drafted.exact(name, APPS[name][0], tokens, wanted.share, machine) for name, tokens in wanted.cases]


def with_drafts(options: argparse.Namespace, cases: Iterable[Case]) -> dict[str, Any]:
    """All shares, each in a process of its own."""
    named = tuple((case.name, case.tokens) for case in cases)
    wanted = [Wanted(share, named, options.scale, options.drafts_repeats) for share in SHARES]
    with ProcessPoolExecutor(len(SHARES), mp_context=get_context("spawn")) as processes:
        made = [row for some in processes.map(drafted_rows, wanted) for row in some]
        virtual = [row for some in processes.map(virtual_rows, wanted) for row in some]
    return {"scale": options.scale, **drafted.at_the_top(made, virtual), "rows": made, "virtual": virtual}


async def undrafted(options: argparse.Namespace) -> dict[str, Any]:
    bench = apps.fake_pool(profiles.rtx3090())
    async with bench.pool:
        await apps.warm_up(bench)
        cases = [await measure(case, bench, options.repeats) for case in chosen(options)]
        idle = await nothing_to_gain(bench, options.repeats)
    return {
        "speedup": cases[0]["speedup"],
        "possible": cases[0]["possible"],
        "over_bound": max(case["over_bound"] for case in cases),
        "nothing_to_gain_ms": idle["behind_ms"]["median"],
        "nothing_to_gain": idle,
        "cases": cases,
    }


def main(options: argparse.Namespace) -> dict[str, Any]:
    started, machine = time.perf_counter(), environment()
    made = asyncio.run(undrafted(options))
    return {
        "benchmark": "single_query",
        **made,
        "drafts": with_drafts(options, chosen(options)) if options.drafts_repeats else None,
        "profile": "rtx3090",
        "repeats": options.repeats,
        "took_s": round(time.perf_counter() - started, 1),
        "environment": machine,
    }


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    shown = [
        {
            "app": case["app"],
            "tokens": case["answer_tokens"],
            "plain s": case["plain_s"]["median"],
            "accelerated s": case["accelerated_s"]["median"],
            "bound s": case["bound_s"],
            "speed-up": case["speedup"],
            "possible": case["possible"],
            "over bound": case["over_bound"],
        }
        for case in result["cases"]
    ]
    idle = result["nothing_to_gain"]
    plain = idle["plain_ms"]["median"] / 1000
    return [
        *shown,
        {"app": "nothing to gain", "plain s": plain, "accelerated s": plain + idle["behind_ms"]["median"] / 1000},
    ]


def drafted_table(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "app": row["app"],
            "tokens": row["answer_tokens"],
            "copied": row["copied"],
            "plain s": row["plain_s"]["median"],
            "with drafts": row["plain_same_engine_s"]["median"],
            "accelerated s": row["accelerated_s"]["median"],
            "speed-up": row["speedup"],
            "possible": row["possible"],
            "by runs": row["possible_runs"],
            "same engine": row["speedup_same_engine"],
            "tokens a step": row["tokens_per_step"]["accelerated"],
        }
        for row in result["drafts"]["rows"]
    ]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind with 10-token answers")
    parser.add_argument("--all", action="store_true", help="also the case that takes longest")
    parser.add_argument("--only", default="", help="only cases whose app/tokens contain this")
    parser.add_argument("--scale", type=float, default=0.5, help="latencies of the rows with drafts, times this")
    parser.add_argument("--drafts-repeats", type=int, default=2, help="runs of those; 0: none of them")


if __name__ == "__main__":
    given = arguments("One query: plain against accelerated against the bound.", _options)
    outcome = main(given)
    report(outcome, given, "one query, RTX 3090 profile", rows(outcome))
    if outcome["drafts"]:
        print_table("one query, answers that copy, on engines that verify drafts", drafted_table(outcome))
