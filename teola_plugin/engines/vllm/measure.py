"""Measurements of an idle LLM engine: seconds by tokens, and seconds of a decoding step by drafted tokens."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from teola_plugin.engines.base import Engine
from teola_plugin.engines.drafts.draft_lengths import tokens_per_step
from teola_plugin.engines.vllm.drafts.worker import FIX_LENGTH
from teola_plugin.graph import Curve, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Done, Failed, Generate, Generation, Prompt, Request, Sampling

_SIZES = (32, 256, 1024, 4096)
"""Prompt tokens to measure, as far as the model takes them and the time goes."""
_OUTPUT = (1, 32)
_CHUNK_SECONDS = 0.03
"""Time for which a chunk of a warm-up may hold up the other requests of the replica."""
_CONCURRENT = 1024
"""Maximum prompt tokens that are prefilled during a decoding, to measure how much they slow each other."""
_numbers = itertools.count(time.time_ns() // 1000)
"""Numbers at the beginning of each text, so that no text of an earlier process is sent: it may be cached."""


async def measure(engine: Engine, budget: float = 2.0, limit: int | None = None) -> EngineProfile:
    """Return a profile with curves for PREFILLING (prompt tokens) and DECODING (output tokens).

    Aims at `budget` seconds. `limit`: maximum tokens of the model, if the engine's profile has none.
    """
    clock = asyncio.get_running_loop().time
    start = clock()
    limit = engine.profile.max_request_size or limit or _SIZES[-1]
    await _timed(engine, 64, _OUTPUT[1])  # the first request pays for what starts lazily
    prefill: list[tuple[int, float]] = []
    for size in _SIZES:
        spent = clock() - start
        if size + 8 > limit or (prefill and spent + prefill[-1][1] * 2 * size / prefill[-1][0] > budget / 2):
            break
        prefill.append(min([await _timed(engine, size, 1) for _ in range(2)], key=lambda point: point[1]))
    few, many = [min([(await _timed(engine, 32, n))[1] for _ in range(2)]) for n in _OUTPUT]
    step = max(1e-6, (many - few) / (_OUTPUT[1] - _OUTPUT[0]))
    curves = {
        PrimitiveKind.PREFILLING: rising(prefill if len(prefill) > 1 else [(1, few), *prefill]),
        PrimitiveKind.DECODING: Curve.linear(0.0, step),
    }
    return _with_chunk(EngineProfile(curves=curves))


def rising(points: Sequence[tuple[int, float]]) -> Curve:
    """Return the curve of the points that take less than all greater ones: disturbances only add to a time.

    If one is left, times are in proportion.
    """
    rising_points: list[tuple[int, float]] = []
    for size, seconds in reversed(points):
        if not rising_points or seconds < rising_points[-1][1]:
            rising_points.append((size, seconds))
    return Curve(tuple(reversed(rising_points)) if len(rising_points) > 1 else ((0, 0.0), *rising_points))


def _with_chunk(profile: EngineProfile) -> EngineProfile:
    """Set the warm-up chunk: the largest power of two within `_CHUNK_SECONDS`, from 64 to 2048 tokens."""
    chunks = [
        n for n in (64, 128, 256, 512, 1024, 2048) if profile.seconds(PrimitiveKind.PREFILLING, n) <= _CHUNK_SECONDS
    ]
    return replace(profile, warmup_chunk=max(chunks, default=64))


async def interference(engine: Engine, profile: EngineProfile) -> float:
    """Return the share of its own time by which a prefilling lengthens a concurrent decoding, 0 to 1."""
    decoding = profile.seconds(PrimitiveKind.DECODING, _OUTPUT[1])
    sizes = [
        n for n, seconds in profile.curves[PrimitiveKind.PREFILLING].points if n <= _CONCURRENT and seconds < decoding
    ]
    size, shares = max(sizes, default=64), list[float]()
    for _ in range(3):  # one, the other and both in turn: what else the machine does meanwhile slows all three
        (_, decoding_alone), (_, prefilling) = await _timed(engine, 32, _OUTPUT[1]), await _timed(engine, size, 1)
        _, (_, both) = await asyncio.gather(_timed(engine, size, 1), _timed(engine, 32, _OUTPUT[1]))
        shares.append((both - decoding_alone) / prefilling)
    return min(1.0, max(0.0, statistics.median(shares)))


async def _timed(engine: Engine, prompt_tokens: int, output_tokens: int) -> tuple[int, float]:
    """Return the prompt's real tokens and the request's seconds, for a new text, which is not cached."""
    number = next(_numbers)
    words = random.Random(number)
    text = f"{number} " + " ".join(words.choice(_WORDS) for _ in range(prompt_tokens))
    ratio = engine.size(_request(number, text, 1))
    text = text[: max(8, round(len(text) * prompt_tokens / ratio))]
    clock = asyncio.get_running_loop().time
    start = clock()
    async for result in engine.execute([_request(number, text, output_tokens)]):
        if isinstance(result, Failed):
            raise result.error
        if isinstance(result, Done):
            assert isinstance(result.value, Generation)
            return result.value.prompt_tokens, clock() - start
    raise AssertionError("execute ended without a result")


def _request(number: int, text: str, output_tokens: int) -> Request:
    sampling = Sampling(max_tokens=output_tokens, ignore_eos=True)
    return Request(f"measure-{number}", PrimitiveKind.PREFILLING, Generate(Prompt(text=text), sampling))


_POINTS = {1: (0, 1, 4, 8, 16, 32, 64), 4: (0, 2, 8, 32), 16: (0, 2, 8)}
"""Measured numbers of drafted tokens, by number of concurrent requests. In between, steps grow evenly."""
_STEPS = 12
"""Number of tokens of each request after its first one. The first requests write some more, so that all of them run
together for that long."""


class DraftingEngine(Engine, Protocol):
    """An engine whose worker has methods that concern drafts."""

    async def call_proposer(self, method: str, argument: Any) -> Any: ...


async def measure_verifying(engine: DraftingEngine, budget: float = 2.5) -> Mapping[int, Curve]:
    """Measure `EngineProfile.verifying`, one batch size after the other, until `budget` seconds are spent.

    For a slow model this may be too short for any: the result is then empty.
    """
    deadline, curves = time.perf_counter() + budget, dict[int, Curve]()
    profile = engine.profile
    try:
        for batch in (n for n in _POINTS if n <= profile.max_requests):
            lengths = [k for k in _POINTS[batch] if k < profile.drafts]
            if batch == 1 or len(lengths) < 2:
                lengths.append(profile.drafts)
            points = await _points(engine, batch, lengths, deadline)
            if len(points) < 2:
                break
            curves[batch] = Curve(points)
    finally:
        await engine.call_proposer(FIX_LENGTH, None)
    return curves


async def _points(
    engine: DraftingEngine, batch: int, lengths: list[int], deadline: float
) -> tuple[tuple[int, float], ...]:
    """Return the seconds of a step by the number of drafted tokens.

    Stops when the time is spent, or at the length with which half as much is written per second as with the best one.
    """
    points, best = list[tuple[int, float]](), 0.0
    for k in lengths:
        if time.perf_counter() > deadline:
            break
        seconds = await _step(engine, batch, k)
        if seconds is None:
            break
        points.append((k, seconds))
        best = max(best, tokens_per_step(k) / seconds)
        if tokens_per_step(k) / seconds < best / 2:
            break
    return tuple(points)


async def _step(engine: DraftingEngine, batch: int, drafted: int) -> float | None:
    """Return the seconds of a step with `batch` rows; None if vLLM's worker made none.

    It is the lower quartile, as disturbances make steps longer, never shorter.
    """
    await engine.call_proposer(FIX_LENGTH, drafted)
    await asyncio.gather(*(_decode(engine, 1 + _STEPS + (batch - i) // 4) for i in range(batch)))
    steps = [seconds for rows, seconds in await engine.call_proposer(FIX_LENGTH, drafted) if rows == batch]
    return sorted(steps)[len(steps) // 4] if steps else None


async def _decode(engine: Engine, tokens: int) -> None:
    """Run one request that writes exactly `tokens` tokens after a new text. Raise the error of one that fails."""
    number = next(_numbers)
    words = " ".join(random.Random(number).choices(_WORDS, k=24))
    payload = Generate(Prompt(text=f"{number} {words}"), Sampling(max_tokens=tokens, ignore_eos=True))
    async for result in engine.execute([Request(f"drafts-{number}", PrimitiveKind.PREFILLING, payload)]):
        if isinstance(result, Failed):
            raise result.error
        if isinstance(result, Done):
            return
    raise AssertionError("execute ended without a result")


_WORDS = ("the", "value", "object", "is", "set", "when", "class", "made", "and", "read", "by", "method", "name")
