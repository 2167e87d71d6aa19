"""Seconds of a decoding step by drafted tokens and requests side by side, measured on the idle engine."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from teola_plugin.engines.base import Engine
from teola_plugin.engines.vllm.drafts.lengths import written
from teola_plugin.engines.vllm.drafts.worker import FIX
from teola_plugin.graph import Curve, PrimitiveKind
from teola_plugin.requests.payloads import Generate, Prompt, Sampling
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Done, Failed

_POINTS = {1: (0, 1, 4, 8, 16, 32, 64), 4: (0, 2, 8, 32), 16: (0, 2, 8)}
"""Drafted tokens by requests side by side: fewer where a step takes longer, for in between it grows evenly."""
_STEPS = 6
"""Tokens of each request behind its first one, and steps at least where nothing is accepted."""
_REPEATS = 2
_numbers = itertools.count(time.time_ns() // 1000)


class Drafting(Engine, Protocol):
    """An engine whose worker takes words about drafts."""

    async def tell_drafts(self, method: str, argument: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class _Sample:
    seconds: float
    drafted: int


async def verifying(engine: Drafting, budget: float = 2.5) -> Mapping[int, Curve]:
    """For `EngineProfile.verifying`. Batches are measured one after the other, until `budget` seconds are spent: of a
    slow model perhaps none, and then nothing is known."""
    until, found = time.perf_counter() + budget, dict[int, Curve]()
    profile = engine.profile
    try:
        for batch in (n for n in _POINTS if n <= profile.max_requests):
            lengths = [k for k in _POINTS[batch] if k < profile.drafts]
            if batch == 1 or len(lengths) < 2:
                lengths.append(profile.drafts)
            points = await _points(engine, batch, lengths, until)
            if len(points) < 2:
                break
            found[batch] = Curve(points)
    finally:
        await engine.tell_drafts(FIX, None)
    return found


async def _points(engine: Drafting, batch: int, lengths: list[int], until: float) -> tuple[tuple[int, float], ...]:
    """By drafted tokens, the seconds of a step: up to the length with which half as much is written as with another, or
    until the time is spent."""
    found, best = list[tuple[int, float]](), 0.0
    for k in lengths:
        if time.perf_counter() > until:
            break
        await engine.tell_drafts(FIX, k)
        seconds = min([await _step(engine, batch, k) for _ in range(_REPEATS)])
        found.append((k, seconds))
        best = max(best, written(k) / seconds)
        if written(k) / seconds < best / 2:
            break
    return tuple(found)


async def _step(engine: Engine, batch: int, drafted: int) -> float:
    """Seconds of a step. Some drafted tokens may be accepted: steps are counted by what was drafted."""
    samples = await asyncio.gather(*(_decoded(engine) for _ in range(batch)))
    steps = [sample.drafted / drafted if drafted and sample.drafted else _STEPS for sample in samples]
    return statistics.median(sample.seconds / n for sample, n in zip(samples, steps, strict=True))


async def _decoded(engine: Engine) -> _Sample:
    """Seconds behind the first token, as the engine tells them."""
    number = next(_numbers)
    words = " ".join(random.Random(number).choices(_WORDS, k=24))
    sampling = Sampling(max_tokens=1 + _STEPS, ignore_eos=True)
    asked = Generate(Prompt(text=f"{number} {words}"), sampling)
    async for result in engine.execute([Request(f"drafts-{number}", PrimitiveKind.PREFILLING, asked)]):
        if isinstance(result, Failed):
            raise result.error
        if isinstance(result, Done):
            return _Sample(result.stats["seconds"] - result.stats["first_token_s"], int(result.stats["drafted"]))
    raise AssertionError("execute ended without a result")


_WORDS = ("the", "value", "object", "is", "set", "when", "class", "made", "and", "read", "by", "method", "name")
