"""Tests of the five applications under load: equal arrivals, files that are not made twice, and summaries."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.apps import load, loaded
from benchmarks.apps.load import ALONE, Cell, cells


def test_all_schemes_have_the_same_arrivals() -> None:
    found = cells(2, 10)
    assert len(set(found)) == len(found)
    times = {tuple(cell.times()) for cell in found if (cell.app, cell.rate, cell.seed) == ("agent", 8, 2)}
    assert len(times) == 1
    assert Cell("agent", "modern", 8, 1, 10).times() != Cell("agent", "modern", 8, 2, 10).times()
    assert all(len(load.RATES[app]) >= 6 for app in load.APPS)
    assert not any(cell.scheme.startswith("AutoGen") for cell in found if cell.app == "naive_rag")


@pytest.mark.skipif(not os.environ.get("TEOLA_TEST_LONG"), reason="records applications: set TEOLA_TEST_LONG=1")
def test_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    wanted = [Cell("agent", "LlamaDist-TO", rate, 1, 4) for rate in (ALONE, 8)]
    first = load.run(wanted, tmp_path, 1)
    times = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    (tmp_path / wanted[1].file).unlink()
    assert load.run(wanted, tmp_path, 1) == first, "the same every time"
    again = {file for file, at in times.items() if file.stat().st_mtime_ns != at}
    assert again == {tmp_path / wanted[1].file}


def measured(*latencies: float) -> dict[str, Any]:
    return {"latencies": latencies, "wasted_tokens": 0.0, "engine_seconds": 1.0, "batch_sizes": {}, "cached": {}}


def test_summary_has_ratios_goodput_and_worst_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded, "RATES", {"agent": (1, 2, 3)})
    monkeypatch.setattr(loaded, "INPUTS", 1)
    found = {}
    for name, factor in (("accelerated", 1.0), ("object", 2.0)):
        found[Cell("agent", name, ALONE, 0, 2)] = measured(9.0, 1.0)
        for rate, slow in ((1, 1.0), (2, 2.0), (3, 4.0)):
            for seed in (1, 2):
                times = measured(*[factor * slow] * 19, 1.5 * slow)
                found[Cell("agent", name, rate, seed, 20)] = times
    summary = loaded.application(found, "agent")
    assert summary["goal_seconds"] == 5.0
    assert summary["speedup_low"]["object"]["median"] == pytest.approx(39.5 / 20.5, abs=1e-4)
    assert summary["goodput"] == {"accelerated": 3, "object": pytest.approx(2.0, abs=0.1)}
    assert summary["worst_ratio"]["of"] == "p99"
    assert [one["within_goal"] for one in summary["latency"]["object"]] == [1.0, 1.0, 0.0]
    assert summary["ratios"] == 6 and not summary["behind"]


def test_ratios_with_interval_below_one_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded, "RATES", {"agent": (1, 2)})
    monkeypatch.setattr(loaded, "INPUTS", 1)
    found = {Cell("agent", name, ALONE, 0, 2): measured(1.0, 1.0) for name in ("accelerated", "object")}
    for rate in (1, 2):
        for seed, factor in enumerate((0.9, 1.1, 1.2), 1):
            found[Cell("agent", "accelerated", rate, seed, 2)] = measured(1.0, 1.0)
            found[Cell("agent", "object", rate, seed, 2)] = measured(*[factor if rate == 2 else 1.0] * 2)
    behind = loaded.application(found, "agent")["behind"]
    assert [(one["baseline"], one["rate"], one["of"], one["interval"][0]) for one in behind] == [
        ("object", 2, "mean", 0.9),
        ("object", 2, "p99", 0.9),
    ]
