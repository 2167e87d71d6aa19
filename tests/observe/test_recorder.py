"""Tests of the recorder of traces: what it keeps, ignores and leaves out."""

from __future__ import annotations

from teola_plugin.observe import GraphView, QueryTrace, TraceRecorder, format_summary, html_page


def test_recorded_query_becomes_a_trace() -> None:
    recorder = TraceRecorder(wall=lambda: 1e9)
    view = GraphView((("embed", "EMBEDDING", "minilm", 0, False),), ())
    recorder.begin("q1", "rag", 1.0)
    recorder.describe("q1", graph=view, graph_text="e", pgraph_text="p", passes=(("prune", True, 1e-4),))
    recorder.queued(
        "q1", "embed", 1.1, kind="EMBEDDING", engine="minilm", scope=("chain",), depth=2, size=4, parents=("chunk",)
    )
    recorder.started("q1", "embed", 1.2, replica="minilm-0", batch=9)
    recorder.first("q1", "embed", 1.25)
    recorder.first("q1", "embed", 1.28)
    recorder.done("q1", "embed", 1.3, tokens=40, cached=8)
    recorder.settle("q1", "embed", "claimed")
    trace = recorder.finish("q1", 1.5)
    assert trace is not None and trace is recorder.get("q1")
    (span,) = trace.spans
    assert (span.queued, span.started, span.first, span.done) == (1.1, 1.2, 1.25, 1.3)
    assert (span.replica, span.batch, span.scope, span.depth, span.size) == ("minilm-0", 9, ("chain",), 2, 4)
    assert (span.tokens, span.cached, span.outcome, span.parents) == (40, 8, "claimed", ("chunk",))
    assert (span.query_id, span.app, trace.wall, trace.graph) == ("q1", "rag", 1e9, view)
    assert (trace.graph_text, trace.pgraph_text, trace.passes) == ("e", "p", (("prune", True, 1e-4),))


def test_open_spans_count_as_cancelled_at_the_end() -> None:
    recorder = TraceRecorder()
    recorder.begin("q", "", 0.0)
    recorder.queued("q", "a", 0.0, kind="CALL")
    trace = recorder.finish("q", 1.0, outcome="failed")
    assert trace is not None
    assert (trace.outcome, trace.spans[0].outcome, trace.spans[0].done) == ("failed", "cancelled", None)


def test_retry_gets_its_own_span() -> None:
    recorder = TraceRecorder()
    recorder.begin("q", "", 0.0)
    for start, outcome in ((0.0, "failed"), (1.0, "done")):
        recorder.queued("q", "a", start, kind="CALL")
        recorder.started("q", "a", start)
        recorder.done("q", "a", start + 0.5, outcome=outcome)
    trace = recorder.finish("q", 2.0)
    assert trace is not None
    assert [(s.started, s.outcome) for s in trace.spans] == [(0.0, "failed"), (1.0, "done")]


def test_several_batches_of_one_primitive_keep_the_first_start() -> None:
    recorder = TraceRecorder()
    recorder.begin("q", "", 0.0)
    recorder.queued("q", "a", 0.0, kind="EMBEDDING")
    recorder.started("q", "a", 0.1, batch=1)
    recorder.started("q", "a", 0.4, batch=2)
    trace = recorder.finish("q", 1.0)
    assert trace is not None and (trace.spans[0].started, trace.spans[0].batch) == (0.1, 2)


def test_late_and_unknown_events_are_ignored() -> None:
    recorder = TraceRecorder()
    recorder.begin("q", "", 0.0)
    recorder.started("q", "never queued", 0.1)
    trace = recorder.finish("q", 1.0)
    recorder.queued("q", "late", 2.0, kind="CALL")
    recorder.done("q", "late", 2.0)
    recorder.settle("nobody", "x", "wasted")
    assert trace is not None and trace.spans == ()
    assert recorder.finish("q", 3.0) is None
    assert recorder.open_queries == ()


def test_details_are_recorded_only_on_request() -> None:
    for details in (False, True):
        recorder = TraceRecorder(details=details)
        recorder.begin("q", "", 0.0)
        recorder.queued("q", "a", 0.0, kind="PREFILLING", detail=(("prompt", "secret"),))
        trace = recorder.finish("q", 1.0)
        assert trace is not None and trace.spans[0].detail == ((("prompt", "secret"),) if details else ())


