"""`teola demo`: runs a RAG app, original and accelerated, on real engines, and prints a report.

The report has some 25 lines, more with `--verbose`. Times are in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from teola_plugin.cli.arguments import count
from teola_plugin.cli.demo.measure import Case
from teola_plugin.errors import ConfigError
from teola_plugin.observe import timeline_text

if TYPE_CHECKING:
    from teola_plugin.cli.demo.runs import DemoOptions


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
    from teola_plugin.cli.demo.command import Report, print_details

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
            raise ConfigError(f"cannot write {page}: there is no such folder.", hint="check the path after --trace")
        return page
    return Path(tempfile.mkdtemp(prefix="teola-demo-")) / "trace.html"


_BAR = 40
"""Characters of the longer bar."""
_COLOURS = {"plain": "yellow", "accelerated": "green"}


class SpeedResult(Protocol):
    """Median times in seconds, and whether every run gave the same answer."""

    @property
    def plain_s(self) -> float: ...
    @property
    def accelerated_s(self) -> float: ...
    @property
    def answers_equal(self) -> bool: ...


class Report:
    """A printer of results on stdout, each as soon as it is there; `quiet` prints nothing."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(quiet=quiet)

    def line(self, *parts: str | tuple[str, str]) -> None:
        """Print one line; parts may come with a style."""
        self.console.print(Text.assemble(*parts), soft_wrap=True)

    def question(self, text: str) -> None:
        self.line()
        self.line(("Question     ", "dim"), text)

    def first_answer(self, answer: Any, seconds: float) -> None:
        """Print the first answer of the original, which runs with cold caches."""
        self.line(("Answer       ", "dim"), f"{answer}", (f"  ({seconds:.1f} s, plain, the first run)", "dim"))

    def result(self, title: str, result: SpeedResult, runs: int) -> None:
        """Print two bars, and whether the answers are the same."""
        self.line()
        self.line((title, "bold"))
        longest = max(result.plain_s, result.accelerated_s)
        for name, seconds in (("plain", result.plain_s), ("accelerated", result.accelerated_s)):
            bar = "█" * max(1, round(_BAR * seconds / longest))
            self.line(f"  {name:11} ", (f"{bar:{_BAR}}", _COLOURS[name]), f" {seconds:.2f} s")
        equality = "same answer" if result.answers_equal else "DIFFERENT ANSWERS: this is a bug, please report it"
        self.line(
            "  ",
            (f"{ratio_text(result.plain_s, result.accelerated_s)}, {equality}", "bold"),
            f" (medians of {runs})" if runs > 1 else " (one run)",
        )

    def saved(self, parts: Mapping[str, float], rest: float) -> None:
        """Print the seconds that each overlap saved. `rest`: what everything else saved, or lost if it is negative."""
        for text, seconds in parts.items():
            self.line(f"  saved {seconds:5.2f} s: {text}")
        if parts and rest <= -0.005:
            self.line(f"  lost  {-rest:5.2f} s: the other parts took longer while more ran at once")

    def nothing_to_gain(self, result: SpeedResult) -> None:
        """Print the times of a chain without any overlap, for comparison."""
        times = f"{result.plain_s:.2f} s plain, {result.accelerated_s:.2f} s accelerated"
        self.line(f"  for comparison, retrieve-prompt-answer has nothing to overlap: {times}")

    def end(self, pages: Sequence[str]) -> None:
        """Print where the timelines are, and what to do next."""
        self.line()
        self.line("Timelines (open in a browser): ", " ".join(pages))
        self.line(
            "Plans, every figure: teola demo --verbose. Your own chain: teola compare my_app:chain --inputs q.jsonl"
        )


def ratio_text(plain_s: float, accelerated_s: float) -> str:
    """Return the ratio in words, e.g. `1.14x faster`."""
    ratio = plain_s / accelerated_s
    if 0.98 <= ratio <= 1.02:
        return f"as fast ({ratio:.2f}x)"
    return f"{ratio:.2f}x faster" if ratio > 1 else f"{1 / ratio:.2f}x slower"


def print_details(console: Console, cases: dict[str, Case], facts: dict[str, Any], heading: str) -> None:
    """Print timelines, plans, the figures of every chain, and versions of the engines."""
    uploaded = cases["uploaded"]
    console.rule(heading, characters="=", style="bold")
    for label, run in (("Plain", uploaded.plain[-1]), ("Accelerated", uploaded.accelerated[-1])):
        console.rule(f"{label}: where the time went")
        console.print(timeline_text(run.trace, width=min(console.width, 110)), highlight=False, markup=False)
    console.rule("What was understood, and what it became")
    console.print(uploaded.explanation, highlight=False, markup=False, soft_wrap=True)
    console.rule("Figures")
    console.print(_case_table(cases))
    console.print(
        f"Bound of the first row from its data dependencies: {facts['bound_s']:.3f} s. "
        f"Prompt tokens prefilled early and found cached: {facts['cached_prefix_tokens']}."
    )
    for name, versions in facts["engines"].items():
        console.print(f"{name:9} " + ", ".join(f"{k} {v}" for k, v in versions.items()), highlight=False)


def _case_table(cases: dict[str, Case]) -> Table:
    table = Table("chain", "plain", "accelerated", "ratio", "answers", "passes that fired")
    for case in cases.values():
        table.add_row(
            case.name,
            f"{case.plain_s:.3f} s",
            f"{case.accelerated_s:.3f} s",
            f"{case.speedup:.2f}",
            "equal" if case.answers_equal else "DIFFERENT",
            ", ".join(case.passes_fired) or "none",
        )
    return table
