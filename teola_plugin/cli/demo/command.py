"""`teola demo`: the main job, end to end, on real engines."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teola_plugin.cli.arguments import count
from teola_plugin.errors import ConfigError

if TYPE_CHECKING:
    from teola_plugin.cli.demo.runs import Asked


_JSON = (
    "print one JSON object instead of the report, with the plain app on an LLM engine as vLLM ships, too "
    "(one more start of some 20 s for each way)"
)


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
    parser.add_argument("--verbose", action="store_true", help="also timelines, plans, every chain's figures, versions")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object instead of the report, with the plain "
        "app on an LLM engine as vLLM ships, too (another start, of some 20 s for each way)",
    )
    parser.set_defaults(run=run_demo, ways=("stock", "pool"))


def run_demo(options: argparse.Namespace) -> int:
    """Exit status 0 when all answers are equal."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from teola_plugin.cli.demo import runs
    from teola_plugin.cli.demo.details import details
    from teola_plugin.cli.demo.report import Report

    report, asked = Report(quiet=options.json), _asked(options)
    facts: dict[str, dict[str, Any]] = {}
    page = _trace_path(options.trace)
    with exiting_on_sigterm():
        for number, way in enumerate(options.ways):
            run, path = (runs.stock, page.with_stem(f"{page.stem}-stock")) if way == "stock" else (runs.pooled, page)
            cases, facts[way] = run(asked, path, report, first=not number)
            if options.verbose and not options.json:
                details(report.console, cases, facts[way], runs.TITLES[way])
    if options.json:
        json.dump(_as_one(facts), sys.stdout)
        sys.stdout.write("\n")
    report.end([one["trace_html"] for one in facts.values()])
    return 0 if all(one["answers_equal"] for one in facts.values()) else 1


@contextmanager
def exiting_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise `SystemExit` in the body, so that the processes which it has started are ended, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _asked(options: argparse.Namespace) -> Asked:
    from teola_plugin.cli.demo import documents
    from teola_plugin.cli.demo.engines import Models
    from teola_plugin.cli.demo.runs import Asked

    models = Models(options.model, options.embedder, options.reranker)
    question = options.question or documents.DEFAULT_QUESTION
    return Asked(models, question, documents.load(options.docs), options.repeats, shipped=options.json)


def _as_one(facts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures of one way; of both: those on the pool, and the others as `stock`."""
    last = list(facts.values())[-1]
    return last | {"stock": facts["stock"]} if len(facts) > 1 else last


def _trace_path(wanted: str | None) -> Path:
    if wanted:
        page = Path(wanted).resolve()
        if not page.parent.is_dir():  # said before anything takes its time
            raise ConfigError(f"cannot write {page}: there is no such folder.", hint="check the path after --trace")
        return page
    return Path(tempfile.mkdtemp(prefix="teola-demo-")) / "trace.html"
