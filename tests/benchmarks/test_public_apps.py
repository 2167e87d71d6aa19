"""The apps after public tutorials run, answer as their originals do, and send what those send."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks.public_apps.__main__ import APPS, Runner, measure, summarized
from benchmarks.public_apps.apps import App
from benchmarks.public_apps.server import FakeServer, fake_server

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of ChatOpenAI with a schema

SCALE = 0.02
"""Latencies that only keep calls apart."""


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(SCALE, keeps_connections=False) as running:
        yield running


@pytest.mark.parametrize("app", APPS, ids=lambda app: app.name)
def test_accelerated_app_answers_and_requests_what_its_original_does(app: App, server: FakeServer) -> None:
    with asyncio.Runner() as loop:
        row = measure(app, Runner(server, loop), server.base_url, repeats=1)

    assert row["possible"] > 0.95
    for way, figures in row["ways"].items():
        assert figures["requests_equal"], way
        assert figures["answers_equal"], way


def test_share_of_possible_leaves_out_apps_with_nothing_to_gain() -> None:
    figures = {"original_s": 1.0, "fast_s": 1.0, "first_s": [0.5, 0.5], "requests_equal": True, "answers_equal": True}
    gains = {**figures, "fast_s": 0.6, "possible": 2.0, "speed_up": 1.5}
    has_none = {**figures, "possible": 1.01, "speed_up": 1.0}

    summary = summarized([{"ways": {"invoke": gains}}, {"ways": {"invoke": has_none}}])

    assert summary["invoke"]["share_of_possible"] == 0.5
    assert summary["invoke"]["worst_behind"] == 0.0
    assert "stream" not in summary
