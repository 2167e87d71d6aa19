"""The demo's two set-ups: LangChain's own classes on a server, and pool-backed objects with everything on engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teola_plugin.adapters.demo_app import COLLECTION, Chains, make_chains
from teola_plugin.cli.demo.engines import SHIPPED, Models, make_pool
from teola_plugin.cli.demo.measure import Case, PreparedChain, run_case, run_one_line_case, speed_facts
from teola_plugin.cli.demo.report import Report
from teola_plugin.cli.demo.stock import measure_indexing, run_stock_cases, start_stock_setup
from teola_plugin.cli.demo.trace_analysis import savings, stock_bound, uploaded_bound
from teola_plugin.observe import QueryTrace, html_page
from teola_plugin.pool import EnginePool

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
    report.question(options.question)
    start = time.perf_counter()
    answer = chain.invoke(options.chain_input)
    report.first_answer(answer, time.perf_counter() - start)


def _print_results(results: Iterator[tuple[str, Case]], title: str, report: Report) -> dict[str, Case]:
    """Print the result of each case as soon as it is measured. Return all cases."""
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
