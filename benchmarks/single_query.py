"""One query on an idle machine: the plain chain's `ainvoke` against the accelerated one's, and against the bound.

Engines are fakes that take as long as RTX 3090s (`profiles.rtx3090`), in wall-clock time. Before every run prefix
caches are emptied and the collection is dropped; the order alternates; answers are compared.

    python -m benchmarks.single_query --json
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from langchain_core.runnables import Runnable

from benchmarks.common import arguments, environment, report, summary
from benchmarks.rag import apps, bound
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


async def warm_up(bench: apps.Bench) -> None:
    """Imports and first-use costs of both ways, untimed."""
    chain = apps.advanced_rag(bench, 1)
    given = {"question": apps.QUESTION, "document": apps.document(chunks=16)}
    for runnable in (chain, accelerate(chain, pool=bench.pool)):
        await asyncio.to_thread(bench.fresh)
        await runnable.ainvoke(given)


def chosen(options: argparse.Namespace) -> list[Case]:
    names = {case: f"{case.name}/{case.tokens}" for case in CASES}
    skipped = () if options.all or options.only else LONG
    return [case for case, name in names.items() if options.only in name and name not in skipped]


async def main(options: argparse.Namespace) -> dict[str, Any]:
    bench = apps.fake_pool(profiles.rtx3090())
    async with bench.pool:
        await warm_up(bench)
        cases = [await measure(case, bench, options.repeats) for case in chosen(options)]
        idle = await nothing_to_gain(bench, options.repeats)
    return {
        "benchmark": "single_query",
        "speedup": cases[0]["speedup"],
        "possible": cases[0]["possible"],
        "over_bound": max(case["over_bound"] for case in cases),
        "nothing_to_gain_ms": idle["behind_ms"]["median"],
        "nothing_to_gain": idle,
        "cases": cases,
        "profile": "rtx3090",
        "repeats": options.repeats,
        "environment": environment(),
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


if __name__ == "__main__":
    given = arguments(
        "One query: plain against accelerated against the bound.",
        lambda parser: (
            parser.add_argument("--repeats", type=int, default=3, help="runs of each kind with 10-token answers"),
            parser.add_argument("--all", action="store_true", help="also the case that takes longest"),
            parser.add_argument("--only", default="", help="only cases whose app/tokens contain this"),
        ),
    )
    outcome = asyncio.run(main(given))
    report(outcome, given, "one query, RTX 3090 profile", rows(outcome))
