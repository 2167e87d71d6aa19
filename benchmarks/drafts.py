"""Decoding with drafts on real vLLM, bundled model: milliseconds a token without, by lookup, by lookup and graph.

Two engines, one with drafts and one without, answer `draft_prompts` in turn: answers from a passage, refinements of
those with another one, and prompts with nothing to copy. Each request is a tenant's of its own, so that none finds
what another has written; but for the way `recent`, where they are one's. Then all prompts with 1, 4 and 16 requests at
once. The bundled model was trained to answer with the words of its passages: figures are those of such a model.

    python -m benchmarks.drafts --json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.common import arguments, environment, report, summary
from benchmarks.draft_prompts import NOTHING_TO_COPY, QUESTIONS, passages
from teola_plugin.cli.demo.prompts import INSTRUCTION, REFINE_INSTRUCTION
from teola_plugin.engines.bundled.files import llm_folder
from teola_plugin.engines.vllm import VllmEngine
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Generate, Generation, Message, Prompt, Sampling
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Done, Failed

WAYS = ("plain", "lookup", "graph", "recent")
"""Without drafts; from a request's own tokens; and from what the graph knows; and from recent outputs."""
KINDS = ("answer", "refine", "nothing to copy")
AT_ONCE = (1, 4, 16)
TOKENS = 64
"""Of an answer at most, as in the demo."""
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    prompt: Prompt
    drafts: tuple[str, ...] = ()
    """What the graph knows that the answer may repeat."""


@dataclass(frozen=True, slots=True)
class Answered:
    value: Generation
    ms_a_token: float
    """Behind the first one; 0 where there is none."""


@dataclass(frozen=True, slots=True)
class Engines:
    plain: VllmEngine
    drafting: VllmEngine

    def of(self, way: str) -> VllmEngine:
        return self.plain if way == "plain" else self.drafting


def _chat(system: str, human: str) -> Prompt:
    return Prompt(messages=(Message("system", system), Message("user", human)))


async def ask(engine: VllmEngine, case: Case, way: str, tenant: str) -> Answered:
    drafts = case.drafts if way in ("graph", "recent") else ()
    asked = Generate(case.prompt, Sampling(max_tokens=TOKENS))
    name, kind = f"drafts-{next(_numbers)}", PrimitiveKind.PREFILLING
    tenant = tenant if way == "recent" else name
    async with aclosing(engine.execute([Request(name, kind, asked, tenant=tenant, app=way, drafts=drafts)])) as results:
        async for result in results:
            if isinstance(result, Failed):
                raise result.error
            if isinstance(result, Done):
                behind = result.value.completion_tokens - 1
                seconds = result.stats["seconds"] - result.stats["first_token_s"]
                return Answered(result.value, 1000 * seconds / behind if behind else 0.0)
    raise AssertionError("execute ended without a result")


async def cases(plain: VllmEngine) -> list[Case]:
    """Refinements hold what the engine without drafts has answered."""
    found = [Case("nothing to copy", _chat("You are a friend.", text)) for text in NOTHING_TO_COPY]
    for topic, question in QUESTIONS:
        first, second = passages(topic, question)
        asked = f"Question: {question}\n\nPassage:\n"
        answer = Case("answer", _chat(INSTRUCTION, f"{asked}{first}\n\nAnswer:"))
        before = (await ask(plain, answer, "plain", "first")).value.text
        again = f"{asked}{second}\n\nEarlier answer: {before}\n\nBetter answer:"
        found += [answer, Case("refine", _chat(INSTRUCTION + REFINE_INSTRUCTION, again), (before,))]
    return found


class OneByOne:
    """Every case in every way, in turn."""

    def __init__(self, engines: Engines, given: Sequence[Case]) -> None:
        self._engines, self._given = engines, given
        self._ms: dict[tuple[int, str], list[float]] = {}
        self._values: dict[tuple[int, str], Generation] = {}
        self.differ = 0

    async def repeat(self, number: int) -> None:
        for i, case in enumerate(self._given):
            shift = (number + i) % len(WAYS)
            for way in (*WAYS[shift:], *WAYS[:shift]):
                found = await ask(self._engines.of(way), case, way, f"{way}-{number}")
                if found.ms_a_token:
                    self._ms.setdefault((i, way), []).append(found.ms_a_token)
                self._values[i, way] = found.value
            self.differ += len({self._values[i, way].text for way in WAYS}) > 1

    def texts(self) -> list[str]:
        return [self._values[i, "plain"].text for i in range(len(self._given))]

    def ms(self, kinds: Sequence[str], way: str) -> float:
        """A token, of all of those: the median of the repeats of each, by its tokens."""
        weights = {i: self._values[i, way].completion_tokens - 1 for i, way_ in self._ms if way_ == way}
        chosen = {i: n for i, n in weights.items() if self._given[i].kind in kinds}
        return sum(median(self._ms[i, way]) * n for i, n in chosen.items()) / sum(chosen.values())

    def speedup(self, kinds: Sequence[str], way: str) -> float:
        return round(self.ms(kinds, "plain") / self.ms(kinds, way), 3)

    def row(self, kind: str) -> dict[str, Any]:
        chosen = [i for i, case in enumerate(self._given) if case.kind == kind]
        values = {way: [self._values[i, way] for i in chosen] for way in WAYS}
        return {
            "kind": kind,
            "prompts": len(chosen),
            "tokens": sum(value.completion_tokens for value in values["plain"]),
            **{f"{way} ms": round(self.ms([kind], way), 3) for way in WAYS},
            **{f"{way} faster": self.speedup([kind], way) for way in WAYS[1:]},
            **{f"{way} drafted": sum(value.drafted for value in values[way]) for way in WAYS[1:]},
            **{f"{way} accepted": sum(value.accepted for value in values[way]) for way in WAYS[1:]},
        }


