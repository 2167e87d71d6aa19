"""Several requests at once in `benchmarks.drafts`: rounds of every way beside the plain one, in turn.

Rounds of equal engines differ by a tenth, from one to the next and for as long as the engines live. So the median is
over sets of engines. The first rounds of each are those in which new engines learn what drafts are worth there.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from benchmarks.draft_cases import CONTROL, Case, Engines, ask
from benchmarks.draft_runs import Plan, timed
from teola_plugin.engines.vllm import VllmEngine

Rounds = Sequence[Sequence[float]]
"""Seconds of each round of each set of engines."""


class Load:
    """All cases of a kind with so many at once, in every way."""

    def __init__(self, plan: Plan, texts: Mapping[str, Sequence[str]]) -> None:
        """`texts`: by kind, what is answered one by one."""
        self._plan, self._texts = plan, texts
        self._rounds: dict[tuple[str, int], dict[str, list[list[float]]]] = {}
        """By kind and number at once, of each way."""
        self._counts: dict[tuple[str, int], Counter[str]] = {}
        """Of those: answers that differ, tokens drafted and accepted, by way."""

    async def repeat(self, engines: Engines, rounds: Mapping[int, int]) -> None:
        """One set of engines. `rounds`: by number at once."""
        for most, times in rounds.items():
            for kind in self._plan.cases:
                ways = ("plain", *self._plan.ways[kind])
                found = self._rounds.setdefault((kind, most), {})
                for way in ways:
                    found.setdefault(way, []).append([])
                for number in range(times):
                    shift = number % len(ways)
                    for way in (*ways[shift:], *ways[:shift]):
                        found[way][-1].append(await self._once(engines.of(way), kind, most, way))

    async def _once(self, engine: VllmEngine, kind: str, most: int, way: str) -> float:
        """Seconds of a round."""
        free = asyncio.Semaphore(most)
        counts = self._counts.setdefault((kind, most), Counter())

        async def one(case: Case) -> str:
            async with free:
                value = (await ask(engine, case, way)).value
            counts[f"{way} drafted"] += value.drafted
            counts[f"{way} accepted"] += value.accepted
            return value.text

        began = time.perf_counter()
        found = await asyncio.gather(*map(one, self._plan.cases[kind]))
        took = time.perf_counter() - began
        counts[way] += sum(one != other for one, other in zip(found, self._texts[kind], strict=True))
        return took

    def rows(self) -> list[dict[str, Any]]:
        return [load_row(*which, rounds, self._counts[which]) for which, rounds in self._rounds.items()]


def load_row(kind: str, most: int, rounds: Mapping[str, Rounds], counts: Mapping[str, int]) -> dict[str, Any]:
    """`rounds`: of each way. `counts`: answers that differ, tokens drafted and accepted, by way."""
    ways = [way for way in rounds if way != "plain"]
    sets = {way: [sum(each) for each in found] for way, found in rounds.items()}
    ratios = {way: faster(rounds, way) for way in ways}
    drafting = [way for way in ways if way != CONTROL]
    return {
        **timed(kind, most, sets, ratios),
        **{f"{way} {what}": counts.get(f"{way} {what}", 0) for way in drafting for what in ("drafted", "accepted")},
        "differ": sum(counts.get(way, 0) for way in rounds),
        "plain differ": counts.get("plain", 0),
        "rounds": {way: [" ".join(f"{one:.3f}" for one in each) for each in found] for way, found in rounds.items()},
    }


def faster(rounds: Mapping[str, Rounds], way: str) -> list[float]:
    """How many times faster a way is than both engines without drafts, in the mean; the control, than the other one. By
    sets of engines, all rounds."""
    others = ("plain",) if way == CONTROL else ("plain", CONTROL)
    plain = [[sum(each) for each in rounds[other]] for other in others]
    return [mean(both) / sum(mine) for *both, mine in zip(*plain, rounds[way], strict=True)]
