"""`teola demo`: runs a RAG app, original and accelerated, on real engines."""

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

from teola_plugin.cli.pool import count
from teola_plugin.errors import ConfigError

if TYPE_CHECKING:
    from teola_plugin.cli.demo.runs import DemoOptions


def add_demo(commands: Any) -> None:
    """Add the sub-command to an argparse group."""
    parser = commands.add_parser(
        "demo",
        help="a RAG chain, plain and accelerated, on real engines",
        description="Document QA with advanced RAG, run as it is and accelerated, with the same models. First in "
        "LangChain's own classes, on a vLLM server that the demo starts, then on pool-backed objects, with "
        "everything on engines.",
    )
    parser.add_argument("--docs", nargs="+", default=[], metavar="PATH", help="text files or folders to upload")
    parser.add_argument("--question", help="the question (default: one about Python's try statement)")
    parser.add_argument("--model", help="LLM: a path or hub id (default: the small one that comes along)")
    parser.add_argument("--embedder", help="sentence-transformers model (default: the packaged MiniLM)")
    parser.add_argument("--reranker", help="cross-encoder (default: the small one that comes along)")
    parser.add_argument("--repeats", type=count, default=5, help="runs of each kind after one warm-up (default 5)")
    parser.add_argument("--trace", metavar="FILE", help="where to write the HTML page (default: a temporary file)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--stock", dest="setups", action="store_const", const=("stock",), help="LangChain's classes only")
    only.add_argument("--pool", dest="setups", action="store_const", const=("pool",), help="pool-backed objects only")
    parser.add_argument("--verbose", action="store_true", help="also timelines, plans, every chain's figures, versions")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object instead of the report, with the plain "
        "app on an LLM engine as vLLM ships, too (another start, of some 20 s for each way)",
    )
    parser.set_defaults(run=run_demo, setups=("stock", "pool"))


def run_demo(options: argparse.Namespace) -> int:
    """Run the command. Return the exit status: 0 if all answers are equal, else 1."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from teola_plugin.cli.demo import runs
    from teola_plugin.cli.demo.report import Report, print_details

    report, demo = Report(quiet=options.json), _demo_options(options)
    facts: dict[str, dict[str, Any]] = {}
    page = _trace_path(options.trace)
    with exiting_on_sigterm():
        for number, setup in enumerate(options.setups):
            is_stock = setup == "stock"
            run, path = (runs.run_stock, page.with_stem(f"{page.stem}-stock")) if is_stock else (runs.run_pooled, page)
            cases, facts[setup] = run(demo, path, report, is_first=not number)
            if options.verbose and not options.json:
                print_details(report.console, cases, facts[setup], runs.TITLES[setup])
    if options.json:
        last = list(facts.values())[-1]
        json.dump(last | {"stock": facts["stock"]} if len(facts) > 1 else last, sys.stdout)
        sys.stdout.write("\n")
    report.end([figures["trace_html"] for figures in facts.values()])
    return 0 if all(figures["answers_equal"] for figures in facts.values()) else 1


@contextmanager
def exiting_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise `SystemExit` in the body, so that the processes which the body has started are ended, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_exit(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    previous_handler = signal.signal(signal.SIGTERM, raise_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _demo_options(options: argparse.Namespace) -> DemoOptions:
    """Return the demo's options from those of the command line. Raise `RegistrationError` for unreadable documents."""
    from teola_plugin.cli.demo import documents
    from teola_plugin.cli.demo.engines import Models
    from teola_plugin.cli.demo.runs import DemoOptions

    models = Models(options.model, options.embedder, options.reranker)
    question = options.question or documents.DEFAULT_QUESTION
    return DemoOptions(models, question, documents.load_documents(options.docs), options.repeats, shipped=options.json)


def _trace_path(option: str | None) -> Path:
    """Return where to write the page. Raise `ConfigError` if its folder does not exist, before anything is started."""
    if option:
        page = Path(option).resolve()
        if not page.parent.is_dir():
            raise ConfigError(f"cannot write {page}: its folder is missing.", hint="check the path after --trace")
        return page
    return Path(tempfile.mkdtemp(prefix="teola-demo-")) / "trace.html"
