"""Tests that the apps from public tutorials run, and that accelerated ones give the same answers and requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda

from benchmarks.public_apps.__main__ import APPS, Run, Runner, cpu_times, measure, summarized
from benchmarks.public_apps.apps import App, Way
from benchmarks.public_apps.server import FakeServer, fake_server

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of ChatOpenAI with a schema

SCALE = 0.02
"""Latencies that only keep calls apart."""


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(SCALE, keeps_connections=False) as running:
        yield running


@pytest.mark.parametrize("app", APPS, ids=lambda app: app.name)
def test_accelerated_app_equals_original_in_answers_and_requests(app: App, server: FakeServer) -> None:
    with asyncio.Runner() as loop:
        row = measure(app, Runner(server, loop), server.base_url, repeats=1)

    assert row["possible"] > 0.95
    for way, figures in row["ways"].items():
        assert figures["requests_equal"], way
        assert figures["answers_equal"], way


class FakeRunner(Runner):
    """Runs nothing: an original takes 2 ms of CPU time, and an accelerated app 5 ms."""

    def __init__(self) -> None:
        pass

    def run(self, app: App, obj: Any, way: Way) -> Run:
        cpu_s = 0.005 if hasattr(obj, "explain") else 0.002
        return Run(seconds=1.0, cpu_s=cpu_s, first_s=1.0, result="", requests=[])


def test_added_cpu_time_is_the_median_difference_of_pairs() -> None:
    app = App("shout", lambda base_url: RunnableLambda(str.upper), "a", lambda calls: 1.0, kind="runnable")

    figures = cpu_times(app, FakeRunner(), "", repeats=3)["ways"]["ainvoke"]

    assert figures["original_cpu_ms"] == pytest.approx(2.0)
    assert figures["added_cpu_ms"]["median"] == pytest.approx(3.0)
    assert figures["added_cpu_ms"]["n"] == 3


def test_share_of_possible_leaves_out_apps_with_nothing_to_gain() -> None:
    figures = {"original_s": 1.0, "fast_s": 1.0, "first_s": [0.5, 0.5], "requests_equal": True, "answers_equal": True}
    gains = {**figures, "fast_s": 0.6, "possible": 2.0, "speed_up": 1.5}
    has_none = {**figures, "possible": 1.01, "speed_up": 1.0}

    summary = summarized([{"ways": {"invoke": gains}}, {"ways": {"invoke": has_none}}])

    assert summary["invoke"]["share_of_possible"] == 0.5
    assert summary["invoke"]["worst_behind"] == 0.0
    assert "stream" not in summary
