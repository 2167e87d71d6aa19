"""The demo's two set-ups: LangChain's own classes on a server, and pool-backed objects with everything on engines.

The traces of their runs are analysed: which overlaps saved how much, and the latency that no schedule could beat.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from teola_plugin.adapters.demo_app import COLLECTION, Chains, make_chains
from teola_plugin.cli.demo.engines import SHIPPED, Models, make_pool
from teola_plugin.cli.demo.measure import Case, PreparedChain, run_case, run_one_line_case, speed_facts
from teola_plugin.cli.demo.report import Report
from teola_plugin.cli.demo.stock import measure_indexing, run_stock_cases, start_stock_setup
from teola_plugin.observe import QueryTrace, Span, html_page
from teola_plugin.pool import EnginePool

# ------------------------------------------------------------ the time that each overlap saved
#
# Each moment of a run is attributed to one part of the app, so that the savings of the parts add up to the saving of
# the run. If several parts are at work, the moment belongs to the one that ends last: the others wait for it alone.

INDEX, ASK, RERANK, ANSWER, REST = "index", "ask", "rerank", "answer", "rest"
SAVING_TEXTS = {
    ASK: "more questions are written and searched with while the document is indexed",
    ANSWER: "the known part of each prompt is read before the passages are there",
    INDEX: "passages are stored while the next ones are embedded",
}
"""The reason why each part saves time."""
_INDEXING, _ASKING = ("ids.", "collection"), ("passages.", "queries")
"""Prefixes of the names of an accelerated run's primitives: the names of the app's steps."""
_SMALLEST_SHARE = 0.01
"""A saving below this share of the original's time is noise."""

PartInterval = tuple[float, float, str]
"""Begin, end, and the part that was at work."""


def savings(plain: Sequence[QueryTrace], accelerated: Sequence[QueryTrace]) -> dict[str, float]:
    """Return the seconds that each kind of overlap saved, by its text, the largest first; medians over the runs."""
    plain_s, accelerated_s = (_median_parts([seconds_by_part(t) for t in traces]) for traces in (plain, accelerated))
    gains = {part: plain_s.get(part, 0.0) - accelerated_s.get(part, 0.0) for part in SAVING_TEXTS}
    if not any(_is_stage(span) for trace in accelerated for span in trace.spans):
        del gains[INDEX]  # indexing ran as in the original, and was quicker by chance
    large = [(part, gain) for part, gain in gains.items() if gain > _SMALLEST_SHARE * sum(plain_s.values())]
    return {SAVING_TEXTS[part]: gain for part, gain in sorted(large, key=lambda item: -item[1])}


def _is_stage(span: Span) -> bool:
    """Return True for a stage of embedding, whose later stages run while earlier results are stored."""
    return span.kind == "EMBEDDING" and "#" in span.primitive and span.primitive.startswith(_INDEXING)


