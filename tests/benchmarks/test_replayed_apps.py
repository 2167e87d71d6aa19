"""Tests that replays of the five applications take as long as the applications, under every scheme."""

from __future__ import annotations

import itertools
import os

import pytest

from benchmarks.apps import inputs
from benchmarks.apps.flows import cluster_of, flow, flow_arrivals, maker
from benchmarks.apps.load import SIMULATED
from benchmarks.apps.schemes import APPS
from teola_plugin.simulation import Arrival, poisson, quantile, replay, simulate

LONG = os.environ.get("TEOLA_TEST_LONG") == "1"
BY_NAME = {scheme.name: scheme for scheme in SIMULATED}
TOLERANCE = {("search_engine", "accelerated"): 0.03}
"""Where a replay may be off by more than 1 %: the graph warms the beginnings of both answers' prompts, one of which is
used, and the replay takes 1 to 2 % longer than the application."""


def off(app: str, name: str, rate: float, queries: int) -> tuple[float, float]:
    """Return by how much the replay's mean and 95th percentile differ from the app's."""
    scheme, times = BY_NAME[name], list(itertools.islice(poisson(rate, 1), queries))
    flows = [flow(app, scheme, number) for number in range(queries)]
    quick = replay(cluster_of(scheme), flow_arrivals(app, flows, times))
    arrivals = [Arrival(at, app, number) for number, at in enumerate(times)]
    real = simulate(cluster_of(scheme), {app: maker(app, scheme)}, arrivals)
    assert not any(one.error for one in real.queries)
    one, other = ([served.seconds for served in run.queries] for run in (quick, real))
    return sum(one) / sum(other) - 1, quantile(one, 0.95) / quantile(other, 0.95) - 1


@pytest.mark.parametrize("app", APPS)
@pytest.mark.parametrize("name", ["modern", "accelerated"])
def test_replay_takes_as_long_as_the_application(app: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "PARAGRAPHS", dict.fromkeys(inputs.PARAGRAPHS, 4))
    flow.cache_clear()
    try:
        assert max(map(abs, off(app, name, 3.0, 3))) < TOLERANCE.get((app, name), 0.01)
    finally:
        flow.cache_clear()


@pytest.mark.skipif(not LONG, reason="some minutes: set TEOLA_TEST_LONG=1")
@pytest.mark.parametrize("app", APPS)
@pytest.mark.parametrize("name", BY_NAME)
def test_replay_at_two_rates_takes_as_long_as_the_application(app: str, name: str) -> None:
    if BY_NAME[name].takes(app):
        for rate in (0.5, 3.0):
            assert max(map(abs, off(app, name, rate, 24))) < TOLERANCE.get((app, name), 0.01)
