"""Tests of traces of LlamaIndex objects with the user's own models and no pool."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.evaluation import RelevancyEvaluator
from llama_index.core.query_engine import RetryQueryEngine

from benchmarks.llamaindex.engines import ASKED, accumulate, router, router_multi
from teola_plugin import QueryTimeout, accelerate
from teola_plugin.observe import html_page
from teola_plugin.observe.spans import QueryTrace, Span
from tests.support.llamaindex_own import ANSWER_S, WatchedKit, create_watched_kit


@pytest.fixture
def own_kit() -> Iterator[WatchedKit]:
    made = create_watched_kit()
    with made.kit.in_force():
        yield made


def traced(fast: Any, question: str = ASKED) -> QueryTrace:
    fast.query(question)
    trace = fast.last_trace()
    assert trace is not None
    return trace


def kinds(trace: QueryTrace) -> Counter[str]:
    return Counter(span.kind for span in trace.spans)


def most_at_once(spans: list[Span]) -> int:
    """Return the largest number of calls that were under way at the same time."""
    times = [(span.started, span.done) for span in spans if span.started is not None and span.done is not None]
    return max(sum(began <= at < ended for began, ended in times) for at, _ in times)


def test_trace_has_a_span_for_each_call(own_kit: WatchedKit) -> None:
    fast = accelerate(accumulate(own_kit.kit), concurrent=own_kit.kit.concurrent)
    assert fast.last_trace() is None
    own_kit.fresh(calls_together=4)
    trace = traced(fast)
    answers = [span for span in trace.spans if span.kind == "GENERATION"]
    assert kinds(trace) == {"EMBEDDING": 1, "SEARCHING": 1, "GENERATION": len(own_kit.starts)}
    assert {span.outcome for span in trace.spans} == {"done"} and trace.outcome == "closed"
    assert most_at_once(answers) >= 4 and all(span.done - span.started >= 0.9 * ANSWER_S for span in answers)  # type: ignore[operator]
    assert {span.primitive.partition(".")[0] for span in answers} == {type(own_kit.kit.llm).__name__}


def test_critical_path_adds_up_to_the_query_time(own_kit: WatchedKit) -> None:
    trace = traced(accelerate(accumulate(own_kit.kit), concurrent=own_kit.kit.concurrent))
    path = trace.critical_path()
    assert sum(step.seconds for step in path) == pytest.approx(trace.seconds, rel=0.02)
    assert any("LLM.call" in step.span.primitive for step in path)
    assert "OwnLLM.call" in html_page([trace])


def test_each_query_of_an_engine_has_its_own_trace(own_kit: WatchedKit) -> None:
    fast = accelerate(accumulate(own_kit.kit), concurrent=own_kit.kit.concurrent, app="letters")
    one, other = traced(fast), traced(fast, "Something else?")
    assert one.query_id != other.query_id and one.app == other.app == "letters"
    assert kinds(one) == kinds(other)


def test_explain_gives_the_speed_up_of_the_last_call(own_kit: WatchedKit) -> None:
    fast = accelerate(accumulate(own_kit.kit), concurrent=own_kit.kit.concurrent)
    assert "not known yet" in fast.explain(ASKED)
    traced(fast)
    assert "times faster in the last call" in fast.explain(ASKED)


def test_nested_engine_calls_belong_to_the_outer_trace(own_kit: WatchedKit) -> None:
    """The evaluator of the answer runs in its turn, and has no trace of its own."""
    engine = RetryQueryEngine(accumulate(own_kit.kit), RelevancyEvaluator(llm=own_kit.kit.llm), max_retries=0)
    fast = accelerate(engine, concurrent=own_kit.kit.concurrent)
    trace = traced(fast)
    assert kinds(trace) == {"EMBEDDING": 1, "SEARCHING": 1, "GENERATION": 4}


def test_failed_query_has_a_trace(own_kit: WatchedKit) -> None:
    fast = accelerate(accumulate(own_kit.kit), concurrent=own_kit.kit.concurrent)
    record_prompt = own_kit.kit.ledger.asked

    def refuses(prompt: str) -> None:
        record_prompt(prompt)
        if len(own_kit.starts) == 2:
            raise ValueError("no")

    own_kit.kit.ledger.asked = refuses  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no"):
        fast.query(ASKED)
    trace = fast.last_trace()
    assert trace is not None and kinds(trace)["SEARCHING"] == 1


def test_router_trace_has_every_llm_call(own_kit: WatchedKit) -> None:
    engine = router_multi(own_kit.kit)
    trace = traced(accelerate(engine, concurrent=own_kit.kit.concurrent), "What would have to change first, and why?")
    assert kinds(trace)["GENERATION"] == len(own_kit.starts)


def test_query_without_prefetching_has_no_trace(own_kit: WatchedKit) -> None:
    for fast in (
        accelerate(accumulate(own_kit.kit)),
        accelerate(accumulate(own_kit.kit), concurrent=own_kit.kit.concurrent, speculate="off"),
    ):
        fast.query(ASKED)
        assert fast.last_trace() is None
    fast = accelerate(accumulate(own_kit.kit), concurrent=own_kit.kit.concurrent)
    asyncio.run(fast.aquery(ASKED))
    assert fast.last_trace() is None


def test_router_to_an_engine_without_prefetching_has_no_trace(own_kit: WatchedKit) -> None:
    """It had an empty trace before. Whether the chosen engine prefetches anything is known only after the choice."""
    fast = accelerate(router(own_kit.kit), concurrent=own_kit.kit.concurrent)
    assert str(fast.query(ASKED)) == str(router(own_kit.kit).query(ASKED))
    assert fast.last_trace() is None


def test_original_runs_if_no_trace_can_start(
    own_kit: WatchedKit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If no query can start, the original runs."""

    def none() -> Any:
        raise RuntimeError("no thread left")

    expected = str(accumulate(own_kit.kit).query(ASKED))
    monkeypatch.setattr("teola_plugin.adapters.llamaindex.session.watching_pool", none)
    fast = accelerate(accumulate(own_kit.kit), concurrent=own_kit.kit.concurrent)
    assert str(fast.query(ASKED)) == expected and fast.last_trace() is None


def test_deadline_of_with_request_context_applies_to_user_models(own_kit: WatchedKit) -> None:
    fast = accelerate(accumulate(own_kit.kit), concurrent=own_kit.kit.concurrent).with_request_context(
        tenant="acme", deadline_s=0.02
    )
    with pytest.raises(QueryTimeout):
        fast.query(ASKED)
