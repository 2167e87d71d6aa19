"""Tests of the report of `teola demo`: its text, and the time that each overlap saved."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.runnables import RunnableLambda
from rich.console import Console

from teola_plugin import EnginePool
from teola_plugin.cli.demo.measure import Case, PreparedChain, TracedRun, run_case, speed_facts
from teola_plugin.cli.demo.report import Report, ratio_text
from teola_plugin.cli.demo.runs import ANSWER, ASK, INDEX, REST, SAVING_TEXTS, _summarize, savings, seconds_by_part
from teola_plugin.engines.fake import fake_engines
from teola_plugin.observe import QueryTrace, Span


def span(primitive: str, engine: str, begin: float, done: float, kind: str = "", outcome: str = "done") -> Span:
    return Span("q", "app", primitive, kind, begin, started=begin, done=done, engine=engine, outcome=outcome)


def trace(*spans: Span, ended: float) -> QueryTrace:
    return QueryTrace("q", "app", 0.0, ended, spans)


PLAIN = trace(
    span("llm.call#1", "llm", 1.0, 1.4),  # before it, the document is indexed by means that no engine sees
    span("embedder.call#2", "embedder", 1.4, 1.5),
    span("reranker.call#3", "reranker", 1.5, 1.6),
    span("llm.call#4", "llm", 1.6, 2.0),
    ended=2.0,
)
SOONER = trace(
    span("ids.add_documents", "", 0.0, 1.1),
    span("passages.documents.model.prefilling", "llm", 0.0, 0.4),
    span("passages.documents.retrieve.vector", "embedder", 0.4, 0.5),
    span("first.model.prefilling.partial#0", "llm", 0.5, 0.6),
    span("second.model.prefilling.partial#0", "llm", 1.3, 9.9, outcome="wasted"),
    span("passages.rerank", "reranker", 1.1, 1.2),
    span("first.model.prefilling", "llm", 1.2, 1.5),
    ended=1.55,
)


def test_seconds_by_part_add_up_to_the_query_time() -> None:
    for one in (PLAIN, SOONER):
        assert sum(seconds_by_part(one).values()) == pytest.approx(one.seconds)
    assert seconds_by_part(PLAIN) == pytest.approx({INDEX: 1.0, ASK: 0.5, "rerank": 0.1, ANSWER: 0.4})
    assert seconds_by_part(SOONER) == pytest.approx({INDEX: 1.1, "rerank": 0.1, ANSWER: 0.3, REST: 0.05})


def test_savings_are_listed_by_size_without_zeros() -> None:
    found = savings([PLAIN, PLAIN], [SOONER])
    assert list(found) == [SAVING_TEXTS[ASK], SAVING_TEXTS[ANSWER]]
    assert list(found.values()) == pytest.approx([0.5, 0.1])
    assert savings([PLAIN], [PLAIN]) == {}


def test_overlap_of_storing_and_embedding_is_listed_only_if_used() -> None:
    def run(embedded: str) -> QueryTrace:
        prefilling = span("queries.model.prefilling", "llm", 0.0, 0.2)
        return trace(span(embedded, "embedder", 0.0, 0.5, "EMBEDDING"), prefilling, ended=1.0)

    assert SAVING_TEXTS[INDEX] in savings([PLAIN], [run("collection.embedding#1")])
    assert SAVING_TEXTS[INDEX] not in savings([PLAIN], [run("collection.embedding")])


@dataclass(frozen=True)
class Found:
    plain_s: float
    accelerated_s: float
    answers_equal: bool = True


def printed(report: Report, console: Console) -> list[str]:
    report.line("Starting ...")
    report.question("What?")
    report.first_answer("That.", 1.25)
    for title in ("one line", "own classes", "on engines"):
        report.result(title, Found(2.0, 1.0), 5)
        if title != "one line":
            report.saved(dict.fromkeys(SAVING_TEXTS.values(), 0.25), -0.02)
            report.nothing_to_gain(Found(0.14, 0.14))
    report.end(["a.html", "b.html"])
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_report_is_short_and_complete() -> None:
    console = Console(file=io.StringIO(), width=200)
    lines = printed(Report(console=console), console)
    text = "\n".join(lines)
    assert len(lines) <= 35, "with every line that there can be"
    for part in (
        "Question     What?",
        "Answer       That.",
        "2.00x faster, same answer",
        "saved  0.25 s",
        "a.html b.html",
    ):
        assert part in text
    bars = [line.count("█") for line in lines if "█" in line]
    assert bars == [40, 20] * 3


def test_different_answer_is_printed_in_capitals() -> None:
    console = Console(file=io.StringIO(), width=200)
    Report(console=console).result("one line", Found(1.0, 1.0, answers_equal=False), 1)
    assert "DIFFERENT ANSWERS" in console.file.getvalue()  # type: ignore[attr-defined]


def test_speed_ratio_is_written_in_words() -> None:
    assert ratio_text(1.5, 1.0) == "1.50x faster"
    assert ratio_text(1.0, 1.25) == "1.25x slower"
    assert ratio_text(1.0, 1.01) == "as fast (0.99x)"


def test_trace_page_shows_medians_of_the_runs(tmp_path: Path) -> None:
    """The page does not show the last run, which is a slow one here."""

    def runs(one: QueryTrace, *seconds: float) -> tuple[TracedRun, ...]:
        return tuple(TracedRun("That.", took, replace(one, ended=took)) for took in seconds)

    case = Case("uploaded document", runs(PLAIN, 2.0, 2.1, 9.0), runs(SOONER, 1.5, 1.6, 8.0), "", ())
    with EnginePool.local(fake_engines()) as pool:
        _summarize({"uploaded": case}, pool, tmp_path / "trace.html", 1.0)
    page = (tmp_path / "trace.html").read_text(encoding="utf-8")
    assert "1.31× faster" in page and page.count("median of 3 runs") == 2
    assert "9.00 s, the run" not in page and "2.10 s, the run nearest to the median of 3" in page


def test_stock_engine_is_the_baseline_of_the_speedup() -> None:
    found = speed_facts(2.0, 1.0, [3.0, 5.0, 4.0])
    assert found == {
        "plain_s": 4.0,
        "plain_same_engine_s": 2.0,
        "accelerated_s": 1.0,
        "speedup": 4.0,
        "speedup_same_engine": 2.0,
    }
    assert speed_facts(2.0, 1.0, ()) == {"plain_s": 2.0, "accelerated_s": 1.0, "speedup": 2.0}


def test_chain_runs_equally_often_on_the_stock_engine() -> None:
    prepared: list[str] = []
    with EnginePool.local(fake_engines()) as pool:
        shipped = PreparedChain(RunnableLambda(lambda given: f"{given}!"), lambda: prepared.append("shipped"))
        case = run_case(
            "one", RunnableLambda(lambda given: f"{given}!"), "a", pool, lambda: None, repeats=2, shipped=shipped
        )
    assert len(case.shipped) == len(case.plain) == len(case.accelerated) == 2
    assert len(prepared) == 3 and case.answers_equal and case.facts()["plain_same_engine_s"] == case.plain_s
    other = replace(case, shipped=(replace(case.shipped[0], answer="b"),))
    assert not other.answers_equal


def test_traces_of_bound_original_show_the_engines() -> None:
    """The bound and the savings are computed from these traces."""
    model = FakeListChatModel(responses=["That."])
    with EnginePool.local(fake_engines()) as pool:
        case = run_case("one", model, "What?", pool, lambda: None, repeats=2, bind=[(model, "llm")])
    for run in case.plain:
        assert [(span.kind, span.engine) for span in run.trace.spans] == [("GENERATION", "llm")]
