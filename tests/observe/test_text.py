"""Tests of the timeline in the terminal."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teola_plugin.observe import QueryTrace, format_summary, timeline_text
from teola_plugin.observe.text import duration, shortened

from .sample_traces import PLAIN, stepped, trace


def test_timeline_shows_spans_as_bars() -> None:
    rows = (
        ("embed", "EMBEDDING", "minilm", 0.0, 0.25, 0.5, ()),
        ("lookahead", "SEARCHING", "store", 0.0, 0.0, 0.5, ()),
        ("answer", "DECODING", "llm", 0.5, 0.5, 1.0, ("embed",)),
    )
    found = trace("tiny", rows, origin=0.0, tail=0.0)
    assert timeline_text(found, 64).splitlines() == [
        "tiny q-tiny: done in 1.00 s",
        "primitive   engine  0                          1.00 s",
        "lookahead   store  |xxxxxxxxxxxxxxxx                 |    500 ms",
        "embed *     minilm |........########                 |    250 ms",
        "answer *    llm    |                #+###############|    500 ms",
        ". waiting  # running  + first piece  x unused  * critical",
    ]


def test_steps_are_listed_above_the_primitives() -> None:
    assert timeline_text(stepped(), 78).splitlines() == [
        "graph q-graph: done in 1.00 s",
        "primitive            engine     0                            1.00 s",
        "1                    superstep |   =================               |    500 ms",
        "  search             node      |     ===                           |    100 ms",
        "  grade              node      |     ===============               |    450 ms",
        "    lookup (early)   tool      | =====                             |    150 ms",
        "2                    superstep |                    ===============| cancelled",
        "search.embedding *   minilm    |###                                |    100 ms",
        "search.searching *   store     |   ###                             |    100 ms",
        "grade.prefilling *   llm       |      ####                         |    100 ms",
        "grade.decoding *     llm       |          #+#####                  |    200 ms",
        "llm.call#1           llm       |          ##########               |    300 ms",
        "lookahead            minilm    |                    xxxx           |    100 ms",
        "answer.decoding *    llm       |                    ##+############|    400 ms",
        ". waiting  # running  + first piece  x unused  * critical",
        "= a step of the object itself: a superstep, a node, a tool",
    ]
    assert all(len(line) <= 60 for line in timeline_text(stepped(), 60).splitlines())
    lost = dataclasses.replace(stepped(), steps_left_out=3)
    assert timeline_text(lost).splitlines()[0].endswith("(3 steps left out)")


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_lines_fit_the_width_and_bars_are_aligned(width: int) -> None:
    lines = timeline_text(trace(), width).splitlines()
    assert all(len(line) <= width for line in lines)
    bars = [line for line in lines if line.count("|") == 2]
    assert len(bars) == len(trace().spans)
    assert len({(line.index("|"), line.rindex("|")) for line in bars}) == 1


def test_touching_primitives_do_not_seem_to_overlap() -> None:
    lines = timeline_text(trace("plain", PLAIN), 120).splitlines()
    rows = {line.split()[0]: line[line.index("|") + 1 : line.rindex("|")] for line in lines if line.count("|") == 2}
    before, after = rows["answer.prefilling"], rows["answer.decoding"]
    assert not any(a != " " and b != " " for a, b in zip(before, after, strict=True))


def test_summary_names_the_figures() -> None:
    text = format_summary(trace())
    assert "done in 2.16 s" in text and "24 (10 on the critical path)" in text and "2 primitives, 0 tokens" in text


def test_empty_trace_has_a_timeline() -> None:
    empty = QueryTrace("q", "app", 5.0, 5.0)
    assert "app q: done in 0 s" in timeline_text(empty)
    assert "no time" in format_summary(empty)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.000041, "41 µs"),
        (0.0015, "1.50 ms"),
        (0.182, "182 ms"),
        (0.9999, "1.00 s"),
        (12.34, "12.3 s"),
        (640.0, "640 s"),
    ],
)
def test_durations_have_three_figures(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.text(max_size=40), st.integers(1, 50))
def test_shortened_keeps_both_ends(text: str, width: int) -> None:
    found = shortened(text, width)
    assert len(found) <= width
    assert found == text or ("…" in found and (width < 3 or (found[0], found[-1]) == (text[0], text[-1])))
