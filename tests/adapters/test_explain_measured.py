"""Tests that the gain which `fast.report()` expects is the measured one, for each app from public tutorials."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.public_apps.__main__ import APPS, ASYNC_ONLY, Runner
from benchmarks.public_apps.apps import App, Way
from benchmarks.public_apps.server import FakeServer, fake_server
from teola_plugin import accelerate

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of ChatOpenAI with a schema

SCALE = 0.25
"""Latencies of the fake server, times this: enough for calls to outweigh the code around them."""
WARM_QUERIES = 2
"""Queries after which `report()` expects what it shows: models that are created inside are known from the second on."""
PAIRS, MAX_ROUNDS = 3, 4
"""Pairs of runs in a round. There are more rounds while the machine is too busy for the first ones to agree."""
LEAST_NOISE = 1.1
"""Factor by which an interval of so few pairs is widened even if the original took equally long each time."""
UNKNOWN = ("multi-query retrieval",)
"""Apps of which no trace tells what a query has gained."""


@dataclass
class Pairs:
    """The seconds of runs of an original and of the accelerated app, in pairs."""

    original: list[float] = field(default_factory=list)
    fast: list[float] = field(default_factory=list)

    @property
    def noise(self) -> float:
        """Return the factor by which two runs of the original differ."""
        return max(LEAST_NOISE, max(self.original) / min(self.original))

    def allow(self, speed_up: float) -> bool:
        """Return True if a speed-up is within the measured interval, widened by the noise of the original."""
        ratios = [original / fast for original, fast in zip(self.original, self.fast, strict=True)]
        return min(ratios) / self.noise <= speed_up <= max(ratios) * self.noise


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(SCALE, keeps_connections=False) as running:
        yield running


def way_of(app: App) -> Way:
    return "ainvoke" if app.kind == "workflow" or app.name in ASYNC_ONLY else "invoke"


@pytest.mark.parametrize("app", APPS, ids=lambda app: app.name)
def test_expected_gain_is_within_the_measured_interval(app: App, server: FakeServer) -> None:
    original: Any = app.build(server.base_url)
    fast, way, pairs = accelerate(original), way_of(app), Pairs()
    before = fast.report()

    with asyncio.Runner() as loop:
        runner = Runner(server, loop)
        for obj in (*[fast] * WARM_QUERIES, original):
            runner.run(app, obj, way)
        for _ in range(MAX_ROUNDS):
            for _ in range(PAIRS):
                pairs.original.append(runner.run(app, original, way).seconds)
                pairs.fast.append(runner.run(app, fast, way).seconds)
            after = fast.report()
            if after.expected_speed_up is None or pairs.allow(after.expected_speed_up):
                break

    expects_gain = bool(before.prefetched)
    assert before.expected_speed_up == (None if expects_gain else 1.0)
    assert before.expect.startswith("not known" if expects_gain else "no gain")
    if app.name in UNKNOWN:
        assert after.expected_speed_up is None
        assert after.expect.startswith("not known")
        return
    assert after.expected_speed_up is not None
    assert pairs.allow(after.expected_speed_up), (after.expect, pairs)
    if pairs.noise < 1.5:  # else the machine is too busy to tell even this
        assert not pairs.allow(2 * after.expected_speed_up), (after.expect, pairs)
    if expects_gain:
        assert f"{after.expected_speed_up:.2f} times faster in the last call" in after.expect


def test_expectation_of_twice_the_gain_is_rejected() -> None:
    pairs = Pairs(original=[1.0, 1.1, 1.05], fast=[0.5, 0.5, 0.52])

    assert pairs.allow(2.1)
    assert not pairs.allow(4.2)
    assert not pairs.allow(1.05)
