"""Tests of the Chrome trace-event file, read as a viewer reads it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teola_plugin.observe import QueryTrace, Span, chrome_trace, write_chrome_trace

from .sample_traces import FAST, PLAIN, stepped, trace


def _slices(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for e in data["traceEvents"] if e["ph"] == "X"]


def _check_format(data: dict[str, Any]) -> None:
    """Check the required fields of each phase, and that nothing overlaps within a thread."""
    for event in data["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts"} <= set(event)
        assert event["ts"] >= 0
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in _slices(data):
        assert event["dur"] >= 0 and isinstance(event["args"], dict)
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    named = {(e["pid"], e["tid"]) for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert named >= set(threads)
    for events in threads.values():
        events.sort(key=lambda e: (e["ts"], e["dur"]))
        for a, b in pairwise(events):
            assert round((a["ts"] + a["dur"]) * 1000) <= round(b["ts"] * 1000)


@pytest.mark.parametrize("by", ["query", "engine"])
def test_trace_file_is_valid_and_complete(tmp_path: Path, by: Any) -> None:
    traces = [trace("plain", PLAIN), trace(origin=200.0)]
    data = json.loads(write_chrome_trace(tmp_path / "trace.json", traces, by=by).read_text())
    _check_format(data)
    ran = [e["name"] for e in _slices(data) if e["cat"] != "queued"]
    assert sorted(ran) == sorted(row[0] for row in (*PLAIN, *FAST))
    processes = {e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"}
    by_query = {"plain q-plain", "accelerated q-accelerated"}
    assert processes == (by_query if by == "query" else {"client", "minilm", "store", "llm", "cross"})


def test_times_are_microseconds_from_the_first_query() -> None:
    data = chrome_trace([trace("plain", PLAIN)])
    (found,) = [e for e in _slices(data) if e["name"] == "rerank"]
    assert (found["ts"], found["dur"]) == (pytest.approx(1.89e6), pytest.approx(0.44e6))
    assert found["args"]["engine"] == "cross"


def test_arrows_connect_slices_and_point_forward() -> None:
    data = chrome_trace([trace()])
    starts = {e["id"]: e for e in data["traceEvents"] if e["ph"] == "s"}
    ends = {e["id"]: e for e in data["traceEvents"] if e["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == sum(len(row[6]) for row in FAST)
    for number, start in starts.items():
        assert start["ts"] <= ends[number]["ts"] and ends[number]["bp"] == "e"
        for arrow in (start, ends[number]):
            assert any(
                (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"]) and e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"]
                for e in _slices(data)
            )


@pytest.mark.parametrize("by", ["query", "engine"])
def test_steps_have_threads_by_kind(by: Any) -> None:
    data = chrome_trace([stepped()], by=by)
    _check_format(json.loads(json.dumps(data)))
    names = [e["args"]["name"] for e in data["traceEvents"] if e["name"] in ("process_name", "thread_name")]
    if by == "query":
        assert names[:5] == ["graph q-graph", "supersteps", "nodes", "nodes (2)", "tools"]
    else:
        assert {"supersteps", "nodes", "tools", "llm"} <= set(names)
    slices = {e["name"]: e for e in _slices(data)}
    assert (slices["grade"]["cat"], slices["grade"]["ts"], slices["grade"]["dur"]) == ("node", 150_000, 450_000)
    assert slices["lookup"]["args"] == {
        "query": "q-graph", "kind": "tool", "outcome": "done", "step": 4, "in": 3, "early": True,
    }  # fmt: skip
    assert slices["2"]["dur"] == 400_000, "to the end of its query"
    assert slices["grade.decoding"]["args"]["step"] == 3 and "step" not in slices["lookahead"]["args"]


times = st.floats(0.0, 1000.0, allow_nan=False)


@given(st.lists(st.tuples(times, times, times, st.booleans(), st.booleans()), max_size=12))
def test_lanes_never_overlap_for_any_spans(rows: list[tuple[float, float, float, bool, bool]]) -> None:
    spans = []
    for i, (a, b, c, ran, ended) in enumerate(rows):
        queued, started, done = sorted((a, b, c))
        parents = (f"p{i - 1}",)
        began, over = (started if ran else None), (done if ended else None)
        spans.append(Span("q", "app", f"p{i}", "CALL", queued, began, None, over, engine="llm", parents=parents))
    data = chrome_trace([QueryTrace("q", "app", 0.0, 1000.0, tuple(spans))])
    _check_format(json.loads(json.dumps(data)))


def test_empty_list_of_traces_gives_a_valid_file() -> None:
    assert chrome_trace([])["traceEvents"] == []
