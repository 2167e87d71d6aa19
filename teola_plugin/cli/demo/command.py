"""`teola demo`: the main job, end to end, on real engines."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teola_plugin.cli.arguments import count
from teola_plugin.errors import RegistrationError

if TYPE_CHECKING:
    from teola_plugin.cli.demo.engines import Chains, Models
    from teola_plugin.cli.demo.measure import Case
    from teola_plugin.observe import QueryTrace
    from teola_plugin.pool import EnginePool


def add_demo(commands: Any) -> None:
    """Add the sub-command to an argparse group."""
    parser = commands.add_parser(
        "demo",
        help="a RAG chain, plain and accelerated, on real engines",
        description="Document QA with advanced RAG, run as it is and accelerated, with the same models: in LangChain's "
        "own classes, on a vLLM server that the demo starts; and on pool-backed objects, with everything on engines.",
    )
    parser.add_argument("--docs", nargs="+", default=[], metavar="PATH", help="text files or folders to upload")
    parser.add_argument("--question", help="what to ask (default: one about Python's try statement)")
    parser.add_argument("--model", help="LLM: a path or hub id (default: the small one that comes along)")
    parser.add_argument("--embedder", help="sentence-transformers model (default: the packaged MiniLM)")
    parser.add_argument("--reranker", help="cross-encoder (default: the small one that comes along)")
    parser.add_argument("--repeats", type=count, default=5, help="runs of each kind after one warm-up (default 5)")
    parser.add_argument("--trace", metavar="FILE", help="where to write the HTML page (default: a temporary file)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--stock", dest="ways", action="store_const", const=("stock",), help="LangChain's classes only")
    only.add_argument("--pool", dest="ways", action="store_const", const=("pool",), help="pool-backed objects only")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    parser.set_defaults(run=run_demo, ways=("stock", "pool"))


def run_demo(options: argparse.Namespace) -> int:
    """Exit status 0 when all answers are equal."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from rich.console import Console

    from teola_plugin.cli.demo import documents, show
    from teola_plugin.cli.demo.engines import Models

    question = options.question or documents.DEFAULT_QUESTION
    uploaded = documents.load(options.docs)
    notes = Console(stderr=True, quiet=options.json)
    models, page = Models(options.model, options.embedder, options.reranker), _trace_path(options.trace)
    facts: dict[str, dict[str, Any]] = {}
    for way in options.ways:
        run, path = (run_stock, page.with_stem(f"{page.stem}-stock")) if way == "stock" else (run_pooled, page)
        cases, facts[way] = run(models, question, uploaded, options.repeats, path, notes.print)
        if not options.json:
            show.show(Console(), cases, question, facts[way], HEADINGS[way])
    if options.json:
        json.dump(_as_one(facts), sys.stdout)
        sys.stdout.write("\n")
    return 0 if all(one["answers_equal"] for one in facts.values()) else 1


HEADINGS = {
    "stock": "LangChain's own classes, on a vLLM server of their own, and one line more",
    "pool": "The same app on pool-backed objects: everything is on engines, and indexing runs ahead, too",
}


def _as_one(facts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures of one way; of both: those on the pool, and the others as `stock`."""
    last = list(facts.values())[-1]
    return last | {"stock": facts["stock"]} if len(facts) > 1 else last


Ran = tuple[dict[str, "Case"], dict[str, Any]]
"""The cases, and the figures to show."""
Say = Callable[[str], object]


def run_pooled(models: Models, question: str, uploaded: list[Any], repeats: int, page: Path, say: Say) -> Ran:
    """Pool-backed objects, on engines in this process's care."""
    from teola_plugin.cli.demo.bound import uploaded_bound
    from teola_plugin.cli.demo.engines import make_chains, make_pool

    say("Starting vLLM, PostgreSQL, the embedder and the reranker ...")
    with make_pool(models) as pool:
        cases = run_cases(pool, make_chains(pool), question, uploaded, repeats)
        plain, _ = _traces(cases)
        return cases, summary(cases, pool, page, uploaded_bound(plain))


def run_stock(models: Models, question: str, uploaded: list[Any], repeats: int, page: Path, say: Say) -> Ran:
    """Stock objects; engines take their place in the accelerated runs."""
    from teola_plugin.cli.demo import stock
    from teola_plugin.cli.demo.bound import stock_bound

    say("Starting vLLM's API server, and loading the embedder and the reranker, twice: plain, and as engines ...")
    with stock.running(models) as (pool, app):
        cases = stock.run_cases(pool, app, question, uploaded, repeats)
        index = stock.index_seconds(app, uploaded, repeats)
        return cases, summary(cases, pool, page, stock_bound(*_traces(cases), index))


def _traces(cases: dict[str, Case]) -> tuple[list[QueryTrace], list[QueryTrace]]:
    """Of the runs with an uploaded document: plain, accelerated."""
    uploaded = cases["uploaded"]
    return [run.trace for run in uploaded.plain], [run.trace for run in uploaded.accelerated]


def run_cases(pool: EnginePool, chains: Chains, question: str, uploaded: list[Any], repeats: int) -> dict[str, Case]:
    """The document comes with the question; the document is there already; a chain with nothing to gain."""
    from teola_plugin.cli.demo.engines import COLLECTION
    from teola_plugin.cli.demo.measure import run_case

    def fresh() -> None:
        pool.admin("store", "delete_collection", COLLECTION).result(60)

    given = {"question": question, "documents": uploaded}
    cases = {"uploaded": run_case("uploaded document", chains.uploaded, given, pool, fresh, repeats=repeats)}
    fresh()
    chains.indexer.invoke(uploaded)
    for key, name, chain, value in (
        ("indexed", "document already indexed", chains.indexed, {"question": question}),
        ("nothing_to_gain", "nothing to gain", chains.nothing_to_gain, question),
    ):
        cases[key] = run_case(name, chain, value, pool, lambda: None, repeats=repeats)
    return cases


def summary(cases: dict[str, Case], pool: EnginePool, trace_html: Path, bound: float) -> dict[str, Any]:
    """The figures as JSON-ready data; writes the page."""
    from teola_plugin.observe import html_page

    uploaded = cases["uploaded"]
    traces = [uploaded.plain[-1].trace, uploaded.accelerated[-1].trace]
    page = html_page(traces, "teola demo: one question, plain and accelerated", labels=("plain", "accelerated"))
    trace_html.write_text(page, encoding="utf-8")
    return {
        "answers_equal": all(case.answers_equal for case in cases.values()),
        "answer": uploaded.accelerated[-1].answer,
        "plain_s": uploaded.plain_s,
        "accelerated_s": uploaded.accelerated_s,
        "speedup": uploaded.speedup,
        "bound_s": bound,
        "passes_fired": list(uploaded.passes_fired),
        "cached_prefix_tokens": uploaded.cached_prefix_tokens,
        "cases": {
            key: {
                "plain_s": case.plain_s,
                "accelerated_s": case.accelerated_s,
                "speedup": case.speedup,
                "answers_equal": case.answers_equal,
                "passes_fired": list(case.passes_fired),
                "runs": len(case.plain),
            }
            for key, case in cases.items()
        },
        "engines": pool.versions(),
        "trace_html": str(trace_html),
    }


def _trace_path(wanted: str | None) -> Path:
    if wanted:
        page = Path(wanted).resolve()
        if not page.parent.is_dir():  # said before anything takes its time
            raise RegistrationError(
                f"cannot write {page}: its folder is not there.", hint="check the path after --trace"
            )
        return page
    return Path(tempfile.mkdtemp(prefix="teola-demo-")) / "trace.html"
