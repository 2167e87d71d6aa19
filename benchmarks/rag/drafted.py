"""The applications on engines that verify drafts, with answers that copy a share of their tokens.

Two baselines: the plain chain on the engine as it ships, without drafts, and on the same engine as the accelerated one,
whose lookup serves the plain chain as well, so that what is left is what the graph adds. The bound is `bound`'s, with
as few steps as ideal drafting from the texts known by then could need: drafts of one token and more, which counts
tokens that stand somewhere before by chance as well, and of two and more, which hardly does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from langchain_core.runnables import Runnable

from benchmarks.common import summary
from benchmarks.rag import apps, bound
from teola_plugin import EnginePool, accelerate
from teola_plugin.engines import profiles
from teola_plugin.engines.fake import Decoded, split_tokens
from teola_plugin.graph import EngineProfile
from teola_plugin.runtime.virtual_time import run_virtual

Machine = Mapping[str, EngineProfile]
Make = Callable[[apps.Bench, int], Runnable[Any, str]]
Bound = Callable[[bound.Machine, apps.Observed], float]

WAYS = ("plain", "plain_same_engine", "accelerated", "accelerated_undrafted")
"""On the engine as it ships: the first and the last. With drafts: the others."""


class Ways:
    """One application with answers of one length that copy one share, in all ways."""

    def __init__(self, make: Make, tokens: int, shipped: apps.Bench, drafting: apps.Bench) -> None:
        self._benches = dict(zip(WAYS, (shipped, drafting, drafting, shipped), strict=True))
        chains = {id(bench): make(bench, tokens) for bench in (shipped, drafting)}
        self._chains: dict[str, Runnable[Any, str]] = {}
        for way, bench in self._benches.items():
            chain = chains[id(bench)]
            self._chains[way] = chain if way.startswith("plain") else accelerate(chain, pool=bench.pool)
        self._given = {"question": apps.QUESTION, "document": apps.document()}
        self.seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        self.decoded: dict[str, Decoded] = {}
        self.answers: set[str] = set()
        self.observed = apps.Observed()

    async def once(self, way: str) -> None:
        """One timed run on empty caches."""
        bench = self._benches[way]
        await asyncio.to_thread(bench.fresh)
        start = time.perf_counter()
        answer = await self._chains[way].ainvoke(self._given)
        self.seconds[way].append(time.perf_counter() - start)
        self.answers.add(answer)
        self.decoded[way] = bench.decoded
        if way == "plain_same_engine":
            self.observed = apps.Observed(list(bench.observed.generated), bench.observed.reranked)

    def least(self, of: Bound, least: int) -> float:
        """Seconds, where drafts of so many tokens and more are ideal."""
        return of(bound.Machine(self._benches["accelerated"].pool.profiles, least), self.observed)

    def ideal(self, least: int) -> float:
        """Tokens per step."""
        most = self._benches["accelerated"].pool.profiles["llm"].drafts
        texts = [(split_tokens(text), split_tokens(prompt)) for prompt, text in self.observed.generated]
        made = sum(len(bound.steps(text, prompt, most, least)) for text, prompt in texts)
        return sum(len(text) for text, _ in texts) / made


async def row(app: str, make: Make, of: Bound, tokens: int, share: float, machine: Machine, n: int) -> dict[str, Any]:
    """Medians of `n` runs of each way. Raises `SystemExit` when answers differ."""
    shipped, drafting = (apps.fake_pool(found, share=share) for found in (machine, profiles.drafting(machine)))
    async with shipped.pool, drafting.pool:
        for bench in (shipped, drafting):
            await apps.warm_up(bench)
        ways = Ways(make, tokens, shipped, drafting)
        for i in range(n):
            for way in WAYS[:: 1 if i % 2 == 0 else -1]:
                await ways.once(way)
        bounds = [ways.least(of, least) for least in (1, 2)]
    if len(ways.answers) != 1:
        raise SystemExit(f"{app}, {tokens} tokens, {share} copied: the answers differ: {ways.answers}")
    return {"app": app, "answer_tokens": tokens, "copied": share, **_figures(ways, *bounds)}


def _figures(ways: Ways, least: float, by_runs: float) -> dict[str, Any]:
    seconds = {way: median(found) for way, found in ways.seconds.items()}
    made = ways.decoded["accelerated"]
    steps = {way: ways.decoded[way].tokens / ways.decoded[way].steps for way in WAYS[1:3]}
    ideal = {"ideal": ways.ideal(1), "ideal_runs": ways.ideal(2)}
    return {
        **_ratios("", seconds["plain"], seconds["accelerated"], least, by_runs),
        **_ratios("_same_engine", seconds["plain_same_engine"], seconds["accelerated"], least, by_runs),
        "speedup_undrafted": round(seconds["plain"] / seconds["accelerated_undrafted"], 3),
        "bound_s": round(least, 4),
        "bound_runs_s": round(by_runs, 4),
        **{f"{way}_s": summary(found) for way, found in ways.seconds.items()},
        "tokens_per_step": {way: round(found, 3) for way, found in (steps | ideal).items()},
        "drafted": made.drafted,
        "accepted": made.accepted,
        "wasted": made.drafted - made.accepted,
        "same_answers": True,
    }


def _ratios(name: str, plain: float, accelerated: float, least: float, by_runs: float) -> dict[str, float]:
    """Over one baseline: the speed-up, what is possible, and the share of it."""
    speedup, possible, runs = plain / accelerated, plain / least, plain / by_runs
    return {
        f"speedup{name}": round(speedup, 3),
        f"possible{name}": round(possible, 3),
        f"possible_runs{name}": round(runs, 3),
        f"share_of_possible{name}": round((speedup - 1) / (possible - 1), 3),
        f"share_of_possible_runs{name}": round((speedup - 1) / (runs - 1), 3),
    }


# ------------------------------------------------------------ in virtual time


def exact(app: str, make: Make, tokens: int, share: float, machine: Machine) -> dict[str, Any]:
    """Seconds of each way in virtual time, where what the processor does takes none; milliseconds until the first token
    of the answer, and by how many the accelerated chain is behind the better plain one."""
    return {"app": app, "answer_tokens": tokens, "copied": share, **run_virtual(_exact(make, tokens, share, machine))}


async def _exact(make: Make, tokens: int, share: float, machine: Machine) -> dict[str, Any]:
    shipped, drafting = (
        apps.fake_pool(found, EnginePool.on_this_loop, share) for found in (machine, profiles.drafting(machine))
    )
    seconds, first = {}, {}
    async with shipped.pool, drafting.pool:
        for way, bench in zip(WAYS, (shipped, drafting, drafting, shipped), strict=True):
            chain = make(bench, tokens)
            runnable = chain if way.startswith("plain") else accelerate(chain, pool=bench.pool)
            seconds[f"{way}_s"] = round(await _seconds(bench, runnable), 4)
            first[way] = round(1000 * await _seconds(bench, runnable, first=True), 2)
    return {
        **seconds,
        "first_ms": first,
        "later_ms": round(first["accelerated"] - min(first[way] for way in WAYS[:2]), 2),
    }


async def _seconds(bench: apps.Bench, runnable: Runnable[Any, str], *, first: bool = False) -> float:
    """Until the answer is there, or its first token."""
    await bench.pool.runtime.areset()
    store: Any = bench.pool.engine("store")
    await store.delete_collection(apps.COLLECTION)
    loop, given = asyncio.get_running_loop(), {"question": apps.QUESTION, "document": apps.document()}
    start, came = loop.time(), []
    if not first:
        await runnable.ainvoke(given)
        return loop.time() - start
    async for _ in runnable.astream(given):
        came.append(loop.time() - start)
    return came[0]


def at_the_top(rows: Sequence[Mapping[str, Any]], virtual: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What holds of all rows. Where nothing is copied: how fast it is with drafts, in virtual time, over without."""
    new = [one["accelerated_undrafted_s"] / one["accelerated_s"] for one in virtual if not one["copied"]]
    return {
        "nothing_copied_worst": round(min(new, default=0.0), 4),
        "share_of_possible_worst": min((row["share_of_possible"] for row in rows), default=0.0),
        "share_of_possible_runs_worst": min((row["share_of_possible_runs"] for row in rows), default=0.0),
        "first_token_latest_ms": max((one["later_ms"] for one in virtual), default=0.0),
        "first_token_never_later": all(one["later_ms"] <= 0 for one in virtual),
    }
