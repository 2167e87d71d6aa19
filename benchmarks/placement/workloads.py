"""Preble's two workloads that need no data set, with the settings that it ships.

From `benchmark_workload_gen.py` of github.com/WukLab/preble. Token ids are made up; who shares what with whom, lengths
and arrivals (exponential) are as there. In `WorkloadPrefix` an example of the prompt takes 475 tokens (its own
estimate), the workload's name 4, the random characters at the end 50.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from teola_plugin.graph import PrimitiveKind
from teola_plugin.scheduling import block_hashes
from teola_plugin.simulation import Flow, FlowArrival, FlowRequest, FlowWork
from teola_plugin.simulation.flows import END


def asked(at: float, tokens: list[int], output: int = 1) -> FlowArrival:
    """A query that is one request, of this prompt."""
    blocks = block_hashes(tokens)
    one = FlowRequest(len(tokens), len(tokens), output, blocks, blocks)
    return FlowArrival(at, "asked", Flow((FlowWork("llm", PrimitiveKind.PREFILLING, (one,)),), ((0, END),)))


@dataclass(frozen=True)
class Workload:
    """`rate` in requests a second; `alone`: share of requests that share nothing with any other."""

    name: str
    replicas: int
    patterns: int
    requests: int
    rate: float
    alone: float = 0.0
    common: float = 0.0
    """PercentCommonShared: part of the prompt that all requests share."""
    examples: int = 0
    """WorkloadPrefix: examples in the prompt; 0 for the other one."""

    @property
    def output(self) -> int:
        return 64 if self.examples else 1

    def arrivals(self, seed: int = 0) -> list[FlowArrival]:
        rng = random.Random(seed)
        prompts = list(self._prompts(rng))
        rng.shuffle(prompts)
        at, made = 0.0, []
        for tokens in prompts:
            made.append(asked(at, tokens, self.output))
            at += rng.expovariate(self.rate)
        return made

    def _prompts(self, rng: random.Random) -> Iterator[list[int]]:
        shared = int(self.requests * (1 - self.alone))
        for number in range(shared):
            yield self._prompt(number % self.patterns, rng)
        for number in range(int(self.requests * self.alone)):
            yield self._prompt(self.patterns + number, rng, alone=True)

    def _prompt(self, pattern: int, rng: random.Random, *, alone: bool = False) -> list[int]:
        if self.examples:
            return [1 + pattern] * 4 + [0] * (475 * self.examples) + [rng.randrange(2, 32_000) for _ in range(50)]
        same = 0 if alone else int(8192 * self.common)
        return [0] * same + [1 + pattern] * (8192 - same)


def percent_common(common: float, rate: float) -> Workload:
    """PercentCommonShared at four replicas: Preble scales patterns, requests and rate with them."""
    return Workload(f"common {common:.0%}", 4, 120, int(600 * rate), 2 * rate, common=common)


WORKLOADS = (
    *(percent_common(0.0, rate) for rate in (1, 3, 6, 9)),
    *(percent_common(common, 6) for common in (0.2, 0.4, 0.6, 0.8)),
    Workload("prefix, 4 examples", 2, 200, 400, 4.0, alone=0.2, examples=4),
    Workload("prefix, 16 examples", 2, 30, 300, 2.0, alone=0.2, examples=16),
    Workload("prefix, 32 examples", 4, 24, 1200, 2.0, alone=0.5, examples=32),
    Workload("prefix, 4 examples", 4, 300, 4800, 12.0, alone=0.2, examples=4),
)