def _median_parts(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {part: statistics.median(run.get(part, 0.0) for run in runs) for run in runs for part in run}


def seconds_by_part(trace: QueryTrace) -> dict[str, float]:
    """Return the seconds during which the answer waited for each part. They add up to the trace's seconds."""
    intervals = sorted(_intervals(trace))
    edges = sorted({trace.started, trace.ended, *(edge for begin, end, _ in intervals for edge in (begin, end))})
    parts: dict[str, float] = {}
    for begin, end in pairwise(edges):
        active = [interval for interval in intervals if interval[0] <= begin and interval[1] >= end]
        part = max(active, key=lambda interval: interval[1])[2] if active else REST
        parts[part] = parts.get(part, 0.0) + end - begin
    return parts


def _intervals(trace: QueryTrace) -> Iterator[PartInterval]:
    """Yield the intervals in which each part of the query was at work."""
    first_llm_call = min(
        (s.begin for s in trace.spans if s.engine == "llm" and s.done is not None), default=trace.ended
    )
    is_accelerated = any(s.primitive.startswith(_INDEXING) for s in trace.spans)
    if not is_accelerated:  # the original indexes first, also by means that no engine sees
        yield trace.started, first_llm_call, INDEX
    for span in trace.spans:
        part = _part_of_accelerated(span) if is_accelerated else _part_of_original(span, first_llm_call)
        if part and span.done is not None and not span.unused:
            begin = span.queued if part == INDEX else span.begin
            yield max(begin, trace.started), min(span.done, trace.ended), part


def _part_of_accelerated(span: Span) -> str:
    """Return the part that a span of an accelerated run belongs to; empty for none."""
    if span.primitive.startswith(_INDEXING) or span.kind == "INGESTION":
        return INDEX
    if not span.engine:
        return ""
    if span.engine == "reranker":
        return RERANK
    if span.engine == "llm" and not span.primitive.startswith(_ASKING):
        return ANSWER
    return ASK


def _part_of_original(span: Span, first_llm_call: float) -> str:
    """Return the part that a span of a run of the original belongs to; empty for none."""
    if span.engine == "llm":
        return ASK if span.begin == first_llm_call else ANSWER
    if span.engine == "reranker":
        return RERANK
    return ASK if span.engine and span.begin >= first_llm_call else ""


# ------------------------------------------------------------ the bound
#
# The bound follows from the engine times of the original's run and the data dependencies of this one chain, which are
# written here by hand, without our graphs. It assumes that all calls which do not depend on each other overlap, and
# that every prompt was prefilled as far as it was known.

LLM_PREFILLS = ("FULL_PREFILLING", "PREFILLING")
LLM_DECODINGS = ("PARTIAL_DECODING", "DECODING")


def uploaded_bound(traces: Sequence[QueryTrace]) -> float:
    """Return the bound for the uploaded-document chain, in seconds; the median over runs of the original."""
    return statistics.median(_uploaded_bound(trace) for trace in traces)


def stock_bound(traces: Sequence[QueryTrace], accelerated: Sequence[QueryTrace], index_s: float) -> float:
    """Return the bound for the chain of LangChain's own classes, which indexes outside the engines (`index_s` seconds).

    The original's answers are not streamed: the share of decoding in their time is that of the accelerated runs.
    """
    shares = [share for trace in accelerated for share in _decoding_shares(trace)]
    share = statistics.median(shares) if shares else 1.0
    return statistics.median(_stock_bound(trace, index_s, share) for trace in traces)


def _decoding_shares(trace: QueryTrace) -> Iterator[float]:
    """Yield the share of decoding in the duration of each streamed generation."""
    for span in trace.spans:
        if span.kind not in LLM_PREFILLS or not span.seconds:
            continue
        name = span.primitive.removesuffix("prefilling")
        decodings = (s for s in trace.spans if s.kind in LLM_DECODINGS and s.primitive.startswith(f"{name}decoding"))
        decode_s = sum(s.seconds for s in decodings)
        yield decode_s / (span.seconds + decode_s)


def _stock_bound(trace: QueryTrace, index_s: float, decoding_share: float) -> float:
    """Return the bound of one run of LangChain's own classes, in seconds; see `stock_bound`."""
    calls = _spans_by_kind(trace)
    expansion, *answers = calls["GENERATION"]
    ask_s = expansion.seconds + min(s.seconds for s in calls["EMBEDDING"])
    return max(index_s, ask_s) + _answer_seconds(calls["RERANKING"], answers, decoding_share)


def _uploaded_bound(trace: QueryTrace) -> float:
    """Return the bound of one run of the uploaded-document chain, in seconds, from its engine times."""
    calls = _spans_by_kind(trace)
    documents, *queries = calls["EMBEDDING"]
    expansion, *answers = calls["GENERATION"]
    index_s = documents.seconds + min(s.seconds for s in calls["INGESTION"])
    ask_s = expansion.seconds + min(s.seconds for s in queries)  # the last question is embedded once it is complete
    search_s = min(s.seconds for s in calls["SEARCHING"])
    return max(index_s, ask_s) + search_s + _answer_seconds(calls["RERANKING"], answers)


def _spans_by_kind(trace: QueryTrace) -> dict[str, list[Span]]:
    return {kind: [s for s in trace.spans if s.kind == kind] for kind in {s.kind for s in trace.spans}}


def _answer_seconds(rerankings: Sequence[Span], answers: Sequence[Span], decoding_share: float = 1.0) -> float:
    """Return the least time from the search results to the last answer.

    Half of the first answer's prompt, its passage, is known last. A later prompt lacks only the answer before it.
    """
    decode_s = [_decode_seconds(span, decoding_share) for span in answers]
    return sum(s.seconds for s in rerankings) + 0.5 * (answers[0].seconds - decode_s[0]) + sum(decode_s)


def _decode_seconds(span: Span, decoding_share: float = 1.0) -> float:
    """Return the seconds of decoding; if nothing says when it began, that share of the whole."""
    if span.done is not None and span.first is not None:
        return span.done - span.first
    return decoding_share * span.seconds


TITLES = {
    "one line": "Three independent questions, your own ChatOpenAI, one line: accelerate(chain)",
    "stock": "RAG over an uploaded document, LangChain's own classes, models named in bind=",
    "pool": "The same app with every step on engines of a pool",
}
SetupResult = tuple[dict[str, Case], dict[str, Any]]
"""The cases, and the figures as JSON-ready data."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The user's options of the demo."""

    models: Models
    question: str
    uploaded: list[Any]
    repeats: int
    shipped: bool = False
    """True if the original runs also on an engine as vLLM ships, without drafts."""

    @property
    def chain_input(self) -> dict[str, Any]:
        """The input of the chain to which the document is uploaded with the question."""
        return {"question": self.question, "documents": self.uploaded}


def run_stock(options: DemoOptions, page: Path, report: Report, *, is_first: bool) -> SetupResult:
    """Run LangChain's own classes; in the accelerated runs engines replace the models in `bind=`.

    Print each result, and write the timelines to `page`. The first set-up also prints the question and an answer.
    """
    report.line("Starting a vLLM server and loading the other models (some 20 s on two cores) ...")
    with start_stock_setup(options.models, drafts=options.shipped) as setup:
        app = setup.app
        if is_first:
            _print_first_answer(app.chain, options, report)
            app.store.store.clear()
        shipped_llm = setup.shipped[0].llm if setup.shipped is not None else None
        one_line = run_one_line_case(app.llm, options.uploaded, options.repeats, shipped_llm)
        report.result(TITLES["one line"], one_line, options.repeats)
        results = run_stock_cases(setup, options.question, options.uploaded, options.repeats)
        cases = _print_results(results, TITLES["stock"], report)
        index_s = measure_indexing(app, options.uploaded, options.repeats)
        facts = _summarize(cases, setup.pool, page, stock_bound(*traces_of(cases["uploaded"]), index_s))
    are_equal = facts["answers_equal"] and one_line.answers_equal
    return cases, facts | {"one_line": one_line.facts(), "answers_equal": are_equal}


def run_pooled(options: DemoOptions, page: Path, report: Report, *, is_first: bool) -> SetupResult:
    """Run pool-backed objects on engines that this process starts. See `run_stock`."""
    if is_first:
        report.line("Starting vLLM, PostgreSQL, the embedder and the reranker (some 25 s on two cores) ...")
    with make_pool(options.models, shipped=options.shipped) as pool:
        chains = make_chains(pool)
        if is_first:
            _print_first_answer(chains.uploaded, options, report)
        cases = _print_results(_run_pooled_cases(pool, chains, options), TITLES["pool"], report)
        return cases, _summarize(cases, pool, page, uploaded_bound(traces_of(cases["uploaded"])[0]))


def _print_first_answer(chain: Any, options: DemoOptions, report: Report) -> None:
    """Run the chain once, with cold caches, and print the question, the answer and the seconds."""
    report.question(options.question)
    start = time.perf_counter()
    answer = chain.invoke(options.chain_input)
    report.first_answer(answer, time.perf_counter() - start)


def _print_results(results: Iterator[tuple[str, Case]], title: str, report: Report) -> dict[str, Case]:
    """Print the case `uploaded` once it is measured, and `nothing_to_gain` at the end. Return all cases by key."""
    cases: dict[str, Case] = {}
    for key, case in results:
        cases[key] = case
        if key == "uploaded":
            report.result(title, case, len(case.plain))
            report.saved(*_savings_and_rest(case))
    report.nothing_to_gain(cases["nothing_to_gain"])
    return cases


def traces_of(case: Case) -> tuple[list[QueryTrace], list[QueryTrace]]:
    """Return the traces of its runs: those of the original, and the accelerated ones."""
    return [run.trace for run in case.plain], [run.trace for run in case.accelerated]


def _savings_and_rest(case: Case) -> tuple[dict[str, float], float]:
    """Return the seconds that each overlap saved, and those that everything else saved."""
    parts = savings(*traces_of(case))
    return parts, case.plain_s - case.accelerated_s - sum(parts.values())


def _run_pooled_cases(pool: EnginePool, chains: Chains, options: DemoOptions) -> Iterator[tuple[str, Case]]:
    """Yield three cases: the document comes with the question; it is indexed already; a chain with nothing to gain."""

    def delete_collection() -> None:
        pool.admin("store", "delete_collection", COLLECTION).result(60)

    repeats = options.repeats
    shipped_chains = make_chains(pool, SHIPPED) if options.shipped else None

    def shipped_chain(name: str, prepare: Callable[[], None] = lambda: None) -> PreparedChain | None:
        return None if shipped_chains is None else PreparedChain(getattr(shipped_chains, name), prepare)

    uploaded = run_case(
        "uploaded document",
        chains.uploaded,
        options.chain_input,
        pool,
        delete_collection,
        repeats=repeats,
        shipped=shipped_chain("uploaded", delete_collection),
    )
    yield "uploaded", uploaded
    delete_collection()
    chains.indexer.invoke(options.uploaded)
    for key, name, chain, value in (
        ("indexed", "document already indexed", chains.indexed, {"question": options.question}),
        ("nothing_to_gain", "nothing to gain", chains.nothing_to_gain, options.question),
    ):
        yield key, run_case(name, chain, value, pool, lambda: None, repeats=repeats, shipped=shipped_chain(key))


def _summarize(cases: dict[str, Case], pool: EnginePool, trace_html: Path, bound_s: float) -> dict[str, Any]:
    """Return the figures of all cases as JSON-ready data, and write the page."""
    uploaded = cases["uploaded"]
    plain, accelerated = traces_of(uploaded)
    page = html_page(
        [*plain, *accelerated],
        "teola demo: one question, plain and accelerated",
        labels=[*("plain" for _ in plain), *("accelerated" for _ in accelerated)],
        seconds=[run.seconds for run in (*uploaded.plain, *uploaded.accelerated)],
    )
    trace_html.write_text(page, encoding="utf-8")
    parts, rest = _savings_and_rest(uploaded)
    return {
        "answers_equal": all(case.answers_equal for case in cases.values()),
        "answer": uploaded.accelerated[-1].answer,
        **speed_facts(uploaded.plain_s, uploaded.accelerated_s, [run.seconds for run in uploaded.shipped]),
        "saved_s": parts,
        "saved_rest_s": rest,
        "bound_s": bound_s,
        "passes_fired": list(uploaded.passes_fired),
        "cached_prefix_tokens": uploaded.cached_prefix_tokens,
        "cases": {key: case.facts() for key, case in cases.items()},
        "engines": pool.versions(),
        "trace_html": str(trace_html),
    }
