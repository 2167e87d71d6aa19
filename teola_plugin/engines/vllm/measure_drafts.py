"""Seconds of a decoding step by drafted tokens and requests side by side, measured on the idle engine."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Mapping
from typing import Any, Protocol

from teola_plugin.engines.base import Engine
from teola_plugin.engines.drafts.draft_lengths import tokens_per_step
from teola_plugin.engines.vllm.drafts.worker import FIX_LENGTH
from teola_plugin.graph import Curve, PrimitiveKind
from teola_plugin.requests.payloads import Generate, Prompt, Sampling
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Done, Failed

_POINTS = {1: (0, 1, 4, 8, 16, 32, 64), 4: (0, 2, 8, 32), 16: (0, 2, 8)}
"""Drafted tokens by requests side by side: fewer where a step takes longer, for in between it grows evenly."""
_STEPS = 12
"""Tokens of each request behind its first one, and steps where nothing is accepted. Those that come first write some
more, so that all are there together for that long."""
_numbers = itertools.count(time.time_ns() // 1000)


class Drafting(Engine, Protocol):
    """An engine whose worker takes words about drafts."""

    async def tell_drafts(self, method: str, argument: Any) -> Any: ...


async def verifying(engine: Drafting, budget: float = 2.5) -> Mapping[int, Curve]:
    """Measure `EngineProfile.verifying`, one batch size after the other, until `budget` seconds are spent.

    For a slow model this may be too short for any: the result is then empty.
    """
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
        await engine.tell_drafts(FIX_LENGTH, None)
    return found


async def _points(engine: Drafting, batch: int, lengths: list[int], until: float) -> tuple[tuple[int, float], ...]:
    """Return the seconds of a step by the number of drafted tokens.

    Stops when the time is spent, or at the length with which half as much is written per second as with the best one.
    """
    found, best = list[tuple[int, float]](), 0.0
    for k in lengths:
        if time.perf_counter() > until:
            break
        seconds = await _step(engine, batch, k)
        if seconds is None:
            break
        found.append((k, seconds))
        best = max(best, tokens_per_step(k) / seconds)
        if tokens_per_step(k) / seconds < best / 2:
            break
    return tuple(found)


async def _step(engine: Drafting, batch: int, drafted: int) -> float | None:
    """Seconds of a step with so many rows: the lower quartile of those that vLLM's worker saw, as what else the machine
    does makes steps longer, never shorter. None where it saw none."""
    await engine.tell_drafts(FIX_LENGTH, drafted)
    await asyncio.gather(*(_decoded(engine, 1 + _STEPS + (batch - i) // 4) for i in range(batch)))
    steps = [seconds for rows, seconds in await engine.tell_drafts(FIX_LENGTH, drafted) if rows == batch]
    return sorted(steps)[len(steps) // 4] if steps else None


async def _decoded(engine: Engine, tokens: int) -> None:
    number = next(_numbers)
    words = " ".join(random.Random(number).choices(_WORDS, k=24))
    asked = Generate(Prompt(text=f"{number} {words}"), Sampling(max_tokens=tokens, ignore_eos=True))
    async for result in engine.execute([Request(f"drafts-{number}", PrimitiveKind.PREFILLING, asked)]):
        if isinstance(result, Failed):
            raise result.error
        if isinstance(result, Done):
            return
    raise AssertionError("execute ended without a result")


_WORDS = ("the", "value", "object", "is", "set", "when", "class", "made", "and", "read", "by", "method", "name")
