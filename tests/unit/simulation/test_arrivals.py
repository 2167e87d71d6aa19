"""Tests of arrivals: repeatable from a seed, with the configured rate, bursts and popularity, or from a trace file."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from teola_plugin.errors import ConfigError
from teola_plugin.simulation import arriving, bursty, poisson, read_trace, zipf
from teola_plugin.simulation.arrivals import filled


def gaps(times: Any, count: int = 20_000) -> list[float]:
    found = list(itertools.islice(times, count))
    return [b - a for a, b in itertools.pairwise([0.0, *found])]


@pytest.mark.parametrize(("times", "variation"), [(poisson(4.0, 1), 1.0), (bursty(4.0, 1), 2.0)])
def test_arrivals_have_the_given_rate_and_variation(times: Any, variation: float) -> None:
    found = gaps(times)
    assert fmean(found) == pytest.approx(0.25, rel=0.05)
    assert pstdev(found) / fmean(found) == pytest.approx(variation, rel=0.05)


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_rate_that_is_not_positive_raises_value_error(rate: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        poisson(rate)


def test_popular_inputs_are_drawn_by_their_rank() -> None:
    draw = zipf(["a", "b", "c", "d"], seed=3, exponent=1.0)
    found = Counter(draw() for _ in range(20_000))
    assert found["a"] / found["b"] == pytest.approx(2, rel=0.1)
    assert found["a"] / found["d"] == pytest.approx(4, rel=0.1)


def test_apps_are_drawn_by_their_shares_and_inputs_taken_in_turn() -> None:
    made = arriving(poisson(1.0), {"desk": ["x", "y"], "agent": ["z"]}, 3000, shares={"desk": 3}, seed=2)
    assert sum(one.app == "desk" for one in made) / 3000 == pytest.approx(0.75, abs=0.03)
    assert [one.value for one in made if one.app == "desk"][:3] == ["x", "y", "x"]
    assert made == arriving(poisson(1.0), {"desk": ["x", "y"], "agent": ["z"]}, 3000, shares={"desk": 3}, seed=2)


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_trace_gives_times_apps_inputs_and_lengths(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"at": 2, "app": "desk", "input_tokens": 30, "output_tokens": 7},
        "",
        {"at": 0.5, "app": "agent", "input": {"question": "why?"}},
    )
    first, second = read_trace(path, ["desk", "agent"], {"desk": {"question": "{text}", "k": 2}, "agent": "x"})
    assert (first.at, first.app, first.value, first.output_tokens) == (0.5, "agent", {"question": "why?"}, 0)
    assert (second.at, second.app, second.output_tokens, second.value["k"]) == (2, "desk", 7, 2)
    assert len(second.value["question"].split()) == 29  # its mark has two tokens
    assert second.mark in second.value["question"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1, column"),
        ("3", "no JSON object"),
        ({"at": 1, "inputs": "x"}, "no field 'inputs'"),
        ({"input": "x"}, "at is None"),
        ({"at": True, "input": "x"}, "at is True"),
        ({"at": 1, "app": "other", "input": "x"}, "no app 'other'"),
        ({"at": 1}, "neither input nor input_tokens"),
        ({"at": 1, "input_tokens": -1}, "input_tokens is -1"),
    ],
)
def test_bad_trace_line_raises_config_error_with_its_number(line: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_trace(written(tmp_path, line), ["desk"], {"desk": "{text}"})
    assert message in str(caught.value) and "line 1" in str(caught.value)


def test_missing_or_empty_trace_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "lost.jsonl", ["desk"], {})
    with pytest.raises(ConfigError, match="no arrivals"):
        read_trace(written(tmp_path, ""), ["desk"], {})


@pytest.mark.parametrize(
    ("sample", "made"),
    [
        ("anything", "T"),
        ("so: {text}", "so: T"),
        ({"question": "x", "k": 3}, {"question": "T", "k": 3}),
        ({"a": "x", "b": "is {text}?"}, {"a": "x", "b": "is T?"}),
        ({"messages": [{"role": "user", "content": "{text}"}]}, {"messages": [{"role": "user", "content": "T"}]}),
    ],
)
def test_text_is_filled_into_the_sample_input(sample: Any, made: Any) -> None:
    assert filled(sample, "T", "mark") == made


def test_sample_without_a_clear_text_slot_raises() -> None:
    for sample in ({"a": "x", "b": "y"}, 3, {"k": 1}):
        with pytest.raises(ValueError, match="where the text"):
            filled(sample, "T", "mark")