async def at_once(engines: Engines, given: Sequence[Case], way: str, most: int, tenant: str) -> tuple[float, list[str]]:
    """Seconds of all of them with so many under way, and what was answered."""
    free, engine = asyncio.Semaphore(most), engines.of(way)

    async def one(case: Case) -> str:
        async with free:
            return (await ask(engine, case, way, tenant)).value.text

    began = time.perf_counter()
    texts = await asyncio.gather(*map(one, given))
    return time.perf_counter() - began, texts


async def load(engines: Engines, given: Sequence[Case], texts: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """A row for each number of requests at once: how many times faster all of them are done. `texts`: as answered one
    by one."""
    rows = []
    for most in AT_ONCE:
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        differ = dict.fromkeys(WAYS, 0)
        for number in range(repeats):
            for way in WAYS[:: 1 if number % 2 else -1]:
                took, found = await at_once(engines, given, way, most, f"{way}-{most}-{number}")
                seconds[way].append(took)
                differ[way] += sum(one != other for one, other in zip(found, texts, strict=True))
        ratios = {way: [p / s for p, s in zip(seconds["plain"], seconds[way], strict=True)] for way in WAYS[1:]}
        rows.append(
            {
                "at once": most,
                **{f"{way} s": round(median(seconds[way]), 3) for way in WAYS},
                **{f"{way} faster": round(median(ratios[way]), 3) for way in WAYS[1:]},
                **{f"{way} differ": differ[way] for way in WAYS},
                "ratios": {way: summary(found) for way, found in ratios.items()},
            }
        )
    return rows


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    started, folder = time.perf_counter(), str(llm_folder())
    plain = VllmEngine("plain", folder, cores=options.cores, drafts="off")
    engines = Engines(plain, VllmEngine("drafting", folder, cores=options.cores, drafts="auto"))
    try:
        for engine in (engines.plain, engines.drafting):
            await engine.start()
        profile = await engines.drafting.measure()
        given = await cases(engines.plain)
        alone = OneByOne(engines, given)
        for number in range(options.repeats):
            await alone.repeat(number)
        loaded = await load(engines, given, alone.texts(), options.repeats)
    finally:
        for engine in (engines.plain, engines.drafting):
            await engine.stop()
    worst = min(row[f"{way} faster"] for row in loaded for way in WAYS[1:])
    differ = alone.differ + sum(row[f"{way} differ"] for row in loaded for way in WAYS)
    return {
        "benchmark": "drafts",
        "speedup_lookup": alone.speedup(KINDS[:2], "lookup"),
        "speedup_graph": alone.speedup(["refine"], "graph"),
        "nothing_to_copy": alone.speedup(["nothing to copy"], "lookup"),
        "worst_at_load": worst,
        "outputs_equal": not differ,
        "outputs_that_differ": differ,
        "cases": [alone.row(kind) for kind in KINDS],
        "load": loaded,
        "step_ms": {
            str(rows): {str(k): round(1000 * seconds, 3) for k, seconds in curve.points}
            for rows, curve in profile.verifying.items()
        },
        "repeats": options.repeats,
        "took_s": round(time.perf_counter() - started, 1),
        "environment": environment(),
    }


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="runs of each way")
    parser.add_argument("--cores", default="0", help="of both engines, which work in turn (CPU builds)")


if __name__ == "__main__":
    wanted = arguments("Decoding with drafts on real vLLM, and without.", _options)
    outcome = asyncio.run(measured(wanted))
    report(outcome, wanted, "one at a time: ms a token", outcome["cases"])
    report(
        outcome,
        argparse.Namespace(json=False),
        "several at once",
        [{name: value for name, value in row.items() if name != "ratios"} for row in outcome["load"]],
    )
