"""Tests of latency curves made from an engine's times, in virtual time, also of times measured under load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from teola_plugin.engines.vllm.measure import interference, measure, rising
from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Done, Generation, Request, Result
from teola_plugin.runtime.virtual_time import run_virtual

PREFILL, DECODE = 0.0003, 0.02
"""Seconds by token."""


def test_rising_times_are_kept() -> None:
    points = [(27, 0.006), (110, 0.010), (420, 0.030)]
    assert rising(points).points == tuple(points)


def test_slow_outlier_of_short_prompt_is_dropped() -> None:
    assert rising([(27, 0.030), (110, 0.010), (420, 0.030)]).points == ((110, 0.010), (420, 0.030))


@pytest.mark.parametrize("points", [[(1, 0.00665), (27, 0.0063)], [(27, 0.0063)]])
def test_single_measured_time_is_scaled_by_size(points: list[tuple[int, float]]) -> None:
    """A line through both would have long prompts take no time at all."""
    curve = rising(points)
    assert curve(27) == pytest.approx(0.0063) and 0 < curve(256) < curve(4096)


class Server:
    """An engine whose decodings are lengthened by `share` of a prefilling that goes on beside them."""

    def __init__(self, share: float) -> None:
        self.share, self.profile, self.prefilling = share, EngineProfile(curves={}), 0.0

    def size(self, request: Request) -> int:
        return len(request.payload.prompt.text) // 4

    async def execute(self, batch: list[Request]) -> AsyncIterator[Result]:
        [request] = batch
        tokens, output = self.size(request), request.payload.sampling.max_tokens
        prefilling = PREFILL * tokens
        if output == 1:
            self.prefilling = prefilling
            await asyncio.sleep(prefilling + DECODE)
            self.prefilling = 0.0
        else:
            await asyncio.sleep(prefilling + DECODE)  # what comes beside it has begun by now
            await asyncio.sleep(DECODE * (output - 1) + self.share * self.prefilling)
        yield Done(request.id, Generation("", prompt_tokens=tokens, completion_tokens=output))


async def measured(engine: Any) -> tuple[EngineProfile, float]:
    found = await measure(engine, budget=100.0)
    return found, await interference(engine, found)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_profile_is_measured_by_sending_requests(share: float) -> None:
    found, beside = run_virtual(measured(Server(share)))
    assert beside == pytest.approx(share, abs=0.1), "texts differ by some tokens"
    assert found.seconds(PrimitiveKind.DECODING, 10) == pytest.approx(10 * DECODE)
    for size in (100, 1000):
        assert found.seconds(PrimitiveKind.PREFILLING, size) == pytest.approx(PREFILL * size + DECODE, rel=0.01)
