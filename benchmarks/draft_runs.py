"""How `benchmarks.drafts` measures: every way beside the plain one, in turn, one at a time and several at once.

Each repeat has engines of its own. Two processes of one model differ in speed by up to a tenth for as long as they
live, whatever they do, as their memory lies differently; so the median is over pairs of engines.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from benchmarks.common import summary
from benchmarks.draft_cases import Answered, Case, Engines, ask
from benchmarks.draft_prompts import QUESTIONS, passages
from teola_plugin.engines.drafts.corpus import Corpus
from teola_plugin.engines.drafts.draft_lengths import longest_of_rows, unmeasured_longest_drafts
from teola_plugin.engines.drafts.request_drafter import RequestDrafter

WAYS = ("lookup", "graph", "recent")
"""From a request's own tokens; from what the graph knows, too; and from recent outputs of the same tenant, too."""

_Values = Mapping[str, list[float]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked: cases by kind, and in which ways beside the plain one."""

    cases: Mapping[str, Sequence[Case]]
    ways: Mapping[str, Sequence[str]]


class OneByOne:
    """Every case in every way, in turn."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._found: dict[tuple[str, str], list[list[Answered]]] = {}
        """By kind and way, of each repeat, of each case."""
        self.differ = 0

    async def repeat(self, engines: Engines, number: int) -> None:
        for kind, cases in self._plan.cases.items():
            ways = ("plain", *self._plan.ways[kind])
            for way in ways:
                self._found.setdefault((kind, way), []).append([])
            for i, case in enumerate(cases):
                shift, texts = (number + i) % len(ways), set()
                for way in (*ways[shift:], *ways[:shift]):
                    tenant = f"{way}-{number}" if way == "recent" else ""
                    found = await ask(engines.of(way), case, way, tenant)
                    self._found[kind, way][-1].append(found)
                    texts.add(found.value.text)
                self.differ += len(texts) > 1

    def texts(self, kind: str) -> list[str]:
        return [one.value.text for one in self._found[kind, "plain"][-1]]

    def ratios(self, kinds: Sequence[str], way: str, *, whole: bool = False) -> list[float]:
        """How many times faster than plain, of each repeat: decoding, or the `whole` request."""
        return [
            self._seconds(kinds, "plain", number, whole) / self._seconds(kinds, way, number, whole)
            for number in range(len(self._found[kinds[0], way]))
        ]

    def _seconds(self, kinds: Sequence[str], way: str, number: int, whole: bool = False) -> float:
        every = [one for kind in kinds for one in self._found[kind, way][number]]
        return sum(one.seconds if whole else one.decoding for one in every)

    def speedup(self, kinds: Sequence[str], way: str) -> float:
        return round(median(self.ratios(kinds, way)), 3)

    def row(self, kind: str) -> dict[str, Any]:
        ways = self._plan.ways[kind]
        values = {way: [one.value for one in self._found[kind, way][-1]] for way in ("plain", *ways)}
        behind = sum(value.completion_tokens - 1 for value in values["plain"])
        repeats = range(len(self._found[kind, "plain"]))
        ms = {way: [1000 * self._seconds([kind], way, n) / behind for n in repeats] for way in ("plain", *ways)}
        return {
            "kind": kind,
            "prompts": len(values["plain"]),
            "tokens": sum(value.completion_tokens for value in values["plain"]),
            **{f"{way} ms": round(median(found), 3) for way, found in ms.items()},
            **{f"{way} faster": self.speedup([kind], way) for way in ways},
            **{f"{way} drafted": sum(value.drafted for value in values[way]) for way in ways},
            **{f"{way} accepted": sum(value.accepted for value in values[way]) for way in ways},
            "ratios": {way: summary(self.ratios([kind], way)) for way in ways},
        }

    def load_row(self, kind: str) -> dict[str, Any]:
        """As `Load` has it, for one request at a time, with the prompts' prefilling."""
        ways = [way for way in self._plan.ways[kind] if way != "recent"]
        ratios = {way: self.ratios([kind], way, whole=True) for way in ways}
        numbers = range(len(self._found[kind, "plain"]))
        seconds = {way: [self._seconds([kind], way, n, True) for n in numbers] for way in ("plain", *ways)}
        return timed(kind, 1, seconds, ratios)


def timed(kind: str, most: int, seconds: _Values, ratios: _Values) -> dict[str, Any]:
    """With so many at once, by way: seconds of each set of engines, and how many times faster they are."""
    return {
        "kind": kind,
        "at once": most,
        **{f"{way} s": round(median(found), 3) for way, found in seconds.items()},
        **{f"{way} faster": round(median(found), 3) for way, found in ratios.items()},
        "ratios": {way: summary(found) for way, found in ratios.items()},
    }


def proposing_us(tokens: int = 8192) -> dict[str, Any]:
    """Microseconds of a proposal and of taking in what came, by step of a row of so many tokens, indexing apart; the
    row copies a third of what it writes. Tokens are words, numbered."""
    words = " ".join(passages(topic, "")[0] for topic, _ in QUESTIONS).split()
    numbers = {word: i for i, word in enumerate(dict.fromkeys(words))}
    text = [numbers[word] for word in words]
    prompt = (text * (tokens // len(text) + 1))[: tokens - 512]
    output = [token for at in range(0, 512, 32) for token in (*text[3 * at : 3 * at + 11], *text[:: at + 7][:21])]
    every = {
        "lookup": RequestDrafter(prompt, len(prompt), (), None, 16),
        "a text and recent outputs beside it": RequestDrafter(prompt, len(prompt), [output[::2]], Corpus(text), 16),
    }
    return {name: _proposed(row, output) for name, row in every.items()}


def _proposed(row: RequestDrafter, output: Sequence[int]) -> dict[str, Any]:
    longest, took, done = longest_of_rows(unmeasured_longest_drafts(16), 1), list[float](), 0
    while done < len(output):
        began = time.perf_counter()
        draft = row.draft(16, longest)
        right = 0
        while right < min(len(draft), len(output) - done - 1) and draft[right] == output[done + right]:
            right += 1
        row.grow(output[done : done + right + 1])
        took.append(1e6 * (time.perf_counter() - began))
        done += right + 1
    return {"mean": round(mean(took), 1), "median": round(median(took), 1), "steps": len(took), "tokens": len(row)}