def test_only_the_last_traces_are_kept() -> None:
    recorder = TraceRecorder(keep=2)
    for i in range(4):
        recorder.begin(f"q{i}", "", 0.0)
        recorder.finish(f"q{i}", 1.0)
    assert [t.query_id for t in recorder.traces] == ["q2", "q3"]
    assert recorder.get("q0") is None


def test_virtual_time_has_no_wall_clock() -> None:
    recorder = TraceRecorder(wall=None)
    recorder.begin("q", "", 0.0)
    trace = recorder.finish("q", 1.0)
    assert trace is not None and trace.wall == 0.0


def many(recorder: TraceRecorder, query: str, count: int) -> QueryTrace:
    recorder.begin(query, "", 0.0)
    for i in range(count):
        recorder.queued(query, f"p{i}", float(i), kind="CALL")
        recorder.done(query, f"p{i}", i + 0.5)
    trace = recorder.finish(query, float(count))
    assert trace is not None
    return trace


def test_long_query_keeps_its_first_and_latest_spans() -> None:
    trace = many(TraceRecorder(max_spans=10), "q", 1000)
    kept = [*range(5), *range(995, 1000)]
    assert [span.primitive for span in trace.spans] == [f"p{i}" for i in kept]
    assert [span.done for span in trace.spans] == [i + 0.5 for i in kept]
    assert trace.left_out == trace.summary()["left_out"] == 990
    assert "990 primitives left out" in format_summary(trace)
    assert "990 more left out" in html_page([trace])
    short = many(TraceRecorder(max_spans=10), "q", 10)
    assert (len(short.spans), short.left_out) == (10, 0)
    assert "left out" not in format_summary(short)


def test_open_query_keeps_a_bounded_number_of_spans() -> None:
    recorder = TraceRecorder(max_spans=10)
    recorder.begin("q", "", 0.0)
    for i in range(1000):
        recorder.queued("q", f"p{i}", float(i), kind="CALL")
    query = recorder._open["q"]
    assert len(query.order) == len(query.live) == 10
    recorder.started("q", "p500", 1e3)  # not kept any more
    recorder.queued("q", "p0", 1e3, kind="CALL")  # a retry: what comes now is the new one's
    recorder.done("q", "p0", 2e3)
    assert [span.done for name, span in query.order if name == "p0"] == [None, 2e3]


def test_finished_traces_are_limited_by_their_spans() -> None:
    recorder = TraceRecorder()
    for i in range(64):
        many(recorder, f"q{i}", 1000)
    assert 1 < len(recorder.traces) < 20
    assert recorder.traces[-1].query_id == "q63"
    for i in range(64):
        many(recorder, f"small{i}", 3)
    assert len(recorder.traces) == 64


def test_drafted_tokens_are_counted_by_span_and_query() -> None:
    recorder = TraceRecorder()
    recorder.begin("q", "", 0.0)
    for name, drafted, accepted in (("a", 12, 9), ("b", 5, 0), ("c", 0, 0)):
        recorder.queued("q", name, 0.0, kind="DECODING", engine="llm")
        recorder.done("q", name, 1.0, tokens=20)
        recorder.verified("q", name, drafted, accepted)
    recorder.merge("q", "a", ["b"])
    trace = recorder.finish("q", 1.0)
    assert trace is not None
    assert [(span.drafted, span.accepted) for span in trace.spans] == [(17, 9), (0, 0)]
    summary = trace.summary()
    assert (summary["drafted_tokens"], summary["accepted_tokens"]) == (17, 9)
    assert "17 tokens, 9 of them accepted" in format_summary(trace)
    assert "9 accepted" in html_page([trace])


def test_summary_omits_drafts_if_there_were_none() -> None:
    recorder = TraceRecorder()
    recorder.begin("q", "", 0.0)
    recorder.queued("q", "a", 0.0, kind="DECODING", engine="llm")
    recorder.done("q", "a", 1.0, tokens=20)
    trace = recorder.finish("q", 1.0)
    assert trace is not None and "drafts" not in format_summary(trace) and "drafted" not in html_page([trace])


def test_traces_of_a_tenant_are_forgotten() -> None:
    recorder = TraceRecorder(wall=None)
    for name, tenant in (("q1", "one"), ("q2", "two"), ("q3", "one")):
        recorder.begin(name, "", 0.0, tenant=tenant)
    recorder.finish("q1", 1.0)
    recorder.finish("q2", 1.0)
    recorder.forget("one")
    assert [trace.query_id for trace in recorder.traces] == ["q2"]
    assert recorder.finish("q3", 2.0) is not None  # under way then: told, and not kept
    assert [trace.query_id for trace in recorder.traces] == ["q2"]
