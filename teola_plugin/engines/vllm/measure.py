"""Seconds by tokens of an LLM engine, measured on the idle engine through its own front door."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from teola_plugin.engines.base import Engine
from teola_plugin.graph import Curve, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Generate, Generation, Prompt, Sampling
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Done, Failed

_SIZES = (32, 256, 1024, 4096)
"""Prompt tokens to measure, as far as the model takes them and the time goes."""
_OUTPUT = (1, 32)
_CHUNK_SECONDS = 0.03
"""How long one chunk of a warm-up may hold up the other requests of the instance."""
_BESIDE = 1024
"""Prompt tokens at most that are prefilled beside a decoding, to see how much they slow each other."""
_numbers = itertools.count(time.time_ns() // 1000)
"""Begin each text: what an earlier process asked a server is not asked again, for it may be cached there."""


async def measure(engine: Engine, budget: float = 2.0, limit: int | None = None) -> EngineProfile:
    """A profile with curves for PREFILLING (prompt tokens) and DECODING (output tokens); aims at `budget` seconds.

    `limit`: tokens that the model takes, where the engine's profile does not say so.
    """
    clock = asyncio.get_running_loop().time
    began = clock()
    limit = engine.profile.max_request_size or limit or _SIZES[-1]
    await _timed(engine, 64, _OUTPUT[1])  # the first request pays for what starts lazily
    prefill: list[tuple[int, float]] = []
    for size in _SIZES:
        spent = clock() - began
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
    """The curve of those that take less than all greater ones: whatever else a machine does only adds to a time. Where
    one is left, times are in proportion."""
    kept: list[tuple[int, float]] = []
    for size, seconds in reversed(points):
        if not kept or seconds < kept[-1][1]:
            kept.append((size, seconds))
    return Curve(tuple(reversed(kept)) if len(kept) > 1 else ((0, 0.0), *kept))


def _with_chunk(profile: EngineProfile) -> EngineProfile:
    """Sets the warm-up chunk: the largest power of two within `_CHUNK_SECONDS`, from 64 to 2048 tokens."""
    fits = [
        n for n in (64, 128, 256, 512, 1024, 2048) if profile.seconds(PrimitiveKind.PREFILLING, n) <= _CHUNK_SECONDS
    ]
    return replace(profile, warmup_chunk=max(fits, default=64))


async def interference(engine: Engine, profile: EngineProfile) -> float:
    """Return the share of its own time by which a prefilling lengthens a concurrent decoding, 0 to 1."""
    decoding = profile.seconds(PrimitiveKind.DECODING, _OUTPUT[1])
    sizes = [n for n, seconds in profile.curves[PrimitiveKind.PREFILLING].points if n <= _BESIDE and seconds < decoding]
    size, shares = max(sizes, default=64), list[float]()
    for _ in range(3):  # one, the other and both in turn: what else the machine does meanwhile slows all three
        (_, alone), (_, prefilling) = await _timed(engine, 32, _OUTPUT[1]), await _timed(engine, size, 1)
        _, (_, both) = await asyncio.gather(_timed(engine, size, 1), _timed(engine, 32, _OUTPUT[1]))
        shares.append((both - alone) / prefilling)
    return min(1.0, max(0.0, statistics.median(shares)))


async def _timed(engine: Engine, prompt_tokens: int, output_tokens: int) -> tuple[int, float]:
    """The prompt's real tokens and the request's seconds; a fresh text, so nothing of it is cached."""
    number = next(_numbers)
    words = random.Random(number)
    text = f"{number} " + " ".join(words.choice(_WORDS) for _ in range(prompt_tokens))
    ratio = engine.size(_request(number, text, 1))
    text = text[: max(8, round(len(text) * prompt_tokens / ratio))]
    clock = asyncio.get_running_loop().time
    began = clock()
    async for result in engine.execute([_request(number, text, output_tokens)]):
        if isinstance(result, Failed):
            raise result.error
        if isinstance(result, Done):
            assert isinstance(result.value, Generation)
            return result.value.prompt_tokens, clock() - began
    raise AssertionError("execute ended without a result")


def _request(number: int, text: str, output_tokens: int) -> Request:
    sampling = Sampling(max_tokens=output_tokens, ignore_eos=True)
    return Request(f"measure-{number}", PrimitiveKind.PREFILLING, Generate(Prompt(text=text), sampling))


_WORDS = ("the", "value", "object", "is", "set", "when", "class", "made", "and", "read", "by", "method", "name")
