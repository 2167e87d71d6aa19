"""Tests of traces: the critical path, busy and wasted work, the summary."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teola_plugin.observe import GraphView, QueryTrace, Span, Step, Wait

from .sample_traces import FAST, PLAIN, trace

times = st.floats(0.0, 10.0, allow_nan=False)


@st.composite
def any_traces(draw: st.DrawFn) -> QueryTrace:
    """Draw traces as a bug may record them: spans in any order of time, with any parents, even cycles."""
    names = [f"p{i}" for i in range(draw(st.integers(1, 10)))]
    spans = []
    for name in names:
        queued, started, done = sorted(draw(st.tuples(times, times, times)))
        spans.append(
            Span(
                "q",
                "app",
                name,
                draw(st.sampled_from(["EMBEDDING", "DECODING"])),
                queued,
                draw(st.sampled_from([started, None])),
                None,
                draw(st.sampled_from([done, done, done, None])),
                engine=draw(st.sampled_from(["", "llm", "minilm"])),
                outcome=draw(st.sampled_from(["done", "claimed", "wasted"])),
                parents=tuple(draw(st.lists(st.sampled_from([*names, "unknown"]), max_size=3))),
            )
        )
    return QueryTrace("q", "app", 0.0, 10.0, tuple(spans))


@given(any_traces())
def test_critical_path_adds_up_to_the_query(found: QueryTrace) -> None:
    path = found.critical_path()
    assert all(min(step.idle, step.waited, step.seconds) >= 0 for step in path)
    engines = [step.span.primitive for step in path if not step.is_code]
    assert len(set(engines)) == len(engines), "no primitive is on it twice"
    if any(span.done is not None for span in found.spans):
        assert sum(step.total for step in path) == pytest.approx(found.seconds)
        assert sum(found.waited_for().values()) == pytest.approx(found.seconds)


@st.composite
def with_plain_calls(draw: st.DrawFn) -> QueryTrace:
    """Draw reports of an original in any disorder: calls and steps outside the query or across others."""
    base = draw(any_traces())
    names = [span.primitive for span in base.spans]
    outside = st.floats(-1.0, 11.0, allow_nan=False)
    pairs = st.lists(st.tuples(outside, outside).map(sorted), max_size=6)
    steps = tuple(
        Step(
            number,
            draw(st.sampled_from(["node", "tool"])),
            "x",
            began,
            draw(st.sampled_from([ended, None])),
            draw(st.integers(0, 6)),
            draw(st.sampled_from(["done", "claimed"])),
            draw(st.sampled_from([(), (("early", True),)])),
        )
        for number, (began, ended) in enumerate(draw(pairs), start=1)
    )
    waits = tuple(
        Wait(
            start,
            answered,
            (draw(st.sampled_from(names)),),
            draw(st.integers(0, 6)),
            draw(st.sampled_from(["", *names])),
        )
        for start, answered in draw(pairs)
    )
    kinds = [draw(st.sampled_from(["EMBEDDING", "OPAQUE", "GENERATION"])) for _ in names]
    spans = tuple(dataclasses.replace(one, kind=kind) for one, kind in zip(base.spans, kinds, strict=True))
    return dataclasses.replace(base, spans=spans, steps=steps, waits=waits, started=draw(st.sampled_from([0.0, 3.0])))


@given(with_plain_calls())
def test_critical_path_adds_up_for_any_trace(found: QueryTrace) -> None:
    path = found.critical_path()
    assert all(min(step.idle, step.waited, step.seconds) >= 0 for step in path)
    assert sum(step.total for step in path) == pytest.approx(found.seconds)
    assert sum(found.waited_for().values()) == pytest.approx(found.seconds)


@given(any_traces())
def test_busy_time_counts_overlaps_once(found: QueryTrace) -> None:
    for engine in ("", "llm", "minilm"):
        each = [s.seconds for s in found.spans if s.engine == engine]
        assert max(each, default=0.0) - 1e-9 <= found.busy(engine) <= min(sum(each), found.seconds) + 1e-9


def test_critical_path_of_a_chain_is_the_chain() -> None:
    path = trace("plain", PLAIN).critical_path()
    assert [step.span.primitive for step in path] == [*(row[0] for row in PLAIN), "your code"]
    assert path[-1].is_code and path[-1].total == pytest.approx(0.02)
    assert sum(step.waited for step in path) == pytest.approx(0.05)
    assert sum(step.idle for step in path) == pytest.approx(0.0)


def test_critical_path_follows_the_parent_that_finished_last() -> None:
    assert [step.span.primitive for step in trace().critical_path()] == [
        "expand.prefilling",
        "expand.partial_decoding.1",
        "expand.partial_decoding.2",
        "expand.partial_decoding.3",
        "retrieve.embedding.3",
        "retrieve.searching.3",
        "retrieve.aggregate",
        "rerank",
        "answer.full_prefilling",
        "answer.decoding",
        "your code",
    ]


def test_time_before_queueing_is_idle_and_in_the_queue_is_waited() -> None:
    rows = (("a", "CALL", "", 0.0, 0.0, 1.0, ()), ("b", "EMBEDDING", "minilm", 1.5, 2.25, 3.0, ("a",)))
    step = trace("gap", rows, origin=0.0).critical_path()[1]
    assert (step.idle, step.waited, step.seconds) == (0.5, 0.75, 0.75)


def test_streaming_parent_that_outlasts_its_child_is_not_its_cause() -> None:
    rows = (
        ("decode", "DECODING", "llm", 0.0, 0.0, 2.0, ()),
        ("early", "EMBEDDING", "minilm", 0.5, 0.5, 1.0, ("decode",)),
        ("last", "CALL", "", 2.0, 2.0, 2.5, ("early", "decode")),
    )
    assert [step.span.primitive for step in trace("stream", rows, tail=0.0).critical_path()] == ["decode", "last"]


def test_late_parent_end_does_not_move_the_start_of_a_call() -> None:
    """The pool hears late that `a` has its text; by then the plain object, which waited for `a`, has asked for `c`."""

    def call(name: str, queued: float, done: float, *parents: str, engine: str = "own") -> Span:
        kind = "GENERATION" if engine else "CALL"
        return Span("q", "app", name, kind, queued, queued, None, done, engine=engine, parents=parents)

    spans = (
        call("a", 0.0, 4.0),
        call("b", 0.0, 2.0),
        call("b.parse", 2.0, 2.1, "b", engine=""),
        call("a.parse", 5.0, 5.1, "a", engine=""),
        call("c", 4.2, 6.0, "a.parse", "b.parse"),
    )
    waits = (Wait(0.0, 4.0, ("a",)), Wait(4.05, 4.1, ("b",)), Wait(4.2, 6.0, ("c",)))
    path = QueryTrace("q", "app", 0.0, 6.0, spans, waits=waits).critical_path()
    assert [step.span.primitive for step in path] == ["a", "your code", "c"]
    assert [step.total for step in path] == pytest.approx([4.0, 0.2, 1.8])


def test_wasted_span_that_ends_last_is_not_on_critical_path() -> None:
    base = trace("plain", PLAIN)
    late = dataclasses.replace(base.spans[-1], primitive="guess", outcome="wasted", done=base.ended + 1, parents=())
    found = dataclasses.replace(base, spans=(*base.spans, late))
    assert found.critical_path()[-2].span.primitive == "answer.decoding"
    assert found.wasted() == (1, late.tokens)


def test_span_that_never_began_is_not_wasted() -> None:
    base = trace("plain", PLAIN)
    dropped = dataclasses.replace(base.spans[0], started=None, done=None, outcome="cancelled")
    assert dataclasses.replace(base, spans=(dropped,)).wasted() == (0, 0)


def test_last_try_of_a_retried_primitive_counts() -> None:
    base = trace("retry", PLAIN[:1], origin=0.0)
    failed = dataclasses.replace(base.spans[0], outcome="failed")
    again = dataclasses.replace(base.spans[0], queued=0.05, started=0.05, done=0.2)
    found = dataclasses.replace(base, spans=(failed, again), ended=0.2)
    assert [step.span for step in found.critical_path() if not step.is_code] == [again]
    assert found.summary()["primitives"] == 1


def test_summary_is_json_and_adds_up() -> None:
    found = json.loads(json.dumps(trace().summary()))
    assert found["primitives"] == len(FAST)
    assert found["seconds"] == pytest.approx(2.16)
    assert found["critical_seconds"] + found["critical_waited"] == pytest.approx(2.14)
    assert found["critical_code"] == pytest.approx(0.02)
    assert sum(found["waited_for"].values()) == pytest.approx(2.16)
    assert found["wasted_primitives"] == 2
    assert found["passes"] == ["prune_dependencies"]
    assert found["busy"]["cross"] == pytest.approx(0.42)


def test_empty_trace_has_no_path_and_no_figures() -> None:
    empty = QueryTrace("q", "app", 5.0, 5.0)
    assert empty.critical_path() == ()
    assert empty.summary()["work_seconds"] == 0
    assert empty.view() == GraphView((), ())


def test_view_falls_back_to_the_spans() -> None:
    found = dataclasses.replace(trace("plain", PLAIN), graph=None).view()
    assert [node[0] for node in found.nodes] == [row[0] for row in PLAIN]
    assert ("rerank", "answer.prefilling", "data") in found.edges
