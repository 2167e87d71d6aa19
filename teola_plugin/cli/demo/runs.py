"""The demo's two ways: LangChain's own classes on a server, and pool-backed objects with everything on engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teola_plugin.adapters.demo_app import COLLECTION, Chains, make_chains
from teola_plugin.cli.demo import aspects
from teola_plugin.cli.demo import stock as own
from teola_plugin.cli.demo.bound import stock_bound, uploaded_bound
from teola_plugin.cli.demo.engines import SHIPPED, Models, make_pool
from teola_plugin.cli.demo.measure import Case, Shipped, compared_facts, run_case
from teola_plugin.cli.demo.report import Report
from teola_plugin.cli.demo.saved import saved
from teola_plugin.observe import QueryTrace, html_page
from teola_plugin.pool import EnginePool

TITLES = {
    "one line": "Three independent questions, your own ChatOpenAI, one line: accelerate(chain)",
    "stock": "RAG over an uploaded document, LangChain's own classes, models named in bind=",
    "pool": "The same app with every step on engines of a pool",
}
Ran = tuple[dict[str, Case], dict[str, Any]]
"""The cases, and the figures as JSON-ready data."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The user's options of the demo."""

    models: Models
    question: str
    uploaded: list[Any]
    repeats: int
    shipped: bool = False
    """Whether the plain app runs on an engine as vLLM ships, too, without drafts."""

    @property
    def given(self) -> dict[str, Any]:
        return {"question": self.question, "documents": self.uploaded}


def stock(asked: Asked, page: Path, report: Report, *, first: bool) -> Ran:
    """LangChain's own classes; engines take the place of what is bound in the accelerated runs."""
    report.line("Starting a vLLM server and loading the other models (some 20 s on two cores) ...")
    with own.running(asked.models, drafts=asked.shipped) as on:
        pool, app = on.pool, on.app
        if first:
            _first_answer(app.chain, asked, report)
            app.store.store.clear()
        shipped = on.shipped[0] if on.shipped is not None else None
        alone = aspects.measured(app.llm, asked.uploaded, asked.repeats, shipped.llm if shipped is not None else None)
        report.result(TITLES["one line"], alone, asked.repeats)
        found = own.run_cases(on, asked.question, asked.uploaded, asked.repeats)
        cases = _told(found, TITLES["stock"], report)
        index = own.index_seconds(app, asked.uploaded, asked.repeats)
        facts = _summary(cases, pool, page, stock_bound(*traces(cases["uploaded"]), index))
    equal = facts["answers_equal"] and alone.answers_equal
    return cases, facts | {"one_line": alone.facts(), "answers_equal": equal}


def pooled(asked: Asked, page: Path, report: Report, *, first: bool) -> Ran:
    """Pool-backed objects, on engines in this process's care."""
    if first:
        report.line("Starting vLLM, PostgreSQL, the embedder and the reranker (some 25 s on two cores) ...")
    with make_pool(asked.models, shipped=asked.shipped) as pool:
        chains = make_chains(pool)
        if first:
            _first_answer(chains.uploaded, asked, report)
        cases = _told(_on_engines(pool, chains, asked), TITLES["pool"], report)
        return cases, _summary(cases, pool, page, uploaded_bound(traces(cases["uploaded"])[0]))


def _first_answer(chain: Any, asked: Asked, report: Report) -> None:
    report.question(asked.question)
    begun = time.perf_counter()
    answer = chain.invoke(asked.given)
    report.first_answer(answer, time.perf_counter() - begun)


def _told(found: Iterator[tuple[str, Case]], title: str, report: Report) -> dict[str, Case]:
    """Return all cases. Prints each one as soon as it is measured."""
    cases: dict[str, Case] = {}
    for key, case in found:
        cases[key] = case
        if key == "uploaded":
            report.result(title, case, len(case.plain))
            report.saved(*_saved(case))
    report.nothing_to_gain(cases["nothing_to_gain"])
    return cases


def traces(case: Case) -> tuple[list[QueryTrace], list[QueryTrace]]:
    """Return the traces of its runs: those of the original, and the accelerated ones."""
    return [run.trace for run in case.plain], [run.trace for run in case.accelerated]


def _saved(case: Case) -> tuple[dict[str, float], float]:
    parts = saved(*traces(case))
    return parts, case.plain_s - case.accelerated_s - sum(parts.values())


def _on_engines(pool: EnginePool, chains: Chains, asked: Asked) -> Iterator[tuple[str, Case]]:
    """The document comes with the question; the document is there already; a chain with nothing to gain."""

    def fresh() -> None:
        pool.admin("store", "delete_collection", COLLECTION).result(60)

    repeats = asked.repeats
    on_shipped = make_chains(pool, SHIPPED) if asked.shipped else None

    def beside(name: str, prepare: Callable[[], None] = lambda: None) -> Shipped | None:
        return None if on_shipped is None else Shipped(getattr(on_shipped, name), prepare)

    first = beside("uploaded", fresh)
    yield (
        "uploaded",
        run_case("uploaded document", chains.uploaded, asked.given, pool, fresh, repeats=repeats, shipped=first),
    )
    fresh()
    chains.indexer.invoke(asked.uploaded)
    for key, name, chain, value in (
        ("indexed", "document already indexed", chains.indexed, {"question": asked.question}),
        ("nothing_to_gain", "nothing to gain", chains.nothing_to_gain, asked.question),
    ):
        yield key, run_case(name, chain, value, pool, lambda: None, repeats=repeats, shipped=beside(key))


def _summary(cases: dict[str, Case], pool: EnginePool, trace_html: Path, bound: float) -> dict[str, Any]:
    """The figures; writes the page."""
    uploaded = cases["uploaded"]
    plain, accelerated = traces(uploaded)
    page = html_page(
        [*plain, *accelerated],
        "teola demo: one question, plain and accelerated",
        labels=[*("plain" for _ in plain), *("accelerated" for _ in accelerated)],
        seconds=[run.seconds for run in (*uploaded.plain, *uploaded.accelerated)],
    )
    trace_html.write_text(page, encoding="utf-8")
    parts, rest = _saved(uploaded)
    return {
        "answers_equal": all(case.answers_equal for case in cases.values()),
        "answer": uploaded.accelerated[-1].answer,
        **compared_facts(uploaded.plain_s, uploaded.accelerated_s, [run.seconds for run in uploaded.shipped]),
        "saved_s": parts,
        "saved_rest_s": rest,
        "bound_s": bound,
        "passes_fired": list(uploaded.passes_fired),
        "cached_prefix_tokens": uploaded.cached_prefix_tokens,
        "cases": {key: case.facts() for key, case in cases.items()},
        "engines": pool.versions(),
        "trace_html": str(trace_html),
    }
